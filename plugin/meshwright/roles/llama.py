"""Llama's plan, an example of a written sharding plan; other families' plans are inferred from structure."""

from meshwright.roles.sharding_plan import ShardingPlan, decoder_roles

PLAN = ShardingPlan(roles=decoder_roles(), source="the llama plan")
