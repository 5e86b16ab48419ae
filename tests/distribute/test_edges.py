"""Odd corners: one process, tiny vocabularies, two forwards before a backward, reentrant recomputation."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import meshwright as mw
from harness.pool import WorkerError
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.reference import make_optimizer
from support.scenarios import one_step
from support.short_programs import Plan, batches, distribute, gradients_of, train, weights_of, worst
from support.tiers import crossings

SP = {"tp": 2, "sequence_parallel": True}


def tiny_vocabulary(plan: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """Five words over four ranks: the last rank holds none, and the padding word sits on the first."""
    ids = tokens(2, 6, vocab_size=5)
    with Float64():
        return train(build("llama", vocab_size=5).double(), plan, [{"input_ids": ids, "labels": ids}])[1]


def test_a_rank_without_words(pool4: Any) -> None:
    expected, actual = tiny_vocabulary(None), pool4.run(tiny_vocabulary, {"tp": 4, "sequence_parallel": True})[0]
    for name, gradient in expected.items():  # float64: only the order of sums differs
        if not name.endswith("k_proj.bias"):
            assert relative_difference(actual[name], gradient) < 1e-10, name


def two_forwards(plan: dict[str, Any] | None, checkpointing: bool) -> dict[str, torch.Tensor]:
    """The losses of two batches of other lengths, summed, then one backward."""
    with Float64():
        model = build("qwen3").double()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model, _, _ = distribute(plan, model)
        losses = [model(input_ids=(ids := tokens(2, n)), labels=labels_for(ids)).loss for n in (12, 8)]
        (losses[0] + losses[1]).backward()
    return gradients_of(model, plan)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_forwards_before_a_backward(checkpointing: bool, pool2: Any) -> None:
    expected, actual = two_forwards(None, False), pool2.run(two_forwards, SP, checkpointing)[0]
    assert max(relative_difference(actual[name], g) for name, g in expected.items()) < 1e-10


def share_blocks(model: Any) -> None:
    """One MLP and one norm in two layers, one norm at both ends of the layers, keys that are the values."""
    first, second = model.model.layers
    second.mlp, second.post_attention_layernorm = first.mlp, first.post_attention_layernorm
    model.model.norm = first.input_layernorm
    first.self_attn.v_proj = first.self_attn.k_proj


def share_projections(model: Any) -> None:
    """One attention, one output projection of two MLPs, and one weight of two modules."""
    first, second = model.model.layers
    second.self_attn, second.mlp.down_proj = first.self_attn, first.mlp.down_proj
    second.mlp.up_proj.weight = first.mlp.up_proj.weight


def share_layer(model: Any) -> None:
    """One layer at both places, as in ALBERT."""
    model.model.layers[1] = model.model.layers[0]


SHARED = {change.__name__: change for change in (share_blocks, share_projections, share_layer)}
SHARED_UNDER: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "sp": {**SP, "recompute": "full"},
    "pp2": {"pp": 2, "gradient_accumulation_steps": 2},
    "cp2": {"cp": 2, "recompute": "full"},
    "zero3": {"dp": 2, "zero_stage": 3},
}


def with_shared_modules(plan: Plan, name: str, folder: str | None = None) -> dict[str, torch.Tensor]:
    """The weights after two clipped steps; ``save_weights`` writes them to the folder."""
    with Float64():
        model: Any = build("llama").double()
        SHARED[name](model)
        if name != "share_blocks":  # on one device, both places of an attention would write to one cache
            model.config.use_cache = False
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = distribute(plan, model, optimizer, batches(2))
        for batch in loader:
            model(**batch).loss.backward()
            mw.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
    if folder is not None:
        mw.save_weights(model, folder)
    return weights_of(model, plan)


@pytest.mark.parametrize(
    ("plan_name", "name"),
    crossings(
        itertools.product(SHARED_UNDER, SHARED),
        only=[(plan_name, "share_projections") for plan_name in ("sp", "cp2", "zero3")],
    ),
)
def test_modules_that_layers_share(plan_name: str, name: str, pool2: Any, tmp_path: Path) -> None:
    plan = SHARED_UNDER[plan_name]
    if name == "share_layer" and plan.get("pp", 1) > 1:
        with pytest.raises(WorkerError, match=r"model\.layers\.0 and model\.layers\.1 are one module"):
            pool2.run(with_shared_modules, plan, name)
        return
    expected = with_shared_modules(None, name)
    actual = pool2.run(with_shared_modules, plan, name, str(tmp_path))[0]
    # 1e-10 in float64: only the order of sums differs. A use whose gradient is lost, or that counts twice, differs by
    # more than 1e-3.
    assert worst(actual, expected) < 1e-10
    written: dict[str, torch.Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        written |= load_file(file)
    assert len(written) > 10 and worst(expected | written, expected) < 1e-10  # a shared weight may be there once


def test_an_attention_that_is_twice_in_a_cache_is_named() -> None:
    model: Any = build("llama")
    share_projections(model)
    model = mw.to_distributed(model, plan="dp1", device_num=1)[0]
    ids = tokens(2, 12)
    with pytest.raises(mw.PlanError, match=r"layers.0.self_attn and .*layers.1.self_attn are one .*use_cache = False"):
        model(input_ids=ids, labels=ids)
    model.config.use_cache = False
    model(input_ids=ids, labels=ids).loss.backward()


def reentrant(plan: dict[str, Any]) -> float:
    gradients = []
    for use_reentrant in (None, True):
        with Float64():
            model = build("llama").double()
            if use_reentrant:
                model.activation_checkpointing_enable({"use_reentrant": True})
            model = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))[0]
            ids = tokens(2, 12)
            model(input_ids=ids, labels=ids).loss.backward()
        gradients.append(mw.full_gradients(model))
    return max((relative_difference(gradients[1][n], g) for n, g in gradients[0].items()), default=0.0)


@pytest.mark.parametrize(
    "plan", [SP, {"dp": 2, "zero_stage": 3}, {"dp": 2, "gradient_accumulation_steps": 2}], ids=["sp", "zero3", "ga2"]
)
def test_reentrant_checkpointing(plan: dict[str, Any], pool2: Any) -> None:
    assert pool2.run(reentrant, plan)[0] < 1e-10


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_one_process(zero_stage: int) -> None:
    ids = tokens(4, 12)
    weights = []
    for is_distributed in (False, True):
        with Float64():
            model = build("gemma2").double()
            optimizer: Any = make_optimizer(model)
            loader: Any = [{"input_ids": ids, "labels": labels_for(ids)}]
            if is_distributed:
                plan = mw.ParallelPlan(zero_stage=zero_stage, gradient_accumulation_steps=2)
                model, optimizer, loader = mw.to_distributed(
                    model, optimizer, loader, device_num=1, config=mw.ToDistributedConfig(plan=plan)
                )
            for batch in loader:
                model(**batch).loss.backward()
                mw.clip_grad_norm_(model, 0.5)
                optimizer.step()
                optimizer.zero_grad()
        weights.append(mw.full_state_dict(model))
    # 1e-10 in float64: micro-batches sum in another order.
    assert max(relative_difference(weights[1][n], w) for n, w in weights[0].items()) < 1e-10


def frozen(plan: dict[str, Any]) -> tuple[bool, bool]:
    """Everything frozen but the second layer, with an optimizer over all parameters."""
    model = build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    optimizer = make_optimizer(model)
    model, optimizer, _ = mw.to_distributed(
        model, optimizer, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
    )
    before = mw.full_state_dict(model)
    ids = tokens(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    mw.clip_grad_norm_(model, 1.0)
    optimizer.step()
    after = mw.full_state_dict(model)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    return all("layers.1" in name for name in changed), "model.layers.1.mlp.up_proj.weight" in changed


@pytest.mark.parametrize("plan", [SP, {"dp": 2}, *({"dp": 2, "zero_stage": stage} for stage in (1, 2, 3))])
def test_frozen_parameters_stay_frozen(plan: dict[str, Any], pool2: Any) -> None:
    assert pool2.run(frozen, plan)[0] == (True, True)


def unused_parameter(plan: dict[str, Any]) -> bool:
    """A trainable parameter that the forward pass does not reach keeps its value: AdamW would decay it."""
    model = build("llama")
    model.spare = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model, optimizer, _ = mw.to_distributed(
        model, optimizer, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
    )
    ids = tokens(2, 12)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return bool((model.spare == 1).all())


@pytest.mark.parametrize("plan", [{"dp": 2}, {"dp": 2, "zero_stage": 1}, {"dp": 2, "zero_stage": 2}])
def test_an_unused_parameter_is_left_alone(plan: dict[str, Any], pool2: Any) -> None:
    assert all(pool2.run(unused_parameter, plan))


def ranks_disagree_about_items(meaning: str) -> float:
    import torch.distributed as dist

    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2), num_items_in_batch=meaning)  # type: ignore[arg-type]
    model = mw.to_distributed(build("llama"), config=config)[0]
    ids = tokens(4, 12).chunk(2)[dist.get_rank()]
    return model(input_ids=ids, labels=ids, num_items_in_batch=22).loss.item()


@pytest.mark.parametrize(("meaning", "items"), [("auto", 44), ("local", 44), ("global", 22)])
def test_what_num_items_in_batch_counts(meaning: str, items: int, pool2: Any) -> None:
    # Each rank has 22 targets: 22 cannot be the count of the global batch, so "auto" adds them up.
    ids = tokens(4, 12)
    expected = build("llama")(input_ids=ids, labels=ids, num_items_in_batch=items).loss.item()
    assert pool2.run(ranks_disagree_about_items, meaning) == pytest.approx([expected] * 2, rel=1e-5)


def test_micro_batches_of_unequal_size(pool2: Any) -> None:
    step = pool2.run(one_step, "gemma2", "plain", {**SP, "micro_batch_size": 3})[0]
    assert abs(step.loss - one_step("gemma2", "plain").loss) < 1e-12


def sometimes_used(plan: dict[str, Any] | None, when: str) -> float:
    """The value, after two steps, of a parameter that only some passes or some ranks reach."""
    rank = torch.distributed.get_rank() if plan is not None else None
    with Float64():
        model: Any = build("llama").double()
        model.spare = torch.nn.Parameter(torch.ones(7).double())
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if plan is not None:
            model, optimizer, _ = mw.to_distributed(
                model, optimizer, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
            )
        ids = tokens(2, 12)
        for _ in range(2):
            for i in range(2):
                with mw.no_sync(model) if plan is not None and i == 0 else contextlib.nullcontext():
                    loss = model(input_ids=ids, labels=ids).loss
                    if when == "in the first pass" and i == 0:
                        loss = loss + model.spare.sum()
                    # On one of two ranks, whose average halves it.
                    if when == "on one rank" and i == 1 and rank in (None, 1):
                        loss = loss + model.spare.sum() * (0.5 if rank is None else 1.0)
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        state = mw.full_state_dict(model)
        return state["spare"].sum().item() if rank in (None, 0) else 0.0


@pytest.mark.parametrize("when", ["in the first pass", "on one rank"])
@pytest.mark.parametrize("plan", [{"dp": 2}, {"dp": 2, "zero_stage": 1}, {"dp": 2, "zero_stage": 2}])
def test_a_parameter_that_some_passes_do_not_reach(plan: dict[str, Any], when: str, pool2: Any) -> None:
    expected = sometimes_used(None, when)
    assert expected < 7 - 0.1  # it did move
    assert pool2.run(sometimes_used, plan, when)[0] == pytest.approx(expected, abs=1e-12)
