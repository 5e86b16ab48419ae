"""What the ranks that share the layers are fed: compared value by value at each forward pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import DivergenceError
from meshwright.faults.collective_log import describe_tensors
from meshwright.faults.memory_digest import bytes_digest, is_plain, ordered_digest
from meshwright.faults.statement import Statement
from meshwright.parallel.async_numbers import Gathered, is_deferred
from meshwright.parallel.collectives import Axis

ADVICE = (
    "Tensor-parallel ranks each compute a part of the same tokens: with other tokens on one of them, the sums are of "
    "no batch at all. Read the data through the loader that to_distributed or shard_dataloader returned, and skip or "
    "sample a batch on all ranks of the axis or on none:\n"
    "    model, optimizer, loader = mw.to_distributed(model, optimizer, loader, ...)"
)


class ComparedInputs:
    """Compares the tensors that the ranks of the TP axis pass to a model.

    On the CPU their bytes are part of what the ranks say when they meet. Elsewhere a read would wait for the device: a
    digest is gathered there, and looked at in the next pass.

    Args:
        tp: the axis.
    """

    def __init__(self, tp: Axis):
        self.tp = tp
        self._gathered: Gathered | None = None
        self._names: list[str] = []

    def statement(self, model: nn.Module, inputs: dict[str, Any]) -> Statement:
        """What this rank is fed, for the meeting of the pass that is about to run."""
        details = {name: _describe(value) for name, value in inputs.items() if _is_compared(value)}
        mode = "training" if model.training else "evaluation"
        texts = [mode, _precision(inputs), *(f"{name} {value}" for name, value in details.items())]
        return Statement(text=", ".join(filter(None, texts)), details=lambda: details, advice=ADVICE)

    def gather(self, inputs: dict[str, Any], step: int) -> None:
        """Begin to compare what is on a device, once the ranks agree on what that is."""
        late = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and _is_late(x)}
        if late:
            self._names = list(late)
            self._gathered = Gathered(torch.stack([ordered_digest(x) for x in late.values()]), self.tp, step)

    def look(self) -> None:
        """Look at what the device compared in the pass before.

        Raises:
            DivergenceError: naming the input that differed, and the ranks.
        """
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            return
        numbers = gathered.numbers()
        differ = [name for name, column in zip(self._names, numbers.T, strict=True) if len(set(column.tolist())) > 1]
        if differ:
            assert self.tp.group is not None
            ranks = dist.get_process_group_ranks(self.tp.group)
            column = numbers[:, self._names.index(differ[0])].tolist()
            shown = "; ".join(f"rank {rank}: digest {_short(value)}" for rank, value in zip(ranks, column, strict=True))
            raise DivergenceError(
                f"tensor-parallel ranks {ranks} got other values of {', '.join(differ)} in step {gathered.step} "
                f"({differ[0]}: {shown}). {ADVICE}"
            )


def _is_compared(value: Any) -> bool:
    return isinstance(value, Tensor | int | float | str)


def _is_late(x: Tensor) -> bool:
    # Kernels of a device may sum in any order, so what is computed there may differ in its last bits.
    is_exact = not (x.is_floating_point() or x.is_complex())
    return is_deferred(x.device) and is_exact and is_plain(x) and x.numel() > 0


def _describe(value: Any) -> str:
    """The value itself, or a tensor's type, shape and, where the host has it, digest."""
    if not isinstance(value, Tensor):
        return repr(value)
    shape = describe_tensors(value)
    if is_deferred(value.device) or not is_plain(value):
        return shape
    return f"{shape} with digest {bytes_digest(value):08x}"


def _short(value: int) -> str:
    return f"{value & (2**64 - 1):016x}"


def _precision(inputs: dict[str, Any]) -> str:
    device = next((x.device for x in inputs.values() if torch.is_tensor(x)), torch.device("cpu")).type
    return f"autocast to {torch.get_autocast_dtype(device)}" if torch.is_autocast_enabled(device) else ""
