"""The estimate of the head and the loss against the bytes that they hold, by what a model does to its logits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from meshwright.mesh.axes import Axis
from meshwright.parallel.fake_passes.measured_shape import LiveBytes
from meshwright.parallel.losses.chunked_head import Cast, ChunkedHeadLoss, ChunkedLoss, Scale, Tanh
from meshwright.parallel.losses.cross_entropy import Words
from meshwright_plan.job.adapters import Lora
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.layer_shape import CASTS_CAPPED_LOGITS, CASTS_LOGITS, Traits, traits_of
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.memory.activations import head_peak

pytestmark = pytest.mark.quick

CAP = (Scale(30.0, divides=True), Tanh(), Scale(30.0))
CAST = (Cast(torch.bfloat16, torch.float32),)
STEPS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    (CAP, {"caps_logits": True}),
    (CAST, {"casts_logits": True}),
]
STEPS.append(((*CAST, *CAP), {"caps_logits": True, "casts_logits": True}))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("steps", "traits"), STEPS, ids=["plain", "capped", "cast", "cast and capped"])
@pytest.mark.parametrize("tokens", [200, 4096], ids=["one chunk", "several chunks"])
def test_the_estimate_is_what_the_head_holds(
    tokens: int, steps: tuple[Any, ...], traits: dict[str, Any], frozen: bool
) -> None:
    """Within half a percent: a few numbers per token are not counted. Without the copy of a cast it is 10% too low."""
    hidden, vocabulary = 64, 2000
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, dtype=torch.bfloat16, requires_grad=not frozen)
    words = Words(first=0, count=vocabulary, vocab_size=vocabulary, ignored=-100, axis=Axis("tp"))
    with LiveBytes([x]) as memory:
        what = ChunkedLoss(words=words, steps=steps, dtype=torch.bfloat16)
        ChunkedHeadLoss.apply(x, weight, None, torch.randint(vocabulary, (tokens,)), None, what)
    shape = ModelShape.of(
        name="m", layers=1, hidden=hidden, heads=4, kv_heads=4, head_dim=16, ffn=64, vocab=vocabulary,
        traits=Traits(**traits),
    )  # fmt: skip
    job = Job(seq_len=tokens, global_batch=1, on_cpu=True, lora=Lora(rank=1) if frozen else None)
    estimated = head_peak(shape, Candidate(), job)
    held = memory.peak - 2 * weight.numel()  # the weight, which the head reads, is counted apart
    assert estimated == pytest.approx(held - 8 * tokens, rel=5e-3)


def test_families_that_cast_their_logits_are_known() -> None:
    """By the code of the installed transformers, of causal LMs, and of those with images that wrap one."""
    cast = re.compile(r"^        logits = (self\.lm_head\(.*\)|logits)(\.float\(\)|\.to\(torch\.float32\))", re.M)
    found = set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        parts = re.split(r"^class (\w+)\(", path.read_text(), flags=re.M)
        if any(
            name.endswith("ForCausalLM") and cast.search(body)
            for name, body in zip(parts[1::2], parts[2::2], strict=True)
        ):
            found.add(path.parent.name)
    assert found and found <= CASTS_LOGITS
    assert traits_of("mamba2", {}).casts_logits and not traits_of("llama", {}).casts_logits
    for cap in (None, 30.0):
        given = {"final_logit_softcapping": cap}
        assert [traits_of(family, given).casts_logits for family in CASTS_CAPPED_LOGITS] == [cap is not None]
        assert traits_of("nanochat", given).caps_logits == (cap is not None)
