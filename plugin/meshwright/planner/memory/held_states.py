"""The optimizer's state on one rank of this version's runtime: by slices, or of the parameters that it owns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.planner.job.adapters import Lora
from meshwright.planner.job.candidate import Candidate, Job
from meshwright.planner.job.optimizers import OptimizerKind, is_matrix, optimizer_kind
from meshwright.planner.job.shapes import ModelShape
from meshwright.planner.memory.bucket_sizes import Parameter, trained_members


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
    """Return AdamW's bytes per weight; this runtime has 32-bit copies of 16-bit weights only under ZeRO."""
    if not job.own_runtime:
        return job.optimizer_bytes
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
