"""What the ranks of an axis compare: digests of their replicas, and the inputs of each forward pass value by value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import DivergenceError
from meshwright.faults.collective_log import describe_tensors
from meshwright.faults.memory_digest import bytes_digest, is_plain, ordered_digest
from meshwright.faults.statement import SHOWN, Statement
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.axes import Axis
from meshwright.parallel.async_numbers import Gathered, is_deferred

WEIGHT_ADVICE = (
    "From then on each rank trains a different model, and averaged gradients belong to none of them. Either the "
    "program changed a weight or a gradient on one rank only (or by what a hook of a module saw in the backward pass, "
    "before gradients are reduced), or a rank's memory is faulty. Change weights on all ranks alike, and resume from a "
    "checkpoint that was saved before:\n"
    "    mw.load_weights(model, CHECKPOINT)"
)
STATE_ADVICE = (
    "One device has one value of each. If the model's forward writes it, each rank has written what follows from its "
    "own rows (as statistics of a batch do), so the numbers are not those of one device. Write what follows from the "
    "rows of all ranks instead: gather them in forward with mw.gather_rows(x), or use a layer that needs no batch, "
    "such as nn.LayerNorm in place of nn.BatchNorm1d. If forward does not write it, the program has changed it on one "
    "rank only, or a rank's memory is faulty: resume from a checkpoint that was saved before"
)
OF_OPTIMIZER, OF_COUNTS, _BUFFER = "optimizer's state of ", "optimizer's counts of ", "buffer "


@dataclass(frozen=True)
class CopiedRows:
    """Rows of a parameter of which the ranks of an axis hold several copies.

    Args:
        name: the parameter's one-device name.
        start, stop: the range of the rows in the one-device parameter; None for the whole parameter.
        local: the dim of the rows, and the index in the shard at which the rows begin.
    """

    name: str
    start: int | None = None
    stop: int | None = None
    local: tuple[int, int] = (0, 0)

    @property
    def key(self) -> str:
        return self.name if self.start is None else f"{self.name}[{self.start}:{self.stop}]"

    def of(self, parameter: Tensor) -> Tensor:
        """Return the values of the rows in this rank's shard."""
        if self.start is None or self.stop is None:
            return parameter.detach()
        return parameter.detach().narrow(*self.local, self.stop - self.start)


def copied_rows(name: str, layout: TensorLayout, rank: int) -> Iterable[CopiedRows]:
    """Yield the rows of a rank's shard that the axis holds more than once, on this rank or on others."""
    place, runs = 0, iter(layout.over("tp").copies(rank))
    for start, stop in layout.over("tp").spans[rank]:
        while start < stop:
            length, copies = next(runs)
            if copies > 1:
                yield CopiedRows(name, start, start + length, (layout.over("tp").dim, place))
            start, place = start + length, place + length


@dataclass(frozen=True)
class Digests:
    """The digests of what the ranks of an axis share.

    Args:
        gathered: the digests of each rank; for each tensor of a module, a key and a digest at the end.
        names: for each rank, the names of its first digests; empty for those that stand for nothing.
        keyed: the names of the tensors of this rank's modules, by key.
        count: the number of keys.
        kinds: what was due: "weights", "state" (tensors of modules), or both in this order.
    """

    gathered: Gathered
    names: list[list[str]]
    keyed: dict[int, str]
    count: int
    kinds: list[str]

    @property
    def step(self) -> int:
        return self.gathered.step

    def differences(self, ranks: list[int]) -> dict[str, list[list[int]]]:
        """Return, for each name whose digests differ, the groups of ranks with equal digests."""
        holders: dict[str, dict[int, list[int]]] = {}
        for rank, names, digests in zip(ranks, self.names, self.gathered.numbers().tolist(), strict=True):
            known = {
                name: digest
                for name, digest in zip(names, digests, strict=False)
                if name and (digest or not name.startswith(OF_COUNTS))  # another rank may step the whole parameter
            }
            if self.count:
                keys, theirs = digests[-2 * self.count : -self.count], digests[-self.count :]
                for key, digest in zip(keys, theirs, strict=True):
                    if key:
                        known[_BUFFER + self.keyed.get(key, f"{key:x}, which this rank has not")] = digest
            for name, digest in known.items():
                holders.setdefault(name, {}).setdefault(digest, []).append(rank)
        return {name: list(by.values()) for name, by in holders.items() if len(by) > 1}


def parted(differ: dict[str, list[list[int]]], axis: Axis, step: int, before: int) -> str:
    lines = [
        f"  {key}: " + " differ from ".join(f"rank(s) {', '.join(map(str, ranks))}" for ranks in parts)
        for key, parts in list(differ.items())[:SHOWN]
    ]
    if len(differ) > SHOWN:
        lines.append(f"  ... and {len(differ) - SHOWN} more")
    since = f"since step {before}, when they were equal" if before else "since the call that distributed the model"
    is_state = next(iter(differ)).startswith(_BUFFER)  # weights come first, and differ because of it
    what, advice = ("buffer", STATE_ADVICE) if is_state else ("weight", WEIGHT_ADVICE)
    head = f"{len(differ)} {what}(s) that the ranks of {axis.name} share are no longer equal in step {step}:"
    return "\n".join([head, *lines, f"They were changed {since}. {advice}"])


ADVICE = (
    "Ranks of tp, cp and pp compute parts of one model for the same tokens. If one rank has other tokens, the parts "
    "mix two batches. Read the data through the loader that to_distributed or shard_dataloader returned, and skip "
    "or sample a batch on all ranks of the axis or on none:\n"
    "    model, optimizer, loader = mw.to_distributed(model, optimizer, loader, ...)"
)


class ComparedInputs:
    """Compares the tensors that the ranks of an axis pass to a model.

    On the CPU, the statement that the ranks compare contains a digest of each tensor's bytes. On other devices the host
    would have to wait for the digests, so they are gathered on the device and checked in the next pass.

    Args:
        axis: the axis tp, cp or pp.
    """

    def __init__(self, axis: Axis):
        self.axis = axis
        self._gathered: Gathered | None = None
        self._names: list[str] = []

    def statement(self, model: nn.Module, inputs: dict[str, object]) -> Statement:
        """Return a description of this rank's inputs, which the ranks compare before the pass runs."""
        details = {name: _describe(value) for name, value in inputs.items() if isinstance(value, _COMPARED)}
        mode = "training" if model.training else "evaluation"
        texts = [mode, _precision(inputs), *(f"{name} {value}" for name, value in details.items())]
        return Statement(text=", ".join(filter(None, texts)), details=lambda: details, advice=ADVICE)

    def gather(self, inputs: dict[str, object], step: int) -> None:
        """Start to compare the inputs on a device; called once the ranks agree on which inputs these are."""
        late = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and _is_late(x)}
        if late:
            self._names = list(late)
            self._gathered = Gathered(torch.stack([ordered_digest(x) for x in late.values()]), self.axis, step)

    def look(self) -> None:
        """Check the digests that were gathered in the previous pass.

        Raises:
            DivergenceError: if the digests differ.
        """
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            return
        numbers = gathered.numbers()
        differ = [name for name, column in zip(self._names, numbers.T, strict=True) if len(set(column.tolist())) > 1]
        if differ:
            assert self.axis.group is not None
            ranks = dist.get_process_group_ranks(self.axis.group)
            column = numbers[:, self._names.index(differ[0])].tolist()
            shown = "; ".join(f"rank {rank}: digest {_short(value)}" for rank, value in zip(ranks, column, strict=True))
            raise DivergenceError(
                f"{self.axis.name} ranks {ranks} got different values of {', '.join(differ)} in step {gathered.step} "
                f"({differ[0]}: {shown}). {ADVICE}"
            )


_COMPARED = Tensor | int | float | str


def _is_late(x: Tensor) -> bool:
    # A device's kernels may sum in any order, so floating-point inputs may differ in their last bits.
    is_exact = not (x.is_floating_point() or x.is_complex())
    return is_deferred(x.device) and is_exact and is_plain(x) and x.numel() > 0


def _describe(value: object) -> str:
    """Return a value's ``repr``; for a tensor, its type and shape, and its digest if the tensor is on the host."""
    if not isinstance(value, Tensor):
        return repr(value)
    shape = describe_tensors(value)
    if is_deferred(value.device) or not is_plain(value):
        return shape
    return f"{shape} with digest {bytes_digest(value):08x}"


def _short(value: int) -> str:
    return f"{value & (2**64 - 1):016x}"


def _precision(inputs: dict[str, object]) -> str:
    device = next((x.device for x in inputs.values() if torch.is_tensor(x)), torch.device("cpu")).type
    return f"autocast to {torch.get_autocast_dtype(device)}" if torch.is_autocast_enabled(device) else ""
