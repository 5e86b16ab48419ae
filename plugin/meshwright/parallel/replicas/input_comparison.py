"""Compare, value by value, the inputs of the ranks that run one model together, at each forward pass."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import DivergenceError
from meshwright.faults.collective_log import describe_tensors
from meshwright.faults.memory_digest import bytes_digest, is_plain, ordered_digest
from meshwright.faults.statement import Statement
from meshwright.mesh.axes import Axis
from meshwright.parallel.async_numbers import Gathered, is_deferred

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
