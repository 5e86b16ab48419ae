"""Determines which layers and which weights each virtual stage of a pipeline holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import nn

from meshwright.errors import PlanError
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.pipeline.layer_order import LayerOrder, OrderWatcher, record_order
from meshwright.plan.config import ParallelPlan
from meshwright.plan.partition import check_stages, even_stages
from meshwright.plan.schedule import rank_of_stage, stages_of_rank
from meshwright.roles import Decoder
from meshwright.roles.decoder import load_of_towers
from meshwright.roles.family_hints import layers_with_features


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A decoder cut into virtual stages, as one rank of the pipeline sees it.

    Args:
        layers: the decoder's layers.
        spans: for each virtual stage, the indices of its layers.
        order: what the decoder's forward does around its layers.
        has_towers: whether there are towers, whose features the decoder adds to the embeddings.
        schedule: the name of the schedule, which says which rank holds which stage.
        size: the number of ranks in the pipeline.
        rank: this rank's place in the pipeline.
        stages_of: for each parameter of the decoder, by each of its names, the virtual stages that hold it. Several
            hold a tied weight, and the weights of a module that layers share.
    """

    layers: tuple[nn.Module, ...]
    spans: tuple[range, ...]
    order: LayerOrder
    has_towers: bool
    schedule: str
    size: int
    rank: int
    stages_of: dict[str, tuple[int, ...]]

    @property
    def own(self) -> tuple[int, ...]:
        """The virtual stages that this rank holds."""
        return stages_of_rank(self.schedule, self.rank, self.size, len(self.spans) // self.size)

    @property
    def last(self) -> int:
        """The virtual stage with the head and the loss."""
        return len(self.spans) - 1

    @property
    def last_rank(self) -> int:
        """The rank that holds the last virtual stage."""
        return self.rank_of(self.last)

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a virtual stage."""
        return rank_of_stage(self.schedule, stage, self.size)

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the ranks of the pipeline that hold a parameter, ascending."""
        return tuple(sorted({self.rank_of(stage) for stage in self.stages_of[name]}))

    def holds(self, name: str) -> bool:
        """Return whether this rank holds a parameter."""
        return self.rank in self.holders(name)

    @property
    def own_layers(self) -> frozenset[int]:
        """The indices of the layers that this rank holds."""
        return frozenset(i for stage in self.own for i in self.spans[stage])


def cut_decoder(
    decoder: Decoder, plan: ParallelPlan, *, rank: int, seen: Callable[[], OrderWatcher | None] | None = None
) -> Cut:
    """Cut a decoder into the virtual stages of a plan, without changing it.

    Args:
        decoder: the decoder, with or without memory.
        plan: the plan; its ``pp``, ``schedule``, ``chunks`` and ``stages`` say how to cut.
        rank: this rank's place in the pipeline.
        seen: see ``record_order``.

    Raises:
        PlanError: if the decoder cannot be cut, or has fewer layers than the plan has virtual stages.
    """
    count = plan.pp * plan.stages_per_rank
    sizes = _sizes(plan, decoder, count)
    ends = [0, *accumulate(sizes)]
    spans = tuple(range(low, high) for low, high in pairwise(ends))
    order = record_order(decoder, seen)
    _check_crossing(order, plan, [span.start for span in spans[1:]])
    cut = Cut(
        layers=decoder.layers,
        spans=spans,
        order=order,
        has_towers=bool(decoder.towers),
        schedule=plan.schedule,
        size=plan.pp,
        rank=rank,
        stages_of=_stages_of(decoder, spans, order),
    )
    _check_shared(cut)
    return cut


def _check_crossing(order: LayerOrder, plan: ParallelPlan, starts: Sequence[int]) -> None:
    """Raise if a stage cannot compute what its layers are given from what crosses the stages, or know its tokens."""
    axis = "cp=1" if plan.cp > 1 else "sequence_parallel=False" if plan.sequence_parallel else None
    if axis is not None and not order.is_plain and (plan.cp > 1 or order.hidden_size is None):
        beside = sorted({one.name for of_layer in order.inputs for one in of_layer})
        what = f"inputs beside their hidden states ({', '.join(beside)})" if beside else "hidden states of more dims"
        raise PlanError(
            f"the layers are given {what}, and it is not known to which tokens these belong where ranks share a row. "
            f"Use ParallelPlan({axis}), or pp=1"
        )
    for layer, (hidden, beside_it) in enumerate(zip(order.hidden, order.inputs, strict=True)):
        for one in (hidden, *beside_it):
            if crossed := [start for start in starts if start <= layer and one.earliest < start <= one.source]:
                what = "what comes before its layers" if one.earliest < 0 else f"the result of layer {one.earliest}"
                raise PlanError(
                    f"the model computes {one.name} of layer {layer} from the result of layer {one.source} and from "
                    f"{what}, and only the stage before layer {crossed[0]} has both. Use ParallelPlan(pp=1), or other "
                    "stages="
                )


def _check_shared(cut: Cut) -> None:
    """Raise unless all weights that several ranks hold are held by the same ranks, which sum their gradients."""
    shared: dict[tuple[int, ...], str] = {}
    for name in cut.stages_of:
        if len(ranks := cut.holders(name)) > 1:
            shared.setdefault(ranks, name)
    if len(shared) > 1:
        found = "; ".join(f"{name} by the ranks {', '.join(map(str, ranks))}" for ranks, name in shared.items())
        raise PlanError(
            f"ParallelPlan.pp={cut.size} gives weights that several places of the model share to different ranks "
            f"({found}), and a pipeline sums the gradients of shared weights over one group of ranks. Choose stages= "
            "such that layers that share a module are on one rank, or use pp=2 or pp=1"
        )


def _sizes(plan: ParallelPlan, structure: Decoder, count: int) -> Sequence[int]:
    """Return the number of layers of each virtual stage."""
    layers, least = len(structure.layers), max(1, layers_with_features(getattr(structure.model, "config", None)))
    try:
        if plan.stages is not None:
            return check_stages(plan.stages, layers, count, least=least)
        return even_stages(layers, count, first=load_of_towers(structure), least=least)
    except ValueError as error:
        most = layers // plan.stages_per_rank
        cure = f". {type(structure.model).__name__} has {layers} layers: set pp={most} or less"
        raise PlanError(f"ParallelPlan.pp={plan.pp}: {error}{cure if count > layers else ''}") from None


def _stages_of(decoder: Decoder, spans: tuple[range, ...], order: LayerOrder) -> dict[str, tuple[int, ...]]:
    stage_of_layer = {i: stage for stage, span in enumerate(spans) for i in span}
    found: dict[int, set[int]] = {}
    facts = decoder.facts
    for stage, modules in [
        *((stage_of_layer[i], facts.inside(layer)) for i, layer in enumerate(decoder.layers)),
        *((0, [facts.modules[name]]) for name in order.before),
        *((len(spans) - 1, [facts.modules[name]]) for name in order.after),
    ]:
        for module in modules:
            for parameter in module.parameters(recurse=False):
                found.setdefault(id(parameter), set()).add(stage)
    # The first stage holds what no module that ran has.
    return {name: tuple(sorted(found.get(id(parameter), {0}))) for name, parameter in facts.parameters.items()}


def with_stages(layouts: dict[str, TensorLayout], cut: Cut) -> dict[str, TensorLayout]:
    """Return layouts that say which ranks of pp hold each parameter."""
    return {name: dataclasses.replace(layout, stages=cut.holders(name)) for name, layout in layouts.items()}
