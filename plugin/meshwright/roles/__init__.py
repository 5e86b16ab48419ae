"""Which parts a decoder has, and sharding plans: which module plays which role, as data."""

from meshwright.roles.decoder import Decoder, find_decoder
from meshwright.roles.registry import infer_plan, plan_for, register_plan, written_plan
from meshwright.roles.sharding_plan import Role, ShardingPlan, decoder_roles

__all__ = [
    "Decoder",
    "Role",
    "ShardingPlan",
    "decoder_roles",
    "find_decoder",
    "infer_plan",
    "plan_for",
    "register_plan",
    "written_plan",
]
