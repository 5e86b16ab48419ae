"""Describe a decoder by its sizes, without weights and without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from meshwright.errors import PlanError
from meshwright.model_kinds import kind_of
from meshwright.outside_files import shown
from meshwright.plan.partition import even_stages
from meshwright.printable import printable
from meshwright_plan.job.adapters import Lora
from meshwright_plan.job.config_file import LAYERS, WIDTH, WrongConfigError, read_config
from meshwright_plan.job.layer_shape import (
    COMPARED,
    LEARNED_POSITIONS,
    NOT_GATED,
    UNKNOWN_SIZES,
    LayerShape,
    Traits,
    has_biases,
    has_norm_biases,
    is_tied,
    shares_one_key_head,
    traits_of,
)
from meshwright_plan.job.measured import TowerShape

_NO_WINDOW = frozenset({"llama", "olmo", "olmo2", "gemma"})  # families whose code ignores the config's window
_STATES = re.compile(r"conv_kernel|conv_dim|conv1d|d_conv|conv_L_cache|lru_width|ssm_|state_size|linear_num_key")
_EXPERTS = re.compile(r"expert|moe(_|$)")
_ALIASES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff"),
    "vocab": ("vocab_size",),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "window": ("sliding_window",),
}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder, which decide its memory and its time.

    Args:
        name: name of the model in tables.
        runs: the layers, as runs of equal layers in the order of the model.
        vocab: rows of the embedding.
        tied: whether embedding and head are one matrix.
        classes: rows of a classifier's head; None for a language model, whose head has a row for each token.
        assumed: what is assumed of a model that the planner does not know, as a warning; empty if it is known.
        positions: rows of a learned position table; 0 for rotary positions or ALiBi.
        towers: the weights beside the decoder, such as an encoder of images; None if there are none.
        tower_layers: how many layers have as much work as the towers, which are on the first stage of a pipeline.
        least_on_first: number of layers that the first stage must have.

    Raises:
        PlanError: a size is below one, or heads is not divisible by kv_heads.

    Example:
        >>> shape = ModelShape.of(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                       vocab=32000)
        >>> round(shape.parameters / 1e9, 2)
        6.74
    """

    name: str
    runs: tuple[LayerShape, ...]
    vocab: int
    tied: bool = False
    classes: int | None = None
    assumed: str = ""
    positions: int = 0
    towers: TowerShape | None = None
    tower_layers: float = 0.0
    least_on_first: int = 1

    @classmethod
    def of(
        cls,
        *,
        name: str,
        layers: int,
        vocab: int,
        tied: bool = False,
        classes: int | None = None,
        assumed: str = "",
        positions: int = 0,
        **sizes: Any,
    ) -> Self:
        """Return a model whose layers are alike; ``sizes`` are those of a ``LayerShape``."""
        runs = (LayerShape(count=layers, **sizes),)
        return cls(name=name, runs=runs, vocab=vocab, tied=tied, classes=classes, assumed=assumed, positions=positions)

    def __post_init__(self) -> None:
        for run in self.runs:
            sizes = {"layers": run.count, "vocab": self.vocab}
            sizes |= {name: getattr(run, name) for name in ("hidden", "heads", "kv_heads", "head_dim", "ffn")}
            for name, value in sizes.items():
                least = 0 if name == "ffn" and (self.experts or run.measured) else 1
                if not isinstance(value, int) or isinstance(value, bool) or value < least:
                    raise PlanError(
                        f"{self.name}: {name}={value!r} must be a positive integer; correct it in the config"
                    )
            if run.heads % run.kv_heads:
                raise PlanError(
                    f"{self.name}: heads={run.heads} is not divisible by kv_heads={run.kv_heads}; correct "
                    "num_key_value_heads in the config"
                )
            if run.window is not None and run.window < 1:
                raise PlanError(f"{self.name}: window={run.window} must be above zero; use None for no window")

    def __hash__(self) -> int:
        # Of a few sizes alone, since a search looks up the same model some hundred thousand times.
        return hash((self.vocab, self.hidden, self.counts))

    @cached_property
    def layers(self) -> int:
        """The number of layers."""
        return sum(self.counts)

    @property
    def hidden(self) -> int:
        return self.runs[0].hidden

    @property
    def traits(self) -> Traits:
        """The properties of the family's code outside of the layers, such as the last norm's."""
        return self.runs[0].traits

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of layers of each run."""
        return tuple(run.count for run in self.runs)

    @property
    def most_stages(self) -> int:
        """The largest number of virtual stages into which the layers can be cut."""
        return self.layers - self.least_on_first + 1

    def even_stages(self, count: int) -> tuple[int, ...]:
        """Return the number of layers of each of ``count`` virtual stages, as the runtime cuts the model."""
        return even_stages(self.layers, count, first=self.tower_layers, least=self.least_on_first)

    def uneven(self, tp: int) -> Iterator[str]:
        """Yield the sizes of layers that ``tp`` ranks cannot share evenly, as in "heads=6"."""
        if all(run.held for run in self.runs):  # the weights on a rank say it
            if any(tp not in {key[0] for key, _ in run.held} for run in self.runs):
                yield "a layer's weights"
            return
        sizes = ((name, getattr(run, name)) for run in self.runs for name in ("heads", "ffn"))
        yield from (f"{name}={size}" for name, size in sizes if size % tp)

    @property
    def embedding_parameters(self) -> int:
        return (self.vocab + self.positions) * self.hidden

    @property
    def outputs(self) -> int:
        """The rows of the output head."""
        return self.vocab if self.classes is None else self.classes

    @property
    def head_parameters(self) -> int:
        """Elements of the output head; 0 if it shares its matrix with the embedding."""
        return 0 if self.tied else self.outputs * self.hidden

    @property
    def parameters(self) -> int:
        """Elements of all parameters; a tied matrix counts once."""
        return sum(self.roles.values())

    @property
    def experts(self) -> int:
        """The smallest number of experts of a layer with experts; 0 for a dense model."""
        return min((run.experts.count for run in self.runs if run.experts), default=0)

    @property
    def active_parameters(self) -> int:
        """Elements that one token uses: of the experts, those of the chosen ones."""
        idle = sum(run.count * (run.experts.elements - run.experts.active) for run in self.runs if run.experts)
        return self.parameters - idle

    @property
    def roles(self) -> dict[str, int]:
        """Elements by role, over all layers; their sum is ``parameters``."""
        routed = {
            "experts": sum(run.count * run.expert_parameters for run in self.runs),
            "router": sum(run.count * run.router_parameters for run in self.runs),
        }
        return {
            "embedding": self.embedding_parameters,
            "attention": sum(run.count * run.attention_parameters for run in self.runs),
            "mlp": sum(run.count * run.mlp_parameters for run in self.runs),
            **{name: elements for name, elements in routed.items() if elements},
            "norm and bias": sum(run.count * (run.norm_parameters + run.biases) for run in self.runs) + self.hidden,
            "head": self.head_parameters,
            **({} if self.towers is None else {"towers": self.towers.elements}),
        }

    def flops(self, seq_len: int, *, lora: Lora | None = None) -> float:
        """Return the floating-point operations of forward and backward for one token.

        A parameter of a matmul counts six operations, or four if it is frozen; of experts those of the chosen ones
        count. Causal attention is added. Recompute is not counted.
        """
        matmul = self.outputs * self.hidden + sum(run.count * run.active_matrices for run in self.runs)
        scores = sum(12 * run.count * run.query_width * run.attended(seq_len) for run in self.runs)
        if lora is None:
            return 6 * matmul + scores
        return 4 * matmul + 6 * sum(run.count * lora.elements(run) for run in self.runs) + scores


def stated_experts(source: Any) -> dict[str, int]:
    """Return the numbers above 1 that a config states of experts, by field.

    Args:
        source: as in ``describe``.

    Example:
        >>> stated_experts({"ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}})
        {'moe_num_experts': 16}
    """

    def found(fields: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
        for key, value in fields.items():
            if isinstance(value, Mapping):
                yield from found(value)
            elif str(key).endswith("experts") and "shared" not in key and type(value) is int and value > 1:
                yield key, value

    return dict(found(read_config(source)[0]))


def name_of(source: Any) -> str:
    """Return the name of a model: that in the path of its config, or in the config."""
    return read_config(source)[1]


def describe(source: Any, *, name: str | None = None, architecture: str | None = None) -> ModelShape:
    """Return the shape of a dense decoder from its transformers config.

    A model that the planner does not know is described as one with Llama's layers; ``assumed`` says so.

    Args:
        source: a config as a dict, a config object (anything with ``to_dict``), the path of a config.json, or the path
            of a directory that contains one.
        name: name of the model (default: the name in the path or the config).
        architecture: class of the model, which shows its head (default: the first of the config's ``architectures``).

    Raises:
        PlanError: the file cannot be read, the model is not a decoder, a field is missing, or a size is below one.

    Example:
        >>> describe({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        ...           "intermediate_size": 128, "vocab_size": 100}).parameters
        95040
    """
    config, label = read_config(source)
    name = name or label
    if counts := stated_experts(config):
        what = ", ".join(f"{key}={count}" for key, count in counts.items())
        raise PlanError(
            f"{name} is a mixture-of-experts model ({what}), and the planner knows only experts that implement "
            "transformers' experts interface. Pass a plan: plan='dp2', plan='dp2 zero3' or plan='pp2'"
        )
    if kind := kind_of(config):
        raise PlanError(f"{name} is {kind}")
    if states := _states(config):
        raise PlanError(
            f"{name} has mixers beside attention ({states[0]}), whose sizes its modules show, and not its config. Give "
            "the model itself, or pass a plan: plan='dp2', plan='dp2 zero3' or plan='pp2'"
        )
    architecture = architecture or next(iter(config.get("architectures") or ()), "")
    classes, has_own_code = _classes(str(architecture), config), bool(config.get("auto_map"))
    if isinstance(config.get("text_config"), Mapping):
        config = {**config["text_config"], "tie_word_embeddings": config.get("tie_word_embeddings", False)}
    family = str(config.get("model_type", ""))
    if why := _unknown_sizes(family, config):
        raise PlanError(
            f"{name}: the planner does not know the sizes of {family}: {why}. Pass a plan: "
            "ToDistributedConfig(plan=ParallelPlan(...))"
        )
    found = {field: _field(config, field) for field in _ALIASES}
    if type(found["window"]) is int and (family in _NO_WINDOW or not config.get("use_sliding_window", True)):
        found["window"] = None  # the model's code ignores it
    missing = [_ALIASES[field][0] for field in ("layers", "hidden", "heads", "vocab") if found[field] is None]
    if found["ffn"] is None:
        if family in NOT_GATED and isinstance(found["hidden"], int):
            found["ffn"] = 4 * found["hidden"]
        else:
            missing.append("intermediate_size")
    if missing:
        raise PlanError(f"{name}: the config has no {', '.join(missing)}; is it a decoder's config.json?")
    for key, value in found.items():
        is_size = type(value) is int and 1 <= value <= (LAYERS if key == "layers" else WIDTH)
        if not is_size and (value is not None or key in ("layers", "hidden", "heads", "vocab", "ffn")):
            raise WrongConfigError(
                f"{name}: {_ALIASES[key][0]}={shown(value)} must be a positive integer, and a size that a model can "
                "have; correct the config"
            )
    shape = _shape(name, family, config, found)
    shape = replace(shape, classes=classes, tied=shape.tied and classes is None)
    if family in COMPARED:
        return shape
    what = "the config names code of its own (auto_map)" if has_own_code else f"model_type={shown(family)} is unknown"
    return replace(
        shape,
        assumed=f"{what}, so the planner assumes a dense decoder with layers like Llama's, of {shape.parameters:,} "
        "parameters. If the model has another number of them, memory and time differ as much",
    )


def _classes(architecture: str, config: Mapping[str, Any]) -> int | None:
    """Return the rows of the head of a classifier; None for a language model."""
    if architecture.endswith("ForQuestionAnswering"):  # the first and the last token of the answer
        return 2
    if not architecture.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return None
    return int(config.get("num_labels") or len(config.get("id2label") or ()) or 2)


def _unknown_sizes(family: str, config: Mapping[str, Any]) -> str | None:
    """Return why a model's sizes do not follow from the usual fields of its config; None if they may."""
    if (rank := config.get("kv_lora_rank")) is not None:
        return f"it uses latent attention (kv_lora_rank={rank})"
    is_dense = any(config.get(key) in (0, 1) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    if family not in COMPARED and family not in UNKNOWN_SIZES and not is_dense:
        counts = ((key, x) for key, x in config.items() if type(x) is int and x > 1)
        found = [f"{printable(key)}={x}" for key, x in counts if _EXPERTS.search(key)]
        return f"its config speaks of experts ({', '.join(found)})" if found else None
    return UNKNOWN_SIZES.get(family)


def _states(config: Mapping[str, Any]) -> list[str]:
    """Return what shows mixers: the kinds of layers or, if they are not stated, widths of convolutions and states."""
    if kinds := config.get("layer_types"):
        return [kind for kind in kinds if "linear" in kind or "attention" not in kind]
    return [key for key, value in config.items() if _STATES.search(key) and isinstance(value, int)]


def _shape(name: str, family: str, config: Mapping[str, Any], found: Mapping[str, Any]) -> ModelShape:
    layers, hidden, heads = found["layers"], found["hidden"], found["heads"]
    if found["head_dim"] is None and hidden % heads:
        raise PlanError(f"{name}: hidden_size={hidden} is not divisible by num_attention_heads={heads}; set head_dim")
    head_dim = found["head_dim"] if found["head_dim"] is not None else hidden // heads
    kv_heads = found["kv_heads"] if found["kv_heads"] is not None else heads
    kv_heads = 1 if shares_one_key_head(config) else kv_heads
    gated = family not in NOT_GATED
    kinds = config.get("layer_types")
    has_window = family not in _NO_WINDOW and config.get("use_sliding_window", True)
    window = found["window"] if has_window else None
    windowed = sum("sliding" in kind for kind in kinds) if kinds else layers
    biases = 0
    if config.get("attention_bias", family == "qwen2") or has_biases(family):
        biases += heads * head_dim + 2 * kv_heads * head_dim + (0 if family == "qwen2" else hidden)
    if config.get("mlp_bias") or has_biases(family):
        biases += found["ffn"] + hidden
    norms = {"gemma2": 4 * hidden, "gemma3_text": 4 * hidden + 2 * head_dim, "qwen3": 2 * hidden + 2 * head_dim}
    norms["olmo2"] = 2 * hidden + heads * head_dim + kv_heads * head_dim
    return ModelShape.of(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=found["ffn"],
        vocab=found["vocab"],
        gated=gated,
        tied=is_tied(family, config),
        window=window if windowed else None,
        windowed=windowed / layers if window else 0.0,
        biases=biases,
        norms=norms.get(family, 4 * hidden if has_norm_biases(family) else 2 * hidden),
        positions=_positions(config) if family in LEARNED_POSITIONS else 0,
        traits=traits_of(family, config),
    )


def _positions(config: Mapping[str, Any]) -> int:
    return int(config.get("max_position_embeddings") or config.get("n_positions") or 0)


def _field(config: Mapping[str, Any], field: str) -> Any:
    return next((config[key] for key in _ALIASES[field] if config.get(key) is not None), None)
