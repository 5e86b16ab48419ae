"""Sharding plans: what to shard, as data."""

from meshwright.plans.base import Role, ShardingPlan, decoder_roles
from meshwright.plans.infer import infer_plan
from meshwright.plans.registry import plan_for, register_plan

__all__ = ["Role", "ShardingPlan", "decoder_roles", "infer_plan", "plan_for", "register_plan"]
