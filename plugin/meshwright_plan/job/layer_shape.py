"""Describes one decoder layer by its sizes, its experts, and the differences of its family from Llama.

Of experts the planner counts the parameters, the rows that reach a rank, and the bytes that travel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from meshwright.errors import PlanError
from meshwright.plan.parts import METHODS
from meshwright_plan.job.measured import Held, MeasuredLayer

# Families whose sizes were compared with those of transformers' own modules. Of others a Llama's layers are assumed.
COMPARED = frozenset(
    {
        "apertus", "arcee", "biogpt", "bitnet", "bloom", "codegen", "cohere", "cohere2", "cohere_compass_text", "ctrl",
        "cwm", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt-sw3", "gpt2",
        "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj", "granite", "granite_swa", "helium",
        "hunyuan_v1_dense", "hyperclovax", "internlm3", "iquestcoder", "jais2", "lfm2", "llama", "ministral",
        "ministral3", "mistral", "modernbert-decoder", "mpt", "nanochat", "nemotron", "olmo", "olmo2", "olmo3",
        "openai-gpt", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm",
        "starcoder2", "vaultgemma", "xglm",
    }
)  # fmt: skip
# Families whose MLP has two matrices, up and down. The config does not show this: BitNet's MLP has the same activation
# as Arcee's, but is gated.
NOT_GATED = frozenset(
    {
        "apertus", "arcee", "biogpt", "bloom", "codegen", "ctrl", "falcon", "gpt2", "gpt_bigcode", "gpt_neo",
        "gpt_neox", "gpt_neox_japanese", "gptj", "jais2", "mpt", "nanochat", "nemotron", "openai-gpt", "opt",
        "persimmon", "phi", "starcoder2", "xglm",
    }
)  # fmt: skip
# Families of NOT_GATED whose projections have biases only if the config says so.
_BIASES_IN_CONFIG = frozenset({"apertus", "arcee", "falcon", "jais2", "mpt", "nanochat", "nemotron"})
_WITHOUT_NORM_BIASES = frozenset({"apertus", "arcee", "mpt", "nanochat"})
LEARNED_POSITIONS = frozenset({"biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt"})
# Families in which embedding and head are one matrix unless the config says otherwise; ``is_tied`` adds all Gemmas.
_TIED = frozenset(
    {
        "biogpt", "bloom", "cohere", "cohere2", "cohere_compass_text", "ctrl", "ernie4_5", "falcon", "gpt2",
        "gpt_bigcode", "gpt_neo", "gpt_neox_japanese", "granite_swa", "lfm2", "modernbert-decoder", "mpt", "openai-gpt",
        "opt", "smollm3", "starcoder2", "vaultgemma", "xglm",
    }
)  # fmt: skip
# Families whose sizes do not follow from the usual fields of a config, and the reasons.
UNKNOWN_SIZES = {
    "gemma4_text": "the heads of its layers are of different widths",
    "gemma4_unified_text": "the heads of its layers are of different widths",
    "moshi": "its MLP is half as wide as its config says",
}

# Families whose attention does not call transformers' attention interface, which context parallelism works through.
_OWN_ATTENTION = frozenset(
    {"bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "mvp", "openai-gpt", "xglm"}
)
_READS_ALL_HEADS = frozenset({"granite_swa"})  # their attention cannot run on a part of the heads

# Causal LMs whose forward casts the logits to 32 bits, and those that do so only to cap them.
CASTS_LOGITS = frozenset(
    {"blt", "falcon_mamba", "inkling2", "mamba", "mamba2", "mllama", "mllama_text_model", "nemotron_h", "xlstm"}
)
CASTS_CAPPED_LOGITS = frozenset({"beam"})


def is_tied(family: str, config: Mapping[str, object]) -> bool:
    """Return whether embedding and head are one matrix."""
    return bool(config.get("tie_word_embeddings", family in _TIED or family.startswith("gemma")))


def has_biases(family: str) -> bool:
    """Return whether a family's projections always have biases, without a config field for them."""
    return family in NOT_GATED - _BIASES_IN_CONFIG


def has_norm_biases(family: str) -> bool:
    """Return whether a layer's norms are LayerNorms with a bias."""
    return family in NOT_GATED - _WITHOUT_NORM_BIASES


def shares_one_key_head(config: Mapping[str, object]) -> bool:
    """Return whether the flag ``multi_query`` of the config says that there is a single key head."""
    return bool(config.get("multi_query")) and not config.get("new_decoder_architecture")


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Properties of a family's code that decide which tensors forward saves for backward.

    Args:
        norms: number of norms per layer on the residual stream.
        norms_in_float32: whether a norm multiplies by its weight in 32 bits.
        norm_copies_weight: whether a norm computes a new 32-bit tensor, 1 + weight.
        query_norm: what a norm of q and of k covers: each "head", or the "whole" projection; None without such norms.
        rotates_in_float32: whether sines and cosines stay in 32 bits.
        fused_qkv: whether one projection makes q, k and v, so that its whole output stays alive as long as v.
        keeps_scores: whether attention stores its scores, as eager attention does, for example to cap them.
        caps_logits: whether the head's logits are capped.
        casts_logits: whether the model casts the head's logits to 32 bits before its loss.
        qkv_bias, output_bias, mlp_bias: whether these projections have biases.
        context: the methods of context parallelism that the attention can use.

    Example:
        >>> Traits().norms
        2
    """

    norms: int = 2
    norms_in_float32: bool = False
    norm_copies_weight: bool = False
    query_norm: Literal["head", "whole"] | None = None
    rotates_in_float32: bool = False
    fused_qkv: bool = False
    keeps_scores: bool = False
    caps_logits: bool = False
    casts_logits: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    context: tuple[str, ...] = METHODS

    @property
    def norms_outputs(self) -> bool:
        """Whether a block's output is normalized before it is added to the residual stream."""
        return self.norms == 4 or self.query_norm == "whole"


def _context_methods(family: str) -> tuple[str, ...]:
    if family in _OWN_ATTENTION:
        return ()
    return ("gather", "ring") if family in _READS_ALL_HEADS else METHODS


def traits_of(family: str, config: Mapping[str, object]) -> Traits:
    """Return the traits of a transformers model.

    Args:
        family: the ``model_type`` of the model's config.
        config: the model's config as a dict.

    Example:
        >>> traits_of("qwen3", {}).query_norm
        'head'
    """
    caps = config.get("final_logit_softcapping") is not None
    common: dict[str, Any] = {
        "keeps_scores": config.get("_attn_implementation") == "eager",
        "qkv_bias": bool(config.get("attention_bias", family == "qwen2")),
        "output_bias": bool(config.get("attention_bias")) and family != "qwen2",
        "mlp_bias": bool(config.get("mlp_bias")),
        "context": _context_methods(family),
        "caps_logits": caps,
        "casts_logits": family in CASTS_LOGITS or (family in CASTS_CAPPED_LOGITS and caps),
    }
    if family == "qwen3":
        return Traits(query_norm="head", **common)
    if family == "olmo2":
        return Traits(norms_in_float32=True, query_norm="whole", rotates_in_float32=True, **common)
    if family == "phi3":
        return Traits(fused_qkv=True, **common)
    if family.startswith("gemma"):
        return Traits(
            norms=2 if family == "gemma" else 4,
            norms_in_float32=True,
            norm_copies_weight=True,
            query_norm="head" if family.startswith("gemma3") else None,
            **common,
        )
    return Traits(**common)


# Kernels of a layer with experts beyond those of a dense layer, relative to these: the router's softmax and choice, the
# sort by expert, the counts, the gathers before and after each exchange, and the weighted sum.
ROUTED_LAUNCHES = 0.8
# Elements moved through memory for each row of an expert and unit of width, forward: a gather into the order of the
# experts, the same on arrival, and after the experts the way back, the product with the router's weights and their sum.
_MOVED = 10


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The experts of one layer, of which each token takes a few.

    Args:
        count: number of experts.
        chosen: number of experts that each token takes.
        hidden: width of the rows that experts take and return.
        width: width inside of an expert.
        gated: whether an expert has a gate projection besides up and down.
        biases: bias elements of an expert.
        router: elements of the router and of other weights for each token, which every rank holds.

    Example:
        >>> experts = ExpertShape(count=128, chosen=8, hidden=2048, width=768, router=128 * 2048)
        >>> experts.elements, experts.active
        (603979776, 37748736)
    """

    count: int
    chosen: int
    hidden: int
    width: int
    gated: bool = True
    biases: int = 0
    router: int = 0

    @property
    def inputs(self) -> int:
        """The number of an expert's input projections."""
        return 2 if self.gated else 1

    @property
    def each(self) -> int:
        """Elements of one expert."""
        return self.hidden * self.width * (self.inputs + 1) + self.biases

    @property
    def elements(self) -> int:
        """Elements of all experts."""
        return self.count * self.each

    @property
    def active(self) -> int:
        """Elements of the experts that a token takes."""
        return min(self.chosen, self.count) * self.each

    def rows(self, tokens: float, ranks: int, load: float) -> float:
        """Return the rows that the experts of the fullest of ``ranks`` ranks get from ``tokens`` tokens of each rank.

        Args:
            tokens: tokens of a rank.
            ranks: number of ranks that share the experts; a rank that holds them all gets its own tokens.
            load: rows of the fullest rank, relative to the mean.
        """
        return tokens * self.chosen * (load if ranks > 1 else 1.0)

    def reached(self, ranks: float) -> float:
        """Return how many of ``ranks`` ranks or nodes a token reaches on average: each that holds some of its experts.

        Example:
            >>> round(ExpertShape(count=128, chosen=8, hidden=2048, width=768).reached(8), 2)
            5.25
        """
        return ranks * (1 - (1 - 1 / ranks) ** self.chosen)

    def sent_bytes(self, tokens: float, ranks: int, element_bytes: int, load: float) -> float:
        """Return the bytes of one exchange: those of a token for each rank that it reaches. ``1 / ranks`` of them stay.

        A layer has two exchanges in forward, two in backward, and those of forward again if it is recomputed.

        Example:
            >>> experts = ExpertShape(count=128, chosen=8, hidden=2048, width=768)
            >>> round(experts.sent_bytes(16384, 8, 2, 1.0) * 7 / 8 / 1e6)
            308
        """
        return load * tokens * self.reached(ranks) * self.hidden * element_bytes if ranks > 1 else 0.0

    def moved(self, rows: float) -> float:
        """Return the bytes of 16-bit elements that forward moves through memory beside the matmuls of ``rows`` rows."""
        return rows * (2 * _MOVED * self.hidden + self.width * (2 + 2 * self.inputs))

    def saved(self, rows: float, element_bytes: int) -> float:
        """Return the bytes that experts keep for backward: the rows in and out, what the gate reads, and its result."""
        return rows * (2 * self.hidden + (self.inputs + 1) * self.width) * element_bytes

    def working(self, rows: float) -> float:
        """Return the elements of the largest temporary tensors of a forward or backward of ``rows`` rows."""
        return rows * (3 * self.width + 2 * self.hidden)


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A run of decoder layers of one kind: their number, and the sizes that decide the memory and time of each.

    Args:
        count: number of layers in the run.
        hidden: width of the residual stream.
        heads: number of query heads.
        kv_heads: number of key and value heads; equal to ``heads`` without grouped-query attention.
        head_dim: width of one head.
        ffn: width of the MLP that every token takes; 0 if there are experts alone.
        gated: whether the MLP has a gate projection besides up and down.
        window: largest number of tokens that a query attends to; None for all tokens before it.
        windowed: share of the layers with that window; the other layers have no window.
        biases: bias elements per layer.
        norms: elements of the norm weights per layer.
        traits: properties of the family's code that decide what backward needs.
        experts: the experts that each token takes a few of; None in a dense layer.
        projections: elements of the attention's matrices, if they are not those of q, k, v and o.
        linears: of each linear projection, the widths in and out, whether tp cuts the input, and whether it is of the
            MLP, if they are not q, k, v, o and those of the MLP.
        measured: the memory of the layer's modules, if there is no formula for them.
        held: the weights of the layer by tp and sp, if there is no formula for them: their elements on a rank, and
            those of the whole weight if its gradient is a sum over tp.
    """

    count: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool = True
    window: int | None = None
    windowed: float = 0.0
    biases: int = 0
    norms: int | None = None
    traits: Traits = field(default_factory=Traits)
    experts: ExpertShape | None = None
    projections: int | None = None
    linears: tuple[tuple[int, int, bool, bool], ...] = ()
    measured: MeasuredLayer | None = None
    held: Held = ()

    def held_by(self, tp: int, sequence_parallel: bool) -> tuple[tuple[int, int], ...]:
        """Return the weights of a rank.

        Raises:
            PlanError: if it is not known how ranks share them.
        """
        for key, weights in self.held:
            if key == (tp, sequence_parallel and tp > 1):
                return weights
        raise PlanError(f"the planner has no estimate for the layers of this model under tp={tp}; use a smaller tp")

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def local_kv_width(self, tp: int) -> int:
        """Return the width of the keys on one of ``tp`` ranks; several ranks share a key head if there are too few.

        Example:
            >>> layer = LayerShape(count=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336)
            >>> layer.local_kv_width(8), layer.local_kv_width(16)
            (128, 128)
        """
        local = max(1, self.heads // tp)
        return local // math.gcd(self.heads // self.kv_heads, local) * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Elements of q, k, v and o in one layer."""
        if self.projections is not None:
            return self.projections
        return self.hidden * (2 * self.query_width + 2 * self.kv_width)

    @property
    def mlp_inputs(self) -> int:
        """The number of the MLP's input projections."""
        return 2 if self.gated else 1

    @property
    def mlp_parameters(self) -> int:
        """Elements of the MLP's matrices in one layer."""
        return self.hidden * self.ffn * (self.mlp_inputs + 1)

    @property
    def norm_parameters(self) -> int:
        """Elements of a layer's norms, which tensor parallelism replicates."""
        return 2 * self.hidden if self.norms is None else self.norms

    @property
    def router_parameters(self) -> int:
        """Elements of a layer's router, which every rank holds."""
        return 0 if self.experts is None else self.experts.router

    @property
    def expert_parameters(self) -> int:
        """Elements of all experts of a layer, which ep spreads over ranks."""
        return 0 if self.experts is None else self.experts.elements

    @property
    def active_matrices(self) -> int:
        """Elements of the matrices that a token is multiplied by."""
        active = 0 if self.experts is None else self.experts.active + self.experts.router
        return self.attention_parameters + self.mlp_parameters + active

    @property
    def dense_parameters(self) -> int:
        """Elements of one layer beside its experts."""
        dense = self.attention_parameters + self.mlp_parameters + self.norm_parameters + self.biases
        return dense + self.router_parameters

    @property
    def parameters(self) -> int:
        """Elements of one layer."""
        return self.dense_parameters + self.expert_parameters

    def rank_parameters(self, tp: int, ep: int) -> tuple[float, float]:
        """Return the elements of one layer on a rank beside its experts, as if tp cut all of them, and of its experts.

        Example:
            >>> experts = ExpertShape(count=8, chosen=2, hidden=64, width=32)
            >>> layer = LayerShape(count=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=0, experts=experts)
            >>> layer.rank_parameters(2, 4)
            (8256.0, 12288.0)
        """
        return self.dense_parameters / tp, self.expert_parameters / ep

    def attended(self, seq_len: int) -> float:
        """Return the mean number of positions that a query attends to, averaged over the layers."""
        full = (seq_len + 1) / 2
        if self.window is None or self.window >= seq_len:
            return full
        windowed = self.window * (1 - self.window / (2 * seq_len)) + 0.5
        return self.windowed * windowed + (1 - self.windowed) * full
