"""Every wrong call is a clear error on every rank, leaves the user's objects as they were, and never hangs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import meshwright as mw
from meshwright.distribute.installation import REFUSALS
from meshwright.features.decision import refuse, table
from meshwright.features.passes import SPLIT_ROWS
from support.calls import call_of
from support.docs_blocks import ROOT
from support.models import build
from support.reference import make_optimizer

pytestmark = pytest.mark.quick


def call(model: Any = None, optimizer: Any = None, *, device_num: Any = None, **plan: Any) -> None:
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
    mw.to_distributed(model or build("llama"), optimizer, device_num=device_num, config=config)


def with_uncovered_parameter() -> None:
    model = build("llama")
    model.model.layers[1].mlp.temperature = torch.nn.Parameter(torch.ones(1))
    model.model.extra = torch.nn.Linear(4, 4)
    call(model, tp=2)


def twice() -> None:
    model = build("llama")
    call(model, tp=2)
    call(model, tp=2)


def foreign_optimizer() -> None:
    call(build("llama"), torch.optim.AdamW(build("llama").parameters()), tp=2)


def empty_optimizer() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    optimizer.param_groups[0]["params"] = []
    call(build("llama"), optimizer, dp=2)


def parameter_twice() -> None:
    model = build("llama")
    call(model, torch.optim.AdamW([*model.parameters(), model.lm_head.weight]), dp=2, zero_stage=3)


def another_model_on_a_rank() -> None:
    call(build("llama", num_hidden_layers=2 + dist.get_rank()), dp=2)


def another_option_on_a_rank() -> None:
    mw.to_distributed(build("llama"), config=mw.ToDistributedConfig(plan="dp2", bucket_size_mb=1 + dist.get_rank()))


def tied_in_two_ways() -> None:
    model = build("llama", intermediate_size=32)
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight = mlp.down_proj.weight
    call(model, tp=2)


def cast_after_the_call() -> None:
    model = build("llama")
    model = mw.to_distributed(model, torch.optim.AdamW(model.parameters()), plan="dp2")[0].bfloat16()
    ids = torch.zeros(2, 4, dtype=torch.int64)
    model(input_ids=ids, labels=ids).loss.backward()


def labels_of_another_length() -> None:
    model, ids = mw.to_distributed(build("llama"), plan="tp2")[0], torch.zeros(2, 4, dtype=torch.int64)
    model(input_ids=ids, labels=ids[:, :2])


def scheduler_in_fourth_place() -> None:
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler: Any = torch.optim.lr_scheduler.ConstantLR(optimizer)
    mw.to_distributed(model, optimizer, None, scheduler, plan="dp2")


def mesh_that_leaves_out_a_rank() -> None:
    optimizer = torch.optim.AdamW(build("llama").parameters())
    mw.shard_optimizer(optimizer, mesh=mw.ProcessMesh([0], ["dp"]))


def mesh_without_the_axis() -> None:
    optimizer = torch.optim.AdamW(build("llama").parameters())
    mw.shard_optimizer(optimizer, mesh=mw.ProcessMesh([0, 1], ["tp"]))


def another_plan_on_a_rank() -> None:
    call(**({"tp": 2, "sequence_parallel": True} if dist.get_rank() == 0 else {"dp": 2}))


def no_plan() -> None:
    mw.to_distributed(build("llama"))


def sharding_plan_without_rows() -> None:
    roles = dict(mw.decoder_roles())
    del roles["model.layers.*.mlp.gate_proj"]
    plan = mw.ShardingPlan(roles=roles)
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(tp=2), sharding_plan=plan)
    mw.to_distributed(build("llama"), config=config)


def whole_batch_for_ids() -> None:
    model, ids = mw.to_distributed(build("llama"), plan="dp2")[0], torch.zeros(2, 4, dtype=torch.int64)
    model({"input_ids": ids, "labels": ids})


def lists_for_ids() -> None:
    mw.to_distributed(build("llama"), plan="dp2")[0](input_ids=[torch.zeros(4, dtype=torch.int64)] * 2)


def real_numbers_for_labels() -> None:
    model, ids = mw.to_distributed(build("llama"), plan="dp2")[0], torch.zeros(2, 4, dtype=torch.int64)
    model(input_ids=ids, labels=ids.float())


def real_numbers_for_ids() -> None:
    mw.to_distributed(build("llama"), plan="tp2")[0](input_ids=torch.zeros(2, 4))


def fsdp_around_the_model() -> None:
    model, ids = mw.to_distributed(build("llama"), plan="dp2")[0], torch.zeros(2, 4, dtype=torch.int64)
    torch.distributed.fsdp.fully_shard(model)
    model(input_ids=ids, labels=ids)


CASES: dict[str, tuple[Callable[[], None], str, str]] = {
    "heads not divisible": (
        lambda: call(build("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=36), tp=2),
        "PlanError",
        r"3 attention heads cannot be divided over tp=2; ParallelPlan.tp must be one of 1, 3",
    ),
    "width not divisible": (
        lambda: call(build("llama", intermediate_size=47), tp=2),
        "PlanError",
        r"gate_proj.*width 47 cannot be divided over tp=2",
    ),
    "too many processes": (lambda: call(tp=1), "PlanError", r"needs 1 process, but 2 were launched"),
    "ZeRO on one process of two": (
        lambda: call(zero_stage=3),
        "PlanError",
        r"needs 1 process, but 2 were launched; write plan='dp2 zero3', or launch with: torchrun --nproc-per-node 1",
    ),
    "a batch for token ids": (whole_batch_for_ids, "TypeError", r"got a dict in place of.*write model\(\*\*batch\)"),
    "lists for token ids": (lists_for_ids, "TypeError", r'got a list in place of.*dataset.set_format\("torch"\)'),
    "real labels": (real_numbers_for_labels, "TypeError", r"a label is an integer, but these are float32.*\.long\(\)"),
    "real token ids": (real_numbers_for_ids, "TypeError", r"a token id is an integer, but these are float32"),
    "FSDP after the call": (
        fsdp_around_the_model,
        "AlreadyDistributedError",
        r"FSDPModule was put around the model after to_distributed.*leave it out",
    ),
    "too few processes": (
        lambda: call(tp=2, dp=2),
        "PlanError",
        r"needs 4 processes, but 2 were launched[^$]*tp=1",
    ),
    "another plan on a rank": (
        another_plan_on_a_rank,
        "PlanError",
        r"different plans; rank 0: ParallelPlan\(tp=2, sequence_parallel=True\), rank 1: ParallelPlan\(dp=2\)",
    ),
    "another option on a rank": (
        another_option_on_a_rank,
        "PlanError",
        r"different options; rank 0: .*bucket_size_mb=1,.*rank 1: .*bucket_size_mb=2,",
    ),
    "device_num": (lambda: call(tp=2, device_num=8), "PlanError", r"device_num=8 .* but 2 process"),
    "a scheduler in fourth place": (scheduler_in_fourth_place, "PlanError", r"A scheduler is not passed"),
    "a cast after the call": (
        cast_after_the_call,
        "ValueError",
        r"is now torch.bfloat16, but was torch.float32 when the model was distributed.*before to_distributed",
    ),
    "labels of another length": (
        labels_of_another_length,
        "ValueError",
        r"logits of 8 tokens, but there are 4 labels. Pass labels of the same shape as input_ids",
    ),
    "device_num of another kind": (
        lambda: call(tp=2, device_num="2"),
        "PlanError",
        r"device_num must be a positive",
    ),
    "uncovered parameters": (
        with_uncovered_parameter,
        "UncoveredParameterError",
        r"3 parameter\(s\):\s+model.layers.1.mlp.temperature\s+model.extra.weight\s+model.extra.bias",
    ),
    "zero 4": (lambda: call(dp=2, zero_stage=4), "PlanError", r"zero_stage=4 must be 0, 1, 2 or 3"),
    "tp=0": (lambda: call(tp=0), "PlanError", r"ParallelPlan.tp must be a positive integer, not 0"),
    "two ways to accumulate": (
        lambda: call(dp=2, micro_batch_size=1, gradient_accumulation_steps=2),
        "PlanError",
        r"both split a rank's rows into micro-batches",
    ),
    "DDP": (
        lambda: call(DistributedDataParallel(build("llama")), tp=2),
        "AlreadyDistributedError",
        r"wrapped by DistributedDataParallel",
    ),
    "torch's DataParallel": (
        lambda: call(torch.nn.DataParallel(build("llama")), dp=2),
        "AlreadyDistributedError",
        r"wrapped by DataParallel already",
    ),
    "twice": (twice, "AlreadyDistributedError", r"distributed by an earlier call"),
    "foreign optimizer": (foreign_optimizer, "OptimizerMismatchError", r"parameters are not the model's"),
    "empty optimizer": (empty_optimizer, "OptimizerMismatchError", r"the optimizer has no parameters"),
    "a parameter twice": (
        parameter_twice,
        "OptimizerMismatchError",
        r"1 parameter\(s\) more than once \(the first is lm_head.weight\)",
    ),
    "another model on a rank": (another_model_on_a_rank, "PlanError", r"rank\(s\) 1 built another model than rank 0"),
    "no parameters": (lambda: call(torch.nn.ReLU(), dp=2), "PlanError", r"ReLU has no parameters"),
    "not a module": (
        lambda: call({"a": 1}, dp=2),
        "PlanError",
        r"model must be a torch.nn.Module, not a dict; the order is",
    ),
    "not a decoder": (
        lambda: call(torch.nn.Linear(2, 2), tp=2),
        "PlanError",
        r"no stack of decoder layers",
    ),
    "a tie of two roles": (tied_in_two_ways, "PlanError", r"one tied parameter"),
    "an embedding that counts its tokens": (
        lambda: call(with_embedding("scale_grad_by_freq"), dp=2),
        "PlanError",
        r"the plan dp2 zero0 splits the batch.*divides the gradient of each token by its count in the rows of one rank",
    ),
    "a rank outside the mesh": (mesh_that_leaves_out_a_rank, "PlanError", r"rank\(s\) 1 of 2 are not in the mesh"),
    "a mesh without dp": (mesh_without_the_axis, "PlanError", r"has the axes tp, but no 'dp'"),
    "no plan, and no batch to pick one for": (no_plan, "PlanError", r"picking a plan needs the size of a batch"),
    "a plan with a gap": (sharding_plan_without_rows, "UncoveredParameterError", r"mlp.gate_proj.weight"),
}


def with_embedding(option: str, kind: type[torch.nn.Module] = torch.nn.Embedding) -> torch.nn.Module:
    return torch.nn.Sequential(kind(11, 4, **{option: True}), torch.nn.Linear(4, 1))


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
@pytest.mark.parametrize("option", ["scale_grad_by_freq", "sparse"])
def test_an_embedding_whose_gradient_depends_on_the_split(option: str, kind: type[torch.nn.Module]) -> None:
    """Its counts would be those of a rank's or micro-batch's rows; sparse gradients cannot be reduced in buckets."""
    splits: list[dict[str, Any]] = [{"dp": 2, "zero_stage": stage} for stage in range(4)]
    splits += [{"dp": 2, "tp": 2}, {"dp": 2, "cp": 2}, {"gradient_accumulation_steps": 2}, {"pp": 2}]
    for plan in splits:
        with pytest.raises(mw.PlanError, match=rf"model.0 is an {kind.__name__} with {option}=True.*{option} = False"):
            refuse(call_of(with_embedding(option, kind), **plan), SPLIT_ROWS)
    model = with_embedding(option, kind)
    refuse(call_of(model), SPLIT_ROWS)
    refuse(call_of(model.requires_grad_(False), dp=2), SPLIT_ROWS)


def test_all_refusals_of_a_call_are_raised_together() -> None:
    """Each with its cure, in the order of the parts of a plan; an error that is the only one keeps its class."""
    model = with_embedding("sparse")
    with pytest.raises(mw.PlanError) as raised:
        refuse(call_of(model, config={"engine": "DeepSpeed"}, pp=2, cp=2), REFUSALS)
    head, *lines = str(raised.value).splitlines()
    assert head == "3 things keep the plan dp1 cp2 pp2 zero0 from this call:"
    assert [re.findall(r"(?<= )use .p=1", line) for line in lines] == [[f"use {axis}=1"] for axis in ("pp", "cp", "pp")]
    assert [line[:2] for line in lines] == ["1.", "2.", "3."] and "is not known" in lines[2]
    call = call_of(model.requires_grad_(False), dp=2, zero_stage=1)
    with pytest.raises(mw.OptimizerMismatchError, match="LBFGS"):
        refuse(dataclasses.replace(call, optimizer=torch.optim.LBFGS(model.parameters())), REFUSALS)


def test_the_refusals_are_in_the_docs() -> None:
    assert "\n".join(table(REFUSALS)) in (ROOT / "docs/support.md").read_text()


def run_case(name: str) -> None:
    CASES[name][0]()


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_a_named_error_on_every_rank(name: str, pool2: Any) -> None:
    _, kind, pattern = CASES[name]
    for actual_kind, message in pool2.run_expecting_error(run_case, name):
        assert actual_kind == kind, message
        assert re.search(pattern, message), message
        assert kind in ("ValueError", "TypeError") or issubclass(getattr(mw, kind), ValueError)


def fail_late() -> None:
    """A call that gets past every check of sizes and fails at the plan leaves no trace."""
    model = build("llama")
    optimizer = make_optimizer(model)
    model.model.extra = torch.nn.Linear(4, 4)
    parameters = list(model.parameters())
    given = [list(group["params"]) for group in optimizer.param_groups]
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(mw.UncoveredParameterError):
        call(model, optimizer, tp=2)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert [list(group["params"]) for group in optimizer.param_groups] == given
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert not any(p._backward_hooks for p in parameters)
    dist.barrier()
    del model.model.extra
    call(model, optimizer, tp=2)  # and the same objects are still good


def test_a_failed_call_changes_nothing(pool2: Any) -> None:
    pool2.run(fail_late)


def test_clipping_takes_the_model_and_a_number() -> None:
    model: Any = build("llama")
    with pytest.raises(TypeError, match=r"takes the model, not a generator.*write mw.clip_grad_norm_\(model, max_norm"):
        mw.clip_grad_norm_(model.parameters(), 1.0)
    nothing: Any = None
    with pytest.raises(TypeError, match=r"max_norm=None is not a number; write.*math.inf"):
        mw.clip_grad_norm_(model, nothing)
