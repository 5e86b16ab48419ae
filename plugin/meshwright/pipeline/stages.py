"""Runs one pipeline stage by the model's own forward, with the layers of other stages passing their input on.

Every stage runs the stock forward on the same tokens, so masks, positions and rotary embeddings are computed as always.
The layer before the stage returns the activation that was received, and the layer after the stage ends the forward with
the stage's result. All other layers outside the stage return what they were given, and so do the layers of towers in
later stages than the first. The program's hooks on layers run where these compute, and nowhere else.

The model's own forward gives its layers what it computes on this rank. What it computes from weights of another stage
is replaced where a layer is given it, by what crossed from the stage before; see ``BesideInputs``. At the end of a
stage the forward goes on through the later layers, which compute nothing, until all that they need from this and
earlier stages was seen.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.faults.memory_digest import has_values
from meshwright.parallel.autograd_graph import tensors_in
from meshwright.parallel.batch.items import kind_of
from meshwright.parallel.batch.schema import Batch, BatchSchema
from meshwright.parallel.draws.stage_states import PassStates
from meshwright.parallel.experts.load_balancing import LoadBalancing
from meshwright.parallel.fake_passes.sources import OUTSIDE
from meshwright.parallel.foreign_hooks import without_foreign_hooks
from meshwright.parallel.method_chain import BatchStep, ChainStep, StepOrder, add_step, arguments
from meshwright.parallel.shards.stand_in import running_stage
from meshwright.parallel.tensor_parallel.apply import SequenceRegion
from meshwright.parallel.tensor_parallel.block_boundary import hidden_states
from meshwright.parallel.tensor_parallel.second_inputs import TowerFeatures
from meshwright.pipeline import layer_order
from meshwright.pipeline.cut import Cut
from meshwright.pipeline.layer_order import LayerInput, Returned
from meshwright.pipeline.links import Crossing


class StageEnd(Exception):
    """Ends a model's forward after the last layer of a stage. It never leaves :meth:`Stages.run`."""

    def __init__(self, crossing: Crossing):
        super().__init__("the stage has ended")
        self.crossing = crossing


class Stages:
    """The virtual stages of this rank, of which one at a time is active.

    Args:
        facts: what the decoder shows.
        cut: the cut, whose layers get another ``forward``.
        step: the step of the decoder's forward that runs the stages.
        region: the region in which each rank has its own tokens, under sequence parallelism.
        balancing: the model's load-balancing loss, if it has one. It is made of the routers of all stages, so the
            statistics of the routers so far cross with the hidden states.
        towers: what cuts the features of towers that enter between the layers; None without towers.
        beside: what the layers of this rank's stages get from other stages beside their hidden states.
    """

    def __init__(
        self,
        facts: Facts,
        cut: Cut,
        step: BatchStep,
        region: SequenceRegion | None,
        balancing: LoadBalancing | None = None,
        towers: TowerFeatures | None = None,
        *,
        beside: BesideInputs,
    ):
        self.cut, self.step, self.region = cut, step, region
        self.balancing, self.towers, self.beside = balancing, towers, beside
        self._length = 0
        self._active: int | None = None
        self._hidden: Tensor | None = None  # what the stage received, and then its result
        self._draws: PassStates | None = None  # of the forward that runs
        self._leaving: dict[int, tuple[OrderedDict[int, Any], int]] = {}  # hooks after the last layer of a stage
        self._required = {x.name for x in step.signature.parameters.values() if x.default is x.empty}
        self._signatures = [inspect.signature(layer.forward) for layer in cut.layers]
        self._checked: set[tuple[int, str]] = set()  # layers and the names of what they were given
        self._checkpointed = [
            [module for module in facts.inside(layer) if hasattr(module, "gradient_checkpointing")]
            for layer in cut.layers
        ]
        for index, layer in enumerate(cut.layers):
            add_step(layer, _LayerForward(index, self))
        for stage in set(cut.own) - {cut.last}:
            last = cut.layers[cut.spans[stage].stop - 1]
            handle = last.register_forward_hook(functools.partial(self._leave_layers, stage))
            self._leaving[stage] = cast(OrderedDict[int, Any], last._forward_hooks), handle.id
        self._is_after = False  # whether the running pass has left the last layer
        for module, name in facts.names.items():
            own = [f"{name}.{key}".lstrip(".") for key, weight in module._parameters.items() if weight is not None]
            is_absent = bool(own) and not any(map(cut.holds, own))
            if is_absent and set(facts.inside(module)).isdisjoint(cut.layers):
                module.register_forward_pre_hook(functools.partial(self._enter_absent, name))
        self._of_towers = [step.model.get_submodule(name) for name in cut.order.passing]
        for layer, returned in zip(self._of_towers, cut.order.passing.values(), strict=True):
            add_step(layer, _TowerLayerForward(returned, self))

    @property
    def is_checkpointed(self) -> bool:
        """Whether a layer of this rank is recomputed in backward."""
        return any(m.gradient_checkpointing and m.training for i in self.cut.own_layers for m in self._checkpointed[i])

    @property
    def is_reentrant(self) -> bool:
        """Whether a layer of any rank is recomputed by torch's reentrant checkpoint."""
        return any(
            m.gradient_checkpointing
            and m.training
            and getattr(getattr(m, "_gradient_checkpointing_func", None), "keywords", {}).get("use_reentrant")
            for modules in self._checkpointed
            for m in modules
        )

    def run(self, stage: int, batch: Batch, received: Crossing | None, draws: PassStates) -> Any:
        """Run a stage on one micro-batch.

        Args:
            stage: the virtual stage.
            batch: the arguments of the decoder's forward.
            received: what crossed from the stage before; None for the first stage. Under sequence and context
                parallelism the hidden states are those of this rank's tokens.
            draws: the random states of the pass.

        Returns:
            What crosses to the next stage, or the output of the decoder if this is the last stage.
        """
        schema = BatchSchema(batch)
        numbers = received[-1] if received is not None and len(received) > 1 + self.beside.count(stage) else None
        after = contextlib.nullcontext() if self.balancing is None else self.balancing.after(numbers)
        with self.active(stage, received), after, running_stage():
            self._hidden = None if received is None else received[0]
            self._draws = draws
            if (kept := self._leaving.get(stage)) is not None:
                kept[0].move_to_end(kept[1])  # behind hooks of the program that draw
            # Where nothing but hidden states crosses, features of images are in the embeddings of the first stage.
            beside = [name for name in schema.of_towers if self.cut.has_towers or kind_of(name) is not None]
            unread = set(beside) - self._required if stage and self.cut.order.is_plain else set()
            try:
                return self.step.method(**{name: value for name, value in batch.items() if name not in unread})
            except StageEnd as end:
                draws.end_stage(stage)
                if self.region is not None:
                    self.region.end_stage()
                return end.crossing
            finally:
                self._hidden = self._draws = None

    def _leave_layers(self, stage: int, *_: object) -> None:
        """Keep the random states after a stage's last layer. The next stage too draws what follows in the model."""
        if self._draws is not None and self._active == stage:
            self._draws.leave_layers(stage)

    @contextlib.contextmanager
    def active(self, stage: int, received: Crossing | None) -> Iterator[None]:
        """Let the layers of a stage compute inside the context, in forward or in a backward that recomputes them.

        Args:
            stage: the virtual stage.
            received: what crossed from the stage before; None for the first stage.
        """
        before, self._active = self._active, stage
        self.beside.begin(stage, received)
        span = self.cut.spans[stage]
        # transformers wraps a layer that is checkpointed. Only layers that compute may be wrapped, since an exception
        # that passes through the wrapper would leave its saved-tensor hooks in place.
        off = [m for i, ms in enumerate(self._checkpointed) if i not in span for m in ms if m.gradient_checkpointing]
        for module in off:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        passing = [layer for i, layer in enumerate(self.cut.layers) if i not in span]
        try:
            with without_foreign_hooks([*passing, *(self._of_towers if stage else ())]):
                yield
        finally:
            self._active, self._is_after = before, False
            self.beside.end()
            for module in off:
                module.gradient_checkpointing = True  # type: ignore[assignment]

    def at_layer(self, index: int, own: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a layer returns in the active stage."""
        if self._active is None:
            raise PlanError(
                "a part of the model was called by itself, but its layers are spread over the ranks of pp. Call the "
                "model that to_distributed returned, model(**batch), or use ParallelPlan(pp=1)"
            )
        span = self.cut.spans[self._active]
        self._is_after = self._active == self.cut.last and index == len(self.cut.layers) - 1
        if index in span:
            self._check_beside(index, args, kwargs)
        if index == span.start and self.region is not None:
            return self.region.run_first(own, args, kwargs, length=None if self._active == 0 else self._length)
        if index in span:
            return own(*args, **kwargs)
        x, _ = hidden_states(args, kwargs)
        if index == 0:
            self._length = x.shape[1]
        if index == span.stop:
            self._hidden = x
            if self.towers is not None:
                self.towers.end_stage()
        if index >= span.stop and (beside := self.beside.crossing(index)) is not None:
            assert self._hidden is not None
            numbers = None if self.balancing is None else self.balancing.so_far()
            raise StageEnd((self._hidden, *beside, *(() if numbers is None else (numbers,))))
        if index == span.start - 1:
            assert self._hidden is not None
            x = self._hidden
            if self._draws is not None:
                self._draws.enter_layers(self._active)
        return self.cut.order.returned[index].passed(x, arguments(self._signatures[index], args, kwargs))

    def _enter_absent(self, name: str, module: nn.Module, args: tuple[object, ...]) -> None:
        """Raise if a module runs whose weights another stage has, unless it runs before the layers of a pass.

        There its result is not used.
        """
        if self._active is None:
            raise PlanError(
                f"{name} was called by itself, and only another stage of the pipeline has its weights, so this rank "
                "would compute NaN. Call the model that to_distributed returned, model(**batch), or use "
                "ParallelPlan(pp=1)"
            )
        if self._is_after:
            raise PlanError(
                f"{name} runs after the layers in this pass, but did not run when the model was cut into stages, so "
                "the last stage does not have its weights and would compute NaN. Run it in each pass, also where it "
                "has no rows, or use ParallelPlan(pp=1)"
            )

    @property
    def passes_towers(self) -> bool:
        """Whether the running stage has no towers, so that their layers return what they are given."""
        return bool(self._active)

    def _check_beside(self, index: int, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Raise if a layer is given what did not show when the model was cut, and only one stage can compute it.

        A later stage reads NaN in place of a weight that another stage has. The host waits for the device when a layer
        is given an input of this name for the first time.
        """
        hidden, _ = hidden_states(args, kwargs)
        crossing = {one.name for one in self.cut.order.inputs[index]}
        for name, value in arguments(self._signatures[index], args, kwargs).items():
            if (index, name) in self._checked:
                continue
            beside = [x for x in tensors_in(value) if x is not hidden and has_values(x)]
            beside = [x for x in beside if x.is_floating_point() or x.is_complex()]
            if self._active == 0:
                is_wrong = name not in crossing and any(x.requires_grad for x in beside)
            else:
                is_wrong = any(bool(x.isnan().any()) for x in beside)
            if beside and (self._active or torch.is_grad_enabled()):
                self._checked.add((index, name))
            if is_wrong:
                raise PlanError(
                    f"layer {index} ({type(self.cut.layers[index]).__name__}) is given {name} beside its hidden "
                    "states, and the model computes it from weights that only another stage has. Use ParallelPlan(pp=1)"
                )


class _LayerForward(ChainStep):
    """The ``forward`` of a layer, which computes only in the stage that the layer belongs to."""

    order = StepOrder.STAGE

    def __init__(self, index: int, stages: Stages):
        self.index, self.stages = index, stages

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.stages.at_layer(self.index, self.method, args, kwargs)


class _TowerLayerForward(ChainStep):
    """The ``forward`` of a layer of a tower, which computes only in the first stage."""

    order = StepOrder.STAGE

    def __init__(self, returned: Returned, stages: Stages):
        self.returned, self.stages = returned, stages

    def __call__(self, *args: object, **kwargs: object) -> object:
        if not self.stages.passes_towers:
            return self.method(*args, **kwargs)
        return self.returned.passed(hidden_states(args, kwargs)[0], {})


class BesideInputs:
    """Hooks on layers that replace their inputs beside the hidden states by those that crossed.

    Args:
        cut: the cut.
        region: the region in which each rank has its own tokens, under sequence parallelism.
    """

    def __init__(self, cut: Cut, region: SequenceRegion | None):
        self.cut, self.region = cut, region
        inputs = cut.order.inputs
        self._crossings = [layer_order.crossing(inputs, span.start) for span in cut.spans]
        self._stage: int | None = None
        self._received: Crossing | None = None
        self._seen: dict[int, Tensor] = {}  # by the number of the tensor
        for index, layer in enumerate(cut.layers if any(inputs) else ()):
            enter = functools.partial(self._enter, index, inspect.signature(layer.forward))
            layer.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)

    def count(self, stage: int) -> int:
        """Return the number of inputs that cross to a stage beside the hidden states."""
        return len(self._crossings[stage].inputs)

    def begin(self, stage: int, received: Crossing | None) -> None:
        """Begin a stage's forward, or a backward that recomputes its layers."""
        self._stage, self._received, self._seen = stage, received, {}

    def end(self) -> None:
        """Let go of the tensors of the stage."""
        self._stage, self._received, self._seen = None, None, {}

    def crossing(self, index: int) -> tuple[Tensor, ...] | None:
        """Return what crosses to the next stage once the call of a later layer has shown all of it; before, None."""
        assert self._stage is not None
        following = self._crossings[self._stage + 1]
        if index < following.end:
            return None
        return tuple(self._seen[one.tensor] for _, one in following.inputs)

    def _enter(
        self, index: int, signature: inspect.Signature, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._stage is None:
            return None
        span, given = self.cut.spans[self._stage], arguments(signature, args, kwargs)
        if index >= span.stop:
            self._look(index, layer, given)
        if self._received is None or index not in span:
            return None
        self._replace(index, given)
        positional = [given.pop(name) for name, _ in zip(signature.parameters, args, strict=False)]
        return (*positional, *args[len(positional) :]), given

    def _replace(self, index: int, given: dict[str, Any]) -> None:
        """Put what crossed in the place of what this rank cannot have computed."""
        assert self._stage is not None and self._received is not None
        start, place = self.cut.spans[self._stage].start, self._crossings[self._stage].place
        for one in self.cut.order.inputs[index]:
            if one.source >= start:
                continue
            x = self._received[place[one.tensor]]
            # Each rank of tp has whole what no layer has computed, and knows it: only this is a leaf of the graph.
            one.put(given, x if one.source == OUTSIDE else x.view_as(x))
            if one.source == OUTSIDE and self.region is not None:
                self.region.sequence.keep_whole([x])

    def _look(self, index: int, layer: nn.Module, given: dict[str, Any]) -> None:
        """Keep what a later layer is given that crosses to the next stage."""
        assert self._stage is not None
        start, place = self.cut.spans[self._stage].start, self._crossings[self._stage].place
        for first, one in self._crossings[self._stage + 1].inputs:
            if first == index:
                is_own = self._received is None or one.source >= start
                x = one.of(given) if is_own else self._received[place[one.tensor]]  # type: ignore[index]
                if not isinstance(x, Tensor):
                    raise PlanError(self._missing(layer, one))
                self._seen[one.tensor] = x

    def _missing(self, layer: nn.Module, one: LayerInput) -> str:
        return (
            f"{type(layer).__name__} is not given {one.name}, which it got in a pass without values when the model was "
            "cut into stages. Use ParallelPlan(pp=1)"
        )
