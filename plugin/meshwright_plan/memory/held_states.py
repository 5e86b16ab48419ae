"""A rank's parameters in the order of the model, the buckets of their gradients, and the optimizer's state of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from meshwright.plan.parts import BUCKET_MB
from meshwright_plan.job.adapters import Lora, projections
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.layer_shape import LayerShape
from meshwright_plan.job.optimizers import OptimizerKind, is_matrix, optimizer_kind
from meshwright_plan.job.shapes import ModelShape

BUCKET_BYTES = int(BUCKET_MB * 2**20)
TOWER = -2  # the layer of parameters of towers


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a rank.

    Args:
        numel: elements on this rank.
        full: elements of the whole parameter if the ranks of tp hold partial gradients of it, otherwise 0.
        layer: index of the decoder layer; -1 before the first layer, -2 for a tower, whose features come before these,
            and the number of layers after the last layer.
        is_spread: whether it is of experts that ep spreads, so that it is averaged over their copies.
        of_experts: whether it is of experts, wherever they are.
    """

    numel: int
    full: int = 0
    layer: int = -1
    is_spread: bool = False
    of_experts: bool = False

    @property
    def is_grad_partial(self) -> bool:
        return self.full > 0


def parameters(shape: ModelShape, plan: Candidate) -> Iterator[Parameter]:
    """Yield a rank's parameters.

    Args:
        shape: the model.
        plan: the plan; only its tp, its sequence_parallel and its ep are used.

    Example:
        >>> shape = ModelShape.of(name="m", layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=100)
        >>> sum(parameter.numel for parameter in parameters(shape, Candidate())) == shape.parameters
        True
    """
    tp, hidden = plan.tp, shape.hidden
    words = -(-shape.vocab // tp)  # rows of the embedding on the first rank
    if shape.towers is not None:
        yield from (Parameter(numel=numel, layer=TOWER) for numel in shape.towers.parameters)
    yield Parameter(numel=words * hidden)
    if shape.positions:
        yield _seen_in_part(shape.positions * hidden, tp, plan.sequence_parallel, -1)
    layers = (run for run in shape.runs for _ in range(run.count))
    for index, layer in enumerate(layers):
        yield from _layer(layer, plan, index)
    yield _seen_in_part(hidden, tp, plan.sequence_parallel, shape.layers)
    if not shape.tied:
        yield Parameter(numel=-(-shape.outputs // tp) * hidden, layer=shape.layers)


def adapters(shape: ModelShape, plan: Candidate, lora: Lora) -> Iterator[Parameter]:
    """Yield a rank's factors of adapters, which alone are trained.

    Args:
        shape: the model.
        plan: the plan; only its tp is used.
        lora: the adapters.

    Example:
        >>> shape = ModelShape.of(name="m", layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=100)
        >>> sum(parameter.numel for parameter in adapters(shape, Candidate(), Lora(rank=8)))
        17408
    """
    tp, rank = plan.tp, lora.rank
    layers = (run for run in shape.runs for _ in range(run.count))
    for index, layer in enumerate(layers):
        keys = layer.local_kv_width(tp)
        for each in projections(layer):
            inner, outer = (int(width) for width in each.cut(tp))
            if not layer.linears and not each.in_mlp and each.outer == layer.kv_width and tp > 1 and not each.is_row:
                outer = max(outer, keys)
            # Every rank holds a factor whole and computes an addend of its gradient.
            first, second = rank * inner, rank * outer
            yield Parameter(numel=first, full=0 if each.is_row or tp == 1 else first, layer=index)
            yield Parameter(numel=second, full=second if each.is_row and tp > 1 else 0, layer=index)


@lru_cache(maxsize=64)
def trained_members(shape: ModelShape, plan: Candidate, lora: Lora | None) -> tuple[Parameter, ...]:
    """Return the parameters of a rank that are trained."""
    return tuple(parameters(shape, plan) if lora is None else adapters(shape, plan, lora))


def _layer(layer: LayerShape, plan: Candidate, index: int) -> Iterator[Parameter]:
    if layer.held:
        for numel, full in layer.held_by(plan.tp, plan.sequence_parallel):
            yield Parameter(numel=numel, full=full, layer=index)
        return
    tp, traits, hidden = plan.tp, layer.traits, layer.hidden
    query, keys, ffn = layer.query_width // tp, layer.local_kv_width(tp), layer.ffn // tp
    copied = layer.kv_width if keys * tp > layer.kv_width else 0  # several ranks hold the same key heads

    def small(numel: int, by_part: bool = plan.sequence_parallel) -> Parameter:
        return _seen_in_part(numel, tp, by_part, index)

    widths = [(query, 0), (keys, copied), (keys, copied)]
    if traits.fused_qkv:
        widths = [(query + 2 * keys, layer.query_width + 2 * copied if copied else 0)]
    if layer.projections is not None:
        yield Parameter(numel=layer.projections // tp, layer=index)
        widths, query = [], 0
    for width, full in widths:
        yield Parameter(numel=width * hidden, full=full * hidden, layer=index)
        if traits.qkv_bias:
            yield Parameter(numel=width, full=full, layer=index)
    if query:
        yield Parameter(numel=query * hidden, layer=index)
    if traits.output_bias:
        yield small(hidden)
    if traits.query_norm == "head":
        yield from [small(layer.head_dim, True)] * 2
    elif traits.query_norm == "whole":
        yield Parameter(numel=query, layer=index)
        yield Parameter(numel=keys, full=copied, layer=index)
    if layer.experts is not None:
        yield from _experts(layer, plan, index)
    ups = layer.mlp_inputs * (ffn > 0)
    for width in [ups * ffn] if traits.fused_qkv else [ffn] * ups:
        yield Parameter(numel=width * hidden, layer=index)
        if traits.mlp_bias:
            yield Parameter(numel=width, layer=index)
    if ffn:
        yield Parameter(numel=ffn * hidden, layer=index)
    if traits.mlp_bias:
        yield small(hidden)
    yield from [small(hidden)] * traits.norms


def _experts(layer: LayerShape, plan: Candidate, index: int) -> Iterator[Parameter]:
    experts = layer.experts
    assert experts is not None
    yield _seen_in_part(experts.router, plan.tp, plan.sequence_parallel, index)
    own = -(-experts.count // plan.ep)  # the first ranks hold as many as any
    # Without ep, every rank of tp holds all experts and computes addends of their gradients.
    is_partial = plan.tp > 1 and plan.ep == 1
    for numel in (experts.hidden * experts.width * experts.inputs, experts.hidden * experts.width + experts.biases):
        full = own * numel if is_partial else 0
        yield Parameter(numel=own * numel, full=full, layer=index, is_spread=plan.ep > 1, of_experts=True)


def _seen_in_part(numel: int, tp: int, by_part: bool, layer: int) -> Parameter:
    """Return a parameter that each rank holds whole. If ``by_part``, each rank computes a partial gradient of it."""
    return Parameter(numel=numel, full=numel if tp > 1 and by_part else 0, layer=layer)


def buckets(members: list[Parameter], element_bytes: int) -> list[list[int]]:
    """Return the buckets, as indices into ``members``, in the order in which backward fills them.

    Buckets of partial gradients come after the others, and those of experts that ep spreads last.

    Args:
        members: the parameters in the order of the model.
        element_bytes: bytes per element of the parameters.
    """
    backwards = range(len(members) - 1, -1, -1)
    spread = [index for index in backwards if members[index].is_spread]
    whole = [index for index in backwards if not members[index].is_grad_partial and not members[index].is_spread]
    partial = [index for index in backwards if members[index].is_grad_partial]
    return [bucket for group in (whole, partial, spread) for bucket in _fill(group, members, element_bytes)]


def units(members: list[Parameter], layers: int) -> list[list[int]]:
    """Return the units of ZeRO-3, as indices into ``members``, in the order of backward.

    ZeRO-3 gathers a unit at once: a layer, or a parameter outside the layers (see optim.zero3_layers.ShardedWeights).

    Args:
        members: the parameters in the order of the model, or those that are trained.
        layers: the number of layers.
    """
    keys = [(m.layer, m.is_spread) if 0 <= m.layer < layers else (m.layer, index) for index, m in enumerate(members)]
    return [[i for i, other in enumerate(keys) if other == key] for key in sorted(set(keys), reverse=True)]


def _fill(group: list[int], members: list[Parameter], element_bytes: int) -> Iterator[list[int]]:
    filling: list[int] = []
    filled = 0
    for index in group:
        size = members[index].numel * element_bytes
        if filling and filled + size > BUCKET_BYTES:
            yield filling
            filling, filled = [], 0
        filling.append(index)
        filled += size
    if filling:
        yield filling


@dataclass(frozen=True, kw_only=True)
class HeldStates:
    """The state of a rank.

    Args:
        bytes: bytes of the state.
        owned: bytes of the whole parameters that a rank steps.
    """

    bytes: float
    owned: float = 0.0


def exchanged(plan: Candidate, trained_bytes: int) -> int:
    """Return how often a rank has what it owns in a step: gradients as they are sent and whole, and weights likewise.

    Args:
        plan: the plan.
        trained_bytes: bytes per trained weight as the layers read it. Owners that have all weights, in the dtype that
            is stepped, are sent gradients alone.
    """
    is_cut = plan.tp > 1 or plan.ep > 1 or plan.zero_stage == 3
    return 4 if is_cut or plan.offload is not None or trained_bytes < 4 else 2


@lru_cache(maxsize=256)
def held_states(
    shape: ModelShape, layout: Candidate, optimizer: str | OptimizerKind, lora: Lora | None, *, unit: int
) -> HeldStates:
    """Return the state of the optimizer on one rank.

    Args:
        shape: the model.
        layout: the plan's sizes, with its data ranks as ``shard``.
        optimizer: as in ``Job``.
        lora: as in ``Job``.
        unit: bytes per element of what is stepped.
    """
    kind, is_sharded = optimizer_kind(optimizer), layout.zero_stage > 0 and layout.data_ranks > 1
    if kind.is_whole and (is_sharded or layout.tp > 1 or layout.ep > 1):
        return _owned(shape, layout.data_ranks * layout.tp, optimizer, lora, unit)

    def share(member: Parameter) -> float:
        ranks = (layout.copies if member.is_spread else layout.data_ranks) if is_sharded else 1
        return _bytes(kind, shape, member, unit, lora) / ranks

    return HeldStates(bytes=sum(map(share, trained_members(shape, layout, lora))))


@lru_cache(maxsize=256)
def _owned(shape: ModelShape, ranks: int, optimizer: str | OptimizerKind, lora: Lora | None, unit: int) -> HeldStates:
    """Return the state of the rank that owns the most: parameters go to the rank that has the fewest elements."""
    kind = optimizer_kind(optimizer)
    whole = trained_members(shape, Candidate(), lora)
    stepped = [member for member in whole if kind.steps_whole(is_matrix=_is_matrix(kind, shape, member, lora))]
    parts = sum(_bytes(kind, shape, member, unit, lora) for member in whole if member not in stepped)
    total, largest = sum(m.numel for m in stepped), max((m.numel for m in stepped), default=0)
    owned = max(total / ranks, largest)
    per_element = sum(_bytes(kind, shape, member, unit, lora) for member in stepped) / max(1, total)
    return HeldStates(bytes=owned * per_element + parts / ranks, owned=owned * unit)


def _bytes(kind: OptimizerKind, shape: ModelShape, member: Parameter, unit: int, lora: Lora | None) -> float:
    return kind.state(member.numel, unit=unit, is_matrix=_is_matrix(kind, shape, member, lora))


def _is_matrix(kind: OptimizerKind, shape: ModelShape, member: Parameter, lora: Lora | None) -> bool:
    """Return whether an optimizer takes a parameter for a matrix: one of a layer, or any if it factors the state."""
    if lora is not None:
        return True
    if kind.is_factored:
        return is_matrix(member.numel, shape.hidden)
    return 0 <= member.layer < shape.layers and not member.of_experts and is_matrix(member.numel, shape.hidden)


def optimizer_bytes(plan: Candidate, job: Job) -> int:
    """Return AdamW's bytes per weight; there are 32-bit copies of 16-bit weights only under ZeRO."""
    if job.trained_bytes == 4:
        return 8
    return 2 * job.trained_bytes if plan.zero_stage == 0 else 12


def master_bytes(plan: Candidate, job: Job) -> int:
    """Return the bytes per weight of the 32-bit copies."""
    return 4 if plan.zero_stage and job.trained_bytes < 4 else 0


def whole_states(shape: ModelShape, job: Job, *, unit: int) -> float:
    """Return the bytes of the state of all trained parameters."""
    return _summed(shape, job.optimizer, job.lora, unit)[0]


def staged_states(shape: ModelShape, plan: Candidate, job: Job, trained: tuple[float, float], kept: float) -> float:
    """Return the bytes of the state on a rank of a pipeline, by the mean over the model's parameters.

    Args:
        shape, plan, job: the model, the plan and the job.
        trained: trained elements on the rank beside its experts, and of these.
        kept: those of which the rank has state, if state is sharded.
    """
    total, elements, _ = _summed(shape, job.optimizer, job.lora, _unit(plan, job))
    if _has_owners(plan, job):
        # The ranks of a stage share its parameters, of which each of them has 1 / tp.
        kept = sum(trained) * plan.tp / (plan.data_ranks * plan.tp)
    return total / max(1.0, elements) * kept


def staged_exchange(shape: ModelShape, plan: Candidate, job: Job, layers: int) -> float:
    """Return the bytes of whole weights and gradients that a rank of a pipeline sends and owns in a step.

    Args:
        shape, plan, job: the model, the plan and the job.
        layers: number of the rank's layers.
    """
    if not _has_owners(plan, job):
        return 0.0
    unit = _unit(plan, job)
    whole = _summed(shape, job.optimizer, job.lora, unit)[2] * layers / shape.layers
    return exchanged(plan, job.trained_bytes) * whole / (plan.data_ranks * plan.tp) * unit


def _has_owners(plan: Candidate, job: Job) -> bool:
    """Return whether one rank steps each whole parameter that the ranks share."""
    return job.kind.is_whole and bool(plan.zero_stage or plan.tp > 1 or plan.ep > 1)


def _unit(plan: Candidate, job: Job) -> int:
    """Return the bytes per element of what is stepped."""
    return 4 if plan.zero_stage else job.trained_bytes


@lru_cache(maxsize=64)
def _summed(
    shape: ModelShape, optimizer: str | OptimizerKind, lora: Lora | None, unit: int
) -> tuple[float, float, float]:
    """Return the bytes of the state of the whole model, its trained elements, and those of parameters with an owner."""
    kind, members = optimizer_kind(optimizer), trained_members(shape, Candidate(), lora)
    owned = sum(m.numel for m in members if kind.steps_whole(is_matrix=_is_matrix(kind, shape, m, lora)))
    total = sum(_bytes(kind, shape, member, unit, lora) for member in members)
    return total, float(sum(m.numel for m in members)), float(owned)
