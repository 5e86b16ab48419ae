"""The state of one forward pass of a distributed model, set up before its layers run.

A call that runs is known by its frame: one whose frame is no longer on the stack was interrupted.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import InitVar, dataclass
from types import FrameType

import torch
from torch import Tensor, nn

from meshwright.compiling import active_backend
from meshwright.errors import AlreadyDistributedError
from meshwright.facts import Facts
from meshwright.faults.every_rank import EVALUATION
from meshwright.faults.guard import Guard
from meshwright.faults.statement import Statement
from meshwright.mesh.axes import Mesh
from meshwright.parallel.async_numbers import require_tensor
from meshwright.parallel.autograd_graph import keep_until_backward, loss_of, scale_gradient
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.longest_position import LongestPosition
from meshwright.parallel.batch.loss_gradients import LossGradients
from meshwright.parallel.batch.mean_over_ranks import slices
from meshwright.parallel.batch.mixed_rows import BatchStatistics
from meshwright.parallel.batch.schema import BatchSchema
from meshwright.parallel.batch.share import enter_pass, taken, without_fillers_targets, yield_next
from meshwright.parallel.collectives import share
from meshwright.parallel.draws.device_draws import DeviceDraws
from meshwright.parallel.dropout_streams import Restore
from meshwright.parallel.foreign_hooks import wrapper_of
from meshwright.parallel.forward.compiled_layers import CompilableLayers
from meshwright.parallel.forward.refused_arguments import check_arguments
from meshwright.parallel.forward.uneven_batches import PaddedRows, UnevenBatches
from meshwright.parallel.forward.user_hooks import HookedModules
from meshwright.parallel.forward.writes import ForwardWrites
from meshwright.parallel.method_chain import ChainStep, StepOrder, arguments
from meshwright.parallel.replicas.comparison import ReplicaComparison
from meshwright.parallel.replicas.digests import ComparedInputs
from meshwright.parallel.shards.added_parameters import AddedParameters
from meshwright.parallel.shards.stand_in import ShardedLogits


@dataclass(eq=False)
class RunningCall:
    """A call of a model, or of a module in it.

    Args:
        module: what was called.
        frame: the frame that runs it.
        is_pass: whether the call is a pass; otherwise it is a part of one.
        end: what ends the call.
        restore: what ends the pass's random draws.
        keeps_sharded: whether the pass computes a training loss from sharded logits.
        defers: whether the pass computes a training loss from the head's input.
    """

    module: nn.Module
    frame: FrameType
    is_pass: bool
    end: Callable[[], object] | None = None
    restore: Restore | None = None
    keeps_sharded: bool = False
    defers: bool = False


class RunningCalls:
    """The calls of one model that run now, on each thread."""

    def __init__(self) -> None:
        self._of_thread: dict[int, list[RunningCall]] = defaultdict(list)

    def __deepcopy__(self, memo: dict[int, object]) -> RunningCalls:
        return RunningCalls()  # none of a copied model runs

    def begin(self, module: nn.Module, frame: FrameType) -> RunningCall:
        """Begin a call. It is a pass, unless it is a part of a pass of another module.

        Args:
            module: what is called.
            frame: the frame that runs it.
        """
        running = self.innermost(frame)
        call = RunningCall(module, frame, is_pass=running is None or running.module is module)
        self._of_thread[threading.get_ident()].append(call)
        return call

    def leave(self, module: nn.Module) -> RunningCall | None:
        """End the innermost call; None if it is not one of this module, whose own call has not begun."""
        calls = self._of_thread.get(threading.get_ident())
        if not calls or calls[-1].module is not module:
            return None
        call = calls.pop()
        if not calls:
            del self._of_thread[threading.get_ident()]
        return call

    def innermost(self, frame: FrameType | None) -> RunningCall | None:
        """Return the innermost pass that runs on this thread, and end those that were interrupted.

        Args:
            frame: a frame inside of the pass.
        """
        calls = self._of_thread.get(threading.get_ident(), [])
        while calls and not is_on_stack(calls[-1].frame, frame):
            call = calls.pop()
            for end in (call.restore, call.end):
                if end is not None:
                    end()
        return next((call for call in reversed(calls) if call.is_pass), None)


def is_on_stack(frame: FrameType, inner: FrameType | None) -> bool:
    """Return whether a frame is one of those that lead to another one."""
    while inner is not None and inner is not frame:
        inner = inner.f_back
    return inner is frame


@dataclass(kw_only=True, eq=False)
class ForwardState:
    """Hooks on the whole model that compare the ranks, decide whether logits stay sharded, and set the random stream.

    Args:
        facts: what the model shows.
        inner: the modules inside the model that a program may call directly, such as transformers' base model.
        draws: what the model's passes draw.
        mesh: the axes. Ranks of tp, of cp and of pp must get the same inputs; ranks with different tokens share a loss.
        guard: the guard that compares the ranks and counts the steps; None on one process.
        comparison: the comparison of the model's replicas; None without a guard.
        losses: what knows the factor of losses of the global batch; None with an engine, and without a guard.
        has_sharded_loss: whether the model's loss function can use sharded logits.
        has_head_loss: whether the model's loss function can compute the logits itself, from the head's input.
        has_known_loss: whether the loss that the model returns is the loss of the global batch.
        uneven: the check for uneven batches, used for losses of an unknown kind.
        hooked: the search for the program's hooks inside the model, since a loss may be computed from what they record.
        statistics: the check for layers that would use the statistics of a part of the batch.
        shares_weights: whether data-parallel ranks gather weights from each other, so every rank must run each pass.
        gather: a callback that gathers the weights of modules that the pass may run on some of these ranks only.
        shares_tokens: whether data-parallel ranks send each other tokens, or their scales, so every rank must run each
            pass.
        towers_differ: a callback for a pass in which only some data-parallel ranks have inputs of towers, such as
            images; None if these ranks need not know.
        is_split: whether a batch runs as several micro-batches.
        format: what the inputs of the model mean.
        longest: the longest position of the batch, for modules that depend on it.
        layers: the model's layers, which ``torch.compile(model)`` compiles.
        follow: a callback that handles parameters frozen or unfrozen since the last pass. It runs in each pass with
            gradients enabled, after the guard has compared the ranks.
        check_layers: a callback that raises if the program has put layers without the plan's hooks in place of others.
    """

    facts: InitVar[Facts]
    inner: Iterable[nn.Module] = ()
    draws: DeviceDraws
    mesh: Mesh
    guard: Guard | None
    comparison: ReplicaComparison | None
    losses: LossGradients | None = None
    has_sharded_loss: bool
    has_head_loss: bool
    has_known_loss: bool
    uneven: UnevenBatches
    hooked: HookedModules
    statistics: BatchStatistics
    shares_weights: bool = False
    gather: Callable[[], None] = lambda: None
    shares_tokens: bool = False
    towers_differ: Callable[[], None] | None = None
    is_split: bool = False
    format: BatchFormat
    longest: LongestPosition
    layers: CompilableLayers
    follow: Callable[[], None] = lambda: None
    check_layers: Callable[[], None] = lambda: None

    def __post_init__(self, facts: Facts) -> None:
        self.model, self.dp = facts.model, self.mesh.tokens
        self._inputs = [ComparedInputs(axis) for axis in reversed(self.mesh.of_same_rows) if axis.size > 1]
        self._added = AddedParameters(facts, is_staged=self.mesh.pp.size > 1)
        self._writes = ForwardWrites(facts)
        self._padded = PaddedRows(self.dp, self.guard)
        self._calls = RunningCalls()
        yield_next(None)  # what loaders gave before was not for this model
        slices.begin()
        self._signatures: dict[nn.Module, inspect.Signature] = {}
        for module in {id(x): x for x in (self.model, *self.inner)}.values():
            self._signatures[module] = inspect.signature(module.forward)
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)

    @property
    def is_running(self) -> bool:
        """Whether a pass is running."""
        return self._running is not None

    @property
    def _running(self) -> RunningCall | None:
        return self._calls.innermost(sys._getframe(1))

    def run(self, method: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run the model's forward as a pass, without the hooks that the program has put around its call."""
        output: object = None
        try:
            args, kwargs = self._enter(self.model, args, kwargs) or (args, kwargs)
            output = method(*args, **kwargs)
        finally:
            changed = self._leave(self.model, args, kwargs, output)
        return output if changed is None else changed

    def keep_logits_sharded(self) -> bool:
        """Return whether the current pass computes a training loss from sharded logits."""
        return (running := self._running) is not None and running.keeps_sharded

    def defers_logits(self) -> bool:
        """Return whether the current pass computes a training loss from the head's input."""
        return (running := self._running) is not None and running.defers

    def _enter(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        call = self._calls.begin(module, sys._getframe(1))
        call.end = self.layers.enter_model()
        if not call.is_pass:
            return None
        if (wrapper := wrapper_of(module)) is not None:
            raise AlreadyDistributedError(
                f"{wrapper} was put around the model after to_distributed, which distributes it already; leave it out, "
                "and let ParallelPlan.dp and zero_stage do what it did"
            )
        self.layers.check_forward(module)
        self.check_layers()
        self.statistics.check()
        trains = module.training and torch.is_grad_enabled()
        self._writes.begin(trains=trains)
        kwargs = without_fillers_targets(kwargs)
        inputs = arguments(self._signatures[module], args, kwargs)
        device = _device(args, kwargs)
        require_tensor(inputs.get("input_ids"))
        check_arguments(module, inputs, self.mesh)
        enter_pass(inputs.values())
        labels = inputs.get("labels")
        self.hooked.look(trains=trains)
        if self.guard is not None:
            self._compare(self.guard, module, inputs, device, trains=trains)
        if torch.is_grad_enabled() or self.mesh.tp.size * self.mesh.pp.size > 1:
            self._added.check()
        if torch.is_grad_enabled():
            self.follow()
            if self.losses is not None:
                self.losses.begin()
        self.gather()
        self.longest.begin(inputs, is_on=trains or (labels is not None and module is self.model))
        has_loss = module is self.model and module.training and labels is not None
        call.keeps_sharded = has_loss and self.has_sharded_loss
        # A whole model that is being traced gets whole logits: dynamo guards on a tensor's strides, and a stand-in has
        # none of its own.
        call.defers = has_loss and self.has_head_loss and active_backend() is None
        call.restore = self.draws.enter_model(module, inputs, device, call.frame, trains=trains)
        if not torch.is_grad_enabled() or self.dp.size == 1:
            return args, kwargs
        has_factor = self.has_known_loss and labels is not None
        return (
            tuple(self._of_input(x, has_factor) for x in args),
            {name: self._of_input(x, has_factor) for name, x in kwargs.items()},
        )

    def _of_input(self, x: object, has_factor: bool) -> object:
        """Return an argument of the pass; backward makes its gradient that of one device.

        Each rank of cp has the gradient of its own tokens only, so backward gives every rank their sum, divided by cp.

        Args:
            x: the argument.
            has_factor: whether the pass computes the loss of the global batch; for an engine, which averages gradients.
        """
        if not isinstance(x, Tensor) or not x.requires_grad:
            return x
        if self.losses is not None:
            x = self.losses.of_input(x, parts=self.mesh.cp.size)
        else:
            is_averaged = not x.is_leaf or isinstance(x, nn.Parameter)
            x = scale_gradient(x, 1 / (self.dp.size if has_factor and not is_averaged else self.mesh.cp.size))
        return share(x, self.mesh.cp)

    def _compare(
        self, guard: Guard, module: nn.Module, inputs: dict[str, object], device: torch.device, *, trains: bool
    ) -> None:
        if trains:
            guard.begin_step()
        self.draws.look(guard, device)
        place = "forward pass" if trains else EVALUATION
        statements = () if self.comparison is None else (self.comparison.statement_before_forward(),)
        of_batch = (batch,) if trains and (batch := taken()) is not None else ()
        for compared in self._inputs:
            compared.look()
            with torch._C.DisableTorchFunctionSubclass():  # read tensor subclasses as plain tensors
                statement = compared.statement(module, inputs)
            others = (*statements, *self.hooked.statements) if compared.axis.name != "pp" else self._of_stages()
            of_draws = self.draws.statements if compared.axis.name in ("tp", "cp") else ()
            guard.meet(place, compared.axis.group, *of_batch, statement, *others, *of_draws)
            with torch._C.DisableTorchFunctionSubclass():
                compared.gather(inputs, guard.step)
        if trains and self.comparison is not None:
            for axis in (self.mesh.tp, self.mesh.pp, self.comparison.tie):
                if axis.size > 1:
                    self.comparison.compare_weights(axis)
        runs_together = self.shares_weights or self.shares_tokens
        if self.dp.size > 1 and (inputs.get("labels") is not None or runs_together):
            modules = (_of_embeddings(inputs),) if self.shares_weights else ()
            guard.meet(place, self.dp.group, *of_batch, *statements, *modules)
            if self.towers_differ is not None and (trains or self.shares_weights):
                schema = BatchSchema(inputs, self.format)
                # Micro-batches run the towers that their rows need.
                given = (*schema.of_towers, schema.towers_of_rows() if self.is_split and trains else "")
                if not guard.agree(f"inputs of towers in the {place}", *given, group=self.dp.group):
                    self.towers_differ()
            if trains and inputs.get("labels") is not None:
                self._padded.look(inputs)

    def _of_stages(self) -> tuple[Statement, ...]:
        """Return what the stages of a pipeline compare; a stage with only frozen layers has no gradients to clear."""
        return () if self.comparison is None else (self.comparison.statement(),)

    def _leave(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> object:
        if (call := self._calls.leave(module)) is None:
            return None
        if output is None and call.is_pass and self.guard is not None:
            self.guard.end_pass(sys.exc_info()[1])
        try:
            return self._end(call, args, kwargs, output) if call.is_pass else None
        finally:
            if call.end is not None:
                call.end()

    def _end(self, call: RunningCall, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> object:
        module = call.module
        if self._writes.end() and self.comparison is not None:
            self.comparison.wrote = True
        if call.restore is not None:
            call.restore()
        if module.training and torch.is_grad_enabled():
            self.hooked.look_at_kept(has_ended=False)
        if self.uneven.is_on and torch.is_grad_enabled():  # a program may train in eval mode, without dropout
            known = loss_of(output) if self.has_known_loss else None
            self.uneven.look(arguments(self._signatures[module], args, kwargs), output, known)
        if torch.is_grad_enabled() and active_backend() is None:  # the graph of what is being traced is another one
            keep_until_backward(self, output)
        return _without_graph(output) if call.keeps_sharded else None


class EnteredForward(ChainStep):
    """Makes ``model.forward(...)`` a pass of the model, as ``model(...)`` is."""

    order = StepOrder.ENTERED

    def __init__(self, state: ForwardState):
        self.state = state

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.method(*args, **kwargs) if self.state.is_running else self.state.run(self.method, args, kwargs)


def _of_embeddings(inputs: dict[str, object]) -> Statement:
    """Return a statement of the inputs that say whether this rank's pass runs the embedding."""
    given = "inputs_embeds" if "inputs_embeds" in BatchSchema(inputs).tensors else "none"
    return Statement(
        text=f"inputs besides token ids: {given}",
        details=lambda: {"the inputs besides token ids": given},
        advice=(
            "Under zero_stage=3 all data-parallel ranks gather the weights of a module together, so inputs_embeds "
            "must be given on all of them or on none. Use zero_stage=2 if that cannot be"
        ),
    )


def _without_graph(output: object) -> object:
    """Detach sharded logits in the output from the graph, since the loss has overwritten them.

    An engine that adds its own graph node to each output (DeepSpeed's ZeRO-3) would otherwise run backward through
    these logits.
    """
    if isinstance(output, tuple):
        return tuple(x.detach() if isinstance(x, ShardedLogits) else x for x in output)
    if isinstance(output, MutableMapping):
        for name, x in list(output.items()):
            if isinstance(x, ShardedLogits):
                output[name] = x.detach()
    return output


def _device(args: tuple[object, ...], kwargs: dict[str, object]) -> torch.device:
    return next((x.device for x in (*args, *kwargs.values()) if torch.is_tensor(x)), torch.device("cpu"))
