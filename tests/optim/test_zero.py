"""ZeRO stages 2 and 3: the numbers of one process, and the memory that they are for.

Tolerance 1e-10 in float64 and 1e-5 in float32 for the reasons of test_parity.py: only the order of sums differs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import meshwright as mw
from meshwright.errors import OptimizerMismatchError, PlanError
from meshwright.mesh.axes import Mesh
from meshwright.parallel.fake_passes.measured_shape import LiveBytes
from meshwright.parallel.gradients.gradient_hooks import GradientHooks
from meshwright.parallel.gradients.sync import GradientSync
from support.exact import Float64, relative_difference
from support.models import FAMILIES, SIZES, build, labels_for, tokens
from support.optimizers import OfOneNorm
from support.own_gradients import on_arrival
from support.parity import TOLERANCE, largest_differences, pool_for, reference
from support.reference import train_family
from support.tiers import crossing, crossings

TP2_DP2 = {"dp": 2, "tp": 2, "sequence_parallel": True}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "stage 2": ({**TP2_DP2, "zero_stage": 2}, {}, {}),
    "stage 2, micro-batches under no_sync": (
        {"dp": 2, "zero_stage": 2, "gradient_accumulation_steps": 2},
        {},
        {"use_no_sync": True},
    ),
    "stage 3, tied, micro-batches, recompute": (
        {"dp": 2, "zero_stage": 3, "micro_batch_size": 1, "recompute": "full"},
        {"tie_word_embeddings": True},
        {},
    ),
    "stage 3, one kv head, no_sync, recompute": (
        {**TP2_DP2, "zero_stage": 3, "recompute": "full"},
        {"num_key_value_heads": 1},
        {"use_no_sync": True},
    ),
    "stage 3 over four, odd sizes": ({"dp": 4, "zero_stage": 3}, {"intermediate_size": 45}, {}),
}


def outlives_a_forward_without_backward() -> bool:
    model = mw.to_distributed(build("llama"), plan="dp2 zero3")[0].train()
    ids = tokens(2, 8)
    model(input_ids=ids, labels=ids)
    reference = weakref.ref(model)
    del model
    gc.collect()
    return reference() is not None


def test_a_forward_without_backward_is_forgotten(pool2: Any) -> None:
    """An evaluation without no_grad, for example: neither its activations nor the model live on."""
    assert pool2.run(outlives_a_forward_without_backward) == [False, False]


@pytest.mark.parametrize("case", crossings(CASES, only=[], quick=["stage 2"]))
def test_equals_one_process_in_float64(case: str, request: pytest.FixtureRequest) -> None:
    plan, overrides, options = CASES[case]
    ranks = pool_for(plan, request).run(train_family, "qwen3", torch.float64, plan, **options, **overrides)
    differences = largest_differences(ranks[0], reference("qwen3", **overrides))
    assert max(differences.values()) <= TOLERANCE, differences
    assert all(rank.losses == ranks[0].losses and rank.norms == ranks[0].norms for rank in ranks)


@pytest.mark.crossing
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_and_norms_over_20_steps(stage: int, pool4: Any) -> None:
    options = {"steps": 20, "accumulation": 1, "lr": 1e-3}
    ranks = pool4.run(train_family, "llama", torch.float32, {**TP2_DP2, "zero_stage": stage}, **options)
    expected = reference("llama", torch.float32, **options)
    for ours, theirs in ((ranks[0].losses, expected.losses), (ranks[0].norms, expected.norms)):
        assert max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True)) <= 1e-5


def run_without_inner_micro_batches() -> Any:
    """Gradients of inner micro-batches that are reduced and then forgotten."""
    from meshwright.optim.zero.zero_optimizer import ReduceScatter

    original = ReduceScatter.add
    ReduceScatter.add = lambda *_: None  # type: ignore[method-assign]
    try:
        plan = {"dp": 2, "zero_stage": 3, "gradient_accumulation_steps": 2}
        return train_family("llama", torch.float64, plan, steps=1)
    finally:
        ReduceScatter.add = original  # type: ignore[method-assign]


def test_forgetting_inner_micro_batches_would_be_caught(pool2: Any) -> None:
    ranks = pool2.run(run_without_inner_micro_batches)
    expected = train_family("llama", torch.float64, None, steps=1)
    assert largest_differences(ranks[0], expected)["gradients"] > 1e-2


def run_in_bfloat16(stage: int) -> list[float]:
    return train_family("llama", torch.bfloat16, {"dp": 2, "zero_stage": stage}, steps=8, lr=1e-4).losses


def test_half_precision_has_the_masters_of_stage_1(pool2: Any) -> None:
    """To the bit: the same gradients in float32, and the same float32 weights, wherever those are kept."""
    losses = [pool2.run(run_in_bfloat16, stage)[0] for stage in (1, 2, 3)]
    assert losses[0] == losses[1] == losses[2]


def bytes_at_rest(plan: dict[str, Any] | None, *, use_no_sync: bool = False) -> tuple[int, int]:
    """Bytes of parameters, gradients and optimizer of this rank after backward; and the most while it was built."""
    config_class, model_class, traits = FAMILIES["qwen2"]
    sizes = {**SIZES, **traits, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
    ids = tokens(2, 8)
    with mw.deferred_init() if plan else contextlib.nullcontext():
        model: Any = model_class(config_class(**sizes)).train()
    with LiveBytes(() if plan else model.parameters()) as memory:
        optimizer = torch.optim.AdamW(model.parameters())
        if plan:
            config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
            model, optimizer, _ = mw.to_distributed(model, optimizer, config=config)
        built = memory.peak
        for is_last in (False, True):
            with mw.no_sync(model) if use_no_sync and is_last else contextlib.nullcontext():
                model(input_ids=ids, labels=ids).loss.backward()
            if not is_last:
                optimizer.step()
                optimizer.zero_grad()
        gc.collect()
        least = memory.now
        for _ in range(10):  # gloo's threads let go of a collective's tensors shortly after it has ended
            time.sleep(0.02)
            least = min(least, memory.now)
        return least, built


def test_bytes_of_a_rank(pool2: Any, pool4: Any) -> None:
    """At most 1.05 of its share: the rest is padding, and numbers such as the optimizer's steps."""
    total, _ = bytes_at_rest(None)
    assert total > 12e6
    for pool, plan in ((pool2, {"dp": 2}), (pool4, {"dp": 4}), (pool4, {**TP2_DP2})):
        share = total / (plan["dp"] * plan.get("tp", 1))
        for held, built in pool.run(bytes_at_rest, {**plan, "zero_stage": 3}):
            assert held <= 1.05 * share, (plan, held / share)
            # Nor does it ever have all of the weights, of which these bytes are four times: only a tensor at a time.
            assert built <= 1.05 * share / 4 + 2 * 512 * 128 * 4, (plan, built)
    stage_2, _ = pool2.run(bytes_at_rest, {"dp": 2, "zero_stage": 2})[0]
    assert stage_2 > 1.05 * total / 2  # what would have failed


def test_stage_2_keeps_no_whole_gradients_under_no_sync(pool2: Any) -> None:
    held = [pool2.run(bytes_at_rest, {"dp": 2, "zero_stage": stage}, use_no_sync=True)[0][0] for stage in (1, 2)]
    parameters = bytes_at_rest(None)[0] / 4
    assert held[0] - held[1] == pytest.approx(parameters / 2, rel=0.05)  # whole gradients, or half of them


def train_and_export(folder: str, plan: dict[str, Any], weights: str | None) -> dict[str, Any]:
    """Build from a file or a seed, train a step, write, read and generate."""
    if weights is None:
        model = build("llama", tie_word_embeddings=True)
    else:
        config_class, model_class, traits = FAMILIES["llama"]
        with torch.device("meta"):
            model = model_class(config_class(**{**SIZES, **traits, "tie_word_embeddings": True})).train()
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), weights=weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, _ = mw.to_distributed(model, optimizer, config=config)
    before = mw.full_state_dict(model)
    with torch.inference_mode():  # what is gathered here must not be used for training
        model.eval()(input_ids=tokens(1, 4))
    ids = tokens(2, 8)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.save_pretrained(folder)
    rank = torch.distributed.get_rank()
    prompt = tokens(1, 3 + rank // plan.get("tp", 1), seed=3)  # one data-parallel rank has more to say than another
    text = model.eval().generate(prompt, max_length=12, do_sample=False)
    unreadable = model.get_parameter("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(mw.UnreadableTensorError):
        unreadable.isnan().all()
    return {
        "before": before,
        "after": mw.full_state_dict(model),
        "prompt": prompt,
        "text": text,
        "shape": tuple(unreadable.shape),
    }


@pytest.mark.parametrize("plan", [crossing({"dp": 2, "zero_stage": 3}), {**TP2_DP2, "zero_stage": 3}], ids=str)
def test_in_and_out(plan: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = build("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "in")
    pool = pool_for(plan, request)
    from_seed = pool.run(train_and_export, str(tmp_path / "out"), plan, None)
    from_file = pool.run(train_and_export, str(tmp_path / "out2"), plan, str(tmp_path / "in"))
    for ranks, folder in ((from_seed, "out"), (from_file, "out2")):
        state = model.state_dict()
        assert ranks[0]["before"].keys() == state.keys()
        assert all(torch.equal(ranks[0]["before"][name], value) for name, value in state.items())
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert all(torch.equal(ranks[0]["after"][name], value) for name, value in saved.state_dict().items())
        assert not torch.equal(saved.lm_head.weight, model.lm_head.weight)
        for rank in ranks:
            expected = saved.generate(rank["prompt"], max_length=12, do_sample=False)
            assert torch.equal(rank["text"], expected)
            assert rank["shape"][1] == SIZES["hidden_size"]


def gradients_of_some(plan: dict[str, Any] | None, trained: str) -> dict[str, Tensor]:
    with Float64():
        model: Any = build("llama").double()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        if plan is not None:
            config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
            model, _, (batch,) = mw.to_distributed(model, optimizer, [_batch()], config=config)
        else:
            batch = _batch()
        model(**batch).loss.backward()
        return mw.full_gradients(model) if plan else {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def _batch() -> dict[str, Tensor]:
    return {"input_ids": tokens(4, 12), "labels": labels_for(tokens(4, 12))}


@pytest.mark.parametrize("trained", ["q_proj", "layers.1.input_layernorm", "embed_tokens"])
def test_frozen_parameters(trained: str, pool4: Any) -> None:
    for stage in (2, 3):
        ours = pool4.run(gradients_of_some, {**TP2_DP2, "zero_stage": stage}, trained)[0]
        theirs = gradients_of_some(None, trained)
        assert ours.keys() == theirs.keys()
        assert all(relative_difference(ours[name], theirs[name]) <= TOLERANCE for name in theirs)


def loss_of_a_frozen_model(stage: int) -> float:
    model: Any = build("llama").requires_grad_(False)
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2, zero_stage=stage))
    model, _, (batch,) = mw.to_distributed(model, None, [_batch()], config=config)
    loss = model(**batch).loss
    norm = mw.clip_grad_norm_(model, 1.0)
    assert norm.item() == 0.0
    return loss.item()


def test_a_model_that_is_frozen_entirely(pool2: Any) -> None:
    expected = build("llama")(**_batch()).loss.item()
    for stage in (2, 3):  # float32: another order of the sum over the rows
        assert pool2.run(loss_of_a_frozen_model, stage)[0] == pytest.approx(expected, rel=1e-6)


def use_whole_weights(what: str) -> None:
    model = build("llama")
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2, zero_stage=3))
    model, _, _ = mw.to_distributed(model, None, config=config)
    if what == "state_dict":
        model.model.state_dict()
    elif what == "again":
        mw.to_distributed(model, None, config=config)
    else:
        with torch.no_grad():
            model.lm_head.weight.sum()


def test_whole_weights_are_refused_by_name(pool2: Any) -> None:
    for what, kind, text in [
        ("state_dict", "UnreadableTensorError", "full_state_dict"),
        ("again", "AlreadyDistributedError", "earlier call"),
        ("read", "UnreadableTensorError", "full_state_dict"),
    ]:
        for error, message in pool2.run_expecting_error(use_whole_weights, what):
            assert error == kind and text in message, message


def losses_after_a_failed_pass(fails: bool) -> list[float]:
    """A pass that raises in backward, of which nothing may be left."""
    model: Any = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2, zero_stage=3))
    model, optimizer, _ = mw.to_distributed(model, optimizer, config=config)
    losses = []
    for step in range(3):
        loss = model(**_batch()).loss
        if fails and step == 1:
            other = model(**_batch()).loss
            gate = on_arrival(model.model.layers[0].self_attn.q_proj.weight, _raise)
            with pytest.raises(ArithmeticError):
                other.backward()
            gate.remove()
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _raise(_: Tensor) -> None:
    raise ArithmeticError


def test_a_failed_backward_leaves_nothing(pool2: Any) -> None:
    assert pool2.run(losses_after_a_failed_pass, True) == pool2.run(losses_after_a_failed_pass, False)


def own_loop(stage: int, use_no_sync: bool) -> list[Tensor]:
    """A program that is data-parallel by itself."""
    torch.manual_seed(0)
    model = nn.Linear(7, 3)
    mesh = mw.ProcessMesh([0, 1], ["dp"])
    optimizer = mw.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), mesh=mesh, stage=stage)
    rows = torch.randn(8, 7).chunk(2)[torch.distributed.get_rank()]
    for _ in range(3):
        for index, row in enumerate(rows):
            with mw.no_sync(optimizer) if use_no_sync and index < 3 else contextlib.nullcontext():
                (model(row).square().mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_shard_optimizer_in_stage_2(pool2: Any) -> None:
    expected = pool2.run(own_loop, 1, True)
    for ranks in (pool2.run(own_loop, 2, True), pool2.run(own_loop, 2, False)):
        # float32, three steps: gradients are summed in another order.
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ranks[0], expected[0], strict=True))


def own_loop_of_another_part() -> None:
    model = nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 2))
    parts = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    mw.shard_optimizer(mw.ChainedOptimizer(*parts))
    model(torch.randn(4, 7)).square().mean().backward()
    parts[torch.distributed.get_rank()].step()


def own_loop_of_another_rate() -> None:
    model = nn.Linear(7, 3)
    rank = torch.distributed.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank)
    mw.shard_optimizer(optimizer, mesh=mw.ProcessMesh([0, 1], ["dp"]))
    model(torch.randn(4, 7)).square().mean().backward()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (own_loop_of_another_part, ("number 1 of the chain", "number 2 of the chain")),
        (own_loop_of_another_rate, ("lr of the optimizer's group 0: 0.1 on rank 0",)),
    ],
)
def test_shard_optimizer_compares_the_ranks(program: Any, words: tuple[str, ...], pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(program):
        assert kind == "DivergenceError" and all(word in message for word in words), message


def step_after_moving(moves: bool) -> dict[str, Tensor]:
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    mw.to_distributed(model, optimizer, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2, zero_stage=1)))
    if moves:
        model.to("cpu:0")  # a copy, for torch
    model(**_batch()).loss.backward()
    optimizer.step()
    return mw.full_state_dict(model)


def test_a_model_that_was_moved_later_is_stepped(pool2: Any) -> None:
    expected, actual = pool2.run(step_after_moving, False)[0], pool2.run(step_after_moving, True)[0]
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_bad_input() -> None:
    for stage in (4, -1, True, "3"):
        with pytest.raises(PlanError, match="must be 0, 1, 2 or 3"):
            mw.ParallelPlan(dp=2, zero_stage=stage)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    with pytest.raises(PlanError, match="stage=2"):
        mw.shard_optimizer(optimizer, mesh=mw.ProcessMesh([0], ["dp"]), stage=3)
    model = build("llama")
    for stage in (2, 3):  # on one rank as in stage 1
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(zero_stage=stage))
        with pytest.raises(OptimizerMismatchError, match="OfOneNorm"):
            mw.to_distributed(model, OfOneNorm(model.parameters()), config=config)


@pytest.mark.parametrize("stage", [2, 3])
def test_one_process(stage: int) -> None:
    result = train_family("llama", torch.float64, {"zero_stage": stage}, steps=2)
    differences = largest_differences(result, train_family("llama", torch.float64, None, steps=2))
    assert max(differences.values()) <= TOLERANCE, differences


def test_a_pass_that_cannot_wait_is_synchronised_under_no_sync() -> None:
    class Nothing:
        can_wait = False

    hooks = GradientHooks(Mesh(), [])
    sync = GradientSync([], tp=functools.partial, reduction=Nothing(), hooks=hooks)  # type: ignore[arg-type]
    with sync.no_sync():
        assert sync._enabled
