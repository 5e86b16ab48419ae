"""The kinds of parameters, for a report with one row per kind."""

from __future__ import annotations

from torch import nn

from meshwright.errors import PlanError
from meshwright.roles import Role, ShardingPlan, plan_for
from meshwright.roles.adapters import without_wrappers
from meshwright.roles.sharding_plan import BlockPart

_NORMS = frozenset({Role.HEAD_NORM, Role.Q_NORM, Role.K_NORM, Role.INNER_NORM, Role.NORM, Role.FINAL_NORM})


def kinds_of(model: nn.Module, sharding_plan: ShardingPlan | None) -> dict[str, str]:
    """Return the kind of each parameter of a model, by its name.

    Args:
        model: the one-device model.
        sharding_plan: the roles of the modules; None for the registered or inferred plan.
    """
    prefix, decoder = without_wrappers(model)
    try:
        plan = sharding_plan or plan_for(decoder)
    except PlanError:  # a plan without tp can still run the model
        plan = ShardingPlan(roles={})
    modules = dict(model.named_modules())
    found = {}
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        role = plan.role_of(owner.removeprefix(prefix)) or plan.role_of(name.removeprefix(prefix))
        found[name] = _kind(role, modules[owner], is_bias=last == "bias", ndim=parameter.ndim)
    return found


def _kind(role: Role | None, owner: nn.Module, *, is_bias: bool, ndim: int) -> str:
    part = None if role is None else role.part
    if part in (BlockPart.COLUMN, BlockPart.INNER):
        return f"gradients: {'biases of ' if is_bias else ''}column projections"
    if part is BlockPart.ROW:
        return f"gradients: {'biases of ' if is_bias else ''}row projections"
    if role is Role.HEAD:
        return "gradients: head"
    if role is Role.EMBEDDING or isinstance(owner, nn.Embedding):
        return "gradients: embeddings"
    if role in _NORMS or "norm" in type(owner).__name__.lower():
        return "gradients: norms"
    return "gradients: other vectors" if ndim == 1 else "gradients: other matrices"
