"""Makes a config's sizes smaller, but keeps the ratios and the divisibility by tp and ep that matter to a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig

from meshwright.plan.config import ParallelPlan

# The widths of MLPs and of experts.
_WIDTHS = (
    "intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "dff", "ffn_hidden_size",
    "moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size", "shared_intermediate_size",
    "moe_shared_expert_intermediate_size", "intermediate_size_mlp",
)  # fmt: skip
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_FEW_EXPERTS, _FEW_CHOSEN, _FEW_GROUPS = 8, 2, 4
_ROWS_OF_VOCABULARY = 128  # per rank


def narrower_configs(config: PretrainedConfig, *, real: ParallelPlan, plan: ParallelPlan) -> Iterator[dict[str, Any]]:
    """Yield the changed fields of narrower configs, the narrowest first; the model class may not accept all of them.

    The width of a head stays the same, and so do sizes that depend on it (above all rotary embeddings). The number of
    heads shrinks, and the other widths shrink in proportion. A token has the choice between fewer experts.

    Args:
        config: the model's config.
        real: the real plan.
        plan: the plan that is verified.
    """
    real_tp, tp = real.tp, plan.tp
    heads = _count(config, "num_attention_heads")
    hidden = _count(config, "hidden_size")
    if not heads or not hidden:
        return
    kv_heads = _count(config, "num_key_value_heads") or heads
    # Every expert has an MLP, so these decide how long the comparison takes.
    most = hidden // 2 if any(_count(config, name) for name in _EXPERTS) else 2 * hidden
    for times in (1, 2, 4):
        few, few_kv = _fewer_heads(heads, kv_heads, real_tp, tp, times)
        if few >= heads:
            return
        fields: dict[str, Any] = {"hidden_size": _scaled(hidden, few, heads), "num_attention_heads": few}
        if _count(config, "num_key_value_heads"):
            fields["num_key_value_heads"] = few_kv
        for name in _WIDTHS:
            if width := _count(config, name):
                narrow = _scaled(min(width, most), few, heads, 8 * tp if width % real_tp == 0 else 1)
                # Two widths that are equal only in the narrow model would change the inferred structure.
                is_equal = width != hidden and narrow == fields["hidden_size"]
                fields[name] = narrow + 8 * tp if is_equal else narrow
        fields |= _of_hidden_size(config, hidden, fields["hidden_size"])
        fields |= _fewer_experts(config, real.ep, plan.ep)
        yield fields | _vocabulary(config, real_tp, tp)


def _fewer_heads(heads: int, kv_heads: int, real_tp: int, tp: int, times: int) -> tuple[int, int]:
    """Return smaller numbers of query and key heads that are shared or divided over ranks as under the real plan."""
    if kv_heads < real_tp:  # ranks share key heads
        few_kv = max(1, kv_heads * tp // real_tp)
    elif kv_heads % real_tp:
        few_kv = kv_heads
    else:
        few_kv = tp * min(2, kv_heads // real_tp)
    few_kv *= times if heads == kv_heads else 1
    group = heads // kv_heads
    wanted = min(group, 2 * times) if group > 1 else 1
    fit = [n for n in range(wanted, group + 1) if heads % real_tp or few_kv * n % tp == 0]
    return few_kv * (fit[0] if fit else group), few_kv


def _scaled(width: int, few: int, heads: int, multiple: int = 1) -> int:
    """Return the width scaled by ``few / heads``, rounded up to a multiple of ``multiple``."""
    return -(-width * few // (heads * multiple)) * multiple


def _fewer_experts(config: PretrainedConfig, real_ep: int, ep: int) -> dict[str, int]:
    """Return fewer experts, which ranks share evenly only if they do so under the real plan, and fewer groups."""
    found = {}
    for name in _EXPERTS:
        if (experts := _count(config, name)) and experts > _FEW_EXPERTS:
            numbers = range(_FEW_EXPERTS, experts + 1)
            found[name] = next((n for n in numbers if (n % ep == 0) == (experts % real_ep == 0)), experts)
    if found:
        for name in _CHOSEN:
            if chosen := _count(config, name):
                found[name] = min(chosen, _FEW_CHOSEN)
        if (groups := _count(config, "n_group")) and (chosen := _count(config, "topk_group")):
            found["n_group"] = few = min(groups, _FEW_GROUPS)
            found["topk_group"] = max(1, chosen * few // groups)
    return found


def _of_hidden_size(config: PretrainedConfig, hidden: int, narrow: int) -> dict[str, int]:
    """Return the other config fields that hold the hidden size, with the narrow size."""
    aliases = getattr(type(config), "attribute_map", {})
    done = {"hidden_size", aliases.get("hidden_size")}
    return {
        name: narrow
        for name, value in config.to_dict().items()
        if value == hidden
        and type(value) is int
        and name not in done
        and any(word in name for word in ("dim", "width", "size", "channels"))
        and not any(word in name for word in ("vocab", "position", "window", "head", "chunk", "block"))
        and name not in _WIDTHS
    }


def _vocabulary(config: PretrainedConfig, real_tp: int, tp: int) -> dict[str, Any]:
    words = _count(config, "vocab_size")
    few = _ROWS_OF_VOCABULARY * tp + (1 if words and words % real_tp else 0)
    if not words or few >= words:
        return {}
    found: dict[str, Any] = {"vocab_size": few}
    for name, value in config.to_dict().items():
        if name.endswith("token_id") and type(value) is int and value >= few:
            found[name] = few - 1
        elif name.endswith("token_id") and isinstance(value, list):
            found[name] = [min(one, few - 1) for one in value]
    return found


def _count(config: PretrainedConfig, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if type(value) is int and value > 0 else None
