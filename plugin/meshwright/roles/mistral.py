"""Mistral: Llama's shape; its sliding window lives in the mask, which stays whole."""

from meshwright.roles.sharding_plan import ShardingPlan, decoder_roles

PLAN = ShardingPlan(roles=decoder_roles(), source="the mistral plan")
