"""Makes a small causal LM with the kinds of layers of a real config, in sizes that keep the ratios a plan needs.

The kinds of decoder layers are found in the real model, and the small one has a small set of layers that includes all
kinds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from meshwright.errors import PlanError
from meshwright.mesh.host import available_memory
from meshwright.parallel.tensor_parallel.structure import describe
from meshwright.plan.config import ParallelPlan
from meshwright.roles import ShardingPlan, plan_for
from meshwright_plan.job.config_file import config_path

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


# Share of the machine's memory that verify's two runs (under the plan, and on one device) may fill together.
MEMORY = 0.8
_COPIES = 6  # copies of the weights per process: weights, gradients, two moments, compared values
LEAST = 2  # minimum number of layers to keep, so that code between two layers runs
MOST = 8  # maximum number of kinds to include
_PLAIN = (bool, int, str, type(None))


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """A model's config on disk.

    Args:
        path: the config.json, or what else :func:`config_path` finds.
        trust_remote_code: whether to run Python code that lies beside it.
    """

    path: Path
    trust_remote_code: bool = False

    def read(self) -> Any:
        """Return the config.

        Raises:
            PlanError: if there is no such file, or transformers does not know the config.
        """
        file = config_path(self.path)
        # Code that lies beside a config is found by its directory.
        place = str(file.parent if file.name == "config.json" else file)
        try:
            return transformers.AutoConfig.from_pretrained(place, trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise PlanError(f"--model {self.path}: transformers cannot read its config: {reason}") from error

    def causal_lm(self, config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
        """Return the causal LM of a config.

        Raises:
            PlanError: if it has none.
        """
        trust = self.trust_remote_code
        try:
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trust
            )
            return model
        except (ValueError, KeyError) as error:
            raise PlanError(
                f"transformers cannot make a causal LM of a {config.model_type} config: "
                f"{str(error).splitlines()[0].rstrip('.')}. For another kind of model, write a function that returns a "
                "small model of its class, and call mw.verify(function, plan, batch=...) with a batch of yours, which "
                "a processor makes if the model sees images (docs/verify.md)"
            ) from error


@dataclass(frozen=True)
class ShortModel:
    """Makes the model of a config with random weights; it can be pickled."""

    source: ConfigFile

    def __call__(self) -> nn.Module:
        # Random weights of its own, since a class may initialise zeros, which would hide a wrong cut.
        model = self.source.causal_lm(self.source.read(), torch.float64)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _draw(name, parameter)
        return model


def _draw(name: str, parameter: nn.Parameter) -> None:
    """Initialise a parameter so that outputs are about as large as inputs; large outputs would saturate the softmax."""
    if parameter.ndim > 1:
        parameter.normal_(std=(parameter.shape[0] / parameter.numel()) ** 0.5)
    elif name.endswith("bias"):
        parameter.zero_()
    else:
        parameter.fill_(1.0)


def short_model(
    source: ConfigFile,
    folder: Path,
    *,
    real_plan: ParallelPlan,
    plan: ParallelPlan,
    full_width: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[ShortModel, list[str]]:
    """Write a shortened config.json into a folder; return a callable that makes its model, and notes on the changes.

    Args:
        source: the real model's config.
        folder: an empty directory.
        real_plan: the plan that the real model is to run under, which is checked on the real sizes.
        plan: the plan that the shortened model runs under.
        full_width: whether to keep all sizes, and shorten only the stack of layers.
        tell: a function that receives a few words at each stage.

    Raises:
        PlanError: if the config has no causal LM, or the plan cannot run the model.
    """
    tell("the real config")
    maker = _Maker(source, folder)
    real = maker.config
    full = maker.on_meta(real)
    if not isinstance(getattr(real, "num_hidden_layers", None), int) or not kinds_of_layers(full):
        raise PlanError(
            f"{type(full).__name__} has no stack of num_hidden_layers decoder layers, so verify cannot shorten it; "
            "write a function that returns a small model of its class, and call mw.verify(function, plan)"
        )
    roles = _roles(full, real_plan)
    tell("which layers")
    short, notes = _shortened(maker, full, plan)
    if plan.ep * plan.etp > 1:  # dropout inside of experts has the tokens that came to a rank
        notes += _without_dropout(short)
    if not full_width:
        tell("which sizes")
        narrow, note = _narrowed(maker, short, roles, real_plan, plan)
        short = narrow or short
        notes.append(note)
    maker.write(short)
    weights = 8 * sum(parameter.numel() for parameter in maker.on_meta(short).parameters())
    needed = _COPIES * weights * (plan.dp + 1)
    available = available_memory()
    if needed > MEMORY * available:
        raise PlanError(
            f"verifying this model in float64 takes about {needed / 2**30:.0f} GiB, but this machine "
            f"has {available / 2**30:.0f} GiB available; leave out --full-width, or choose a plan with a smaller dp"
        )
    return ShortModel(maker.short), notes


class _Maker:
    """Makes configs and models that differ from the user's in a few fields."""

    def __init__(self, source: ConfigFile, folder: Path):
        self.short = replace(source, path=folder)
        self.config = source.read()
        if source.trust_remote_code and source.path.is_dir():
            for code in source.path.glob("*.py"):
                shutil.copy(code, folder)

    def with_fields(self, config: PretrainedConfig, fields: Mapping[str, Any]) -> Any:
        """Return the config with changed fields; fields that are derived from them are recomputed."""
        names = getattr(type(config), "attribute_map", {})
        values = config.to_dict() | {names.get(name, name): value for name, value in fields.items()}
        self._save(values)
        return self.short.read()

    def write(self, config: PretrainedConfig) -> None:
        self._save(config.to_dict())

    def _save(self, values: Mapping[str, Any]) -> None:
        values = {name: value for name, value in values.items() if name not in ("dtype", "torch_dtype")}
        (self.short.path / "config.json").write_text(json.dumps(values, indent=2, default=str))

    def on_meta(self, config: PretrainedConfig) -> Any:
        with torch.device("meta"):
            return self.short.causal_lm(config, torch.float32).train()


def _roles(model: nn.Module, plan: ParallelPlan) -> dict[str, str] | None:
    """Return the role of each parameter under tp, with ``*`` for layer numbers in the names; None without tp."""
    if plan.tp == 1:
        return None
    sharding_plan = plan_for(model)
    describe(model, sharding_plan, tp=plan.tp, sequence_parallel=plan.sequence_parallel)
    return _roles_of(model, sharding_plan)


def _roles_of(model: nn.Module, sharding_plan: ShardingPlan) -> dict[str, str]:
    found = {}
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        role = sharding_plan.role_of(owner) or sharding_plan.role_of(name)
        found[".".join("*" if part.isdigit() else part for part in name.split("."))] = str(role)
    return found


def _shortened(maker: _Maker, full: nn.Module, plan: ParallelPlan) -> tuple[Any, list[str]]:
    config = maker.config
    kinds = kinds_of_layers(full)
    for kept, fields in layers_to_keep(config, kinds, plan.pp * plan.stages_per_rank):
        short = maker.with_fields(config, fields)
        if set(kinds_of_layers(maker.on_meta(short))) == set(kinds):
            count = len(set(kinds))
            what = f"{count} kinds of layers occur" if count > 1 else "all layers are of one kind"
            return short, [f"{len(kept)} of {len(kinds)} layers are kept: {what}."]
    return config, [f"All {len(kinds)} layers are kept, since no shorter stack has all their kinds."]


def _without_dropout(config: PretrainedConfig) -> list[str]:
    """Set all dropout rates of a config to 0, since programs with different masks cannot be compared; return a note."""
    changed = [name for name, value in vars(config).items() if "drop" in name and isinstance(value, float) and value]
    for name in changed:
        setattr(config, name, 0.0)
    return [f"Dropout is off: {', '.join(changed)}."] if changed else []


def _narrowed(
    maker: _Maker, short: PretrainedConfig, roles: dict[str, str] | None, real_plan: ParallelPlan, plan: ParallelPlan
) -> tuple[Any, str]:
    for fields in narrower_configs(short, real=real_plan, plan=plan):
        try:
            narrow = maker.with_fields(short, fields)
            model = maker.on_meta(narrow)
            if roles is not None:
                sharding_plan = plan_for(model)
                describe(model, sharding_plan, tp=plan.tp, sequence_parallel=plan.sequence_parallel)
                if _roles_of(model, sharding_plan).items() != roles.items():
                    continue
        except (ValueError, TypeError, ZeroDivisionError, RuntimeError):  # the class does not accept these sizes
            continue
        return narrow, f"Sizes are reduced: {', '.join(_changes(short, fields))}."
    return None, "All sizes are kept, since no smaller ones have the roles of the real model."


def _changes(config: PretrainedConfig, fields: Mapping[str, Any]) -> Iterator[str]:
    for name, value in fields.items():
        before = getattr(config, name, None)
        if isinstance(value, int) and not name.endswith("token_id"):
            yield f"{name} {before} -> {value}"


def kinds_of_layers(model: nn.Module) -> list[Hashable]:
    """Return the kind of each decoder layer: a hashable value of its modules, their settings and its parameter shapes.

    Args:
        model: a causal LM, on the meta device or not.
    """
    count = getattr(model.config, "num_hidden_layers", 0)
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not stacks:
        return []
    settings = [dict(_settings(layer)) for layer in stacks[0]]
    # A setting that holds the layer's index does not distinguish kinds.
    counts = {
        p
        for p in settings[0]
        if len(settings) > 1 and all(_counts(s.get(p), settings[0][p], i) for i, s in enumerate(settings))
    }
    return [
        (
            tuple((place, value) for place, value in one.items() if place not in counts),
            tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()),
        )
        for one, layer in zip(settings, stacks[0], strict=True)
    ]


def _settings(layer: nn.Module) -> Iterator[tuple[Any, Any]]:
    for name, module in layer.named_modules():
        yield (name, ""), type(module).__name__
        for key, value in sorted(vars(module).items()):
            if not key.startswith("_") and isinstance(value, _PLAIN):
                yield (name, key), value


def _counts(value: object, first: object, index: int) -> bool:
    return type(value) is int and type(first) is int and value == first + index


def layers_to_keep(
    config: PretrainedConfig, kinds: Sequence[Hashable], least: int
) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Yield sets of layers that include all kinds, the smallest first, with the config fields for only these layers.

    Args:
        config: the config of the whole model.
        kinds: the kinds of its layers.
        least: the smallest number of layers to keep, if the model has that many; never less than 2.
    """
    least = max(least, LEAST)
    first = sorted(dict.fromkeys(kinds.index(kind) for kind in kinds))[:MOST]
    chosen = first
    if len(first) < least <= len(kinds):
        chosen = [*first, *(i for i in range(len(kinds)) if i not in first)][:least]
    prefix = list(range(max(chosen) + 1))
    for kept in (sorted(chosen), prefix):
        if len(kept) < len(kinds):
            yield kept, {"num_hidden_layers": len(kept), **_per_layer(config, len(kinds), kept)}


def _per_layer(config: PretrainedConfig, count: int, kept: list[int]) -> dict[str, Any]:
    return {
        name: [value[i] for i in kept]
        for name, value in config.to_dict().items()
        if isinstance(value, list) and len(value) == count and any(word in name for word in ("layer", "block", "attn"))
    }
