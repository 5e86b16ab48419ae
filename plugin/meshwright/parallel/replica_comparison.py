"""Check during training that the replicas of a model over tp and dp agree on everything that must be equal.

The check is on by default.

- The text of each meeting contains the optimizer's settings and number of steps, ``requires_grad`` of each parameter,
  and whether gradients were cleared.
- Digests of the weights' memory are compared every few steps and before a save. Replicas over dp get the same reduced
  gradients and take the same elementwise steps, so they are bitwise equal. Norms and copied key/value rows whose
  gradients are averaged over tp are bitwise equal too. For other replicated weights, each rank of tp computes the
  whole gradient itself. These weights are equal on the CPU. On CUDA, kernels may add in another order, so
  these weights are compared there only under ``torch.use_deterministic_algorithms(True)``.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.errors import DivergenceError
from meshwright.faults.guard import Guard
from meshwright.faults.memory_digest import memory_digest
from meshwright.faults.statement import SHOWN, Statement
from meshwright.parallel.async_numbers import Gathered, is_deferred
from meshwright.parallel.collectives import Axis
from meshwright.parallel.loss_gradients import LossGradients
from meshwright.parallel.row_layout import ShardRecord
from meshwright.parallel.shard_reads import reading_shards
from meshwright.parallel.user_hooks import has_gradient_hooks

ADVICE = (
    "Each rank steps a replica of the same weights. After one more step the replicas differ permanently, and averaged "
    "gradients belong to none of them. Base decisions (a skipped step, a learning rate, what is frozen) on numbers "
    "that are equal on all ranks, such as outputs.loss, and act on all ranks alike"
)
WEIGHT_ADVICE = (
    "From then on each rank trains a different model, and averaged gradients belong to none of them. Either the "
    "program changed a weight or a gradient on one rank only (or in a hook of the backward pass, whose gradients are "
    "reduced after it), or a rank's memory is faulty. Change weights on all ranks alike, and resume from a checkpoint "
    "that was saved before:\n"
    "    mw.load_weights(model, CHECKPOINT)"
)


@dataclass(frozen=True)
class Rows:
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


class ReplicaComparison:
    """Compares the replicas of one model.

    Args:
        model: a model whose parameters have records.
        tp, dp: the axes over which the replicas are compared.
        guard: the guard, which counts the steps and holds the meetings.
        every: the number of steps between two comparisons of the weights; 0 for never.
        has_weights: whether this process holds the weights and the runtime steps them; else they are not compared.
    """

    def __init__(self, model: nn.Module, *, tp: Axis, dp: Axis, guard: Guard, every: int, has_weights: bool):
        self.tp, self.dp, self.guard, self.every, self.has_weights = tp, dp, guard, every, has_weights
        self.tie = Axis("tie")  # the pipeline's ranks that hold one tied weight on two stages; set by the pipeline
        self.losses = LossGradients()
        self._named = list(model.named_parameters())
        self._optimizer: Optimizer | None = None
        self._steps = self._steps_seen = 0
        self._cleared = ""
        self._has_looked = False  # for hooks on gradients, in the first step
        self._compared: dict[str, int] = {}  # axis -> the step of the last comparison of weights
        self._gathered: dict[str, tuple[Gathered, list[list[str]]]] = {}

    def for_copy(self) -> ReplicaComparison:
        """Return a comparison without an optimizer for a copy of the model; pass the copy to :meth:`look_at`."""
        new = copy.copy(self)
        new._named, new._optimizer, new._compared, new._gathered = [], None, {}, {}
        new.losses = LossGradients()
        new._steps = new._steps_seen = 0
        new._cleared = ""
        return new

    def look_at(self, model: nn.Module) -> None:
        """Compare the parameters of this model from now on."""
        self._named = list(model.named_parameters())

    def watch(self, optimizer: Optimizer) -> None:
        """Compare an optimizer's settings and steps from now on."""
        self._optimizer = optimizer
        optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._steps += 1

    def statement(self) -> Statement:
        """Return a statement of what must be equal on all ranks before the optimizer's next step."""
        with reading_shards():  # reading a guarded parameter's property takes microseconds, and this runs in every step
            trained = bytes(parameter.requires_grad for _, parameter in self._named)
        parts = [f"parameters trained {zlib.crc32(trained):08x}"]
        if self._optimizer is not None:
            settings = repr([value for group in self._optimizer.param_groups for value in _settings(group).items()])
            parts += [f"{self._steps} optimizer steps", f"settings {zlib.crc32(settings.encode()):08x}"]
        return Statement(text=", ".join(parts), details=self._details, advice=ADVICE)

    def statement_before_forward(self) -> Statement:
        """Return :meth:`statement`, and add whether gradients were cleared since the optimizer's last step."""
        statement = self.statement()
        if self._steps != self._steps_seen:
            # Only right after a step, since passes under no_sync may later leave gradients on some ranks.
            self._steps_seen = self._steps
            has_any = any(parameter.grad is not None for _, parameter in self._named)
            self._cleared = f"gradients {'kept' if has_any else 'cleared'} since step {self._steps} of the optimizer"
        if not self._cleared:
            return statement
        cleared = self._cleared

        def details() -> dict[str, str]:
            return {**self._details(), "optimizer.zero_grad()": cleared}

        return Statement(text=f"{statement.text}, {cleared}", details=details, advice=ADVICE)

    def _details(self) -> dict[str, str]:
        found = {}
        if self._optimizer is not None:
            found["optimizer.step()"] = f"called {self._steps} times"
            for index, group in enumerate(self._optimizer.param_groups):
                found |= {f"{key} of the optimizer's group {index}": value for key, value in _settings(group).items()}
        return found | {f"requires_grad of {name}": str(p.requires_grad) for name, p in self._named}

    def compare_weights(self, axis: Axis) -> None:
        """Compare the weights that the ranks of an axis share, if a comparison is due. All ranks must call this.

        Raises:
            DivergenceError: if weights differ; the message says since when.
        """
        before, _ = self._gathered.get(axis.name, (None, []))
        if before is not None and before.step < self.guard.step:  # a digest of this step would make the host wait
            self._look(axis)
        if not self.every or not (self._is_due(axis) or self._comes_early(axis)):
            return
        self._begin(axis)
        if not is_deferred(self._device):
            self._look(axis)

    def _is_due(self, axis: Axis) -> bool:
        return self.guard.step - self._compared.get(axis.name, 0) >= self.every

    def _comes_early(self, axis: Axis) -> bool:
        """Return whether to compare in the first step too, since hooks may step weights by unreduced gradients."""
        if axis is not self.dp or self._has_looked:
            return False
        self._has_looked = True
        with reading_shards():
            return any(has_gradient_hooks(parameter) for _, parameter in self._named)

    def compare_now(self, *, is_met: bool = False) -> None:
        """Compare everything and wait for the result, for example before a save. All ranks must call this.

        Args:
            is_met: whether all ranks have just made the same :meth:`statement`, so that only digests are compared.

        Raises:
            DivergenceError: if weights differ; the message says since when.
        """
        if not self.every:
            return
        error: DivergenceError | None = None
        for axis in self._axes:
            if not is_met or not _has_all_ranks(axis):  # the log of a group's collectives is not that of all ranks
                self.guard.meet("weights", axis.group, self.statement())
            try:
                self._look(axis)
                self._begin(axis)
                self._look(axis)
            except DivergenceError as found:  # ranks of other groups go on to the next axis, and so must this one
                error = error or found
        if error is not None:
            raise error

    @property
    def is_of_all_ranks(self) -> bool:
        """Whether all ranks find the same differences; otherwise those of one group may find what others do not."""
        return any(map(_has_all_ranks, self._axes))

    @property
    def _axes(self) -> list[Axis]:
        return [axis for axis in (self.tp, self.dp, self.tie) if axis.size > 1]

    @property
    def _device(self) -> torch.device:
        return self._named[0][1].device

    def _begin(self, axis: Axis) -> None:
        if not self.has_weights:
            return
        shared = self._shared_over(axis)
        keys = [[rows.key for _, rows in theirs] for theirs in shared]
        with reading_shards():
            own = [memory_digest(rows.of(parameter)) for parameter, rows in shared[axis.rank]]
        most = max(map(len, keys))
        if most == 0:
            return
        own += [torch.zeros((), dtype=torch.int64, device=self._device)] * (most - len(own))
        self._gathered[axis.name] = Gathered(torch.stack(own), axis, self.guard.step), keys

    def _look(self, axis: Axis) -> None:
        gathered, keys = self._gathered.pop(axis.name, (None, []))
        if gathered is None:
            return
        holders: dict[str, dict[int, list[int]]] = {}
        assert axis.group is not None
        ranks = dist.get_process_group_ranks(axis.group)
        for rank, names, digests in zip(ranks, keys, gathered.numbers().tolist(), strict=True):
            for key, digest in zip(names, digests, strict=False):
                holders.setdefault(key, {}).setdefault(digest, []).append(rank)
        before = self._compared.get(axis.name, 0)
        self._compared[axis.name] = gathered.step
        differ = {key: list(by.values()) for key, by in holders.items() if len(by) > 1}
        if differ:
            raise DivergenceError(_parted(differ, axis, gathered.step, before))

    def _shared_over(self, axis: Axis) -> list[list[tuple[Tensor, Rows]]]:
        """Return, for each rank of an axis, those of its rows that the axis holds more than once."""
        shared: list[list[tuple[Tensor, Rows]]] = [[] for _ in range(axis.size)]
        for name, parameter in self._named:
            record: ShardRecord = parameter.meshwright  # type: ignore[attr-defined]
            if not record.is_held or (axis is self.tie and record.stage_copies == 1):
                continue
            if axis is self.tie:
                for rank in range(axis.size):
                    shared[rank].append((parameter, Rows(name)))
                continue
            if axis is self.dp or not record.is_sharded:
                if axis is self.tp and not self._is_equal_over_tp(parameter, record):
                    continue
                for rank in range(axis.size):
                    shared[rank].append((parameter, Rows(name)))
            elif record.layout.has_copies:
                for rank in range(axis.size):
                    shared[rank] += ((parameter, rows) for rows in _copied_rows(name, record, rank))
        return shared

    def _is_equal_over_tp(self, parameter: Tensor, record: ShardRecord) -> bool:
        is_averaged = record.is_grad_partial or not parameter.requires_grad
        return is_averaged or not is_deferred(parameter.device) or torch.are_deterministic_algorithms_enabled()


def _copied_rows(name: str, record: ShardRecord, rank: int) -> Iterable[Rows]:
    """Yield the rows of a rank's shard that the axis holds more than once, on this rank or on others."""
    place, runs = 0, iter(record.layout.copies(rank))
    for start, stop in record.layout.spans[rank]:
        while start < stop:
            length, copies = next(runs)
            if copies > 1:
                yield Rows(name, start, start + length, (record.layout.dim, place))
            start, place = start + length, place + length


def _settings(group: dict[str, Any]) -> dict[str, str]:
    """Return an optimizer group's settings as text, without tensors on a device, since the host would wait for them."""
    return {key: text for key, value in group.items() if key != "params" and (text := _text(value)) is not None}


def _text(value: Any) -> str | None:
    if isinstance(value, Tensor):
        return None if is_deferred(value.device) or value.numel() > 1 else repr(value.item())
    if isinstance(value, list | tuple):
        return repr([_text(item) for item in value])
    return repr(value) if isinstance(value, str | int | float | bool | None) else None


def _parted(differ: dict[str, list[list[int]]], axis: Axis, step: int, before: int) -> str:
    lines = [
        f"  {key}: " + " differ from ".join(f"rank(s) {', '.join(map(str, ranks))}" for ranks in parts)
        for key, parts in list(differ.items())[:SHOWN]
    ]
    if len(differ) > SHOWN:
        lines.append(f"  ... and {len(differ) - SHOWN} more")
    since = f"since step {before}, when they were equal" if before else "since the call that distributed the model"
    head = f"{len(differ)} weight(s) that the ranks of {axis.name} share are no longer equal in step {step}:"
    return "\n".join([head, *lines, f"They were changed {since}. {WEIGHT_ADVICE}"])


def _has_all_ranks(axis: Axis) -> bool:
    return axis.size == dist.get_world_size()
