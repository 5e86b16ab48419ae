"""Gemma 2: four norms a layer, tied embeddings, soft-capped attention and logits."""

from meshwright.roles.sharding_plan import ShardingPlan, decoder_roles

PLAN = ShardingPlan(
    roles=decoder_roles(
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
    ),
    source="the gemma2 plan",
)
