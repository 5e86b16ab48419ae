"""The head and the causal-LM loss in chunks: the loss and the gradients of one process, and no whole logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
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
from meshwright.mesh.axes import Axis
from meshwright.optim.runtime import find_runtime
from meshwright.parallel.fake_passes.measured_shape import LiveBytes
from meshwright.parallel.losses.causal_lm import CausalLMLoss
from meshwright.parallel.losses.chunked_head import ChunkedHeadLoss, ChunkedLoss
from meshwright.parallel.losses.cross_entropy import Words
from support.exact import Float64, relative_difference
from support.fused_loss import counting_fused_losses
from support.models import SIZES, build, labels_for, tokens
from support.short_programs import train
from support.tiers import crossings

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


def loss_of(model: Any, batch: dict[str, Tensor], smoothing: float) -> Tensor:
    if not smoothing:
        return model(**batch).loss
    runtime = find_runtime(model)
    if runtime is not None:
        with runtime.features.find(CausalLMLoss).smoothed(smoothing):
            return model(**batch).loss
    logits, targets = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing)


def run(plan: dict[str, Any] | None, cases: list[tuple[str, dict[str, Any]]], smoothing: float = 0.0) -> list[Any]:
    """For each case, the loss, the whole gradients and how often the fused loss ran, with chunks of five tokens."""
    results = []
    with counting_fused_losses(tokens_per_chunk=5) as runs, Float64():
        for family, overrides in cases:
            runs.clear()
            model: Any = make(family, **overrides).double()
            ids = tokens(ROWS, LENGTH)
            # With a factor of the program's own.
            (loss,), gradients = train(
                model,
                plan,
                [{"input_ids": ids, "labels": labels_for(ids)}],
                loss_of=lambda model, batch: loss_of(model, batch, smoothing) / 2,
            )
            results.append((loss, gradients, len(runs)))
    return results


def assert_equal(cases: list[tuple[str, dict[str, Any]]], actual: list[Any], smoothing: float = 0.0) -> None:
    for case, (loss, gradients, runs), (expected_loss, expected, stock_runs) in zip(
        cases, actual, run(None, cases, smoothing), strict=True
    ):
        assert runs > stock_runs == 0, case
        # float64: only the order of sums differs; a chunk that counts twice is off by a fifth.
        assert loss == pytest.approx(expected_loss, rel=1e-12), case
        largest = max(gradient.abs().max().item() for gradient in expected.values())
        for name, gradient in expected.items():
            if gradient.abs().max() > 1e-12 * largest:  # a key's bias has rounding only
                assert relative_difference(gradients[name], gradient) < 1e-10, (case, name)


def test_heads_on_one_process() -> None:
    assert_equal(CASES, run({}, CASES))


# A bias, a soft cap and a scale; 97 words, of which two ranks have 49 and 48, so that one column is padding.
SMOOTHED = [("phi", {}), ("gemma2", {}), ("cohere", {})]


def test_smoothed_labels_on_one_process() -> None:
    assert_equal(SMOOTHED, run({}, SMOOTHED, 0.1), 0.1)
    # Without smoothing the loss is another one, so that a factor which is lost would be seen.
    assert abs(run(None, SMOOTHED[:1])[0][0] / run(None, SMOOTHED[:1], 0.1)[0][0] - 1) > 1e-3


@pytest.mark.parametrize("plan", [{"tp": 2, "sequence_parallel": True}, {"pp": 2, "gradient_accumulation_steps": 3}])
def test_smoothed_labels_on_two_ranks(plan: dict[str, Any], pool2: Any) -> None:
    first, last = pool2.run(run, plan, SMOOTHED, 0.1, timeout=300)
    # Rank 0 has the gathered gradients; the head runs on the last rank.
    assert_equal(SMOOTHED, [(*a[:2], b[2]) for a, b in zip(first, last, strict=True)], 0.1)


TWO_RANKS: dict[str, tuple[dict[str, Any], slice]] = {
    "tp2+sp": ({"tp": 2, "sequence_parallel": True}, slice(1, 3)),
    "tp2+sp, other heads": ({"tp": 2, "sequence_parallel": True}, slice(3, None)),
    "dp2 zero3": ({"dp": 2, "zero_stage": 3}, slice(1, 2)),
    "dp2 zero3, other heads": ({"dp": 2, "zero_stage": 3}, slice(2, None)),
}


@pytest.mark.parametrize("case", crossings(TWO_RANKS, but=["tp2+sp", "dp2 zero3"]))
def test_heads_on_two_ranks(case: str, pool2: Any) -> None:
    """97 words over two ranks are 49 and 48, and 36 tokens are no multiple of five."""
    plan, heads = TWO_RANKS[case]
    assert_equal(CASES[heads], pool2.run(run, plan, CASES[heads], timeout=300)[0])


def distributed(**overrides: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    model = build("gemma2", **overrides)
    stock = copy.deepcopy(model)
    ids = tokens(ROWS, LENGTH)
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan())
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


def penalty(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).square().mean()


def measured_in_inference_mode(model: Any, batch: Any) -> Tensor:
    outputs = model(**batch)
    with torch.inference_mode():
        outputs.logits.argmax(-1)
    return outputs.loss + penalty(outputs.logits)


def recomputed(model: Any, batch: Any) -> Tensor:
    outputs = model(**batch)
    return outputs.loss + checkpoint(penalty, outputs.logits, use_reentrant=False)


def doubled_in_backward(model: Any, batch: Any) -> Tensor:
    model.lm_head.register_full_backward_hook(lambda _, to_input, to_output: (to_input[0] * 2 * to_output[0].shape[0],))
    return model(**batch).loss


def watched_everywhere(model: Any, batch: Any) -> Tensor:
    sums = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        if module is model.lm_head:
            sums.append(args[0].detach().sum() + output.detach().mean())

    handle = nn.modules.module.register_module_forward_hook(look)
    try:
        loss = model(**batch).loss
    finally:
        handle.remove()
    (seen,) = sums
    return loss * seen


def of_the_head_alone(model: Any, batch: Any) -> Tensor:
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    outputs = model(**batch)
    return outputs.loss * (2 if outputs.logits.requires_grad else 1)


def handed_to_a_collective(model: Any, batch: Any) -> Tensor:
    """As accelerate's gather does: code that is not torch's Python must get the values."""
    outputs = model(**batch)
    logits = outputs.logits if outputs.logits.is_contiguous() else outputs.logits.contiguous()
    assert type(logits) is Tensor
    return outputs.loss


PROGRAMS = [
    measured_in_inference_mode, recomputed, doubled_in_backward, watched_everywhere, of_the_head_alone,
    handed_to_a_collective,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_programs_do_with_logits(program: Callable[[Any, Any], Tensor]) -> None:
    model, stock, batch = distributed(tie_word_embeddings=False)
    for each in model, stock:
        program(each, batch).backward()
    for (name, p), q in zip(model.named_parameters(), stock.named_parameters(), strict=True):
        assert (p.grad is None) == (q[1].grad is None), name
        if p.grad is not None:
            # float32: a lost or doubled term is off by more than a tenth.
            torch.testing.assert_close(p.grad, q[1].grad, rtol=1e-4, atol=1e-6, msg=name)


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(ROWS, LENGTH, 97)


def written(write: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def program(model: Any, outputs: Any) -> Any:
        outputs.loss.backward()
        write(model)
        return outputs.logits.argmax(-1)

    return program


def with_weights_of_a_call(model: Any, _: Any) -> Any:
    """The weights of the call have the same values and version, but gradients of their own."""
    own = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    ids = tokens(ROWS, LENGTH)
    return torch.func.functional_call(model, own, (), {"input_ids": ids, "labels": ids}).logits.sum()


ERRORS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "retain_grad": (lambda _, out: out.logits.retain_grad(), "does not reach them"),
    "autograd.grad": (lambda _, out: torch.autograd.grad(out.loss, [out.logits]), "does not reach them"),
    "a function": (lambda _, out: Summed.apply(out.logits).backward(), "gradient would be lost"),
    "a function, frozen body": (
        lambda model, _: Summed.apply(
            model.requires_grad_(False).lm_head.requires_grad_(True)
            and model(input_ids=tokens(ROWS, LENGTH), labels=tokens(ROWS, LENGTH)).logits
        ).backward(),
        "gradient would be lost",
    ),
    "create_graph": (
        lambda model, out: torch.autograd.grad(out.loss, [*model.parameters()], create_graph=True),
        "computes some gradients without a graph",
    ),
    "a step": (written(lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step()), r"before optimizer.step\(\)"),
    "data": (written(lambda model: model.lm_head.weight.data.mul_(1.01)), r"before optimizer.step\(\)"),
    "functional_call": (with_weights_of_a_call, "have changed"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_would_be_another_value_is_an_error(case: str) -> None:
    model, _, batch = distributed(tie_word_embeddings=False)
    program, message = ERRORS[case]
    with pytest.raises(UnreadableTensorError, match=message) as error:
        program(model, model(**batch))
    assert "gather_logits=True" in str(error.value)


def test_a_graph_that_is_kept_runs_twice() -> None:
    model, _, batch = distributed()
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    once = {n: p.grad.clone() for n, p in model.named_parameters()}
    loss.backward()
    assert all(torch.equal(2 * once[n], p.grad) for n, p in model.named_parameters())


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    words = Words.of_columns(len(weight), vocab_size=len(weight), ignored=-100, axis=Axis("tp"))
    what = ChunkedLoss(words=words, steps=(), dtype=hidden.dtype)
    factor = torch.tensor(1 / len(targets))
    result: Tensor = ChunkedHeadLoss.apply(hidden, weight, None, targets, factor, what)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_eighth_of_the_logits(dtype: torch.dtype) -> None:
    """Beside the gradients, head and loss hold an eighth of whole 32-bit logits at most.

    16-bit gradients of the weight are summed in 32 bits. `test_head_memory.py` has realistic widths.
    """
    num_tokens, width, num_words = 4096, 8, 1000
    hidden = torch.randn(num_tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(num_words, width, dtype=dtype, requires_grad=True)
    targets = torch.arange(num_tokens) % num_words
    with LiveBytes([hidden, weight, targets]) as memory:
        before = memory.now
        loss = head_loss(hidden, weight, targets)
        loss.backward()
    of_weight = dtype.itemsize + (4 if dtype == torch.bfloat16 else 0)
    gradients = dtype.itemsize * hidden.numel() + of_weight * weight.numel()
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
