"""Finds out whether the rows of a batch depend on each other, by comparing a batch collated whole with the same rows
collated in parts.

A rank that collates its own rows alone has other values than one device where these depend on other rows: values that
are normalised over the batch, a partner from the next row, random draws. All ranks read the same samples, so all find
the same, without asking each other. Each rank cuts its own rows out of a batch that was collated whole.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from meshwright.data.collation import Collate, is_padded, same_values
from meshwright.data.global_batches import Share, Sharing
from meshwright.data.nested import SPARSE, digest, is_dense, like, take_rows
from meshwright.data.one_length import KeepingSamples
from meshwright.errors import PlanError
from meshwright.mesh.axes import Axis
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.schema import BatchSchema
from meshwright.random_states import RandomStates, parts_of


@dataclass
class RowComparison:
    """What the parts of a batch have shown about its entries, by name.

    Args:
        of_batch: what has rows whose values depend on the rows of other parts.
        of_rows: real numbers without rows that are computed from all rows.
        fixed: tensors and lists that are the same for any rows, though they have as many entries as the batch has rows.
    """

    of_batch: list[str] = field(default_factory=list)
    of_rows: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)


def compare(whole: object, parts: Sequence[object], sizes: Sequence[int]) -> RowComparison:
    """Compare a batch with its parts.

    Padding is no difference: the loader pads the ranks' rows to one length afterwards.

    Args:
        whole: what a collate function returned for all rows.
        parts: what it returned for the first ``sizes[0]`` rows, for the ``sizes[1]`` rows after these, and so on.
        sizes: the numbers of rows of the parts.

    Example:
        >>> rows = torch.tensor([1.0, 2.0, 3.0, 6.0])
        >>> compare(rows - rows.mean(), [rows[:2] - 1.5, rows[2:] - 4.5], [2, 2]).of_batch
        ['batch']
    """
    found = RowComparison()
    for name, x, of_parts in _paired(whole, list(parts), sizes, ""):
        _judge(name or "batch", x, of_parts, sizes, found)
    return found


def _paired(whole: Any, parts: list[Any], sizes: Sequence[int], name: str) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield each entry that all parts have, a list with a value for each row whole, with its name and its values."""
    if isinstance(whole, Mapping) and all(isinstance(part, Mapping) for part in parts):
        for key in whole:
            if all(key in part for part in parts):  # rows without images have none of their inputs
                yield from _paired(whole[key], [part[key] for part in parts], sizes, f"{name}.{key}".lstrip("."))
    elif isinstance(whole, list | tuple) and all(type(part) is type(whole) for part in parts):
        if all(len(part) == len(whole) for part in parts) and not _has_row_lists(whole, parts, sizes):
            for i, item in enumerate(whole):
                yield from _paired(item, [part[i] for part in parts], sizes, f"{name}.{i}".lstrip("."))
        else:
            yield name, whole, parts
    else:
        yield name, whole, parts


def _has_row_lists(whole: Sequence[Any], parts: Sequence[Sequence[Any]], sizes: Sequence[int]) -> bool:
    return len(whole) == sum(sizes) and [len(part) for part in parts] == list(sizes)


def _judge(name: str, whole: Any, parts: list[Any], sizes: Sequence[int], found: RowComparison) -> None:
    if isinstance(whole, list | tuple) and all(isinstance(part, list | tuple) for part in parts):
        if _has_row_lists(whole, parts, sizes) and not _are_same_rows(whole, parts, sizes):
            found.of_batch.append(name)
        return
    values = [_tensor(x) for x in (whole, *parts)]
    if any(x is None for x in values):
        return
    x, *pieces = [x for x in values if x is not None]
    if all(same_values(piece, x) for piece in pieces):
        if x.ndim and len(x) == sum(sizes):
            found.fixed.append(name)
    elif _are_rows(x, pieces, sizes):
        if not (_are_pieces(x, pieces) or _are_blocks(x, pieces, sizes)):
            found.of_batch.append(name)
    elif x.is_floating_point() and all(piece.shape == x.shape for piece in pieces) and not _is_total(x, pieces):
        found.of_rows.append(name)


def _are_same_rows(whole: Sequence[Any], parts: Sequence[Sequence[Any]], sizes: Sequence[int]) -> bool:
    ends = list(accumulate(sizes))
    return all(
        digest(list(whole[end - size : end])) == digest(list(part))
        for part, size, end in zip(parts, sizes, ends, strict=True)
    )


def _tensor(x: object) -> Tensor | None:
    """Return a value's numbers as a dense tensor; None for what has none, or whose form cannot be compared."""
    if isinstance(x, float):
        return torch.tensor(x, dtype=torch.float64)
    if isinstance(x, np.ndarray | np.generic):
        array = np.asarray(x)
        return torch.from_numpy(array.copy()) if array.dtype.kind in "fiu" and array.dtype.isnative else None
    if not isinstance(x, Tensor) or x.is_nested:
        return None
    return x if is_dense(x) else (x.to_dense() if x.layout in SPARSE else None)


def _are_rows(x: Tensor, pieces: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Return whether a tensor has rows, or blocks of them, along its first dim. A part may have lost that dim."""
    rows = sum(sizes)
    if not x.ndim or len(x) == 0 or len(x) % rows:
        return False
    blocks = len(x) // rows
    if all(piece.ndim == x.ndim for piece in pieces):
        return [len(piece) for piece in pieces] == [blocks * size for size in sizes]
    return blocks == 1


def _are_pieces(x: Tensor, pieces: Sequence[Tensor]) -> bool:
    """Return whether a tensor consists of the parts' tensors along some dim, but for padding in its other dims."""
    for dim in range(x.ndim if all(piece.ndim == x.ndim for piece in pieces) else 0):
        lengths = [piece.shape[dim] for piece in pieces]
        if sum(lengths) == x.shape[dim] and all(
            is_padded(own, piece) for own, piece in zip(x.split(lengths, dim), pieces, strict=True)
        ):
            return True
    return False


def _are_blocks(x: Tensor, pieces: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Return whether a tensor has blocks of rows, such as the chosen rows and then the rejected, as the parts do."""
    if any(piece.ndim != x.ndim for piece in pieces):
        return False
    blocks = x.unflatten(0, (-1, sum(sizes))).split(list(sizes), 1)
    return all(is_padded(own.flatten(0, 1), piece) for own, piece in zip(blocks, pieces, strict=True))


def _is_total(x: Tensor, pieces: Sequence[Tensor]) -> bool:
    """Return whether a number is a count, or an extreme, of the parts' numbers: each rank has that of its own rows."""
    stacked = torch.stack(list(pieces))
    return any(same_values(y, x) for y in (stacked.sum(0), stacked.amax(0), stacked.amin(0)))


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
