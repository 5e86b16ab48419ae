"""Behaviour around the step: guarded reads, evaluation, generation, dropout, saving."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import meshwright as mw
from harness.torchrun import ROOT
from meshwright.parallel.forward.refused_arguments import table
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.tiers import crossing, quick

SP = {"tp": 2, "sequence_parallel": True}


def distributed(family: str, plan: dict[str, Any], *, config: dict[str, Any] | None = None, **overrides: Any) -> Any:
    options = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), **(config or {}))
    return mw.to_distributed(build(family, **overrides), config=options)[0]


def read_training_logits() -> str:
    ids = tokens(2, 12)
    logits = distributed("gemma2", SP)(input_ids=ids, labels=ids).logits
    reads = (
        lambda: logits.argmax(-1),
        lambda: logits[0],
        lambda: logits.shape,
        lambda: logits + logits,
        lambda: F.cross_entropy(logits.view(-1, 97), ids.view(-1)),
        lambda: logits.numpy(),
        lambda: logits.tolist(),
    )
    for read in reads:
        with pytest.raises(mw.UnreadableTensorError, match=r"gather_logits=True"):
            read()
    return repr(logits)


def test_training_logits_cannot_be_read_and_say_what_gathers_them(pool2: Any) -> None:
    assert "gather_logits" in pool2.run(read_training_logits)[0]


def gathered_logits(family: str) -> tuple[torch.Tensor, float]:
    ids = tokens(2, 12)
    output = distributed(family, SP, config={"gather_logits": True})(input_ids=ids, labels=labels_for(ids))
    return output.logits.detach(), output.loss.item()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gather_logits(family: str, pool2: Any) -> None:
    ids = tokens(2, 12)
    expected = build(family)(input_ids=ids, labels=labels_for(ids))
    for logits, loss in pool2.run(gathered_logits, family):
        # 1e-5: float32 sums in another order.
        assert relative_difference(logits, expected.logits) < 1e-5
        assert abs(loss - expected.loss.item()) < 1e-5


def evaluation(family: str) -> tuple[torch.Tensor, float, bool]:
    ids = tokens(2, 12)
    model = distributed(family, SP).eval()
    with torch.no_grad():
        output = model(input_ids=ids, labels=labels_for(ids))
    return output.logits, output.loss.item(), output.logits.requires_grad


def test_evaluation_has_whole_logits_and_the_loss(pool2: Any) -> None:
    ids = tokens(2, 12)
    expected = build("gemma2").eval()(input_ids=ids, labels=labels_for(ids))
    for logits, loss, _ in pool2.run(evaluation, "gemma2"):
        assert relative_difference(logits, expected.logits) < 1e-5
        assert abs(loss - expected.loss.item()) < 1e-5


def own_loss(plan: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """A loss that the user computes from whole logits, in training without labels."""
    ids = tokens(2, 12)
    with Float64():
        model = build("qwen3").double() if plan is None else None
        if plan is not None:
            config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
            model = mw.to_distributed(build("qwen3").double(), config=config)[0]
        assert model is not None
        logits = model(input_ids=ids).logits
        F.cross_entropy(logits[:, :-1].reshape(-1, 97), ids[:, 1:].reshape(-1)).backward()
        if plan is None:
            return {n: p.grad for n, p in model.named_parameters()}
        return mw.full_gradients(model)


@pytest.mark.parametrize("plan", [{"tp": 2}, SP])
def test_own_loss_from_whole_logits(plan: dict[str, Any], pool2: Any) -> None:
    expected = own_loss(None)
    actual = pool2.run(own_loss, plan)[0]
    # 1e-10 in float64: only the order of sums differs.
    assert max(relative_difference(actual[n], g) for n, g in expected.items()) < 1e-10


def generate(family: str, plan: dict[str, Any] | None, **options: Any) -> list[list[int]]:
    model = build(family) if plan is None else distributed(family, plan)
    ids = tokens(2, 5)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return (
        model.eval()
        .generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False, use_cache=True, **options)
        .tolist()
    )


@pytest.mark.parametrize("plan", [{"tp": 2}, SP])
@pytest.mark.parametrize("family", [quick("llama"), crossing("qwen3"), "phi3"])
def test_generate(family: str, plan: dict[str, Any], pool2: Any) -> None:
    expected = generate(family, None)
    assert pool2.run(generate, family, plan) == [expected, expected]


def ask_for_internals(option: str) -> None:
    distributed("llama", SP)(input_ids=tokens(1, 4), **{option: True})


@pytest.mark.parametrize("option", ["output_hidden_states", "output_attentions"])
def test_internals_are_refused_by_name(option: str, pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(ask_for_internals, option):
        assert kind == "PlanError" and option in message and "tp=1" in message


def test_the_table_of_refused_arguments_is_in_the_docs() -> None:
    text = (ROOT / "docs/support.md").read_text()
    assert "\n".join(table()) in text


def dropout_masks(plan: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """The zeros that each dropout of a layer draws, as this rank sees them."""
    torch.manual_seed(dist.get_rank())  # an unseeded script: every process has a state of its own
    dropout = {"resid_pdrop": 0.5, "attention_dropout": 0.5}
    model = distributed("phi3", plan, config={"draws": "rank"}, **dropout, attn_implementation="eager")
    masks: dict[str, list[torch.Tensor]] = {"residual": [], "attention": []}
    layer = model.model.layers[0]
    layer.resid_attn_dropout.register_forward_hook(lambda m, args, out: masks["residual"].append(out == 0))
    original = F.dropout

    def record(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        out = original(x, p, training, inplace)
        if x.ndim == 4:
            masks["attention"].append((out == 0) & (x != 0))
        return out

    F.dropout = record
    try:
        before = torch.get_rng_state()
        for _ in range(2):
            model(input_ids=tokens(4, 12), labels=tokens(4, 12)).loss.backward()
        assert torch.equal(before, torch.get_rng_state())  # the user's own random state is left alone
    finally:
        F.dropout = original
    return masks


def test_dropout_masks_are_shared_where_replicated_and_differ_where_sharded(pool2: Any) -> None:
    first, second = pool2.run(dropout_masks, {"tp": 2})
    assert all(torch.equal(a, b) for a, b in zip(first["residual"], second["residual"], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first["attention"], second["attention"], strict=True))
    assert not torch.equal(first["residual"][0], first["residual"][1])  # another mask every pass

    first, second = pool2.run(dropout_masks, SP)  # other tokens on each rank: other masks everywhere
    assert not any(torch.equal(a, b) for a, b in zip(first["attention"], second["attention"], strict=True))
    for mask, other in zip(first["residual"], second["residual"], strict=True):  # a hook sees those of both ranks
        half, rest = mask.flatten(0, 1).chunk(2)
        assert torch.equal(mask, other) and not torch.equal(half, rest)

    first, second = pool2.run(dropout_masks, {"dp": 2})  # other rows on each rank
    assert not torch.equal(first["residual"][0], second["residual"][0])


def checkpointed_dropout_gradients(plan: dict[str, Any]) -> float:
    """The difference that recomputation makes to the gradients of a model with dropout."""
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(5)
        model = distributed("phi3", plan, resid_pdrop=0.5, attention_dropout=0.3, attn_implementation="eager")
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(6)
        model(input_ids=tokens(4, 12), labels=tokens(4, 12)).loss.backward()
        gradients.append(mw.full_gradients(model))
    return max((relative_difference(gradients[1][n], g) for n, g in gradients[0].items()), default=0.0)


@pytest.mark.parametrize("plan", [{"tp": 2}, SP])
def test_checkpointing_replays_the_dropout_masks(plan: dict[str, Any], pool2: Any) -> None:
    # Equal masks give equal gradients to the bit or nearly so; another mask is off by order 1.
    assert pool2.run(checkpointed_dropout_gradients, plan)[0] < 1e-5


def save(path: str) -> None:
    distributed("gemma2", {"dp": 1, **SP}).save_pretrained(path)


def test_save_pretrained_writes_one_device_weights(pool2: Any, tmp_path: Any) -> None:
    pool2.run(save, str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    expected = build("gemma2").state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())


def shards_joined(family: str, plan: dict[str, Any], **overrides: Any) -> dict[str, torch.Tensor]:
    return mw.full_state_dict(distributed(family, plan, **overrides))


@pytest.mark.parametrize("family", ["phi3", crossing("gemma2"), crossing("olmo2")])
def test_initial_weights_are_bitwise_those_of_one_process(family: str, pool2: Any, pool4: Any) -> None:
    expected = build(family).state_dict()
    for pool, plan in ((pool2, SP), (pool4, {"tp": 2, "dp": 2, "zero_stage": 1}), (pool4, {"tp": 4})):
        actual = pool.run(shards_joined, family, plan)[0]
        assert all(torch.equal(actual[name], weight) for name, weight in expected.items())


def unseeded() -> tuple[float, float]:
    model = build("llama", seed=dist.get_rank())
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2))
    model, _, _ = mw.to_distributed(model, config=config)
    return model.lm_head.weight.sum().item(), build("llama", seed=0).lm_head.weight.sum().item()


def test_ranks_with_different_weights_get_those_of_the_first(pool2: Any) -> None:
    for actual, expected in pool2.run(unseeded):
        assert actual == expected


def nan_loss(plan: dict[str, Any]) -> tuple[float, float]:
    model = distributed("llama", plan)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    loss = model(input_ids=tokens(2, 6), labels=tokens(2, 6)).loss
    loss.backward()
    return loss.item(), mw.clip_grad_norm_(model, 1.0).item()


@pytest.mark.parametrize("plan", [SP, {"dp": 2, "zero_stage": 0}])
def test_nan_is_passed_through(plan: dict[str, Any], pool2: Any) -> None:
    for loss, norm in pool2.run(nan_loss, plan):
        assert loss != loss and norm != norm


def half_precision_step(plan: dict[str, Any] | None, precision: str) -> dict[str, torch.Tensor]:
    ids = tokens(4, 12)
    model = build("llama") if plan is None else distributed("llama", plan)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    if plan is None:
        return {n: p.grad for n, p in model.named_parameters()}
    return mw.full_gradients(model)


def test_bf16_autocast_is_as_exact_as_on_one_device(pool2: Any) -> None:
    def error(gradients: dict[str, torch.Tensor]) -> float:
        return sum((gradients[n] - g).square().sum().item() for n, g in exact.items()) ** 0.5

    exact = half_precision_step(None, "float32")
    stock, ours = half_precision_step(None, "bf16"), pool2.run(half_precision_step, SP, "bf16")[0]
    # bf16 rounds where it likes, so the float32 gradients are the judge: within 1.5 of stock bf16's own error.
    assert error(ours) < 1.5 * error(stock)
    size = sum(g.square().sum().item() for g in exact.values()) ** 0.5
    assert error(stock) < 0.05 * size  # a missing term would be an error of order 1


def float64_under_autocast(plan: dict[str, Any] | None) -> float:
    model = build("llama").double()
    if plan is not None:
        model = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))[0]
    ids = tokens(4, 12)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item()


def test_autocast_leaves_float64_alone(pool2: Any) -> None:
    assert pool2.run(float64_under_autocast, SP) == pytest.approx([float64_under_autocast(None)] * 2, rel=1e-6)
