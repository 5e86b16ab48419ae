"""A lead's questions before there are machines: one command each, whose figure is computed here by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright_tools.cli import app
from support.tiers import crossings

GB, GIB = 1e9, 2**30
H, F, L, V = 4096, 14336, 32, 128256  # Llama 3 8B: width, width of the MLP, layers, vocabulary
KV = 1024  # 8 key heads of 128
PROJECTIONS = L * (2 * H * H + 2 * H * KV + 3 * H * F)
NORMS = (2 * L + 1) * H
LLAMA = PROJECTIONS + 2 * V * H + NORMS
# The inputs and outputs of the seven projections, each of which has adapters of rank 16.
ADAPTERS = 16 * L * (2 * (H + H) + 2 * (H + KV) + 3 * (H + F))
EXPERT, EXPERTS, TAKEN = 3 * 512 * 256, 16, 4  # parameters of an expert; their number; those that a token takes
OUTSIDE = 4 * (2 * 512 * 512 + 2 * 512 * 256 + EXPERTS * 512 + 2 * 512 + 2 * 64) + 2 * 1024 * 512 + 512
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {
        "model_type": "llama", "num_hidden_layers": L, "hidden_size": H, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": F, "vocab_size": V,
    },
    "experts": {
        "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1024, "moe_intermediate_size": 256,
        "num_experts": EXPERTS, "num_experts_per_tok": TAKEN, "vocab_size": 1024,
    },
    "images": {
        "model_type": "qwen3_vl", "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_vl_text", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1024, "vocab_size": 152000,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [12, 10, 10], "rope_type": "default"},
        },
        "vision_config": {
            "depth": 3, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 512,
            "patch_size": 16, "spatial_merge_size": 2, "deepstack_visual_indexes": [0, 1, 2],
        },
    },
}  # fmt: skip
Check = Callable[[Any], list[tuple[float, float]]]  # of an answer: pairs of what it says and what is right


def first(answer: Any) -> Any:
    return answer["plans"][0]


def bill(answer: Any, *, gpus: int, tokens: float, batch: int, price: float) -> list[tuple[float, float]]:
    run, seconds = first(answer)["run"], first(answer)["step_seconds"]
    steps = math.ceil(tokens / batch)
    hours = steps * seconds / 3600 * gpus
    return [(run["steps"], steps), (run["days"], hours / gpus / 24), (run["cost"], hours * price)]


def utilisation(answer: Any, *, gpus: int, rows: int, length: int, peak: float) -> list[tuple[float, float]]:
    """Forward and backward take 6 operations per weight of a matmul, and attention 6 x width per pair of tokens, of
    which a causal mask leaves a half."""
    tokens = rows * length
    flops = tokens * 6 * (PROJECTIONS + V * H) + L * rows * 12 * H * length**2 / 2
    return [(first(answer)["mfu"], flops / first(answer)["step_seconds"] / gpus / peak)]


def of_cards(rows: Any) -> list[tuple[float, float]]:
    prices, seen = (1.5, 2.5, 5.0), [row["gpu"] for row in rows]
    assert seen == ["a100-80", "h100-sxm", "b200"] and rows[0]["step_seconds"] > rows[2]["step_seconds"]
    steps = math.ceil(1e12 / (128 * 4096))
    costs = [steps * row["step_seconds"] / 3600 * 8 * price for row, price in zip(rows, prices, strict=True)]
    return [(row["cost"], cost) for row, cost in zip(rows, costs, strict=True)]


def of_precisions(rows: Any) -> list[tuple[float, float]]:
    """Matrix multiplications of the layers take as much less time as 8 bits are faster; nothing gets slower."""
    wide, narrow = (row["step_seconds"] for row in rows)
    assert [row["precision"] for row in rows] == ["bf16", "fp8"] and 1 < wide / narrow < 1979 / 989
    return [(rows[1]["cost"] / rows[0]["cost"], narrow / wide)]


def in_days(rows: Any) -> list[tuple[float, float]]:
    *slower, last = (row for row in rows if row.get("plan"))
    assert last["days"] <= 14 and all(row["days"] > 14 for row in slower) and slower
    return [(last["days"], math.ceil(1e12 / (512 * 4096)) * last["step_seconds"] / 86400)]


QUESTIONS: dict[str, tuple[str, str, Check]] = {
    "How large is the model?": ("dense", "weigh --plan dp8", lambda answer: [(answer["model"]["parameters"], LLAMA)]),
    "What does 1 T tokens cost on 64 GPUs?": (
        "dense", "weigh --plan dp64,zero2,mb1 --global-batch 512 --seq-len 8192 --tokens 1T --price 2.5",
        lambda answer: bill(answer, gpus=64, tokens=1e12, batch=512 * 8192, price=2.5),
    ),
    "What does ZeRO-1 leave on a rank?": (
        "dense", "weigh --plan dp8,zero1,mb1",  # the weights in 16 bits; an eighth of masters and two moments
        lambda answer: [
            (first(answer)["memory"]["weights"], 2 * LLAMA), (first(answer)["memory"]["optimizer"], 12 * LLAMA / 8)
        ],
    ),
    "And ZeRO-3?": (
        "dense", "weigh --plan dp8,zero3,mb1",  # an eighth of 32-bit weights, and of two moments
        lambda answer: [
            (first(answer)["memory"]["weights"], 4 * LLAMA / 8), (first(answer)["memory"]["optimizer"], LLAMA)
        ],
    ),
    "And tp 4?": (
        "dense", "weigh --plan dp2,tp4+sp,zero1,mb1",
        lambda answer: [(first(answer)["memory"]["weights"], 2 * ((LLAMA - NORMS) / 4 + NORMS))],
    ),
    "And four stages?": (
        "dense", "weigh --plan dp2,pp4,zero1,mb1",  # the fullest has 8 layers and the embedding
        lambda answer: [(first(answer)["memory"]["weights"], 2 * (PROJECTIONS / 4 + NORMS / 4 + V * H))],
    ),
    "How well are the GPUs used?": (
        "dense", "weigh --plan dp8,zero2,mb1 --global-batch 64",
        lambda answer: utilisation(answer, gpus=8, rows=64, length=4096, peak=989e12),
    ),
    "And with 128k tokens?": (
        "dense", "weigh --plan dp1,cp8(ulysses),zero3,mb1 --global-batch 4 --seq-len 131072",
        lambda answer: utilisation(answer, gpus=8, rows=4, length=131072, peak=989e12),
    ),
    "Which cluster needs 14 days?": (
        "dense", "sweep --tokens 1T --days 14 --global-batch 512", in_days
    ),
    "How much memory may a plan fill?": (
        "dense", "weigh --plan dp8,zero1,mb1 --memory 0.8", lambda answer: [(answer["budget_bytes"], 0.8 * 80 * GIB)]
    ),
    # Money, other GPUs, experts, images and LoRA
    "Which GPU is the cheapest?": (
        "dense", "sweep --gpu a100,h100,b200 --price 1.5,2.5,5 --tokens 1T --global-batch 128", of_cards
    ),
    "What does fp8 save?": (
        "dense", "sweep --precision bf16,fp8 --price 2.5 --tokens 1T --global-batch 128", of_precisions
    ),
    "And on another GPU?": (
        "dense", "weigh --gpu mi300x --plan dp8,zero1,mb1 --global-batch 64",
        lambda answer: [
            *utilisation(answer, gpus=8, rows=64, length=4096, peak=1307.4e12),
            (answer["budget_bytes"], 0.9 * 192 * GIB),
        ],
    ),
    "And on one that no list has?": (
        "dense", "weigh --gpu-spec memory=96,flops=148,bandwidth=4000,link=450 --plan dp8,zero2,mb1 --global-batch 64",
        lambda answer: [
            *utilisation(answer, gpus=8, rows=64, length=4096, peak=148e12), (answer["budget_bytes"], 0.9 * 96 * GB)
        ],
    ),
    "How large are the experts?": (
        "experts", "weigh --plan dp8,zero1,mb1",
        lambda answer: [
            (answer["model"]["parameters"], OUTSIDE + 4 * EXPERTS * EXPERT),
            (answer["model"]["active_parameters"], OUTSIDE + 4 * TAKEN * EXPERT),
        ],
    ),
    "And if 8 ranks share them?": (
        "experts", "weigh --plan dp8,ep8,zero1,mb1",
        lambda answer: [(first(answer)["memory"]["weights"], 2 * (OUTSIDE + 4 * EXPERTS * EXPERT / 8))],
    ),
    "What does an image add?": (
        "images", "weigh --plan dp8,zero1,mb1 --images-per-row 2",  # 448 / 16 patches in a row, merged by 2
        lambda answer: [(float(answer["notes"][0].split(" per sequence, ")[1].split()[0]), (448 / 16 / 2) ** 2)],
    ),
    "What does LoRA train?": (
        "dense", "weigh --plan dp8,zero0,mb1 --lora 16",  # adapters and their moments in 32 bits
        lambda answer: [
            (first(answer)["memory"]["weights"], 2 * LLAMA + 4 * ADAPTERS),
            (first(answer)["memory"]["optimizer"], 8 * ADAPTERS),
        ],
    ),
    "And QLoRA?": (
        "dense", "weigh --plan dp8,zero0,mb1 --lora 16 --quantised nf4",  # a 32-bit scale for 64 elements of 4 bits
        lambda answer: [
            (first(answer)["memory"]["weights"],
             (0.5 + 4 / 64) * PROJECTIONS + 2 * (LLAMA - PROJECTIONS) + 4 * ADAPTERS)
        ],
    ),
    "What does Muon save?": (
        "dense", "weigh --plan dp1,zero0,mb1 --optimizer muon",  # one moment instead of two for matrices of the layers
        lambda answer: [(first(answer)["memory"]["optimizer"], 2 * PROJECTIONS + 4 * (LLAMA - PROJECTIONS))],
    ),
}  # fmt: skip


SLOW = ("What does an image add?", "Which cluster needs 14 days?")  # models of modules and searches


@pytest.mark.parametrize("question", crossings(QUESTIONS, but=[name for name in QUESTIONS if name not in SLOW]))
def test_a_question_has_one_command_and_a_figure_that_is_right(question: str, tmp_path: Path) -> None:
    """1 %: padding of shards and buckets, and six digits of prices; a forgotten term is more."""
    model, command, right = QUESTIONS[question]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[model]))
    name, *options = command.split()
    done = CliRunner().invoke(app, ["plan", name, "--model", str(path), "--json", *options])
    assert done.exit_code in (0, 1), done.output  # 1: the plan does not fit
    for said, by_hand in right(json.loads(done.stdout)):
        assert said == pytest.approx(by_hand, rel=0.01)
