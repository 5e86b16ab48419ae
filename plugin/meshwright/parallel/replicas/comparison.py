"""Check during training that the replicas of a model over tp and dp agree on everything that must be equal.

The check is on by default.

- The text of each meeting contains the optimizer's settings and number of steps, ``requires_grad`` of each parameter,
  and whether gradients were cleared.
- Digests of the weights' memory, and of the optimizer's state of them, are compared every few steps and before a save.
  Replicas over dp get the same reduced gradients and take the same elementwise steps, so they are bitwise equal. Norms
  and copied key/value rows whose gradients are averaged over tp are bitwise equal too. For other replicated weights,
  each rank of tp computes the whole gradient itself. These weights are equal on the CPU. On CUDA, kernels may add in
  another order, so these weights are compared there only under ``torch.use_deterministic_algorithms(True)``.
- Digests of buffers and of other tensors that modules keep travel with them. If forward writes tensors of the model in
  the first steps, all is compared in these steps too: a data-parallel rank writes what follows from its own rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.errors import DivergenceError
from meshwright.faults.guard import Guard
from meshwright.faults.memory_digest import memory_digest
from meshwright.faults.statement import Statement
from meshwright.layout.tensor_layout import TensorLayout, layout_of
from meshwright.mesh.axes import Axis, Mesh
from meshwright.parallel.async_numbers import Gathered, is_deferred
from meshwright.parallel.batch.loss_gradients import LossGradients
from meshwright.parallel.draws.device_draws import DeviceDraws
from meshwright.parallel.gradients.gradient_hooks import GradientHooks
from meshwright.parallel.replicas.digests import OF_COUNTS, OF_OPTIMIZER, CopiedRows, Digests, copied_rows, parted
from meshwright.parallel.replicas.replicate_model import ModuleTensors, counts_digest, optimizer_digest
from meshwright.parallel.shards.stand_in import own_shape, reading_shards
from meshwright.parallel.shards.state_of_parts import state_of

ADVICE = (
    "Each rank steps a replica of the same weights. After one more step the replicas differ permanently, and averaged "
    "gradients belong to none of them. Base decisions (a skipped step, a learning rate, what is frozen) on numbers "
    "that are equal on all ranks, such as outputs.loss, and act on all ranks alike"
)
FIRST = 3  # meetings at which everything is compared if forward writes tensors


class ReplicaComparison:
    """Compares the replicas of one model.

    Args:
        named: the parameters of the model by name, which have layouts.
        mesh: the axes over which the replicas are compared; over pp, tensors that modules outside of the layers keep.
        guard: the guard, which counts the steps and holds the meetings.
        every: the number of steps between two comparisons of the weights; 0 for never.
        every_state: the number of steps between two comparisons of ``tensors``.
        has_weights: whether this process holds the weights and the runtime steps them; else they are not compared.
        tensors: the tensors of the model's modules that are no parameters; None if ranks may have their own.
        draws: what the model draws, which begins from the same state on all ranks.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        *,
        mesh: Mesh,
        guard: Guard,
        every: int,
        every_state: int = 50,
        has_weights: bool,
        tensors: ModuleTensors | None = None,
        draws: DeviceDraws | None = None,
    ):
        self.mesh, self.guard, self.has_weights = mesh, guard, has_weights
        self.every, self.every_state = every, every_state
        self.tie = Axis("tie")  # the pipeline's ranks that hold one tied weight on two stages; set by the pipeline
        self.draws = draws
        self._tensors = tensors
        self.losses = LossGradients(self._any_trained, mesh.dp.size)
        self.hooks: GradientHooks | None = None  # the program's hooks on the gradients, which all ranks run together
        self._named = list(named)
        self._optimizer: Optimizer | None = None
        self._stepped: Callable[[nn.Parameter], Tensor | None] | None = None
        self._steps = self._steps_seen = 0
        self._steps_of_part: dict[Optimizer, int] = {}
        self._stepping: Callable[[], Iterable[Optimizer]] = tuple
        self._cleared = ""
        self._compared: dict[tuple[str, str], int] = {}  # axis, kind of values -> the step of the last comparison
        self._due: dict[tuple[str, str], int] = {}  # the same, without the first comparisons
        self._meetings: dict[str, int] = {}  # axis -> number of meetings at which a comparison may be due
        self._gathered: dict[str, Digests] = {}
        self.wrote = False  # whether a forward pass of this rank has written tensors of the model

    def _any_trained(self, test: Callable[[Tensor], bool]) -> bool:
        with reading_shards():
            return any(p.requires_grad and test(p) for _, p in self._named)

    def for_copy(self) -> ReplicaComparison:
        """Return a comparison without an optimizer for a copy of the model; pass the copy to :meth:`look_at`."""
        return ReplicaComparison(
            (),
            mesh=self.mesh,
            guard=self.guard,
            every=self.every,
            every_state=self.every_state,
            has_weights=self.has_weights,
            tensors=self._tensors,
        )

    def look_at(self, model: nn.Module, draws: DeviceDraws | None) -> None:
        """Compare the parameters of this model and its draws from now on."""
        self._named, self.draws = list(model.named_parameters()), draws
        if self._tensors is not None:
            self._tensors = ModuleTensors(model)

    def watch(
        self,
        optimizer: Optimizer,
        *,
        stepped: Callable[[nn.Parameter], Tensor | None] | None,
        stepping: Callable[[], Iterable[Optimizer]],
    ) -> None:
        """Compare an optimizer's settings and steps from now on, and its state; where this is cut, its counts alone.

        Args:
            optimizer: the optimizer.
            stepped: returns what this rank steps of a parameter, if anything; None if it steps the parameters.
            stepping: returns the optimizers that step now, of a chain those whose turn it is; outside of a step, all.
        """
        self._optimizer, self._stepped = optimizer, stepped
        self._stepping, self._steps_of_part = stepping, dict.fromkeys(stepping(), 0)
        optimizer.register_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self._steps += 1
        for part in self._stepping():
            self._steps_of_part[part] += 1

    def _counted(self) -> dict[str, int]:
        """Return how often the optimizer was stepped; of a chain, each of its optimizers."""
        if len(self._steps_of_part) == 1:
            return {"optimizer.step()": self._steps}
        return {
            f"step() of {type(part).__name__}, number {number} of the chain": steps
            for number, (part, steps) in enumerate(self._steps_of_part.items(), 1)
        }

    def statement(self) -> Statement:
        """Return a statement of what must be equal on all ranks before the optimizer's next step."""
        with reading_shards():  # reading a guarded parameter's property takes microseconds, and this runs in every step
            trained = bytes(parameter.requires_grad for _, parameter in self._named)
        parts = [f"parameters trained {zlib.crc32(trained):08x}"]
        if self.hooks is not None and self.hooks.are_any:
            parts.append(f"{self.hooks.count} hooks on gradients")
        if self.draws is not None:
            parts.append(f"random draws {self.draws.moment}")
        if self._optimizer is not None:
            settings = repr([value for group in self._optimizer.param_groups for value in _settings(group).items()])
            steps = " and ".join(map(str, self._counted().values()))
            parts += [f"{steps} optimizer steps", f"settings {zlib.crc32(settings.encode()):08x}"]
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
        if self.draws is not None:
            found["the random streams (the random state, the passes)"] = self.draws.moment
        if self._optimizer is not None:
            found |= {name: f"called {times} times" for name, times in self._counted().items()}
            for index, group in enumerate(self._optimizer.param_groups):
                found |= {f"{key} of the optimizer's group {index}": value for key, value in _settings(group).items()}
        if self.hooks is not None and self.hooks.count:
            found["hooks on gradients"] = str(self.hooks.count)
        return found | {f"requires_grad of {name}": str(p.requires_grad) for name, p in self._named}

    def compare_weights(self, axis: Axis) -> None:
        """Compare what the ranks of an axis share, if a comparison is due. All ranks must call this.

        Raises:
            DivergenceError: if values differ; the message says since when.
        """
        before = self._gathered.get(axis.name)
        if before is not None and before.step < self.guard.step:  # a digest of this step would make the host wait
            self._look(axis)
        if not self.every:
            return
        shows = self._shows_writes(axis)
        kinds = [
            kind
            for kind, every in (("weights", self.every), ("state", self.every_state))
            if self._is_due(axis, kind, every) or shows
        ]
        if kinds:
            self._begin(axis, kinds)
            if not is_deferred(self._device):
                self._look(axis)

    def _shows_writes(self, axis: Axis) -> bool:
        """Return whether to compare everything in the first steps: forward has written tensors on some rank of the
        axis."""
        meetings = self._meetings[axis.name] = self._meetings.get(axis.name, 0) + 1
        if meetings > FIRST or self._tensors is None or not self.guard.is_current:
            return False
        return not self.guard.agree("what is written", "some" if self.wrote else "", group=axis.group) or self.wrote

    def _is_due(self, axis: Axis, kind: str, every: int) -> bool:
        step = self.guard.step
        if is_due := step - self._due.get((axis.name, kind), 0) >= every:
            self._due[axis.name, kind] = step
        return is_due

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
                self._begin(axis, ["weights", "state"])
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
        return [axis for axis in (*self.mesh.factors.values(), self.tie, *self._of_experts) if axis.size > 1]

    @property
    def _of_experts(self) -> tuple[Axis, ...]:
        """The axes whose ranks compare weights of experts alone."""
        return self.mesh.copies, self.mesh.etp

    @property
    def _device(self) -> torch.device:
        return self._named[0][1].device

    def _begin(self, axis: Axis, kinds: list[str]) -> None:
        """Gather the digests of what the ranks of an axis share.

        Args:
            axis: the axis.
            kinds: "weights" for weights and the optimizer's state of them; "state" for other tensors of the modules.
        """
        nothing = torch.zeros((), dtype=torch.int64, device=self._device)
        own: list[Tensor] = []
        names: list[list[str]] = [[] for _ in range(axis.size)]
        if "weights" in kinds and self.has_weights and axis is not self.mesh.pp:
            shared = self._shared_over(axis)
            most = max(map(len, shared))
            pad = [nothing] * (most - len(shared[axis.rank]))
            has_state = self._optimizer is not None and self._stepped is None
            with reading_shards():
                own += [memory_digest(rows.of(parameter)) for parameter, rows in shared[axis.rank]] + pad
                if has_state:
                    own += [self._of_optimizer(parameter, rows, nothing) for parameter, rows in shared[axis.rank]] + pad
            for theirs, known in zip(shared, names, strict=True):
                keys = [rows.key for _, rows in theirs] + [""] * (most - len(theirs))
                known += keys + [key and f"{OF_OPTIMIZER}{key}" for key in keys if has_state]
            if self._optimizer is not None:
                cut = [(name, p) for name, p in self._named if self._is_cut_over(axis, layout_of(p))]
                own += [self._of_counts(parameter, nothing) for _, parameter in cut]
                for known in names:
                    known += [f"{OF_COUNTS}{name}" for name, _ in cut]
        keyed: dict[int, str] = {}
        count = 0
        if "state" in kinds and self._tensors is not None and axis not in (self.tie, *self._of_experts):
            tensors, keyed = self._tensors.digests(self._device, on_all_stages=axis is self.mesh.pp)
            own, count = own + tensors, self._tensors.capacity
        if own:
            gathered = Gathered(torch.stack(own), axis, self.guard.step)
            self._gathered[axis.name] = Digests(gathered, names, keyed, count, kinds)

    def _of_optimizer(self, parameter: Tensor, rows: CopiedRows, nothing: Tensor) -> Tensor:
        """Return a digest of the optimizer's state of the rows of a parameter."""
        assert self._optimizer is not None
        state = state_of(self._optimizer, parameter)

        def take(x: Tensor) -> Tensor | None:
            return rows.of(x) if rows.start is None or x.shape == own_shape(parameter) else None

        total, rest = optimizer_digest(state, nothing.device, take)
        rest_there = torch.full_like(nothing, rest) if rest else nothing
        return rest_there if total is None else total + rest_there

    def _is_cut_over(self, axis: Axis, layout: TensorLayout) -> bool:
        """Whether each rank of an axis has a part of a parameter, and the optimizer counts its steps on each."""
        if self._stepped is not None and axis is (self.mesh.copies if layout.is_over_ep else self.mesh.tokens):
            return layout.is_held
        return layout.is_held and layout.is_over_ep is (axis is self.mesh.etp) and layout.is_cut_over(axis.name)

    def _of_counts(self, parameter: nn.Parameter, nothing: Tensor) -> Tensor:
        assert self._optimizer is not None
        stepped = parameter if self._stepped is None else self._stepped(parameter)
        found = counts_digest(state_of(self._optimizer, stepped), nothing.device)
        return found if isinstance(found, Tensor) else torch.full_like(nothing, found)

    def _look(self, axis: Axis) -> None:
        gathered = self._gathered.pop(axis.name, None)
        if gathered is None:
            return
        assert axis.group is not None
        differ = gathered.differences(dist.get_process_group_ranks(axis.group))
        before = self._compared.get((axis.name, gathered.kinds[0]), 0)
        self._compared |= {(axis.name, kind): gathered.step for kind in gathered.kinds}
        if differ:
            self._due |= {(axis.name, kind): -self.every_state for kind in gathered.kinds}  # again, if it is caught
            raise DivergenceError(parted(differ, axis, gathered.step, before))

    def _shared_over(self, axis: Axis) -> list[list[tuple[Tensor, CopiedRows]]]:
        """Return, for each rank of an axis, those of its rows that the axis holds more than once."""
        shared: list[list[tuple[Tensor, CopiedRows]]] = [[] for _ in range(axis.size)]
        is_of_experts = any(axis is other for other in self._of_experts)
        for name, parameter in self._named:
            layout = layout_of(parameter)
            if not layout.is_held or (axis is self.tie and layout.stage_copies == 1):
                continue
            if axis is not self.tie and layout.is_over_ep is not is_of_experts:
                continue  # the ranks of other axes hold different experts, and other weights are compared over those
            if axis is self.mesh.etp and (layout.is_cut_over("etp") or not self._is_equal_over_tp(parameter, layout)):
                continue
            if axis is self.tie or is_of_experts:
                for rank in range(axis.size):
                    shared[rank].append((parameter, CopiedRows(name)))
                continue
            if axis is self.mesh.tokens or not layout.is_sharded:
                if axis is self.mesh.tp and not self._is_equal_over_tp(parameter, layout):
                    continue
                for rank in range(axis.size):
                    shared[rank].append((parameter, CopiedRows(name)))
            elif layout.over("tp").has_copies:
                for rank in range(axis.size):
                    shared[rank] += ((parameter, rows) for rows in copied_rows(name, layout, rank))
        return shared

    def _is_equal_over_tp(self, parameter: Tensor, layout: TensorLayout) -> bool:
        is_averaged = layout.has_addends or not parameter.requires_grad
        return is_averaged or not is_deferred(parameter.device) or torch.are_deterministic_algorithms_enabled()


def _settings(group: dict[str, object]) -> dict[str, str]:
    """Return an optimizer group's settings as text, without tensors on a device, since the host would wait for them."""
    return {key: text for key, value in group.items() if key != "params" and (text := _text(value)) is not None}


def _text(value: object) -> str | None:
    if isinstance(value, Tensor):
        return None if is_deferred(value.device) or value.numel() > 1 else repr(value.item())
    if isinstance(value, list | tuple):
        return repr([_text(item) for item in value])
    return repr(value) if isinstance(value, str | int | float | bool | None) else None


def _has_all_ranks(axis: Axis) -> bool:
    return axis.size == dist.get_world_size()
