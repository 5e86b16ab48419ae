"""Qwen3: Llama's shape with a norm over each query and key head."""

from meshwright.roles.sharding_plan import Role, ShardingPlan, decoder_roles

PLAN = ShardingPlan(
    roles=decoder_roles(
        attention_roles={
            "q_proj": Role.Q,
            "k_proj": Role.K,
            "v_proj": Role.V,
            "o_proj": Role.O,
            "q_norm": Role.HEAD_NORM,
            "k_norm": Role.HEAD_NORM,
        }
    ),
    source="the qwen3 plan",
)
