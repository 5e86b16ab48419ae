"""Llama, as an example of a sharding plan that is written out; other families' plans are inferred from structure."""

from meshwright.roles.sharding_plan import ShardingPlan, decoder_roles

PLAN = ShardingPlan(roles=decoder_roles(), source="the llama plan")
