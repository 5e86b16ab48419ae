"""``offload="optimizer"``: the host keeps the optimizer's state and masters, and on CPU no bit of a number changes."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import meshwright as mw
from meshwright.checkpoint.format.background import Background
from meshwright.optim import offload
from meshwright.optim.offload import HostSteps
from meshwright.optim.zero import segments
from support.models import build, labels_for, tokens
from support.own_gradients import on_arrival
from support.tiers import crossings

SP = {"tp": 2, "sequence_parallel": True}
PLANS: dict[str, dict[str, Any]] = {
    "zero1": {"zero_stage": 1},
    "dp2 zero1": {"dp": 2, "zero_stage": 1},
    "dp2 zero2 ga2": {"dp": 2, "zero_stage": 2, "gradient_accumulation_steps": 2},
    "dp2 zero3": {"dp": 2, "zero_stage": 3},
    "tp2+sp zero1": {**SP, "zero_stage": 1},
    "pp2 zero1": {"pp": 2, "zero_stage": 1},
}
HALF = torch.bfloat16


def make(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "head" not in n]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": matrices}]
    if kind == "muon":
        return mw.ChainedOptimizer(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-2))
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-2, fused=kind == "fused AdamW")


def train(
    plan: dict[str, Any],
    kind: str = "AdamW",
    dtype: torch.dtype = HALF,
    *,
    steps: range = range(4),
    folder: str | None = None,
    changes: bool = False,
    scales: bool = False,
) -> dict[str, torch.Tensor]:
    """Train in a plan; a folder is saved into after the first steps, and loaded from before later ones."""
    torch.manual_seed(0)
    model: Any = build("qwen3").to(dtype)
    optimizer = make(kind, model)
    model, optimizer, _ = mw.to_distributed(
        model, optimizer, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), bucket_size_mb=0.03)
    )
    if folder is not None and steps.start:
        mw.load_checkpoint(folder, model, optimizer)
    dp = plan.get("dp", 1)
    rank = dist.get_rank() // plan.get("tp", 1) % dp if dist.is_initialized() else 0
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, enabled=scales)
    for step in steps:
        ids = tokens(4, 12, seed=step).chunk(dp)[rank]
        weight = model.model.norm.weight
        overflow = on_arrival(weight, lambda x: x * torch.inf) if scales and step == 1 and rank == 0 else None
        scaler.scale(model(input_ids=ids, labels=labels_for(ids)).loss).backward()
        if overflow is not None:
            overflow.remove()
        scaler.unscale_(optimizer)
        mw.clip_grad_norm_(model, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if changes and step == 1:
            with torch.no_grad():
                model.model.norm.weight.mul_(0.5)
            model.model.layers[0].mlp.requires_grad_(False)
        if changes and step == 2:
            model.model.layers[0].mlp.requires_grad_(True)
    if folder is not None and not steps.start:
        mw.save_checkpoint(folder, model, optimizer, step=steps.stop)
    return mw.full_state_dict(model)


def offloaded(plan: dict[str, Any]) -> dict[str, Any]:
    return {**plan, "offload": "optimizer"}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name, weight in expected.items() if not torch.equal(actual[name], weight)] == []


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"AdamW under {plan}": (plan, {}) for plan in PLANS},
    "float32": ("dp2 zero1", {"dtype": torch.float32}),
    "float32 in shards": ("dp2 zero3", {"dtype": torch.float32}),
    "fused": ("dp2 zero1", {"kind": "fused AdamW"}),
    "SGD": ("dp2 zero1", {"kind": "sgd"}),
    "owners": ("dp2 zero1", {"kind": "muon"}),
    "owners of shards": ("dp2 zero3", {"kind": "muon"}),
    "owners under tp": ("tp2+sp zero1", {"kind": "muon"}),
    "a scaler, and an overflow on one rank": ("dp2 zero2 ga2", {"scales": True, "dtype": torch.float32}),
    "weights written, frozen and thawed": ("dp2 zero1", {"changes": True}),
}


@pytest.mark.parametrize(
    "name", crossings(RUNS, but=["AdamW under dp2 zero3", "owners", "weights written, frozen and thawed"])
)
def test_every_bit_is_that_of_the_plan_without_offload(name: str, pool2: Any) -> None:
    plan, options = RUNS[name]
    run = train if plan == "zero1" else lambda *args, **kwargs: pool2.run(train, *args, **kwargs)[0]
    assert_same(run(offloaded(PLANS[plan]), **options), run(PLANS[plan], **options))


def without_masters(plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    with mock.patch.object(segments.HostCopy, "take_in", segments.HostCopy.refresh):
        return train(plan)


def test_a_master_that_forgets_its_bits_would_differ(pool2: Any) -> None:
    plan = offloaded(PLANS["dp2 zero1"])
    with pytest.raises(AssertionError):
        assert_same(pool2.run(without_masters, plan)[0], pool2.run(train, plan)[0])


RESUMES = [
    ("AdamW", offloaded(PLANS["dp2 zero1"]), offloaded(PLANS["dp2 zero3"])),
    ("AdamW", offloaded(PLANS["dp2 zero3"]), PLANS["dp2 zero1"]),
    ("muon", PLANS["dp2 zero1"], offloaded(PLANS["dp2 zero1"])),
    ("muon", offloaded(PLANS["dp2 zero3"]), PLANS["dp2 zero1"]),
]


@pytest.mark.parametrize(("kind", "before", "after"), crossings(RESUMES, but=RESUMES[:1]))
def test_a_run_resumes_with_and_without(
    kind: str, before: dict[str, Any], after: dict[str, Any], pool2: Any, tmp_path: Any
) -> None:
    folder = str(tmp_path / "checkpoint")
    pool2.run(train, before, kind, steps=range(2), folder=folder)
    resumed = pool2.run(train, after, kind, steps=range(2, 4), folder=folder)[0]
    assert_same(resumed, pool2.run(train, PLANS["dp2 zero1"], kind)[0])


def before_a_step(plan: dict[str, Any]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = build("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, _ = mw.to_distributed(
        model, optimizer, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), bucket_size_mb=0.03)
    )
    ids = tokens(4, 12)
    model(input_ids=ids, labels=labels_for(ids)).loss.backward()
    return model, optimizer


def stepped_parts(plan: dict[str, Any]) -> list[int]:
    """How many parameters have a state when a bucket is sent, for each bucket."""
    _, optimizer = before_a_step(plan)
    calls = []
    send = segments.HostCopy.send

    def sent(self: segments.HostCopy) -> None:
        calls.append(dict.__len__(optimizer.state))
        send(self)

    with mock.patch.object(segments.HostCopy, "send", sent):
        optimizer.step()
    return calls


def test_a_bucket_returns_before_the_next_is_stepped() -> None:
    calls = stepped_parts(offloaded(PLANS["zero1"]))
    assert len(calls) > 2 and calls == sorted(set(calls)), "each bucket is sent once, when those before have a state"


def with_a_hook(plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    model, optimizer = before_a_step(plan)
    optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups[0].update(lr=1e-3))
    optimizer.step()
    return mw.full_state_dict(model)


def test_a_hook_of_the_program_changes_the_step_of_each_bucket() -> None:
    assert_same(with_a_hook(offloaded(PLANS["zero1"])), with_a_hook(PLANS["zero1"]))


def test_no_bucket_is_stepped_before_a_save_has_its_copy() -> None:
    _, optimizer = before_a_step(offloaded(PLANS["zero1"]))
    seen: list[int] = []
    with mock.patch.object(Background, "wait_for_copy", lambda _: seen.append(dict.__len__(optimizer.state))):
        background = Background()
        background.hold_steps_of(optimizer)
        optimizer.step()
    assert seen == [0] and optimizer.state


def test_options_in_tensors_are_on_the_host_during_a_step() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1e-2)
    (group,) = optimizer.param_groups
    piece = SimpleNamespace(shard=weight, stepped=weight)
    steps = HostSteps(optimizer, SimpleNamespace(slices=[piece], sharded=[]))  # type: ignore[arg-type]
    with FakeTensorMode():  # a GPU's tensors without a GPU
        lr, betas = torch.full((), 1e-2, device="cuda"), (torch.full((), 0.9, device="cuda"), 0.99)
        group["lr"], group["betas"], group["count"] = lr, betas, 1
        steps.lend()
        assert {x.device.type for x in (group["lr"], group["betas"][0])} == {"cpu"} and group["betas"][1] == 0.99
        group["count"] = 2
        steps.return_all()
    assert group["lr"] is lr and group["betas"] is betas and group["count"] == 2
    group["lr"] = lr = torch.tensor(1e-2)
    with mock.patch.object(offload, "on_host", copy.deepcopy):  # as of a device whose memory is not the host's
        steps.lend()
        group["lr"].mul_(2)
        assert lr.item() == pytest.approx(1e-2)
        steps.return_all()
    assert group["lr"] is lr and lr.item() == pytest.approx(2e-2), "what the step wrote"


def with_a_closure() -> None:
    model = build("qwen3")
    model, optimizer, _ = mw.to_distributed(
        model, torch.optim.AdamW(model.parameters()), plan="zero1 offload=optimizer"
    )
    optimizer.step(lambda: 0.0)


def of_an_engine() -> None:
    config = mw.ToDistributedConfig(plan="zero1 offload=optimizer", engine="DeepSpeed")
    mw.to_distributed(build("llama"), config=config)


def of_a_gpu() -> None:
    model = build("qwen3")
    mw.to_distributed(model, torch.optim.AdamW(model.parameters(), capturable=True), plan="zero1 offload=optimizer")


@pytest.mark.parametrize(("call", "words"), [
    (lambda: mw.ParallelPlan(dp=2, offload="optimizer"), "Set zero_stage=1, also on one data-parallel rank"),
    (lambda: mw.ParallelPlan(zero_stage=1, offload="parameters"), "offload='parameters' must be None or 'optimizer'"),
    (with_a_closure, "Call loss.backward\\(\\), and then optimizer.step\\(\\)"),
    (of_an_engine, "DeepSpeed, which keeps the optimizer itself"),
    (of_a_gpu, "capturable=True"),
])  # fmt: skip
def test_what_is_refused(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
