"""Sharding plans: which module plays which role, as data."""

from meshwright.roles.infer import infer_plan
from meshwright.roles.registry import plan_for, register_plan
from meshwright.roles.sharding_plan import Role, ShardingPlan, decoder_roles

__all__ = ["Role", "ShardingPlan", "decoder_roles", "infer_plan", "plan_for", "register_plan"]
