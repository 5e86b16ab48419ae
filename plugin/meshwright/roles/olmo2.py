"""OLMo 2: norms after the blocks, and a query and key norm over the whole width."""

from meshwright.roles.sharding_plan import Role, ShardingPlan, decoder_roles

PLAN = ShardingPlan(
    roles=decoder_roles(
        attention_roles={
            "q_proj": Role.Q,
            "k_proj": Role.K,
            "v_proj": Role.V,
            "o_proj": Role.O,
            "q_norm": Role.Q_NORM,
            "k_norm": Role.K_NORM,
        },
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    source="the olmo2 plan",
)
