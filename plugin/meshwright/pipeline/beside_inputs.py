"""Give the layers of a stage what earlier stages have computed for them, and take what later stages need.

The model's own forward gives its layers what it computes on this rank. What it computes from weights of another stage
is replaced where a layer is given it, by what crossed from the stage before. At the end of a stage the forward goes on
through the later layers, which compute nothing, until all that they need from this and earlier stages was seen.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.parallel.fake_passes.sources import OUTSIDE
from meshwright.parallel.method_chain import arguments
from meshwright.parallel.tensor_parallel.apply import SequenceRegion
from meshwright.pipeline import layer_inputs
from meshwright.pipeline.cut import Cut
from meshwright.pipeline.layer_inputs import LayerInput
from meshwright.pipeline.links import Crossing


class BesideInputs:
    """Hooks on layers that replace their inputs beside the hidden states by those that crossed.

    Args:
        cut: the cut.
        region: the region in which each rank has its own tokens, under sequence parallelism.
    """

    def __init__(self, cut: Cut, region: SequenceRegion | None):
        self.cut, self.region = cut, region
        inputs = cut.order.inputs
        self._crossings = [layer_inputs.crossing(inputs, span.start) for span in cut.spans]
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
