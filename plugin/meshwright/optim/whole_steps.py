"""Steps parameters whole, each on one rank, for optimizers whose update of a parameter reads all of it.

Between steps ranks have the parts of the parameters that they have under any plan: shards, or slices of them under
ZeRO. Norms, clipping, accumulation and masters are those of any optimizer. For a step, every parameter and its gradient
are sent whole to its owner. There the model's own parameter, which the optimizer knows by its identity, has the whole
values and the whole gradient while the step and the program's hooks of it run. The ranks then get their parts of the
result::

    backward -> parts of gradients -> [ owners: whole parameters, whole gradients, step ] -> parts of the parameters

The owner of a parameter is the rank that has most of it, so a step sends little. Norms, scalers and masters know
nothing of owners, since this window is around the step alone. Only exact classes that are known to be elementwise, and
are as their library has them, step parts (``elementwise.py``). Whether an update reads other parameters is not guessed:
all ranks step a small parameter of each group, each beside others, and compare the results (``trial.py``).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.errors import OptimizerMismatchError
from meshwright.layout.row_layout import RowLayout, StridedBlock, numel
from meshwright.layout.tensor_layout import TensorLayout, layout_of
from meshwright.mesh.axes import Axis, Mesh
from meshwright.optim.chained import groups_of, members, stepping
from meshwright.optim.gradients import Gradients
from meshwright.optim.owners import ComparedSteps, owners_of
from meshwright.optim.trial import follow_overrides
from meshwright.parallel.collectives import start_all_to_all_uneven
from meshwright.parallel.gradients.buckets import flat_dtype
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright.parallel.shards.state_of_parts import LentParameter, OwnedParameter, open_state

logger = logging.getLogger(__name__)

Blocks = list[StridedBlock]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Move:
    """What ranks have of one parameter.

    Args:
        parameter: the model's parameter.
        owners: the ranks that step it, of which the first one's result counts.
        sent: what each rank sends to the owners: together each element at least once.
        held: what each rank has.
        has_values: whether each owner has the whole weights, so that it is sent the gradient alone.
    """

    parameter: nn.Parameter
    owners: tuple[int, ...]
    sent: dict[int, Blocks]
    held: dict[int, Blocks]
    has_values: bool

    def sent_numel(self, rank: int) -> int:
        """Return the number of elements that a rank sends to an owner; the last says whether it has a gradient."""
        return (1 if self.has_values else 2) * numel(self.sent[rank]) + 1


class WholeSteps:
    """The steps of an optimizer's groups whose parameters are stepped whole.

    Args:
        optimizer: the optimizer, whose state of these parameters is that of one device, if it has any.
        groups: the indices of the groups.
        mesh: the ranks.
        gradients: the model's gradients, which are complete before the first step.
        on_host: whether owners step on the host (offload); ranks send what is on their devices.
    """

    def __init__(
        self, optimizer: Optimizer, groups: Sequence[int], mesh: Mesh, gradients: Gradients, *, on_host: bool = False
    ):
        self._optimizer, self._groups, self._mesh, self._gradients = optimizer, list(groups), mesh, gradients
        self._of_group = [list(optimizer.param_groups[index]["params"]) for index in groups]
        self._parameters = [p for parameters in self._of_group for p in parameters]
        self._known = set(map(id, self._parameters))
        self._owners: dict[int, tuple[int, ...]] = {}  # by the id of the parameter, of this stage's parameters
        self._device = self._parameters[0].device
        self._home = torch.device("cpu") if on_host else self._device
        state = optimizer.state
        self._given = {id(p): state.pop(p) for p in self._parameters if p in state}
        self._wholes: dict[int, nn.Parameter] = {}  # by the id of the parameter, those that this rank owns
        self._parts: list[list[nn.Parameter]] = []  # what each group has outside of this window
        self._moves: dict[tuple[int, ...], list[_Move]] = {}
        self._lent: list[LentParameter] = []
        self._compared = ComparedSteps(self._device)
        self._owned: list[OwnedParameter] = []

    def hook_end(self) -> None:
        """Add the hook that ends a step, before those that publish what was stepped."""
        self._optimizer.register_step_post_hook(lambda *_: self.close())

    def hook_begin(self) -> None:
        """Add the hook that begins a step, after those that settle the gradients; the parts are known by now."""
        self._optimizer.register_step_pre_hook(self._open)
        for each in {self._optimizer, *members(self._optimizer)}:
            each.zero_grad = functools.partial(self._zero_grad, each.zero_grad)  # type: ignore[method-assign]
            each.add_param_group = functools.partial(_refuse_group, type(each).__name__)  # type: ignore[method-assign]
        self._owners = owners_of(self._of_group, self._mesh, self._gradients)
        for parameter in self._parameters:
            if self._mesh.index in self._owners.get(id(parameter), ()):
                whole = nn.Parameter(torch.empty((), dtype=self._dtype(parameter), device=self._home))
                whole.data = _without_memory(whole, layout_of(parameter).shape)
                self._wholes[id(parameter)] = whole
                for each in members(self._optimizer):
                    follow_overrides(each, parameter, parameter)
                if id(parameter) in self._given:
                    self._optimizer.state[whole] = {
                        name: _as_state(value, whole) for name, value in self._given[id(parameter)].items()
                    }
        self._given = {}
        if self._mesh.is_first:
            self._tell()

    def _zero_grad(self, clear: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._parts:
            raise OptimizerMismatchError(
                "zero_grad() in a hook of the step would clear copies of the gradients, since the optimizer steps "
                "whole parameters. Call optimizer.zero_grad() in the loop, after optimizer.step()"
            )
        clear(*args, **kwargs)

    def abandon(self) -> None:
        """End the window of a step that raised; what it made of the parameters is lost."""
        if self._parts:
            self._end_window([self._optimizer.param_groups[index] for index in self._groups])
            for whole in self._wholes.values():
                whole.data, whole.grad = _without_memory(whole, whole.shape), None

    def _tell(self) -> None:
        sent = sum(move.sent_numel(rank) for moves in self._by_dtype().values() for move in moves for rank in move.sent)
        logger.info(
            "%s steps %d parameters whole, each on one rank, since it is not known to update each element from that "
            "element alone: in each step the ranks of a stage send each other up to %.1f M elements more. If it does, "
            "pass ToDistributedConfig(optimizer_reads='element')",
            " and ".join(type(each).__name__ for each in members(self._optimizer)), len(self._parameters), sent / 1e6,
        )  # fmt: skip

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is stepped whole, by a rank of this or of another stage."""
        return id(parameter) in self._known

    def part_of(self, parameter: nn.Parameter) -> tuple[TensorLayout, nn.Parameter | None]:
        """Return where the state of a parameter is: its layout, and on the owner the key of the state."""
        layout = layout_of(parameter)
        if not layout.is_held:
            return layout, None
        size = layout.shape.numel()
        owners = {self._mesh.places[owner]["ranks"] for owner in self._owners[id(parameter)]}
        ranks = self._mesh.tokens.size * self._mesh.tp.size
        spans = tuple(((0, size if rank in owners else 0),) for rank in range(ranks))
        flat = TensorLayout(shape=layout.shape, stages=layout.stages, name=layout.name, place=layout.place)
        return flat.flattened(RowLayout(0, size, spans), "ranks"), self._wholes.get(id(parameter))

    def _open(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if any(callable(argument) for argument in (*args, *kwargs.values())):
            raise ValueError(
                f"{type(optimizer).__name__}.step(closure) computes gradients inside of the step, but parameters are "
                "sent to the ranks that step them before it. Call loss.backward(), and then optimizer.step()"
            )
        if not {index for each in stepping(optimizer) for index in groups_of(each, optimizer)}.isdisjoint(self._groups):
            self.open()  # unless another optimizer of a chain steps alone

    def open(self) -> None:
        """Let the optimizer have the whole parameters that this rank owns; every rank makes the call."""
        groups = [self._optimizer.param_groups[index] for index in self._groups]
        with torch.no_grad(), reading_shards():
            self._gather()
            self._parts = [group["params"] for group in groups]
            trained = {id(p) for p in self._gradients.parameters}
            for group, parameters in zip(groups, self._of_group, strict=True):
                group["params"] = []
                for parameter in parameters:
                    whole = self._wholes.get(id(parameter))
                    if whole is not None and whole.numel() and id(parameter) in trained:
                        self._owned.append(OwnedParameter(parameter, whole))
                        group["params"].append(self._owned[-1].stepped)
                    elif id(parameter) in self._owners and id(parameter) in trained:
                        self._lent.append(LentParameter(parameter))
        with open_state(self._optimizer) as state:
            for owned in self._owned:
                if owned.whole in state:
                    state[owned.stepped] = state.pop(owned.whole)
        self._compared.begin()

    def close(self) -> None:
        """Give every rank its parts of what the owners have made of the parameters.

        Raises:
            OptimizerMismatchError: on every rank, if the ranks have stepped a parameter that all of them step to
                different values, or if the step of one has drawn random numbers.
        """
        if not self._parts:
            return
        self._end_window([self._optimizer.param_groups[index] for index in self._groups])
        with torch.no_grad(), reading_shards():
            self._compare()
            self._scatter()

    def _end_window(self, groups: Sequence[dict[str, Any]]) -> None:
        with open_state(self._optimizer) as state:
            for owned in self._owned:
                if owned.stepped is not owned.whole and owned.stepped in state:
                    state[owned.whole] = state.pop(owned.stepped)
        with reading_shards():
            for owned in self._owned:
                owned.give_back()
            for lent in self._lent:
                lent.give_back()
        for group, parts in zip(groups, self._parts, strict=False):
            group["params"] = parts
        self._parts, self._owned, self._lent = [], [], []

    def _compare(self) -> None:
        trained = {id(p) for p in self._gradients.parameters}
        several = {key for key, owners in self._owners.items() if len(owners) > 1 and key in trained}
        shared = [next((p for p in group if id(p) in several), None) for group in self._of_group]
        results = [
            (index, None if p is None else layout_of(p).name, None if p is None else self._wholes[id(p)].detach())
            for index, p in zip(self._groups, shared, strict=True)
        ]
        self._compared.compare(self._optimizer, results, self._mesh, self._world)

    def _gather(self) -> None:
        """Fill the parameters that this rank owns, and their gradients."""
        rank = self._mesh.index
        for dtype, moves in self._by_dtype().items():
            messages: list[list[Tensor]] = [[] for _ in range(self._mesh.size)]
            for move in moves:
                if rank in move.sent:
                    contribution = self._contribution(move, dtype)
                    for owner in move.owners:
                        messages[owner] += contribution
            received = self._exchange(
                messages,
                [sum(m.sent_numel(r) for m in moves if rank in m.owners and r in m.sent) for r in self._ranks],
                dtype,
            )
            self._fill([move for move in moves if rank in move.owners], received)

    def _contribution(self, move: _Move, dtype: torch.dtype) -> list[Tensor]:
        """Return this rank's elements of a gradient, then of the weights if need be, and whether it has a gradient."""
        key = self._gradients.part_of(move.parameter)[1]
        assert key is not None
        blocks, gradient = move.sent[self._mesh.index], key.grad
        sources = [
            torch.zeros_like(key) if gradient is None else gradient,
            *([] if move.has_values else [key.detach()]),
        ]
        own = [view.reshape(-1).to(self._device, dtype) for x in sources for view in _views(x.reshape(-1), blocks)]
        return [*own, torch.full((1,), float(gradient is not None), dtype=dtype, device=self._device)]

    def _fill(self, moves: list[_Move], received: list[Tensor]) -> None:
        offsets = [0] * len(received)
        marks: list[list[Tensor]] = []
        gradients = []
        for move in moves:
            whole = self._wholes[id(move.parameter)]
            rows = 1 if move.has_values else 2
            filled = torch.zeros(rows, whole.numel(), dtype=whole.dtype, device=self._device)
            marks.append([])
            for rank, blocks in move.sent.items():
                count, end = numel(blocks), offsets[rank] + move.sent_numel(rank) - 1
                for target, part in zip(filled, received[rank][offsets[rank] : end].split(count), strict=True):
                    _put(_views(target, [block.swapped() for block in blocks]), part)
                marks[-1].append(received[rank][end])
                offsets[rank] = end + 1
            gradient, *values = filled.to(self._home).view(rows, *whole.shape)
            whole.data = values[0] if values else move.parameter.detach()  # the step is in place, and published then
            gradients.append(gradient)
        # One read, only if this rank lacks a gradient that another may have: reading makes the host wait for CUDA.
        lacking = [each for move, each in zip(moves, marks, strict=True) if move.parameter.grad is None]
        others_have = iter(torch.stack([torch.stack(each).amax() for each in lacking]).tolist() if lacking else ())
        for move, gradient in zip(moves, gradients, strict=True):
            has_one = move.parameter.grad is not None or next(others_have)
            self._wholes[id(move.parameter)].grad = gradient if has_one else None

    def _scatter(self) -> None:
        """Give every rank its parts of the stepped parameters, and free the whole ones."""
        rank = self._mesh.index
        for dtype, moves in self._by_dtype().items():
            messages: list[list[Tensor]] = [[] for _ in range(self._mesh.size)]
            for move in moves:
                if move.owners[0] == rank:
                    whole = self._wholes[id(move.parameter)]
                    values = whole.detach().reshape(-1).to(self._device)
                    for other, blocks in move.held.items():
                        swapped = [block.swapped() for block in blocks]
                        messages[other] += [view.reshape(-1) for view in _views(values, swapped)]
            received = self._exchange(
                messages,
                [sum(numel(m.held[rank]) for m in moves if m.owners[0] == r and rank in m.held) for r in self._ranks],
                dtype,
            )
            offsets = [0] * len(received)
            for move in moves:
                if rank in move.held:
                    key = self._gradients.part_of(move.parameter)[1]
                    assert key is not None
                    owner, count = move.owners[0], numel(move.held[rank])
                    start, offsets[owner] = offsets[owner], offsets[owner] + count
                    _put(_views(key.detach().view(-1), move.held[rank]), received[owner][start : start + count])
        for whole in self._wholes.values():
            whole.data, whole.grad = _without_memory(whole, whole.shape), None

    def _exchange(self, messages: list[list[Tensor]], sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
        """Send each rank its message, and return those of all ranks, which have these sizes."""
        rank, nothing = self._mesh.index, torch.empty(0, dtype=dtype, device=self._device)
        own = torch.cat([nothing, *messages[rank]])
        if self._mesh.size == 1:
            return [own]
        messages[rank], sizes[rank] = [], 0
        sent = [sum(part.numel() for part in message) for message in messages]
        flat = torch.cat([nothing, *(part for message in messages for part in message)])
        received = list(start_all_to_all_uneven(flat, sent, sizes, self._world)().split(sizes))
        received[rank] = own
        return received

    @property
    def _world(self) -> Axis:
        return Axis("ranks", size=self._mesh.size, rank=self._mesh.index, group=dist.group.WORLD)

    @property
    def _ranks(self) -> range:
        return range(self._mesh.size)

    def _by_dtype(self) -> dict[torch.dtype, list[_Move]]:
        """Return the moves of the parameters that are trained, by the dtype in which they are stepped."""
        trained = {id(p) for p in self._gradients.parameters}
        parameters = [p for p in self._parameters if id(p) in trained and id(p) in self._owners]
        key = tuple(map(id, parameters))
        if key not in self._moves:
            self._moves = {key: [self._move(parameter) for parameter in parameters]}
        # A dtype of which only other stages of a pipeline have parameters counts too, since all ranks communicate.
        dtypes = sorted({self._dtype(parameter) for parameter in self._parameters}, key=str)
        return {d: [move for move in self._moves[key] if self._dtype(move.parameter) == d] for d in dtypes}

    def _dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype in which a parameter is stepped, which does not depend on whether this rank has it."""
        return parameter.dtype if self._gradients.zero is None else flat_dtype(parameter.dtype)

    def _move(self, parameter: nn.Parameter) -> _Move:
        owners, places = self._owners[id(parameter)], self._mesh.places
        layout, _ = self._gradients.part_of(parameter)
        stage = [rank for rank, place in enumerate(places) if place["pp"] == self._mesh.pp.rank]
        held = {rank: blocks for rank in stage if (blocks := layout.blocks(places[rank]))}
        # Of the ranks that have the same elements, the one nearest to the first owner sends them.
        near = sorted(held, key=lambda rank: sum(places[rank][a] != places[owners[0]][a] for a in ("tp", "tokens")))
        sent: dict[int, Blocks] = {}
        for rank in near:
            if held[rank] not in sent.values():
                sent[rank] = held[rank]
        return _Move(
            parameter=parameter,
            owners=owners,
            sent=dict(sorted(sent.items())),
            held=held,
            has_values=self._has_values(parameter),
        )

    def _has_values(self, parameter: nn.Parameter) -> bool:
        """Return whether each rank of a parameter's stage has all of its weights, in the dtype that is stepped."""
        zero = self._gradients.zero
        bucket = None if zero is None else zero.bucket_of(parameter)
        is_here = self._home == self._device and not layout_of(parameter).is_cut
        return is_here and (bucket is None or bucket.weights.holds_all)


def _views(flat: Tensor, blocks: Blocks) -> Iterator[Tensor]:
    """Yield the elements of a 1-d tensor that are at the storage positions of blocks."""
    for block in blocks:
        stride = (block.local_stride, 1)
        yield flat.as_strided((block.count, block.length), stride, flat.storage_offset() + block.local)


def _put(views: Iterable[Tensor], values: Tensor) -> None:
    """Copy a 1-d tensor into views, one after the other."""
    start = 0
    for view in views:
        view.copy_(values[start : start + view.numel()].view(view.shape))
        start += view.numel()


def _without_memory(like: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(tuple(shape))


def _refuse_group(name: str, param_group: object) -> NoReturn:
    raise OptimizerMismatchError(
        f"{name} steps whole parameters, whose owners are chosen in the call. Pass all groups to the optimizer before "
        "to_distributed; parameters that are frozen then may be trained later"
    )


def _as_state(value: object, whole: nn.Parameter) -> object:
    """Return a value of a state that was made before the call, on the device and in the dtype of what is stepped."""
    if not isinstance(value, Tensor):
        return value
    if not value.ndim:
        return value.cpu() if whole.is_cpu else value
    return value.to(whole.device, whole.dtype if value.is_floating_point() else value.dtype)
