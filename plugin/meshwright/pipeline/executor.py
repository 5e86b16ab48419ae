"""Runs the operations of a schedule on this rank: forwards, backwards, and what is sent between the stages.

For zero-bubble schedules, the gradients of linear weights are computed apart from the gradients of inputs. The backward
of such a schedule has two parts. The first computes the gradient of the stage's input, which the stage before waits
for. The second computes the weights' gradients, which nobody waits for. A linear layer keeps its input and the gradient
of its output from the first part to the second. Everything else of the graph is freed in the first part. The first part
also computes the gradients of norms, biases and embeddings, since they are small. (autograd's own way,
``retain_graph=True``, keeps all activations until the second part and runs Python functions twice.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshwright import errors
from meshwright.errors import PlanError
from meshwright.parallel.autograd_graph import loss_of
from meshwright.parallel.batch.loss_gradients import LossGradients
from meshwright.parallel.batch.schema import Batch
from meshwright.parallel.batch.share import cut
from meshwright.parallel.draws.stage_states import PassStates
from meshwright.parallel.gradients.summed import SummedGradients
from meshwright.parallel.method_chain import StepOrder
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright.parallel.tensor_parallel.column_projections import LinearForward
from meshwright.pipeline.links import (
    Crossing,
    Expected,
    Format,
    Links,
    Receiver,
    differentiable,
    format_of,
    has_gradient,
)
from meshwright.pipeline.stages import Stages
from meshwright.plan.schedule import Kind, Operation, received_by, receiving_stage, transfers
from meshwright.roles.linear_kernel import LinearKernel, kernel_of
from meshwright.temporarily import temporarily

T = TypeVar("T")
Key = tuple[bool, int, int]  # a transfer: is it an activation (or a gradient), its receiving stage, its micro-batch
# A weight, the kernel of its layer, the layer's input, and the gradient of its output.
_Waiting = tuple[nn.Parameter, LinearKernel, Callable[[], Tensor], Tensor]

_WRITTEN = (
    "backward needs a tensor that was written in place since its forward. If the model's forward writes a weight, or "
    "another tensor that it also reads, a pipeline cannot train it, since the forward of the next micro-batches runs "
    "before this backward. Write it after optimizer.step(), or use ParallelPlan(pp=1)"
)


@dataclass(frozen=True, kw_only=True)
class Boundaries:
    """What crosses from stage to stage. A boundary has the number of the stage that gets its hidden states.

    Activations whose format is not known are announced. A gradient has the shape and the dtype of its tensor.

    Args:
        known: for each micro-batch, the formats at the boundaries of this rank's stages that an earlier one crossed.
        counts: the number of tensors at each boundary.
        hidden: for each micro-batch, the shape of its hidden states; None if only a run shows it.
        seen: for each micro-batch, the formats at the boundaries of this rank's stages that it has crossed so far.
    """

    known: Sequence[Mapping[int, Format]]
    counts: Sequence[int]
    hidden: Sequence[tuple[int, ...] | None]
    seen: tuple[dict[int, Format], ...]

    def expected(self, key: Key) -> Expected:
        """Return the crossing that a rank will receive."""
        is_forward, stage, micro_batch = key
        boundary = stage if is_forward else stage + 1
        known, seen = self.known[micro_batch], self.seen[micro_batch]

        def format() -> Format | None:
            found = known.get(boundary)
            if is_forward:
                return found
            found = found or seen.get(boundary)  # it was sent before its gradient comes
            return None if found is None else tuple(one for one in found if has_gradient(one[1]))

        return Expected(key, format, self.counts[boundary])

    def see(self, boundary: int, micro_batch: int, crossing: Crossing) -> None:
        """Keep the format of a crossing.

        Raises:
            PlanError: if it is another one than that of an earlier micro-batch with inputs of the same shapes, or than
                the pass without values has shown.
        """
        if (hidden := self.hidden[micro_batch]) is not None and hidden != crossing[0].shape:
            raise PlanError(
                f"a stage of the pipeline returns hidden states of shape {list(crossing[0].shape)} in place of "
                f"{list(hidden)}: the model adds tokens, such as an image's, that later stages do not know of. Use "
                "ParallelPlan(pp=1)"
            )
        found = self.seen[micro_batch][boundary] = format_of(crossing)
        known = self.known[micro_batch].get(boundary, found)
        if found != known:
            raise PlanError(
                f"stage {boundary} of the pipeline gets tensors of {_words(found)}, and of {_words(known)} for earlier "
                "inputs of the same shapes. These shapes must not depend on values. Use ParallelPlan(pp=1)"
            )


def _words(format: Format) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in format)


@dataclass(kw_only=True)
class Step:
    """One batch on its way through the stages of this rank.

    An error about the program, which the ranks of one stage alone find, becomes one of all stages: from then on this
    rank computes nothing, and receives and sends all that the schedule has, so that no other rank waits.

    Args:
        stages: the stages of this rank.
        links: the channels to the other ranks.
        operations: what this rank does, in order.
        batches: the arguments of the decoder's forward, for each micro-batch.
        boundaries: what crosses from stage to stage.
        parameters: the trained parameters of each of this rank's stages.
        losses: what knows the factor of losses in backward; None if nothing needs it.
        draws: the random states that cross with the first micro-batch.
        leaves_at_once: whether an error leaves at once, since ranks of dp wait for each other inside of a stage.
        finish: takes the batch and the decoder's output of a micro-batch, and returns the output whose loss counts.
        keep: called with each output of the last stage, in the order of the micro-batches.
        look: called after a stage's forward on each micro-batch, to find state that the forward has written.
        scale: the factor of the losses in float16; None for no factor.
        fillers: the micro-batches without rows of their own, which only keep this rank in step.
        total: the loss so far, on the last stage.
        failure: the error that a stage of this rank has found.
        is_over: whether this rank computes nothing more, because a stage has failed.
    """

    stages: Stages
    links: Links
    operations: tuple[Operation, ...]
    batches: Sequence[Batch]
    boundaries: Boundaries
    parameters: dict[int, list[nn.Parameter]]
    losses: LossGradients | None
    draws: PassStates
    leaves_at_once: bool
    finish: Callable[[Batch, Any], Any]
    keep: Callable[[Any], None]
    look: Callable[[], None]
    scale: Tensor | float | None = None
    fillers: frozenset[int] = frozenset()
    total: Tensor | None = None
    failure: Exception | None = None
    is_over: bool = False
    _receivers: dict[int, Receiver] = field(default_factory=dict)
    _arrived: dict[Key, int] = field(default_factory=dict)  # how many crossings a transfer shows to have arrived
    _handed: dict[Key, Crossing] = field(default_factory=dict)  # what one stage of this rank gives to another
    _alive: dict[tuple[int, int], tuple[Crossing | None, Crossing]] = field(default_factory=dict)

    def open(self, *, trains: bool) -> None:
        """Post the first receives."""
        for sender, keys in (self._training_keys() if trains else self._evaluation_keys()).items():
            self._receivers[sender] = self.links.receiver(sender, map(self.boundaries.expected, keys))

    def _training_keys(self) -> dict[int, list[Key]]:
        """Return what each rank sends to this one in a training step, in its order."""
        cut = self.stages.cut
        sizes = cut.schedule, cut.size, len(cut.spans) // cut.size, len(self.batches)
        arrived = received_by(*sizes)
        found = {}
        for pair, made in transfers(*sizes).items():
            if pair[1] == cut.rank:
                found[pair[0]] = [transfer.key for transfer in made]
                self._arrived.update(zip(found[pair[0]], arrived[pair], strict=True))
        return found

    def _evaluation_keys(self) -> dict[int, list[Key]]:
        """Return what each rank sends to this one in evaluation, in its order."""
        cut = self.stages.cut
        keys: dict[int, list[Key]] = {}
        for micro_batch in range(len(self.batches)):
            for stage in cut.own:
                if stage > 0 and cut.rank_of(stage - 1) != cut.rank:
                    keys.setdefault(cut.rank_of(stage - 1), []).append((True, stage, micro_batch))
        return keys

    @contextlib.contextmanager
    def running(self, micro_batch: int) -> Iterator[None]:
        """Return a context for what runs of a micro-batch, which says whether it has rows."""
        is_filler = micro_batch in self.fillers
        with self.draws.of_micro_batch(micro_batch), cut(is_filler=True) if is_filler else contextlib.nullcontext():
            yield

    def forward(self, stage: int, micro_batch: int, *, trains: bool) -> None:
        """Run a stage's forward on one micro-batch, and send the result on."""
        cut, received = self.stages.cut, None
        if stage > 0:
            received = self._take(True, stage, micro_batch, cut.rank_of(stage - 1))
            if received:
                self.boundaries.seen[micro_batch][stage] = format_of(received)
            else:
                self.is_over = True
            if micro_batch == 0 and self.draws.carries:
                self._take_states(stage)
        output = self._attempt(lambda: self._computed(stage, micro_batch, received, trains=trains))
        if stage != cut.last:
            sent = None if output is None else tuple(x.detach() for x in output)
            self._give(Operation(Kind.FORWARD, stage, micro_batch), sent)
            if micro_batch == 0 and self.draws.carries and (receiver := cut.rank_of(stage + 1)) != cut.rank:
                self.links.send_beside(self.draws.after(stage), receiver)
        if trains and output is not None:
            self._alive[stage, micro_batch] = received, output

    def _computed(self, stage: int, micro_batch: int, received: Crossing | None, *, trains: bool) -> Crossing:
        """Return the activations that a stage sends on, or the loss of the last stage."""
        if received is not None:
            self.boundaries.see(stage, micro_batch, received)
            for x in received:
                x.requires_grad_(trains and has_gradient(x.dtype))
        batch = self.batches[micro_batch]
        with self.running(micro_batch):
            self.draws.begin()
            output = self.stages.run(stage, batch, received, self.draws)
        self.look()
        if stage != self.stages.cut.last:
            self.boundaries.see(stage + 1, micro_batch, output)
            return output  # type: ignore[no-any-return]
        output = self.finish(batch, output)
        self.draws.leave_layers(stage)
        self.keep(output)
        loss = loss_of(output)
        if loss is None:
            return ()
        self.total = loss.detach() if self.total is None else self.total + loss.detach()
        return (loss if self.scale is None else loss * self.scale,)

    def backward(self, operation: Operation, sums: SummedGradients, later: WeightGradients) -> None:
        """Run a stage's backward of one micro-batch, and send the gradient of its input on.

        Args:
            operation: the backward. If it is only of the input, the gradients of linear weights wait in ``later``.
            sums: the sums that the gradients of parameters are added to.
            later: the gradients of linear weights that wait.
        """
        cut, stage, micro_batch = self.stages.cut, operation.stage, operation.micro_batch
        received, output = self._alive.pop((stage, micro_batch), (None, ()))
        gradients: Sequence[Tensor | None] = [None]
        if stage != cut.last:
            gradients = self._take(False, stage, micro_batch, cut.rank_of(stage + 1))
            self.is_over |= not gradients
        parameters = self.parameters[stage]
        crossed = differentiable(received or ())

        def compute() -> list[Tensor | None]:
            # Nothing requires a gradient if all stages so far are frozen.
            trained = [(x, g) for x, g in zip(differentiable(output), gradients, strict=False) if x.requires_grad]
            inputs: list[Tensor] = [*crossed, *parameters]
            if not trained or not inputs:
                return [None] * len(inputs)
            averaging = contextlib.nullcontext() if self.losses is None else self.losses.averaging()
            with self.stages.active(stage, received), later.waiting(operation), reading_shards(), averaging:
                try:
                    return list(
                        torch.autograd.grad([x for x, _ in trained], inputs, [g for _, g in trained], allow_unused=True)
                    )
                except RuntimeError as error:  # about a weight that the forward of a later micro-batch has written
                    raise (PlanError(_WRITTEN) if "inplace operation" in str(error) else error) from error

        found = self._attempt(compute)
        sent = None
        if found is not None:
            sent = tuple(torch.zeros_like(x) if g is None else g for x, g in zip(crossed, found, strict=False))
        if stage > 0:
            self._give(operation, sent)
        if found is not None:
            sums.add(parameters, found[len(crossed) :], used=sent or ())

    def _attempt(self, compute: Callable[[], T]) -> T | None:
        """Return what an operation computes; None if it fails, or a stage has failed before.

        Other errors than those about the program, such as of memory, may be this rank's alone, and leave at once.
        """
        if self.is_over:
            return None
        try:
            return compute()
        except ValueError as error:
            if type(error).__module__ != errors.__name__ or self.leaves_at_once:
                raise
            self.failure, self.is_over = error, True
            return None

    def _take_states(self, stage: int) -> None:
        """Take the random states with which the layers of a stage begin."""
        cut = self.stages.cut
        is_own = (sender := cut.rank_of(stage - 1)) == cut.rank
        states = self.draws.after(stage - 1) if is_own else self.links.receive_beside(self.draws.size, sender)
        self.draws.arrive(stage, states)

    def share_states(self) -> None:
        """Go on after the pass from the random states after the last stage, on all ranks."""
        if self.draws.carries:
            cut = self.stages.cut
            self.draws.end(self.links.from_rank(self.draws.after(cut.last), cut.last_rank))

    def _take(self, is_forward: bool, stage: int, micro_batch: int, sender: int) -> Crossing:
        key = (is_forward, stage, micro_batch)
        if sender == self.stages.cut.rank:
            return self._handed.pop(key)
        crossing = self._receivers[sender].take(key)
        self.links.settle(sender, self._arrived.get(key, 0))
        return crossing

    def _give(self, operation: Operation, crossing: Crossing | None) -> None:
        """Send what an operation has computed, or if it has not, something of its form."""
        cut, is_forward, micro_batch = self.stages.cut, operation.kind is Kind.FORWARD, operation.micro_batch
        stage = receiving_stage(operation, len(cut.spans))
        assert stage is not None
        expected = self.boundaries.expected((is_forward, stage, micro_batch))
        format = expected.format()
        if crossing is None:
            crossing = tuple(torch.zeros(shape, dtype=dtype, device=self.links.device) for shape, dtype in format or ())
        receiver = cut.rank_of(stage)
        if receiver == cut.rank:
            self._handed[is_forward, stage, micro_batch] = crossing
        else:
            self.links.send(crossing, receiver, announced=expected.count if format is None else 0)


def run_training(step: Step, sums: SummedGradients, later: WeightGradients) -> None:
    """Run all operations of a training step. The gradients go to ``sums``, the loss of the last stage to the step."""
    step.open(trains=True)
    with sums.computing():
        for operation in step.operations:
            if operation.kind is Kind.FORWARD:
                step.forward(operation.stage, operation.micro_batch, trains=True)
            elif operation.kind is Kind.WEIGHT_GRAD:
                with step.running(operation.micro_batch):
                    later.add_to(sums, operation.stage, operation.micro_batch)
            else:
                with step.running(operation.micro_batch):
                    step.backward(operation, sums, later)
    step.links.end()


def run_evaluation(step: Step) -> None:
    """Run the forwards alone, stage by stage."""
    step.open(trains=False)
    for micro_batch in range(len(step.batches)):
        for stage in step.stages.cut.own:
            step.forward(stage, micro_batch, trains=False)
    step.links.end()


class WeightGradients:
    """The gradients of linear weights that wait for the second part of their backward.

    Args:
        modules: the modules whose linear layers get another ``forward``; empty for a schedule whose backward has one
            part.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        self._waiting: dict[tuple[int, int], list[_Waiting]] = {}
        self.now: list[_Waiting] | None = None  # those of the running backward, if they are to wait
        for module in modules:
            if kernel_of(module) is not None:
                _DelayedLinear(module, self)

    def waiting(self, operation: Operation) -> contextlib.AbstractContextManager[None]:
        """Keep the gradients of linear weights for later inside the context, if the operation is of the input alone."""
        if operation.kind is not Kind.INPUT_GRAD:
            return contextlib.nullcontext()
        now = self._waiting[operation.stage, operation.micro_batch] = []
        return temporarily(self, now=now)

    def add_to(self, sums: SummedGradients, stage: int, micro_batch: int) -> None:
        """Compute the gradients that wait for a stage and a micro-batch, and add them to the sums."""
        # A stage before which all is frozen has run no backward, so nothing waits.
        for weight, kernel, read_input, gradient in self._waiting.pop((stage, micro_batch), ()):
            sums.add_linear(weight, kernel, read_input(), gradient)


class _DelayedLinear(LinearForward):
    """The ``forward`` of a linear layer whose weight's gradient may be computed later than its input's."""

    order = StepOrder.LATER_GRADIENT

    def __init__(self, module: nn.Module, later: WeightGradients):
        super().__init__(module)
        self.later = later

    def weight_gradient(
        self, weight: nn.Parameter, read_input: Callable[[], Tensor], gradient: Tensor
    ) -> Tensor | None:
        if self.later.now is None:
            return super().weight_gradient(weight, read_input, gradient)
        self.later.now.append((weight, self.kernel, read_input, gradient))
        return None
