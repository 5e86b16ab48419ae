"""Phi-3: q, k and v in one matrix, gate and up in another."""

from meshwright.roles.sharding_plan import Role, ShardingPlan, decoder_roles

PLAN = ShardingPlan(
    roles=decoder_roles(
        attention_roles={"qkv_proj": Role.QKV, "o_proj": Role.O},
        mlp_roles={"gate_up_proj": Role.GATE_UP, "down_proj": Role.DOWN},
    ),
    source="the phi3 plan",
)
