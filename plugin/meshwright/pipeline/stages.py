"""Run one pipeline stage by the model's own forward, with the layers of other stages passing their input on.

Every stage runs the stock forward on the same tokens, so masks, positions and rotary embeddings are computed as always.
The layer before the stage returns the activation that was received, and the layer after the stage ends the forward with
the stage's result. All other layers outside the stage return what they were given, and so do the layers of towers in
later stages than the first. The program's hooks on layers run where these compute, and nowhere else. What an earlier
stage has computed for the layers of a stage is put in its place where they are given it; see ``BesideInputs``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.faults.memory_digest import has_values
from meshwright.parallel.autograd_graph import tensors_in
from meshwright.parallel.batch.items import kind_of
from meshwright.parallel.batch.schema import Batch, BatchSchema
from meshwright.parallel.experts.load_balancing import LoadBalancing
from meshwright.parallel.foreign_hooks import without_foreign_hooks
from meshwright.parallel.method_chain import BatchStep, ChainStep, StepOrder, add_step, arguments
from meshwright.parallel.shards.reads import running_stage
from meshwright.parallel.tensor_parallel.apply import SequenceRegion
from meshwright.parallel.tensor_parallel.block_boundary import hidden_states
from meshwright.parallel.tensor_parallel.tower_features import TowerFeatures
from meshwright.pipeline.beside_inputs import BesideInputs
from meshwright.pipeline.cut import Cut
from meshwright.pipeline.layer_inputs import Returned
from meshwright.pipeline.links import Crossing


class StageEnd(Exception):
    """Ends a model's forward after the last layer of a stage. It never leaves :meth:`Stages.run`."""

    def __init__(self, crossing: Crossing):
        super().__init__("the stage has ended")
        self.crossing = crossing


class Stages:
    """The virtual stages of this rank, of which one at a time is active.

    Args:
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
        self._required = {x.name for x in step.signature.parameters.values() if x.default is x.empty}
        self._signatures = [inspect.signature(layer.forward) for layer in cut.layers]
        self._checked: set[tuple[int, str]] = set()  # layers and the names of what they were given
        self._checkpointed = [
            [module for module in layer.modules() if hasattr(module, "gradient_checkpointing")] for layer in cut.layers
        ]
        for index, layer in enumerate(cut.layers):
            add_step(layer, _LayerForward(index, self))
        self._is_after = False  # whether the running pass has left the last layer
        for name, module in step.model.named_modules():
            own = [f"{name}.{weight}" for weight, _ in module.named_parameters(recurse=False)]
            inside = set(module.modules())
            if own and not any(map(cut.holds, own)) and not any(layer in inside for layer in cut.layers):
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

    def run(self, stage: int, batch: Batch, received: Crossing | None) -> Any:
        """Run a stage on one micro-batch.

        Args:
            stage: the virtual stage.
            batch: the arguments of the decoder's forward.
            received: what crossed from the stage before; None for the first stage. Under sequence and context
                parallelism the hidden states are those of this rank's tokens.

        Returns:
            What crosses to the next stage, or the output of the decoder if this is the last stage.
        """
        schema = BatchSchema(batch)
        numbers = received[-1] if received is not None and len(received) > 1 + self.beside.count(stage) else None
        after = contextlib.nullcontext() if self.balancing is None else self.balancing.after(numbers)
        with self.active(stage, received), after, running_stage():
            self._hidden = None if received is None else received[0]
            # Where nothing but hidden states crosses, features of images are in the embeddings of the first stage.
            beside = [name for name in schema.of_towers if self.cut.has_towers or kind_of(name) is not None]
            unread = set(beside) - self._required if stage and self.cut.order.is_plain else set()
            try:
                return self.step.method(**{name: value for name, value in batch.items() if name not in unread})
            except StageEnd as end:
                if self.region is not None:
                    self.region.end_stage()
                return end.crossing
            finally:
                self._hidden = None

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
                "model that to_distributed returned"
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
        return self.cut.order.returned[index].passed(x, arguments(self._signatures[index], args, kwargs))

    def _enter_absent(self, name: str, module: nn.Module, args: tuple[object, ...]) -> None:
        """Raise if a module runs after the layers whose weights another stage has; before them its result is unused."""
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
