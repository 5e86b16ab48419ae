"""Qwen2: Llama's shape with biases on q, k and v, sharded with their rows."""

from meshwright.roles.sharding_plan import ShardingPlan, decoder_roles

PLAN = ShardingPlan(roles=decoder_roles(), source="the qwen2 plan")
