"""Llama 1 to 3: separate projections, two norms a layer, an optional bias everywhere."""

from meshwright.plans.base import ShardingPlan, decoder_roles

PLAN = ShardingPlan(roles=decoder_roles(), source="the llama plan")
