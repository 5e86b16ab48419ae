"""Shrinks the default config of any type of transformers, by what its attributes mean.

No rule knows the name of a type. An attribute is a width, a number of layers, of heads or of experts, a size of images,
a position or a token by its name; and what follows from others (a field whose default is None) is left to the config.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES

WIDTH, HEADS, KV_HEADS, HEAD = 64, 4, 2, 16
INNER, VOCAB, POSITIONS = 128, 97, 128
IMAGE, PATCH = 16, 4  # pixels per side
FRAMES = 32  # of a row of sound
LAYERS = 2

Rule = tuple[str, Callable[[int], int]]


def _at_most(value: int) -> Callable[[int], int]:
    return lambda default: min(default, value) if default > 0 else default


# The first pattern that an attribute's name contains decides. Values are at most the default's.
RULES: tuple[Rule, ...] = (
    (r"type_vocab|^(num|in|audio|out)_channels$|temporal_patch|merge|kernel|stride|scale_factor|conv_L", lambda d: d),
    (r"channel_multiplier", _at_most(1)),
    (r"num_filters", _at_most(4)),
    (r"^depths$|self_attends", _at_most(LAYERS)),
    (r"patch_embed_hidden_size|patch_dim$", _at_most(3 * PATCH * PATCH)),
    (r"codebook_size|^num_embeddings$", _at_most(16)),
    (r"(^|_)vocab(_size)?($|_)", _at_most(VOCAB)),
    (r"index(er)?_top_?k|index_kpool|top_k_tokens", _at_most(8)),
    (r"experts_per_tok|top_?k($|_experts)|moe_k$|moe_topk|router_topk", _at_most(2)),
    (r"^coordinate_size$", _at_most(WIDTH // 8)),
    (r"^shape_size$", _at_most(WIDTH // 4)),
    (r"upsample_groups", _at_most(WIDTH)),
    (r"n_groups?$|ngroups$|num_expert_groups?$|^groups$", _at_most(2)),
    (r"topk_group", _at_most(1)),
    (r"shared_experts?$", _at_most(1)),
    (r"experts$|^zero_expert_num$", _at_most(4)),
    (r"first_k_dense|num_dense_layers|max_window_layers|layer_start_index", _at_most(1)),
    (r"kv_shared_layers", _at_most(0)),
    (r"(period|interval|every_n_layers|sparse_step|moe_layer_step|window_pattern|layer_group_size)$", _at_most(2)),
    (r"_(sparse)_(en|de)coder_layers$", _at_most(1)),
    (r"layer_offset$", _at_most(1)),
    (r"(^|_)n?layers?$|^depth$|_depth$|layers_per_stack|layers_per_attn|^num_blocks$|predict_layers", _at_most(LAYERS)),
    (r"per_layer_input|router_hidden|lora_rank|_rank$|lowrank", _at_most(16)),
    (r"rotary_dim", _at_most(HEAD // 2)),
    (r"head_?(dim|size)$|^d_head$|^d_kv$|kv_channels|^dim_head|_d_head$|head_dim", _at_most(HEAD)),
    (r"linear_num_key_heads|index_n_heads|indexer_|_per_ngram", _at_most(2)),
    (r"mamba_(n|num)_heads", _at_most(8)),
    (r"n_mamba_heads", lambda d: d),
    (r"heads?(_per_layer)?$|query_groups", _at_most(HEADS)),
    (r"state_size|d_state", _at_most(16)),
    (r"expert_(ffn_)?(hidden|intermediate)|moe_(shared_)?(expert_)?intermediate|shared_intermediate", _at_most(32)),
    (r"intermediate|ffn_(dim|hidden)|^d_ff$|^dff$|dim_ff|mlp_dim|feed_forward_size|d_inner", _at_most(INNER)),
    (r"image_size|img_size|crop_size|^resolution$", _at_most(IMAGE)),
    (r"patch_size", _at_most(PATCH)),
    (r"num_position_embeddings|^num_patches$", _at_most((IMAGE // PATCH) ** 2)),
    (r"pos_emb_(height|width)|posemb_grid", _at_most(IMAGE // PATCH)),
    (r"tokens_per_image|image_seq_length|num_image_tokens|query_(tokens|num)|n(um)?_latents", _at_most(4)),
    (r"max_source_positions", _at_most(FRAMES // 2)),
    (r"position_embeddings$|n_positions|target_positions", _at_most(POSITIONS)),
    (r"max_(seq|text)?_?len|^n_ctx$|context_length", _at_most(POSITIONS)),
    (r"n_window$", _at_most(4)),
    (r"acoustic|_every$", lambda d: d),
    (r"window|chunk_size|block_size|local_attention|segment_means|landmarks", _at_most(16)),
    (r"hidden_(size|dim)|d_model|d_latents|n_embd|emb(ed(ding)?)?_(dim|size)|^dim$", _at_most(WIDTH)),
    (r"projection_(dim|size)|proj_dim", _at_most(WIDTH)),
    (r"(out|output|input)_(dim|size)|_width$|d_ssm|projector_|adapter_|_channel(s|_size)?$|^scale$", _at_most(WIDTH)),
)  # fmt: skip
_RANDOM = re.compile(r"drop|jitter|noise|vae_std|mask_(time|feature)_prob|pdrop")
_TOKEN = re.compile(r"(token|bos|eos|pad|boi|eoi|start|end|newline|patch|im_\w+|codec_\w+)_(id|index)$|_token_ids?$")
_LISTED = re.compile(f"{_TOKEN.pattern}|pinpoints|feature_layer$|_indexes$|^image_size$")
_FEATURES = re.compile(r"(image|audio|video)_token_(id|index)")
_INDICES = re.compile(r"(indexes|indices|layer_ids|idxs|_layers|feature_layer)$")


@dataclass
class Words:
    """The words of a tiny vocabulary: those with a meaning get places at its end, the same for the same word."""

    places: dict[int, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)

    def place(self, name: str, word: int) -> int:
        """Return the place of a word that an attribute names."""
        if word >= VOCAB:
            word = self.places.setdefault(word, VOCAB - 1 - len(self.places))
        self.names.setdefault(name, word)
        return word


@dataclass(frozen=True)
class Shrinker:
    """Shrinks a config and the configs in it.

    Args:
        words: the words with a meaning.
        every_kind: whether layers of kinds that the default does not have, but the model's code knows, are added.
        fills: whether sizes that the default leaves open get a value.
        twice: whether each kind of layer is there twice, as where layers of a kind share weights.
        draws: whether dropout, noise and masks stay as the default has them; otherwise they are off.
        fields: values of attributes that replace those of the rules, for the outermost config (a dotted name for one
            in it).
    """

    words: Words
    every_kind: bool = True
    fills: bool = False
    twice: bool = False
    draws: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)

    def tiny(self, default: PretrainedConfig, prefix: str = "") -> PretrainedConfig:
        """Return a tiny config of the class of ``default``."""
        known = (
            {f.name: _default_of(f) for f in dataclasses.fields(default)} if dataclasses.is_dataclass(default) else {}
        )
        values: dict[str, Any] = {}
        chosen = self._layers(default)
        aliases = {target: source for source, target in default.attribute_map.items() if source in known}
        for stored, value in vars(default).items():
            name = stored if stored in known else aliases.get(stored, stored)
            dotted = prefix + name
            if isinstance(value, PretrainedConfig):
                values[name] = self.tiny(value, f"{dotted}.")
            elif dotted in self.fields:
                values[name] = self._given(name, self.fields[dotted])
            elif name.startswith("_") or name in _KEPT or (known and name not in known and name not in _COMMON):
                continue
            elif chosen and name in chosen.lists:
                values[name] = chosen.lists[name]
            elif chosen and name == chosen.field:
                given = (self.fields.get(f"{prefix}{n}") for n in chosen.lists)
                values[name] = next((len(x) for x in given if isinstance(x, list)), chosen.count)
            elif name == "rope_parameters":
                if isinstance(value, dict):
                    values[name] = value
            elif value is None and _FEATURES.fullmatch(name):
                values[name] = self.words.place(name, VOCAB + len(name))
            elif known and known.get(name) is None and not _LISTED.search(name):
                if self.fills and value is None and re.search(r"head|experts|size$|dim$|window", name):
                    values[name] = _shrunk(name, 64)
            elif re.search(r"(kv|key_value)_heads$", name) and isinstance(value, int):
                heads = vars(default).get("num_attention_heads")
                values[name] = HEADS if value == heads else min(value, KV_HEADS)
            elif name in ("num_heads", "n_heads") and "expand" in vars(default):
                values[name] = default.expand * WIDTH // HEAD  # a mixer whose heads have all of its channels
            else:
                values[name] = self._value(name, value, default)
        values = {name: value for name, value in values.items() if value is not None}
        own = {n.removeprefix(prefix): v for n, v in self.fields.items() if n.startswith(prefix)}
        values |= {n: self._given(n, v) for n, v in own.items() if "." not in n and n not in values}
        if isinstance(rope := values.pop("rope_parameters", None), dict):
            values["rope_parameters"] = _rope(rope, values, default)
        return type(default)(**values)

    def _given(self, name: str, value: Any) -> Any:
        return self.words.place(name, value) if isinstance(value, int) and _TOKEN.search(name) else value

    def _value(self, name: str, value: Any, owner: PretrainedConfig) -> Any:
        match value:
            case bool() | None | str():
                return value
            case int() if _TOKEN.search(name):
                return self.words.place(name, value)
            case int():
                return _shrunk(name, value)
            case float():
                return 0.0 if _RANDOM.search(name) and not self.draws else value
            case [[int(), int()], *_] if "pinpoints" in name:
                return [[IMAGE, IMAGE]]
            case list() | tuple() if value and all(isinstance(x, int) and not isinstance(x, bool) for x in value):
                if _TOKEN.search(name):
                    return type(value)(self.words.place(f"{name}{i}", x) for i, x in enumerate(value))
                if _INDICES.search(name):
                    return type(value)(_indices(value, _layer_count(owner)))
                return type(value)(_shrunk(name, x) for x in value)
            case dict():
                return {key: self._value(str(key), x, owner) for key, x in value.items()}
            case _:
                return value

    def _layers(self, default: PretrainedConfig) -> _Layers | None:
        """Return the layers of a config with lists that say something of each layer: each kind once, at least two."""
        count = _layer_count(default)
        name = next((n for n in _COUNTS if isinstance(vars(default).get(n), int)), None)
        if name is None or count < 2:
            return None
        lists = {n: list(v) for n, v in vars(default).items() if isinstance(v, list | tuple) and len(v) == count}
        if vars(default).get("layer_types", ()) is None and len(kinds := _kinds(default)) > 1 and self.every_kind:
            return _Layers(name, len(kinds), {"layer_types": kinds})
        if not any(isinstance(v[0], str) for v in lists.values()):
            return _Layers(name, LAYERS, {n: _first(v) for n, v in lists.items()}) if lists else None
        seen: dict[Any, int] = {}
        for i in range(count):
            seen.setdefault(tuple(str(v[i]) for v in lists.values()), i)
        picked = sorted(seen.values())[:5] * (2 if self.twice else 1)
        while len(picked) < LAYERS:
            picked.append(picked[-1])
        small = {n: [self._value(n + "[]", v[i], default) for i in picked] for n, v in lists.items()}
        if self.every_kind and "layer_types" in small:
            for kind in _kinds(default):
                if kind not in small["layer_types"]:
                    if len(set(small["layer_types"])) < len(small["layer_types"]) == LAYERS:
                        small["layer_types"][-2] = kind
                    else:
                        for n, v in small.items():
                            v.insert(0, kind if n == "layer_types" else v[0])
        return _Layers(name, len(next(iter(small.values()))), small)


@dataclass(frozen=True)
class _Layers:
    field: str
    count: int
    lists: dict[str, list[Any]]


_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "depth",
    "decoder_layers",
    "encoder_layers",
    "layers",
)
_COMMON = frozenset({"pad_token_id", "bos_token_id", "eos_token_id"})
_KEPT = frozenset(
    {"transformers_version", "architectures", "dtype", "torch_dtype", "id2label", "label2id", "name_or_path"}
    | {"problem_type", "ignore_keys_at_rope_validation"}
)


def _default_of(f: dataclasses.Field[Any]) -> Any:
    if f.default is not dataclasses.MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else None


def _shrunk(name: str, value: int) -> int:
    for pattern, rule in RULES:
        if re.search(pattern, name):
            return rule(value)
    return value


def _layer_count(config: PretrainedConfig) -> int:
    return next((v for n in _COUNTS if isinstance(v := vars(config).get(n), int)), 0)


def _first(values: Sequence[Any]) -> list[Any]:
    return [values[0], next((v for v in values if v != values[0]), values[0])]


def _indices(values: Sequence[int], count: int) -> list[int]:
    """Return which of the tiny model's layers a list of layers means: as near as can be, but not all of them."""
    if not count or any(value < 0 for value in values) or max(values) >= count:
        return [max(v, -LAYERS) if v < 0 else min(v, LAYERS - 1) for v in values]
    found = sorted({value * LAYERS // count for value in values})
    return found[1:] if len(found) == LAYERS and len(values) < count else found


def _source(config: PretrainedConfig) -> str:
    """Return the code of the models of a config's type."""
    package = type(config).__module__.rsplit(".", 1)[0]
    name = type(config).__module__.rsplit("configuration_", 1)[-1]
    try:
        __import__(f"{package}.modeling_{name}")
        return inspect.getsource(sys.modules[f"{package}.modeling_{name}"])
    except ImportError:
        return ""


def _kinds(config: PretrainedConfig) -> list[str]:
    """Return the kinds of layers that the code of a config's type names."""
    code = _source(config) + inspect.getsource(sys.modules[type(config).__module__])
    return [kind for kind in ALLOWED_ATTN_LAYER_TYPES if re.search(rf"[\"']{kind}[\"']", code)]


def _rope(rope: dict[str, Any], values: Mapping[str, Any], default: PretrainedConfig) -> dict[str, Any]:
    """Return rotary parameters whose sections and factors fit a tiny head."""
    if rope and all(isinstance(value, dict) for value in rope.values()):
        return {key: _rope(value, values, default) for key, value in rope.items()}
    if not rope:
        return rope
    head = values.get("qk_rope_head_dim") or values.get("head_dim") or HEAD
    pairs = int(head * rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))) // 2
    small = dict(rope)
    if "mrope_section" in small or "mrope_section" in _source(default):
        given = small.get("mrope_section", [1, 1, 1])
        parts = [max(pairs * part // sum(given), 1 if part else 0) for part in given]
        parts[2 if len(parts) == 3 and given[0] == given[1] else 0] += pairs - sum(parts)
        small["mrope_section"] = parts
    for name in ("long_factor", "short_factor"):
        if name in small:
            small[name] = small[name][:pairs]
    return small
