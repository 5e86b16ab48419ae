"""Whether a plan with context parallelism may be picked for a model."""

from __future__ import annotations

from typing import Any

from meshwright.choose.plan_file import runnable_fields
from meshwright.config import ParallelPlan, ToDistributedConfig
from meshwright.context.check_method import check_method
from meshwright.context.record import record_context
from meshwright.errors import PlanError
from meshwright.parallel.structure import describe
from meshwright.planner.candidate import Candidate
from meshwright.roles import plan_for
from meshwright.roles.adapters import without_wrappers


def against_context(config: ToDistributedConfig) -> str | None:
    """Return why no plan with context parallelism may be picked under these options; None if one may be."""
    return None if config.engine is None else f"{config.engine} averages gradients over dp alone"


def why_no_context(model: Any, candidate: Candidate, config: ToDistributedConfig) -> str | None:
    """Return why a candidate's context parallelism cannot run a model; None if it can.

    The model's forward runs on tensors without values.
    """
    decoder = without_wrappers(model)[1]
    try:
        roles = config.sharding_plan or plan_for(decoder)
        structure = describe(decoder, roles, tp=1, sequence_parallel=False)
        check_method(record_context(decoder, structure), ParallelPlan(**runnable_fields(candidate)))
    except PlanError as error:
        return str(error)
    return None
