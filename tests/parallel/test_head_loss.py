"""The head and the causal-LM loss in chunks: the loss and the gradients of one process, and no whole logits."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

import meshwright as mw
from meshwright.errors import UnreadableTensorError
from meshwright.parallel.chunked_head_loss import ChunkedHeadLoss, HeadLoss
from meshwright.parallel.collectives import Axis
from meshwright.parallel.cross_entropy import Words
from meshwright.planner import head_chunks
from meshwright.tracing.traced_memory import LiveBytes
from support.exact import Float64, relative_difference
from support.models import SIZES, build, labels_for, tokens

ROWS, LENGTH = 3, 12
HEADS: dict[str, tuple[type, type, dict[str, Any]]] = {  # scale, divisor, bias
    "cohere": (CohereConfig, CohereForCausalLM, {"logit_scale": 0.25}),
    "granite": (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 3.0}),
    "phi": (PhiConfig, PhiForCausalLM, {"resid_pdrop": 0.0}),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}), ("llama", {"tie_word_embeddings": True}), ("gemma2", {}), ("cohere", {}), ("granite", {}),
    ("phi", {}),
]  # fmt: skip


def make(family: str, **overrides: Any) -> PreTrainedModel:
    if family not in HEADS:
        return build(family, **overrides)
    config_class, model_class, traits = HEADS[family]
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(config_class(**{**SIZES, **traits, **overrides})).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def train(plan: dict[str, Any] | None, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """For each case, the loss, the whole gradients and how often the fused loss ran, with chunks of five tokens."""
    results = []
    runs: list[int] = []
    apply = ChunkedHeadLoss.apply

    def counted(*args: Any) -> Tensor:
        runs.append(len(args[0]))
        result: Tensor = apply(*args)
        return result

    with mock.patch.object(head_chunks, "_FEWEST", 5), mock.patch.object(ChunkedHeadLoss, "apply", counted), Float64():
        for family, overrides in cases:
            runs.clear()
            model: Any = make(family, **overrides).double()
            ids = tokens(ROWS, LENGTH)
            batches: Any = [{"input_ids": ids, "labels": labels_for(ids)}]
            if plan is not None:
                config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
                model, _, batches = mw.to_distributed(model, None, batches, config=config)
            for batch in batches:
                loss = model(**batch).loss
                (loss / 2).backward()  # a factor of the program's own
            gradients = {n: p.grad for n, p in model.named_parameters()}
            results.append((loss.item(), gradients if plan is None else mw.full_gradients(model), len(runs)))
    return results


def assert_equal(actual: list[Any]) -> None:
    for case, (loss, gradients, runs), (expected_loss, expected, stock_runs) in zip(
        CASES, actual, train(None, CASES), strict=True
    ):
        assert runs > stock_runs == 0, case
        # float64: only the order of sums differs; a chunk that counts twice is off by a fifth.
        assert loss == pytest.approx(expected_loss, rel=1e-12), case
        largest = max(gradient.abs().max().item() for gradient in expected.values())
        for name, gradient in expected.items():
            if gradient.abs().max() > 1e-12 * largest:  # a key's bias has rounding only
                assert relative_difference(gradients[name], gradient) < 1e-10, (case, name)


def test_heads_on_one_process() -> None:
    assert_equal(train({}, CASES))


@pytest.mark.parametrize("plan", [{"tp": 2, "sequence_parallel": True}, {"dp": 2, "zero_stage": 3}], ids=str)
def test_heads_on_two_ranks(plan: dict[str, Any], pool2: Any) -> None:
    """97 words over two ranks are 49 and 48, and 36 tokens are no multiple of five."""
    assert_equal(pool2.run(train, plan, CASES, timeout=300)[0])


def distributed(**options: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    model = build("gemma2")
    stock = copy.deepcopy(model)
    ids = tokens(ROWS, LENGTH)
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(), **options)
    return mw.to_distributed(model, config=config)[0], stock, {"input_ids": ids, "labels": labels_for(ids)}


def test_logits_are_computed_when_they_are_read() -> None:
    """Bitwise those of the stock model, and a loss on them reaches the parameters."""
    model, stock, batch = distributed()
    outputs, expected = model(**batch), stock(**batch)
    with torch.no_grad():
        outputs.logits.argmax(-1)  # a metric, before the loss that needs a graph
    assert outputs.logits.shape == expected.logits.shape and outputs.logits.dtype == expected.logits.dtype
    assert torch.equal(outputs.logits, expected.logits)
    for out in outputs, expected:
        (out.loss + out.logits.logsumexp(-1).square().mean()).backward()
    for (name, p), q in zip(model.named_parameters(), stock.parameters(), strict=True):
        # float32: a lost term is off by more than a tenth.
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(ROWS, LENGTH, 97)


def test_what_would_be_another_value_is_an_error() -> None:
    model, _, batch = distributed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = model(**batch)
    with pytest.raises(UnreadableTensorError, match="gather_logits=True"):
        outputs.logits.retain_grad()
    with pytest.raises(UnreadableTensorError, match="gradient would be lost"):
        Doubled.apply(outputs.logits).backward()
    outputs = model(**batch)
    outputs.loss.backward()
    optimizer.step()
    with pytest.raises(UnreadableTensorError, match=r"before optimizer.step\(\)"):
        outputs.logits.argmax(-1)


def test_a_graph_that_is_kept_runs_twice() -> None:
    model, _, batch = distributed()
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    once = {n: p.grad.clone() for n, p in model.named_parameters()}
    loss.backward()
    assert all(torch.equal(2 * once[n], p.grad) for n, p in model.named_parameters())


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    words = Words(first=0, count=len(weight), ignored=-100, axis=Axis("tp"))
    what = HeadLoss(words=words, steps=(), dtype=hidden.dtype)
    factor = torch.tensor(1 / len(targets))
    result: Tensor = ChunkedHeadLoss.apply(hidden, weight, None, targets, factor, what)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_eighth_of_the_logits(dtype: torch.dtype) -> None:
    """Beside the gradients, which a step needs anyway, head and loss hold an eighth of whole 32-bit logits at most."""
    num_tokens, width, num_words = 4096, 8, 1000
    hidden = torch.randn(num_tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(num_words, width, dtype=dtype, requires_grad=True)
    targets = torch.arange(num_tokens) % num_words
    with LiveBytes([hidden, weight, targets]) as memory:
        before = memory.now
        loss = head_loss(hidden, weight, targets)
        loss.backward()
    gradients = 8 * (hidden.numel() + weight.numel())
    assert memory.peak - before <= 4 * num_tokens * num_words / 8 + gradients


def test_16_bit_gradients_are_no_worse_than_those_of_whole_logits() -> None:
    """Against float64; sums over sixteen chunks that were rounded to 16 bits would be twice as far off."""
    draws = torch.Generator().manual_seed(0)
    hidden = torch.randn(4096, 64, generator=draws).bfloat16()
    weight = (torch.randn(200, 64, generator=draws) * 0.1).bfloat16()
    targets = torch.randint(200, (4096,), generator=draws)

    def of(dtype: torch.dtype, *, chunked: bool) -> list[Tensor]:
        h, w = (x.to(dtype).requires_grad_() for x in (hidden, weight))
        if chunked:
            head_loss(h, w, targets).backward()
        else:
            logits = torch.nn.functional.linear(h, w)
            logits = logits if dtype == torch.float64 else logits.float()
            torch.nn.functional.cross_entropy(logits, targets).backward()
        return [h.grad, w.grad]  # type: ignore[list-item]

    exact = of(torch.float64, chunked=False)
    stock, own = of(torch.bfloat16, chunked=False), of(torch.bfloat16, chunked=True)
    for reference, theirs, ours in zip(exact, stock, own, strict=True):
        assert relative_difference(ours.double(), reference) <= 1.02 * relative_difference(theirs.double(), reference)
