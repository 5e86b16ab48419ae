"""Tiny models that are more than a stack of dense layers: experts in the layers, or a tower of images beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from conformance.families import expert_models
from support.models import SIZES, labels_for, tokens

Sample = dict[str, Tensor]
LENGTH, IMAGE = 14, 96  # IMAGE is the word in whose place the features of an image go
EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",  # torch's grouped matrix multiplication has no float64
}


def llama(**sizes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 1, **sizes}))


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4))


def balanced(kind: str = "Mixtral") -> Any:
    """Experts with a load-balancing loss whose weight is large enough that a wrong value would be seen.

    Olmoe has four layers, for schedules in which each of two ranks has two stages.
    """
    experts = {"num_local_experts": 4} if kind == "Mixtral" else {"num_experts": 5, "moe_intermediate_size": 16}
    sizes = SIZES if kind == "Mixtral" else {**SIZES, "num_hidden_layers": 4}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, **EXPERTS, **experts, output_router_logits=True, router_aux_loss_coef=0.5
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def qwen3_moe() -> Any:
    """Five experts, which two ranks cannot share evenly."""
    config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=5, head_dim=4, moe_intermediate_size=16)
    return transformers.Qwen3MoeForCausalLM(config)


def qwen2_moe() -> Any:
    """Experts beside an MLP that every token takes, whose result a gate of its own scales."""
    sizes = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
    config = transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, **sizes, num_experts=4)
    return transformers.Qwen2MoeForCausalLM(config)


def deepseek_v3() -> Any:
    """A dense layer, and one of experts in groups with a bias that corrects the routing, under latent attention."""
    latent = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
    routed = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
    sizes = {**SIZES, "num_key_value_heads": SIZES["num_attention_heads"], "moe_intermediate_size": 16}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes, **EXPERTS, **latent, **routed))


def gpt_oss() -> Any:
    """Experts with biases, whose channels are in turn those of the gate and those that it scales."""
    config = transformers.GptOssConfig(**SIZES, **EXPERTS, num_local_experts=4, head_dim=4, attn_implementation="eager")
    return transformers.GptOssForCausalLM(config)


def llava() -> Any:
    """Two layers of text and six of images; an image of 8 x 8 pixels has 4 features."""
    tower = {"num_hidden_layers": 6, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 24}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**tower, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(**SIZES),
        image_token_id=IMAGE,
    )
    return transformers.LlavaForConditionalGeneration(config)


def qwen2_vl() -> Any:
    """Two layers of text and six of images, which may have any size."""
    tower = {"depth": 6, "embed_dim": 16, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
    config = transformers.Qwen2VLConfig(
        vision_config={**tower, "hidden_size": SIZES["hidden_size"]},
        text_config={**SIZES, "rope_parameters": rotary},
        image_token_id=IMAGE,
        video_token_id=IMAGE - 1,
        vision_start_token_id=IMAGE - 2,
        vision_end_token_id=IMAGE - 3,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def idle_experts() -> Any:
    """All tokens go to the same two of four experts, so that a rank of ep gets none. The router stays as it is."""
    model = mixtral()
    for layer in model.model.layers:
        layer.mlp.gate.weight.idle = True
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "mixtral": mixtral,
    "mixtral, idle experts": idle_experts,
    "mixtral, balanced": balanced,
    "olmoe, balanced": functools.partial(balanced, "Olmoe"),
    "qwen3_moe": qwen3_moe,
    "qwen2_moe": qwen2_moe,
    "deepseek_v3": deepseek_v3,
    "llava": llava,
    "llava, images in some rows": llava,
    "qwen2_vl": qwen2_vl,
}


# Models of tests that name them.
OTHERS: dict[str, Callable[[], Any]] = {
    "gpt_oss": gpt_oss,
    "qwen4_exp, balanced": functools.partial(
        expert_models.build, "qwen4_exp_text", output_router_logits=True, router_aux_loss_coef=0.5
    ),
}


def build(name: str) -> Any:
    """A seeded model of which every parameter has a random value of its own."""
    torch.manual_seed(0)
    model = (MODELS | OTHERS)[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.05))
            if getattr(parameter, "idle", False):
                parameter.zero_().requires_grad_(False)  # its gradient would be rounding alone
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("k_proj.bias"):  # softmax leaves its gradient no value but rounding
            parameter.requires_grad_(False)
    return model.double().train()


def samples(name: str, rows: int) -> list[Sample]:
    """Rows of tokens with labels; those of a model with a tower have an image each, of different sizes if it can."""
    ids = tokens(rows, LENGTH, vocab_size=IMAGE - 3)
    labels = labels_for(ids)
    found = []
    for row in range(rows):
        sample = {"input_ids": ids[row], "labels": labels[row]}
        if "balanced" in name:
            sample["attention_mask"] = torch.arange(LENGTH) < LENGTH - 3 * (row % 3)
            sample["labels"] = labels[row].masked_fill(~sample["attention_mask"], -100)
        width = 4 * (1 + row % 2) if name == "qwen2_vl" else 4
        has_image = name in ("llava", "qwen2_vl") or (name == "llava, images in some rows" and row % 4 < 2)
        if has_image:
            sample["input_ids"][2 : 2 + width] = IMAGE
            sample["labels"][2 : 2 + width] = -100
        generator = torch.Generator().manual_seed(row)
        if has_image and name != "qwen2_vl":
            sample["pixel_values"] = torch.randn(3, 8, 8, generator=generator, dtype=torch.float64)
        if name == "qwen2_vl":
            sample["mm_token_type_ids"] = (sample["input_ids"] == IMAGE).long()
            sample["image_grid_thw"] = torch.tensor([1, 4, width])
            sample["pixel_values"] = torch.randn(4 * width, 3 * 2 * 4 * 4, generator=generator, dtype=torch.float64)
        found.append(sample)
    return found


def collate(rows: list[Sample]) -> Sample:
    """Stack the rows and their images; patches of images of different sizes are joined, as by Qwen2-VL's processor."""
    images = [row["pixel_values"] for row in rows if "pixel_values" in row]
    join = torch.cat if "image_grid_thw" in rows[0] else torch.stack
    others: Sample = default_collate([{name: x for name, x in row.items() if name != "pixel_values"} for row in rows])
    return {**others, "pixel_values": join(images)} if images else others


def loader(name: str, *, rows: int = 4, steps: int = 3) -> Any:
    return DataLoader(samples(name, rows * steps), batch_size=rows, collate_fn=collate)
