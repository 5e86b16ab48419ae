"""Read from a row of a table which experts its model has, and how a run spreads them over ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import PlanError
from meshwright_plan.job.layer_shape import ExpertShape, LayerShape
from meshwright_plan.job.shapes import ModelShape

# What a row states of experts: in a column of one of these names, or as "name=number" in the notes.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "ep": ("ep", "ep_size"),
    "experts": ("num_experts", "moe experts", "experts"),
    "topk": ("topk", "top_k"),
    "shared": ("shared_experts", "shared"),
    "first_dense": ("first_dense",),
    "dense_ffn": ("dense_ffn",),
    "head_dim": ("head_dim",),
    "window": ("window",),
}
# Names of models with experts, and forms of names that say so: 8x7B, 30B-A3B, 17B-16E.
_WITH_EXPERTS = re.compile(
    r"moe\b|mixture.of.experts|\d+x\d+(\.\d+)?b|\d+b[-_ ]*a\d+(\.\d+)?b|\d+b-\d+e\b|mixtral|gpt-oss|dbrx|grok|arctic"
    r"|deepseek-?(v[23]|r1(?!-distill))|llama-?4|kimi-?k2|glm-?4\.[56]|minimax|switch|qwen3-(30|235)b|jamba",
    re.IGNORECASE,
)
_NOTES_OF_EXPERTS = re.compile(
    r"\b(etp|ep)[ _-]?(size)?\s*[=:]?\s*([2-9]|\d\d+)\b"
    r"|\b(topk|top_k|num_experts|(moe )?experts)\s*=\s*([2-9]|\d\d+)|(?<!no )(?<!non-)(?<!not )\bmoe\b"
    r"|mixture.of.experts|\bactive_B\s*=",
    re.IGNORECASE,
)
_COLUMNS_OF_EXPERTS = re.compile(
    r"(^|_)(ep|etp|moe|experts?|topk|top_k|dropless)($|_)|^(expert|moe)|active_params", re.IGNORECASE
)
_NO_EXPERTS = ("", "-", "0", "1", "no", "none", "false")  # one expert, or one rank for them, is a dense model
_TENSOR_PARALLEL = re.compile(r"\betp\s*=\s*([2-9]|\d\d+)", re.IGNORECASE)
# Latent attention as in every published model that has it (DeepSeek-V2 and V3, Kimi K2): a head has 192 channels of
# queries and keys, 64 of which are rotated, and 128 of values; queries and keys have 1536 and 512 channels before.
_LATENT = {"q": 1536, "kv": 512, "query": 192, "rotated": 64, "value": 128}
_MOST_OFF = 1.15  # ratio of stated weights to those that the sizes imply, or the other way round


@dataclass(frozen=True, kw_only=True)
class Experts:
    """What a row states of the experts of its model.

    Args:
        ep: number of ranks that share the experts of a layer.
        experts: number of experts in a layer.
        topk: number of experts that a token takes.
        shared: number of experts that every token takes.
        first_dense: number of layers before the first with experts.
        dense_ffn: width of the MLP of these.
        head_dim: width of a head; None for the hidden width over the heads.
        window: window of every other layer's attention; None for no window.
        is_latent: whether attention is latent.
    """

    ep: int
    experts: int
    topk: int
    shared: int = 0
    first_dense: int = 0
    dense_ffn: int = 0
    head_dim: int | None = None
    window: int | None = None
    is_latent: bool = False

    @classmethod
    def of(cls, row: Mapping[str, str]) -> Experts | None:
        """Return the experts of a row's model; None for a dense model.

        Raises:
            PlanError: the model has experts, but the row does not state how many, or how many a token takes.

        Example:
            >>> Experts.of({"model": "Qwen3-30B-A3B", "params_B": "30.5", "notes": "ep=8; moe experts=128 topk=8"}).ep
            8
        """
        sign = _sign_of_experts(row)
        if sign is None:
            return None
        found = {name: number for name in _NAMES if (number := _stated(row, name)) is not None}
        if found.get("experts", 0) < 2 or not found.get("topk"):
            raise PlanError(
                f"{sign} is of a model with experts, but the row does not state their number and how many each token "
                "takes; write the columns num_experts and topk, or 'experts=128 topk=8' in the notes"
            )
        stated = next((row[name] for name in row if name.strip().lower() == "etp"), "")
        if _TENSOR_PARALLEL.search(row["notes"]) or stated not in _NO_EXPERTS:
            raise PlanError("etp cuts each expert over tensor-parallel ranks, which the planner does not know")
        return cls(**{"ep": 1, **found}, is_latent="MLA" in re.split(r"[\s;,]+", row["notes"]))

    def shape(self, sizes: Mapping[str, Any], stated: float) -> ModelShape:
        """Return the model, tied or not, whose number of parameters comes closest to the stated one.

        Args:
            sizes: the sizes of a dense model; ``ffn`` is the width of an expert.
            stated: the stated number of parameters; 0 for none.

        Raises:
            PlanError: the number of parameters is not that of these sizes.
        """
        width = {"head_dim": self.head_dim or sizes["head_dim"]}
        if self.is_latent:
            heads, hidden, x = sizes["heads"], sizes["hidden"], _LATENT
            keys = hidden * (x["kv"] + x["rotated"]) + x["kv"] * heads * (x["query"] - x["rotated"] + x["value"])
            queries = hidden * x["q"] + x["q"] * heads * x["query"]
            width = {
                "head_dim": (x["query"] + x["value"]) // 2,
                "projections": queries + keys + heads * x["value"] * hidden,
            }
        window = {} if self.window is None else {"window": self.window, "windowed": 0.5}
        own = {name: sizes[name] for name in ("hidden", "heads", "kv_heads")} | width | window
        experts = ExpertShape(
            count=self.experts, chosen=self.topk, hidden=sizes["hidden"], width=sizes["ffn"],
            router=sizes["hidden"] * self.experts,
        )  # fmt: skip
        routed = sizes["layers"] - self.first_dense
        runs = [LayerShape(count=self.first_dense, ffn=self.dense_ffn, **own)] if self.first_dense else []
        runs.append(LayerShape(count=routed, ffn=self.shared * sizes["ffn"], experts=experts, **own))
        forms = [
            ModelShape(name=sizes["name"], runs=tuple(runs), vocab=sizes["vocab"], tied=tied) for tied in (False, True)
        ]
        nearest = min(forms, key=lambda shape: abs(shape.parameters - stated)) if stated else forms[0]
        ratio = stated / nearest.parameters if stated else 1.0
        if not 1 / _MOST_OFF < ratio < _MOST_OFF:
            raise PlanError(
                f"params_B={stated / 1e9:.4g}, but the sizes and {self.experts} experts make "
                f"{nearest.parameters / 1e9:.4g} B; correct ffn, the width of one expert, or another size"
            )
        return nearest


def _stated(row: Mapping[str, str], name: str) -> int | None:
    for column, cell in row.items():
        if column.strip().lower() in _NAMES[name] and cell.strip() not in ("", "-"):
            try:
                return int(float(cell))
            except ValueError:
                raise PlanError(f"{column}={cell!r} is not a number") from None
    words = "|".join(re.escape(word) for word in _NAMES[name])
    found = re.search(rf"(?:^|[\s;,])(?:{words})\s*=\s*(\d+)", row["notes"], re.IGNORECASE)
    return int(found[1]) if found else None


def _sign_of_experts(row: Mapping[str, str]) -> str | None:
    """Return the cell that says that a row's model has experts; None if nothing says so."""
    if found := _WITH_EXPERTS.search(row["model"]):
        return f"model={row['model']!r} ({found[0]!r})"
    for name, cell in row.items():
        # As many active weights as there are: a dense model too.
        is_said = cell.strip().lower() not in _NO_EXPERTS and cell != row["params_B"]
        if is_said and _COLUMNS_OF_EXPERTS.search(name):
            return f"{name}={cell!r}"
    found = _NOTES_OF_EXPERTS.search(row["notes"])
    return f"notes: {found[0]!r}" if found else None
