"""Llama 1 to 3: separate projections, two norms a layer, an optional bias everywhere."""

from meshwright.roles.sharding_plan import ShardingPlan, decoder_roles

PLAN = ShardingPlan(roles=decoder_roles(), source="the llama plan")
