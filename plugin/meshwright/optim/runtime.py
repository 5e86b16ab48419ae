"""The runtime of a distributed model: its axes, and the objects that handle its gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.compiling import without_compilation
from meshwright.errors import AlreadyDistributedError, CheckpointError, PlanError
from meshwright.faults.every_rank import BACKWARD
from meshwright.faults.guard import Guard
from meshwright.faults.together import attempt, raise_if_any, succeed_together
from meshwright.layout.tensor_layout import layout_of
from meshwright.mesh.axes import Axis, Mesh
from meshwright.optim.chained import step_name
from meshwright.optim.gradients import Gradients
from meshwright.optim.zero.zero3_layers import ShardedWeights
from meshwright.parallel.batch.loss_gradients import LossGradients
from meshwright.parallel.draws.device_draws import DeviceDraws
from meshwright.parallel.dropout_streams import DropoutStreams
from meshwright.parallel.method_chain import Features
from meshwright.parallel.replicas.comparison import ReplicaComparison
from meshwright.plan.config import ParallelPlan
from meshwright.temporarily import temporarily

T = TypeVar("T")

_ATTRIBUTE = "_meshwright"
_attached: list[weakref.ref[Runtime]] = []


class Watch:
    """Watches the steps of a model, to show what the run does."""

    @property
    def step(self) -> int:
        """The run's last step."""
        raise NotImplementedError

    def saw_norm(self, norm: Tensor) -> None:
        """Called after the program has clipped the gradients, which had this norm."""
        raise NotImplementedError

    def saw_loss(self, loss: Tensor) -> None:
        """Called with the mean over the global batch of a loss that the program has computed itself."""
        raise NotImplementedError

    def resumed(self, step: int) -> None:
        """Called when the run resumes from a checkpoint of this step."""
        raise NotImplementedError

    def end_step(self, *, lr: float | None, norm: Tensor | None) -> None:
        """Called after an engine has stepped its optimizer."""
        raise NotImplementedError


@dataclass
class WholeLogits:
    """Where ``outputs.logits`` are whole on every rank.

    Args:
        in_training: whether they are in training.
        in_evaluation: whether every rank of a pipeline gets them in evaluation.
    """

    in_training: bool = False
    in_evaluation: bool = False

    def gathering(self) -> contextlib.AbstractContextManager[None]:
        """Send evaluated logits from a pipeline's last stage to every rank inside this context; all ranks enter it."""
        return temporarily(self, in_evaluation=True)


@dataclass(eq=False)
class Runtime:
    """The state of one ``to_distributed`` (or ``shard_optimizer``) call.

    Args:
        mesh: the axes, with this rank's place on them.
        gradients: the trained parameters and what is done with their gradients.
        guard: the guard that watches the ranks; None on one process.
        plan: the plan of a ``to_distributed`` call.
        plan_source: where the plan comes from, in words.
        weights: the sharded parameters under ZeRO stage 3.
        comparison: the comparison of the model's replicas; None without a guard.
        features: what the parts of the plan have installed: the loss, the streams of dropout, the region of context
            parallelism, the watch, ...
    """

    mesh: Mesh
    gradients: Gradients = field(default_factory=Gradients)
    guard: Guard | None = None
    plan: ParallelPlan | None = None
    plan_source: str = "given in the call"
    weights: ShardedWeights | None = None
    comparison: ReplicaComparison | None = None
    features: Features = field(default_factory=Features)

    @property
    def engine(self) -> str | None:
        """The name of the engine that handles the gradients; None if the runtime does so."""
        return None if self.gradients.engine is None else self.gradients.engine.name

    @property
    def streams(self) -> DropoutStreams:
        """The random streams of dropout of a model that ``to_distributed`` has distributed."""
        return self.features.get(DropoutStreams)

    @property
    def draws(self) -> DeviceDraws:
        """What the passes of a model draw that ``to_distributed`` has distributed."""
        return self.features.get(DeviceDraws)

    @property
    def logits(self) -> WholeLogits:
        """Where ``outputs.logits`` are whole."""
        return self.features.find(WholeLogits) or self.features.add(WholeLogits())

    def without_gradients(self) -> Runtime:
        """Return a runtime for a copy of the model, without gradients, optimizer, weights or features."""
        gradients = Gradients(bucket_bytes=self.gradients.bucket_bytes)
        return dataclasses.replace(self, gradients=gradients, weights=None, features=Features())

    def __deepcopy__(self, memo: dict[int, object]) -> Runtime:
        raise AlreadyDistributedError(
            "a module whose gradients are synchronised was copied without its model, so each rank would train its "
            "copy alone. Copy the model that to_distributed returned, or the plain model: copy.deepcopy(ddp.module)"
        )

    def check_own(self, what: str, instead: str) -> None:
        """Raise if the model has an engine, which handles the call ``what`` in the runtime's place.

        Raises:
            ValueError: if the model has an engine. The message says what to use instead.
        """
        if self.engine is not None:
            raise ValueError(f"{what}: {self.engine} keeps this model's gradients and master weights; {instead}")

    @property
    def spreads_gradients(self) -> bool:
        """Whether some rank has gradients that another one has not, once they are synchronised."""
        layouts = (layout_of(parameter) for parameter in self.gradients.parameters)
        return self.gradients.zero is not None or self.mesh.pp.size > 1 or any(layout.is_sharded for layout in layouts)

    def has_values(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter's values can be read without communication."""
        return self.weights is None or self.weights.is_gathered(parameter)

    @property
    def loss_gradients(self) -> LossGradients | None:
        """What takes the gradients that reach losses of the global batch; None if no meeting compares them."""
        return None if self.comparison is None or self.engine is not None else self.comparison.losses

    def leave_towers_out(self) -> None:
        """Prepare for a pass in which a tower runs on some data-parallel ranks only; every rank makes the call."""
        if self.weights is not None:
            self.weights.keep_beside()
        if self.gradients.zero is not None:
            self.gradients.zero.is_uneven = True

    def meet_over(self, axis: Axis) -> None:
        """Compare the ranks of an axis once all of them have started to reduce their gradients over it.

        Raises:
            DivergenceError: if the ranks differ. The message lists what differs on which ranks.
        """
        if self.guard is None or axis.size == 1:
            return
        if self.comparison is None:
            self.guard.meet(BACKWARD, axis.group)
            return
        self.guard.meet(BACKWARD, axis.group, self.comparison.statement(), self.comparison.losses.statement())
        if self.comparison.draws is not None:
            self.comparison.draws.meet_over(self.guard, axis)
        self.comparison.compare_weights(axis)

    def compare_before_save(self) -> None:
        """Compare the weights that several ranks hold; every rank must make the call.

        Raises:
            DivergenceError: if weights differ. The message lists these weights and the ranks.
            CheckpointError: if the process group was destroyed.
        """
        if self.mesh.size > 1 and not dist.is_initialized():
            raise CheckpointError(
                "the process group was destroyed before this save, in which all ranks take part; save before "
                "accelerator.end_training() or torch.distributed.destroy_process_group()"
            )
        if self.comparison is not None:
            self.comparison.compare_now()

    def compare_replicas(self, prepare: Callable[[], T] | None = None) -> T:
        """Compare what several ranks hold, as :meth:`compare_before_save` does; every rank must make the call.

        If nothing is wrong, the ranks meet once. Only if they do not agree, they exchange what each has to say.

        Args:
            prepare: a step without communication that comes first, such as the preparation of a save.

        Returns:
            The result of the step.

        Raises:
            Exception: if the step fails on any rank, as :func:`succeed_together` does.
            DivergenceError, CheckpointError: as :meth:`compare_before_save` does.
        """
        result, error = (None, None) if prepare is None else attempt(prepare)
        if self.guard is not None and self.guard.is_current:
            statement = self.comparison.statement().text if self.comparison is not None else ""
            if self.guard.agree("save", statement, "" if error is None else "failed"):
                if error is not None:
                    raise error
                if self.comparison is not None:
                    _, error = attempt(functools.partial(self.comparison.compare_now, is_met=True))
                    if not self.comparison.is_of_all_ranks:
                        succeed_together(lambda: raise_if_any(error))
                    raise_if_any(error)
                return cast(T, result)
        succeed_together(lambda: raise_if_any(error))
        self.compare_before_save()
        return cast(T, result)

    def meet_before_publishing(self, optimizer: Optimizer, *_: object) -> None:
        """Compare the ranks that are about to step their slices of the same weights."""
        # Of the two axes over which ZeRO shards, the ranks of one are some of those of the other.
        axis = max(self.mesh.tokens, self.mesh.copies, key=lambda axis: axis.size)
        if self.guard is not None and axis.size > 1:
            self.guard.meet(step_name(optimizer), axis.group)

    def meet_all(self, place: str) -> None:
        """Compare all ranks of the model, which are about to make collectives outside of a pass.

        Without the meeting, a rank that comes alone would meet another collective of its peers, and gloo would abort.

        Args:
            place: the place in the program.

        Raises:
            DivergenceError, PeerFailedError: as :meth:`Guard.meet` does.
        """
        if self.guard is None or self.mesh.size == 1:
            return
        is_world = self.mesh.size == dist.get_world_size()
        for group in [None] if is_world else [axis.group for axis in self.mesh.factors.values() if axis.size > 1]:
            self.guard.meet(place, group)


def attach(owner: nn.Module | Optimizer, runtime: Runtime) -> None:
    """Store a runtime on its model or optimizer."""
    if isinstance(owner, nn.Module) and runtime not in live_runtimes():
        _attached.append(weakref.ref(runtime))
    object.__setattr__(owner, _ATTRIBUTE, runtime)


def live_runtimes() -> list[Runtime]:
    """Return the runtimes of the models that this process has distributed and still has, in their order."""
    _attached[:] = [reference for reference in _attached if reference() is not None]
    return [runtime for reference in _attached if (runtime := reference()) is not None]


def find_runtime(owner: object) -> Runtime | None:
    """Return the runtime of a distributed model, compiled or not, or a sharded optimizer; None for any other object."""
    if isinstance(owner, nn.Module):
        owner = without_compilation(owner)
    return getattr(owner, "__dict__", {}).get(_ATTRIBUTE)


def runtime_of(owner: nn.Module | Optimizer) -> Runtime:
    """Return the runtime of a distributed model or sharded optimizer.

    Raises:
        ValueError: if ``owner`` is neither.
    """
    runtime = find_runtime(owner)
    if runtime is None:
        raise ValueError(
            f"this {type(owner).__name__} is not distributed; pass what to_distributed (or shard_optimizer) returned"
        )
    return runtime


def check_steps(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise a PlanError if an optimizer has none of a model's parameters, so that its step would change nothing."""
    runtime = find_runtime(model)
    if runtime is not None and find_runtime(optimizer) is runtime:
        return
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise PlanError(
            f"the {type(optimizer).__name__} has no parameter of this {type(model).__name__}, so its step would not "
            "train it; pass the optimizer of this model, after to_distributed the one that it returned"
        )


def plan_of(model: nn.Module) -> ParallelPlan:
    """Return the plan that ``to_distributed`` applied to a model, whether the plan was given, read or picked.

    Args:
        model: the model that ``to_distributed`` returned.

    Raises:
        ValueError: if ``to_distributed`` did not distribute the model.

    Example::

        model, optimizer, loader = mw.to_distributed(model, optimizer, loader)
        print(mw.plan_of(model))
    """
    plan = runtime_of(model).plan
    if plan is None:
        raise ValueError(f"this {type(model).__name__} has no plan; pass what to_distributed returned")
    return plan


def no_sync(owner: nn.Module | Optimizer) -> contextlib.AbstractContextManager[None]:
    """Leave gradients unsynchronised inside this context. The first backward pass outside synchronises their sum.

    Use it in loops that accumulate gradients by hand. Without it the result is also right, but each pass sends the
    gradients. ``ParallelPlan.gradient_accumulation_steps`` needs neither the loop nor this call.

    Raises:
        ValueError: if ``owner`` is not distributed.

    Example::

        for i, batch in enumerate(loader):
            is_last = (i + 1) % 4 == 0
            with contextlib.nullcontext() if is_last else mw.no_sync(model):
                (model(**batch).loss / 4).backward()
            if is_last:
                mw.clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
    """
    runtime = runtime_of(owner)
    runtime.check_own("no_sync", "its own gradient_accumulation_steps decides when they are averaged")
    return runtime.gradients.no_sync()


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
