"""Hints for what a family's structure does not tell, such as the order of fused rows or the role of a bare weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from meshwright.roles.sharding_plan import Role


@dataclass(frozen=True)
class Hint:
    """The role of one module or parameter of each layer.

    Args:
        name: the end of its dotted name inside the layer.
        role: its role.
        when: the config values under which the hint applies. If several hints for a name apply, the first is used.
    """

    name: str
    role: Role
    when: Mapping[str, object] = field(default_factory=dict)


# Each head's rows of the query projection are its query, then its gate.
_GATED = (Hint("self_attn.q_proj", Role.PER_HEAD),)
_OUTPUT_GATE = (Hint("self_attn.gate_proj", Role.PER_HEAD),)
# Code that computes with all heads together, such as a reshape to the width of the input; its heads cannot be cut.
_WHOLE = (Hint("self_attn", Role.WHOLE), Hint("encoder_attn", Role.WHOLE))
_FUSED_SHARED_EXPERTS = (Hint("shared_mlp.input_linear", Role.GATE_UP),)

_HINTS: dict[str, tuple[Hint, ...]] = {
    "afmoe": _OUTPUT_GATE,
    "apertus": (Hint("mlp.act_fn", Role.SHARED),),
    "bitnet": (Hint("self_attn.attn_sub_norm", Role.INNER_NORM), Hint("mlp.ffn_sub_norm", Role.INNER_NORM)),
    "bloom": (Hint("query_key_value", Role.QKV_BY_GROUP),),
    "beam": (*_OUTPUT_GATE, Hint("self_attn.gate_bias", Role.PER_HEAD)),
    "codegen": (Hint("qkv_proj", Role.QKV_IN_FOUR),),
    "diffllama": _WHOLE,  # the first half of the heads works with the second
    "doge": _WHOLE,  # the mask is computed from the values of all heads
    "falcon": (
        Hint("query_key_value", Role.QKV_BY_GROUP, when={"new_decoder_architecture": True}),
        Hint("query_key_value", Role.QKV, when={"multi_query": True}),
        Hint("query_key_value", Role.QKV_BY_GROUP),
    ),
    "flint": (Hint("self_attn.sinks", Role.PER_HEAD),),
    "glm": (Hint("gate_up_proj", Role.GATE_UP),),
    "glm4": (Hint("gate_up_proj", Role.GATE_UP),),
    "gpt2": (Hint("attn.c_attn", Role.QKV),),
    "gpt_bigcode": (
        Hint("attn.c_attn", Role.QKV, when={"multi_query": True}),
        Hint("attn.c_attn", Role.QKV_BY_GROUP),
    ),
    "gpt_neox": (Hint("query_key_value", Role.QKV_BY_GROUP),),
    # The last layer's attention returns its bias for the layer to add to each token.
    "gpt_neox_japanese": (Hint("query_key_value", Role.QKV_BY_GROUP), Hint("attention.dense_bias", Role.NORM)),
    "gpt_oss": (Hint("self_attn.sinks", Role.PER_HEAD),),
    "granite_swa": (Hint("self_attn.sinks", Role.PER_HEAD),),
    "granitemoe_swa": (Hint("self_attn.sinks", Role.PER_HEAD), *_FUSED_SHARED_EXPERTS),
    "granitemoehybrid": _FUSED_SHARED_EXPERTS,
    "granitemoeshared": _FUSED_SHARED_EXPERTS,
    "laguna": (Hint("self_attn.g_proj", Role.PER_HEAD),),
    "llama4_text": (Hint("self_attn.qk_norm", Role.HEAD_NORM),),
    "led": _WHOLE,
    "mimo_v2_flash": (Hint("self_attn.sinks", Role.PER_HEAD),),
    "minimax_m3_vl_text": (
        Hint("mlp.gate_up_proj", Role.GATE_UP),
        Hint("shared_experts.gate_up_proj", Role.GATE_UP),
    ),
    "modernbert-decoder": (Hint("mlp.Wi", Role.GATE_UP),),
    "moshi": (
        Hint("self_attn", Role.ATTENTION),
        Hint("q_proj.linear", Role.Q),
        Hint("k_proj.linear", Role.K),
        Hint("v_proj.linear", Role.V),
        Hint("o_proj.linear", Role.O),
        Hint("mlp.fc1", Role.GATE_UP),
    ),
    "mpt": (Hint("attn.Wqkv", Role.QKV),),
    "muse_glimmer_text": (*_OUTPUT_GATE, Hint("self_attn.qk_norm", Role.HEAD_NORM)),
    "muse_spark_text": (
        *_OUTPUT_GATE,
        Hint("self_attn.qk_norm", Role.HEAD_NORM),
        Hint("self_attn.o_norm", Role.HEAD_NORM),
    ),
    "nanochat": (Hint("q_norm", Role.HEAD_NORM), Hint("k_norm", Role.HEAD_NORM)),
    "openai-gpt": (Hint("attn.c_attn", Role.QKV),),
    "persimmon": (Hint("query_key_value", Role.QKV_BY_GROUP),),
    "phi3": (Hint("self_attn.qkv_proj", Role.QKV), Hint("gate_up_proj", Role.GATE_UP)),
    "qwen3_5_moe_text": _GATED,
    "qwen3_5_text": _GATED,
    "qwen3_next": _GATED,
    "step3p5": (Hint("self_attn.g_proj", Role.PER_HEAD),),
    "trocr": _WHOLE,
}


def hints_of(model: nn.Module) -> dict[str, Role]:
    """Return the hints for a model's family and for that of its decoder: end of a name inside a layer -> role."""
    config = getattr(model, "config", None)
    return _hints_for(decoder_config(config)) | _hints_for(config)


def decoder_config(config: object) -> object:
    """Return the config of the decoder beside towers; the config itself if it has no such part."""
    find = getattr(config, "get_text_config", None)
    return find(decoder=True) if callable(find) else config


def hinted_roles(layer: nn.Module, hints: Mapping[str, Role]) -> dict[str, Role]:
    """Return the hinted roles of a layer's modules and parameters, by name."""
    ends = {name: [role for end, role in hints.items() if f".{name}".endswith(f".{end}")] for name in named_in(layer)}
    return {name: roles[0] for name, roles in ends.items() if roles}


def roles_inside(name: str, roles: Mapping[str, Role]) -> dict[str, Role]:
    """Return the roles inside of a module of a layer, by name in that module; of "", the layer itself, all roles."""
    prefix = f"{name}." if name else ""
    return {inner.removeprefix(prefix): role for inner, role in roles.items() if inner.startswith(prefix)}


def named_in(layer: nn.Module) -> list[str]:
    """Return the names of a layer's modules and parameters."""
    modules = (name for name, _ in layer.named_modules(remove_duplicate=False) if name)
    return [*modules, *(name for name, _ in layer.named_parameters(remove_duplicate=False))]


def _hints_for(config: object) -> dict[str, Role]:
    hints: dict[str, Role] = {}
    for hint in _HINTS.get(getattr(config, "model_type", ""), ()):
        if all(getattr(config, key, None) == value for key, value in hint.when.items()):
            hints.setdefault(hint.name, hint.role)
    return hints


# Config fields that list layers of a tower: the decoder adds the features of each after a layer of its own, from the
# first on.
_LISTS_OF_FEATURES = ("deepstack_visual_indexes",)


def layers_with_features(config: object) -> int:
    """Return after how many of its first layers a decoder adds features of a tower."""
    fields = vars(config) if hasattr(config, "__dict__") else {}
    inside = (layers_with_features(value) for value in fields.values() if hasattr(value, "model_type"))
    return max((len(fields.get(name) or ()) for name in _LISTS_OF_FEATURES), default=0) or max(inside, default=0)
