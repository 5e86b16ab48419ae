"""Finds out whether the rows of a batch depend on each other, by collating it whole and by the rows of each rank.

A rank that collates its own rows alone has other values than one device where these depend on other rows: values that
are normalised over the batch, a partner from the next row, random draws. All ranks read the same samples, so all find
the same, without asking each other. Each rank cuts its own rows out of a batch that was collated whole.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from meshwright.data.collation import Collate
from meshwright.data.global_batches import Share, Sharing
from meshwright.data.nested import digest, like, take_rows
from meshwright.data.one_length import KeepingSamples
from meshwright.data.row_comparison import RowComparison, compare
from meshwright.errors import PlanError
from meshwright.mesh.axes import Axis
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.schema import BatchSchema
from meshwright.random_states import RandomStates, parts_of

logger = logging.getLogger(__name__)

# The number of batches that are tried. One batch may hide by chance that its rows depend on each other, for example if
# all are of one class. What forward writes is watched for as many passes.
TRIED = 3

DRAWS = "the dataset or its collate function draws random numbers"
_DEEPEST = 3  # how deep in a collate function a change is looked for
# In place of the names of entries.
PARTS, READ = "what the collate function returns", "what the dataset's __getitems__ returns"

_WHOLE = (
    "%s. For the values of one device, each of the %d data-parallel ranks reads and collates all rows of a batch, and "
    "keeps its own: %d times the work. If reading is then slower than training, %s"
)
_ALONE = (
    "%s, and what is collated for a batch (%s) cannot be cut into rows. So each rank collates its own rows alone, and "
    "the values differ from those of one device. Return tensors whose first dim is the batch's rows, or %s"
)
_BY_RANK = (
    "set LoaderOptions(draws='rank'), so that each rank reads its own rows alone, with draws that differ from those of "
    "one device"
)
_SEEDED = "draw from a generator that is seeded by the sample's index"
_IN_LOOP = "compute them in the training loop, from the rows of all ranks: x = meshwright.gather_rows(x)"


@dataclass(frozen=True)
class RowsFinding:
    """What a trial has shown.

    Args:
        whole: the batch that was collated whole, if some of it depends on all of its rows; otherwise None.
        depends: what depends on all rows, in words.
        is_drawn: whether it is drawn at random.
        shared: the names of the entries that belong to every row of a batch.
    """

    whole: Any = None
    depends: str = ""
    is_drawn: bool = False
    shared: tuple[str, ...] = ()


class CollationTrial:
    """Collates a batch whole, and by the rows of each rank. It can be sent to the workers of a DataLoader.

    The user's own function runs once for the batch, as on one device; copies of it run for the ranks.

    Args:
        collate: the user's collate function.
        dp: the axis along which ranks take different rows.
        share: the function that chooses a rank's rows.
        keeps_samples: whether a rank's rows are returned with their samples.
    """

    def __init__(self, collate: Collate, dp: Axis, share: Sharing, *, keeps_samples: bool):
        self._collate, self._share, self._keeps_samples = collate, share, keeps_samples
        self._dp = Axis(dp.name, dp.size, dp.rank)  # a process group cannot be sent to a worker
        self._copy: Collate | None = None  # of the function, if a call has not changed it

    def of(
        self, samples: Any, rows: int, before: RandomStates, again: Callable[[Share], Any] | None = None
    ) -> tuple[Any, RowsFinding]:
        """Return this rank's rows as they are collated alone, or None if that fails, and what was found.

        Args:
            samples: the samples of the whole batch.
            rows: their number.
            before: the random states before the samples were read.
            again: a function that reads the rows of a share by themselves, if the dataset reads rows together.
        """
        outline, collate, kept = (
            _outline(self._collate),
            self._copy or _copied_function(self._collate),
            _copied(samples),
        )
        whole = self._collate(samples)
        self._copy = collate if _outline(self._collate) == outline else None
        tried = self._copy or _copied_function(collate)
        is_drawn, after = not before.are_unchanged, before.now()
        shares = [self._share(rows, replace(self._dp, rank=rank)) for rank in range(self._dp.size)]
        has_all = all(share.counted and not share.is_replicated for share in shares)  # rows for each rank
        found, alone = RowComparison(), None
        try:
            read = [again(share) if again else kept[share.low : share.high] for share in shares]
            if has_all and not is_drawn:
                found = _compared(whole, tried, kept, read, shares)
                if self._copy is None and (found.of_batch or found.of_rows):
                    found = _compared(whole, collate, kept, read, shares, is_changed=True)
            alone = (KeepingSamples(collate) if self._keeps_samples else collate)(read[self._dp.rank])
        except (MemoryError, OSError):
            raise
        except Exception as error:  # of a function that needs more rows than a rank has
            logger.info("the rows of a rank alone could not be collated", exc_info=error)
            found.of_batch = [PARTS]
        after.restore()
        if is_drawn:
            return alone, RowsFinding(whole, DRAWS, is_drawn=True)
        names = found.of_batch + found.of_rows
        verb = "depends" if len(names) == 1 else "depend"
        said = f"{', '.join(map(_place, names))} {verb} on all rows of the batch" if names else ""
        return alone, RowsFinding(whole if names else None, said, shared=(*found.fixed, *found.of_rows))


@dataclass(frozen=True)
class Verdict:
    """What follows from a finding.

    Args:
        reads_whole: whether batches are collated whole from now on.
        message: a log message and its arguments; empty if there is nothing to tell.
        shared: the names of the entries that belong to every row of a batch.
    """

    reads_whole: bool
    message: tuple[Any, ...]
    shared: tuple[str, ...]


@dataclass
class Trials:
    """Whether the batches of a reader are collated whole, as the first ones have shown.

    Args:
        left: the number of batches that are still to be tried.
        format: what the inputs of a batch mean.
        reads_whole: whether batches are collated whole from now on.
    """

    left: int
    format: BatchFormat | None
    reads_whole: bool = False
    _told: tuple[Any, ...] = ()

    def settle(self, alone: Any, finding: RowsFinding, share: Share, rows: int, ranks: int) -> tuple[Any, Verdict]:
        """Return a rank's rows of a batch that was tried, and what follows for later ones.

        Args:
            alone, finding: what the trial has returned.
            share: the rank's rows.
            rows: the number of rows of the batch.
            ranks: the number of ranks that have other rows.

        Raises:
            PlanError: the collate function fails for the rows of a rank alone, and the batch cannot be cut.
        """
        if finding.whole is None:
            return alone, Verdict(False, (), finding.shared)
        own = own_rows(finding.whole, share, rows, _with_shared(self.format, finding.shared))
        kind = type(finding.whole).__name__
        if own is not None:
            cure = _BY_RANK if finding.is_drawn else _IN_LOOP
            return own, Verdict(True, (_WHOLE, finding.depends, ranks, ranks, cure), finding.shared)
        if alone is None:
            raise PlanError(
                f"the collate function fails for the rows of one rank alone, and what it returns for a batch ({kind}) "
                "cannot be cut into rows. Return tensors whose first dim is the batch's rows, or say which dim has "
                "them: ToDistributedConfig(batch_dims={'NAME': DIM})"
            )
        cure = _SEEDED if finding.is_drawn else _IN_LOOP
        return alone, Verdict(False, (_ALONE, finding.depends, kind, cure), finding.shared)

    def take(self, verdict: Verdict, *, is_told: bool) -> None:
        """Follow a verdict from the next batch on, and log its message if it is new."""
        self.left -= 1
        self.reads_whole |= verdict.reads_whole
        self.format = _with_shared(self.format, verdict.shared)
        if is_told and verdict.message and verdict.message != self._told:
            self._told = verdict.message
            logger.warning(*verdict.message)


def own_rows(batch: object, share: Share, rows: int, format: BatchFormat | None) -> Any:
    """Return a share of a batch of ``rows`` rows; None if the batch cannot be cut into these rows.

    Args:
        batch: what a collate function returned for all rows.
        share: this rank's rows.
        rows: the number of rows.
        format: what the inputs of the batch mean.
    """
    schema = BatchSchema(batch if isinstance(batch, Mapping) else {"batch": batch}, format)
    if schema.rows != rows:
        return None
    try:
        own = schema.part(slice(share.low, share.high), take_rows)
    except ValueError:
        return None
    return like(batch, own) if isinstance(batch, Mapping) else own["batch"]


def cut_rows(batch: object, share: Share, rows: int, format: BatchFormat | None) -> Any:
    """Return a share of a batch, as ``own_rows``, where earlier batches could be cut.

    Raises:
        ValueError: the batch cannot be cut into its rows.
    """
    own = own_rows(batch, share, rows, format)
    if own is None:
        raise ValueError(
            f"what the collate function returned for a batch of {rows} rows ({type(batch).__name__}) cannot be cut "
            "into rows, unlike the batches before. The ranks collate whole batches, since the function draws random "
            "numbers, or its rows depend on each other. Return tensors whose first dim is the batch's rows for every "
            "batch, or set LoaderOptions(draws='rank'), so that each rank collates its own rows, with values of its own"
        )
    return own


def _with_shared(format: BatchFormat | None, names: tuple[str, ...]) -> BatchFormat | None:
    """Return the format of batches in which some entries belong to every row, unless the program says otherwise."""
    if not names:
        return format
    format = format or BatchFormat()
    return replace(format, dims={**dict.fromkeys(names), **format.dims})


def _compared(
    whole: object,
    collate: Collate,
    samples: Any,
    read: list[Any],
    shares: list[Share],
    *,
    is_changed: bool = False,
) -> RowComparison:
    """Compare a batch with the rows of each rank.

    Args:
        whole: the batch.
        collate: a copy of the user's function, as it was before it collated the batch.
        samples: the samples of the batch, as they were then.
        read: the samples of each share.
        shares: the rows of each rank.
        is_changed: whether a call changes the function, for example because it counts them, so that each share is
            collated by a copy that was not called.
    """
    if isinstance(samples, list) and any(
        digest(samples[share.low : share.high]) != digest(part) for share, part in zip(shares, read, strict=True)
    ):
        return RowComparison(of_batch=[READ])
    parts = [(_copied_function(collate) if is_changed else collate)(_copied(part)) for part in read]
    return compare(_named(whole), [_named(part) for part in parts], [share.high - share.low for share in shares])


def _named(batch: object) -> Mapping[Any, Any]:
    return batch if isinstance(batch, Mapping) else {"batch": batch}


def _place(name: str) -> str:
    """Return the name of an entry as code."""
    if name in (PARTS, READ):
        return name
    keys = [int(key) if key.isdigit() else key for key in name.split(".")]
    return "batch" + "".join(f"[{key!r}]" for key in (keys[1:] if keys[0] == "batch" else keys))


def _outline(collate: Collate) -> list[object]:
    """Return what a call may change in a function: the numbers and texts that it holds, and which objects."""
    found: list[object] = []
    level: list[object] = [collate]
    for _ in range(_DEEPEST):
        found += [x if isinstance(x, int | float | str | None) else id(x) for x in level]
        found += [len(x) for x in level if isinstance(x, list | tuple | dict | set)]
        level = [
            part for x in level if not isinstance(x, type | ModuleType | int | float | str) for part in parts_of(x)
        ]
    return found


def _copied(value: Any, shared: Mapping[int, object] | None = None) -> Any:
    """Return a copy, for a function that takes entries out of its samples, or counts its calls.

    Args:
        value: what is copied.
        shared: the objects inside that the copy has too, by their identity.
    """
    try:
        return copy.deepcopy(value, dict(shared or {}))
    except Exception:  # what cannot be copied, such as a lock
        return value


def _copied_function(collate: Collate) -> Collate:
    """Return a copy of a collate function that shares what is large: a model, a dataset, arrays."""
    shared: dict[int, object] = {}
    level: list[Any] = [collate]
    for _ in range(_DEEPEST + 1):
        shared |= {id(x): x for x in level if _is_large(x)}
        level = [
            part
            for x in level
            if id(x) not in shared and not isinstance(x, type | ModuleType | int | float | str)
            for part in parts_of(x)
        ]
    copied: Collate = _copied(collate, shared)
    return copied


def _is_large(x: object) -> bool:
    is_dataset = hasattr(x, "__getitem__") and hasattr(x, "__len__") and not isinstance(x, list | dict | tuple | str)
    return is_dataset or isinstance(x, nn.Module | Dataset | Tensor)
