"""``to_distributed`` without a plan: what it picks, that all ranks pick it, and what it says where it cannot."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import meshwright as mw
from meshwright.choose.given_plan import given_plan, save_plan
from meshwright.choose.model_sizes import kind_of
from meshwright.choose.picked_plan import pick_plan
from meshwright.choose.runnable_plans import RunnablePlans
from meshwright.distribute.decide import call_of, runnable_plans
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.optimizers import OPTIMIZERS
from meshwright_plan.job.shapes import describe
from meshwright_plan.machine.hardware import CATALOGUE, Cluster
from meshwright_plan.memory.footprint import footprint
from meshwright_plan.memory.peak import peak_memory
from meshwright_tools.cli import app
from support import anatomies
from support.models import build, tokens
from support.optimizers import Lamb, OfOneNorm
from support.short_programs import losses_of

ROWS, LENGTH = 8, 32
SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 512, (LENGTH,), generator=generator) for _ in range(2 * ROWS)]
    return DataLoader([{"input_ids": ids, "labels": ids} for ids in rows], batch_size=ROWS)


def picked(options: dict[str, Any], optimizer_class: type = torch.optim.AdamW, family: str = "llama") -> Any:
    """The plan, and the losses of an epoch."""
    model = build(family, **SIZES).train()
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    config = mw.ToDistributedConfig(**options)
    model, optimizer, batches = mw.to_distributed(model, optimizer, loader(), config=config)
    return dataclasses.asdict(mw.plan_of(model)), losses_of(model, optimizer, batches)


def needs(plan: Candidate, family: str = "llama") -> float:
    """Bytes that the planner counts for a rank, the process included."""
    job = Job(seq_len=LENGTH, global_batch=ROWS, on_cpu=True).in_32_bits()
    return peak_memory(describe(build(family, **SIZES).config), plan, job).total


@pytest.mark.parametrize("option", [None, "auto"])
def test_all_ranks_train_by_one_plan_as_one_device_would(option: str | None, pool2: Any, pool4: Any) -> None:
    """float32, a step of lr 1e-2 in between: 1e-5. A plan that lost rows or a share of gradients is off by 1e-2."""
    alone = picked({"plan": option})
    assert alone[0]["dp"] * alone[0]["tp"] == 1
    for pool, world in ((pool2, 2), (pool4, 4)):
        plans, losses = zip(*pool.run(picked, {"plan": option}), strict=True)
        assert all(plan == plans[0] for plan in plans) and plans[0]["dp"] * plans[0]["tp"] == world
        for own in losses:
            assert own == pytest.approx(alone[1], rel=1e-5)


def picked_with_experts() -> Any:
    """The plan and the losses of an epoch of a model with experts."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = mw.ToDistributedConfig(expert_load=1.5)
    model, optimizer, batches = mw.to_distributed(model, optimizer, loader(), config=config)
    return dataclasses.asdict(mw.plan_of(model)), losses_of(model, optimizer, batches)


def test_a_model_with_experts_trains_by_the_plan_that_was_picked(pool2: Any) -> None:
    """float32: 1e-5, as above."""
    alone = picked_with_experts()
    plans, losses = zip(*pool2.run(picked_with_experts), strict=True)
    assert plans[0] == plans[1] and plans[0]["dp"] * plans[0]["tp"] * plans[0]["pp"] == 2
    assert losses[0] == pytest.approx(alone[1], rel=1e-5)


ONE_HEAD = {**SIZES, "num_attention_heads": 1, "num_key_value_heads": 1}


def stages_or_nothing(**options: Any) -> tuple[mw.ParallelPlan, torch.Tensor]:
    """One head and odd rows, which neither tp nor dp can divide; evaluation reads the logits."""
    model: Any = build("llama", **ONE_HEAD)
    spec = {"input_ids": ((3, LENGTH), torch.int64)}
    model, _, _ = mw.to_distributed(model, config=mw.ToDistributedConfig(input_spec=spec, **options))
    ids = tokens(3, LENGTH)
    model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        return mw.plan_of(model), model.eval()(input_ids=ids, labels=ids).logits


def test_stages_are_picked_where_nothing_else_can_be(pool2: Any) -> None:
    expected = build("llama", **ONE_HEAD).eval()(input_ids=tokens(3, LENGTH)).logits
    for plan, logits in pool2.run(stages_or_nothing):
        assert (plan.pp, plan.micro_batch_size) == (2, 1)
        torch.testing.assert_close(logits, expected.detach(), rtol=1e-5, atol=1e-5)  # float32: sums in another order
    for kind, message in pool2.run_expecting_error(stages_or_nothing, picks_stages=False):
        assert kind == "PlanError" and "pp=2: ToDistributedConfig(picks_stages=False)" in message


def runnable(model: torch.nn.Module, **options: Any) -> RunnablePlans:
    return runnable_plans(call_of(model, mw.ToDistributedConfig(**options), None, torch.device("cpu")))


def test_what_the_runtime_refuses_is_not_searched() -> None:
    """By the rows of ``Feature.refusals``, some of which a pass without values decides."""
    model, stages = build("llama"), Candidate(pp=2, gradient_accumulation_steps=2)
    plans = runnable(model)
    assert set(plans.against()) == {"ep"} and plans.refusal(stages) is plans.refusal_when_cut(stages) is None
    against = runnable(model, engine="DeepSpeed").against()
    assert "DeepSpeed: its engine runs the backward pass" in against["pp"]
    assert "averages gradients over dp alone" in against["cp"]
    assert "float16" in runnable(build("llama").half()).against()["pp"]
    assert "what the loss of Linear averages over is not known" in runnable(torch.nn.Linear(2, 2)).against()["pp"]
    model.model.forward = lambda *args, **kwargs: None
    plans = runnable(model)
    assert plans.refusal(stages) is None
    assert "could not be run on tensors without values" in str(plans.refusal_when_cut(stages))
    assert plans.refusal(stages.copy(gradient_accumulation_steps=8)) is not None  # of the same kind


def test_what_refuses_a_part_alone_is_known_of_every_plan_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.parallel.forward.recompute._layers", lambda model: [])
    plans, few = runnable(build("llama")), Candidate(dp=2, recompute="full", recomputed_layers=3)
    plans.against()
    assert "all of its layers or none" in str(plans.known_refusal(few))
    assert plans.known_refusal(few.copy(recomputed_layers=None)) is None


def test_an_axis_is_not_blamed_for_what_refuses_the_plan_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"input_ids": ((ROWS, LENGTH), torch.int64)}
    plans = runnable(anatomies.build("qwen3_moe"), token_dispatcher="all_gather", input_spec=spec)
    assert plans.against() == {} and plans.refusal(Candidate(tp=2)) is not None
    with pytest.raises(mw.PlanError, match=r"^ToDistributedConfig.token_dispatcher='all_gather' is for .* but ep=1"):
        pick_plan(plans, None, node_num=1)
    cluster = Cluster(device=CATALOGUE["cpu"], gpus=2)
    monkeypatch.setattr("meshwright.choose.picked_plan.cluster_at_hand", lambda *args: cluster)
    plan, reasons = pick_plan(plans, None, node_num=1)
    assert plan.ep == 2 and reasons.count("but ep=1") == 1


def test_a_budget_decides(pool2: Any) -> None:
    """Just below what the first plan needs it is not picked, and what is picked fits."""
    free, _ = pool2.run(picked, {})[0]
    simplest = Candidate(dp=2, micro_batch_size=4)
    assert (free["dp"], free["zero_stage"], free["micro_batch_size"]) == (2, 0, None)
    budget = needs(simplest) - 1
    tight, losses = pool2.run(picked, {"memory_budget": budget})[0]
    assert tight != free
    micro = tight["micro_batch_size"] or ROWS // tight["dp"]
    chosen = Candidate(
        **{name: tight[name] for name in ("dp", "tp", "sequence_parallel", "zero_stage", "recompute")},
        micro_batch_size=micro,
        gradient_accumulation_steps=ROWS // tight["dp"] // micro,
    )
    assert needs(chosen) <= budget
    assert losses == pytest.approx(picked({})[1], rel=1e-5)  # the same batch, in other pieces


def test_the_leanest_plan_on_request(pool2: Any) -> None:
    lean, _ = pool2.run(picked, {"prefer": "memory"})[0]
    free, _ = pool2.run(picked, {})[0]
    assert (lean["recompute"], free["recompute"]) == ("full", "none")
    micro = lean["micro_batch_size"] or ROWS // lean["dp"]
    chosen = Candidate(
        **{name: lean[name] for name in ("dp", "tp", "sequence_parallel", "zero_stage", "recompute")},
        micro_batch_size=micro,
        gradient_accumulation_steps=ROWS // lean["dp"] // micro,
    )
    leanest = Candidate(dp=2, zero_stage=1, recompute="full")
    others = [leanest.copy(micro_batch_size=size, gradient_accumulation_steps=4 // size) for size in (1, 2, 4)]
    assert all(needs(chosen) <= needs(other) for other in others)


def test_nothing_fits(pool2: Any) -> None:
    errors = pool2.run_expecting_error(picked, {"memory_budget": 1_000_000.0})
    assert len(errors) == 2 and all(kind == "PlanError" and "no plan fits" in text for kind, text in errors)
    assert "GiB too much" in errors[1][1] and "What would make one fit" in errors[1][1]


@pytest.mark.parametrize(("gpus", "rows", "label"), [(4, 8, "dp4 zero1 mb2x1"), (2, 64, "dp2 zero2 mb1x32")])
def test_the_plan_is_the_first_that_meshwright_plan_prints(
    gpus: int, rows: int, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest plans are dp2 tp2+sp, which ties and is less simple, and zero0, which keeps no 32-bit masters."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=128256)
    config.save_pretrained(tmp_path)
    job = ["--gpus", str(gpus), "--seq-len", "4096", "--global-batch", str(rows)]
    answer = CliRunner().invoke(app, ["plan", "--model", str(tmp_path), *job, "--json"])
    assert json.loads(answer.stdout)["plans"][0]["label"] == label
    cluster = Cluster(device=CATALOGUE["h100-sxm"], gpus=gpus)
    monkeypatch.setattr("meshwright.choose.picked_plan.cluster_at_hand", lambda *args: cluster)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    options = mw.ToDistributedConfig(input_spec={"input_ids": ((rows, 4096), torch.int64)})
    call = call_of(model, options, None, torch.device("cuda"))
    _, reasons = pick_plan(runnable_plans(call), None, node_num=1)
    assert reasons.startswith(f"picked {label} for")


class Broken(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        raise OSError("the disk is gone")


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from [{"input_ids": torch.ones(LENGTH, dtype=torch.int64)}] * 16


def planned_for(dataset: Any) -> None:
    mw.to_distributed(build("llama", **SIZES).train(), None, DataLoader(dataset, batch_size=ROWS))


def test_a_dataset_that_fails_on_rank_0_fails_everywhere(pool2: Any) -> None:
    """At once: rank 0 alone reads, and the other waits for its plan."""
    errors = pool2.run_expecting_error(planned_for, Broken())
    assert [kind for kind, _ in errors] == ["OSError", "OSError"]
    assert all("the disk is gone" in text for _, text in errors)


def test_a_stream_tells_no_length(pool2: Any) -> None:
    errors = pool2.run_expecting_error(planned_for, Stream())
    assert all(kind == "PlanError" and "needs the size of a batch" in text for kind, text in errors)


def test_an_optimizer_that_may_not_be_sharded_decides_too(pool2: Any) -> None:
    plan, _ = pool2.run(picked, {}, OfOneNorm)[0]
    assert (plan["tp"], plan["zero_stage"]) == (1, 0)
    budget = {"memory_budget": needs(Candidate(dp=2, micro_batch_size=4)) - 1}
    plan, _ = pool2.run(picked, budget, Lamb)[0]  # one rank steps each parameter whole
    assert (plan["tp"], plan["zero_stage"]) == (1, 1)


def test_the_state_of_the_given_optimizer_is_counted(pool2: Any) -> None:
    budget = {"memory_budget": needs(Candidate(dp=2, micro_batch_size=4)) - 1}  # too little for AdamW's
    free, _ = pool2.run(picked, {})[0]
    assert pool2.run(picked, budget)[0][0] != free and pool2.run(picked, budget, torch.optim.SGD)[0][0] == free


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", lambda matrices, others: torch.optim.AdamW([*matrices, *others])),
        ("sgd", lambda matrices, others: torch.optim.SGD([*matrices, *others], lr=0.1)),
        ("sgd-momentum", lambda matrices, others: torch.optim.SGD([*matrices, *others], lr=0.1, momentum=0.9)),
        ("adafactor", lambda matrices, others: torch.optim.Adafactor([*matrices, *others])),
        ("muon", lambda matrices, others: mw.ChainedOptimizer(torch.optim.Muon(matrices), torch.optim.AdamW(others))),
        (
            "adamw8bit",
            lambda matrices, others: pytest.importorskip("bitsandbytes").optim.AdamW8bit([*matrices, *others]),
        ),
        ("adamw4bit", lambda matrices, others: pytest.importorskip("torchao.optim").AdamW4bit([*matrices, *others])),
    ],
)
def test_what_an_optimizer_keeps_is_found_by_trial_steps(name: str, make: Any) -> None:
    model = build("llama")
    ends = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in ends]
    found = kind_of(make(matrices, [p for p in model.parameters() if p.ndim != 2 or id(p) in ends]), model)
    known = OPTIMIZERS[name]
    assert name == found if name == "adamw" else dataclasses.replace(found, name=name, words=known.words) == known


def test_a_saved_plan(tmp_path: Path, pool2: Any) -> None:
    path = tmp_path / "plan.yaml"
    save_plan(
        Candidate(tp=2, sequence_parallel=True, micro_batch_size=4, gradient_accumulation_steps=2),
        path,
        comment="by hand",
    )
    plan, losses = pool2.run(picked, {"plan": str(path)})[0]
    assert (plan["tp"], plan["sequence_parallel"], plan["micro_batch_size"]) == (2, True, 4)
    assert losses == pytest.approx(picked({})[1], rel=1e-5)
    save_plan(Candidate(pp=2, schedule="zbv", gradient_accumulation_steps=4), path)
    fields = {"pp": 2, "schedule": "zbv", "micro_batch_size": 1}
    assert given_plan(mw.ToDistributedConfig(plan=path)) == mw.ParallelPlan(**fields)
    save_plan(Candidate(dp=4, replicate=2, zero_stage=1), path)
    with pytest.raises(mw.PlanError, match="replicate is not available"):
        given_plan(mw.ToDistributedConfig(plan=path))
    with pytest.raises(mw.PlanError, match="no such plan; write one with meshwright plan --save"):
        given_plan(mw.ToDistributedConfig(plan=tmp_path / "none.yaml"))


@pytest.mark.parametrize("tight", [False, True])
def test_input_spec_stands_for_the_loader(tight: bool, caplog: pytest.LogCaptureFixture) -> None:
    """One process is told of its plan if memory has decided it, since it has no sizes to choose."""
    model = build("llama", **SIZES).train()
    spec = {"input_ids": ((ROWS, LENGTH), torch.int64)}
    budget = needs(Candidate(micro_batch_size=ROWS)) - 1 if tight else None
    config = mw.ToDistributedConfig(input_spec=spec, memory_budget=budget)
    model, _, _ = mw.to_distributed(model, None, None, config=config)
    plan = mw.plan_of(model)
    assert plan.world_size == 1 and (plan.micro_batch_size is not None or plan.recompute == "full") == tight
    said = caplog.text.partition("picked ")[2].partition(" for ")[0].split()  # with mb8x1, for one micro-batch too
    assert set(plan.label.split()) <= set(said) if tight else not said
    assert "next dp" not in caplog.text


@pytest.mark.parametrize("more_layers", [0, 3])
def test_a_model_that_is_not_what_its_config_usually_means(more_layers: int, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = build("llama", **SIZES).train()
    model.config.num_hidden_layers += more_layers
    spec = {"input_ids": ((4, 16), torch.int64)}
    mw.to_distributed(model, config=mw.ToDistributedConfig(input_spec=spec))
    assert ("the planner expects LlamaForCausalLM" in caplog.text) == bool(more_layers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefer": "speed"}, "must be 'throughput' or 'memory'"),
        ({"memory_budget": 0}, "must be a number above zero"),
        ({"input_spec": {"x": ((4,), torch.int64)}}, r"no entry of shape \(rows, tokens\)"),
        ({"hardware_profile": "none.json"}, "no such profile"),
        ({"plan": 3}, "plan=3 is a number and must be a ParallelPlan, its words"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(mw.PlanError, match=message):
        picked(options)


def test_a_model_that_the_planner_cannot_describe() -> None:
    model = torch.nn.Linear(4, 4)
    spec = {"input_ids": ((4, 16), torch.int64)}
    with pytest.raises(mw.PlanError, match="Linear has neither; pass a plan"):
        mw.to_distributed(model, config=mw.ToDistributedConfig(input_spec=spec))


def test_reading_rows_to_measure_them_leaves_the_random_state() -> None:
    """Rank 0 alone reads them: it must not run ahead of the others."""

    class Noisy(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> Any:
            ids = torch.randint(0, 512, (LENGTH,))
            return {"input_ids": ids, "labels": ids}

    states = []
    for plan in (None, mw.ParallelPlan()):
        model = build("llama", **SIZES).train()
        torch.manual_seed(5)
        mw.to_distributed(model, None, DataLoader(Noisy(), batch_size=8), config=mw.ToDistributedConfig(plan=plan))
        states.append(torch.random.get_rng_state())
    assert torch.equal(*states)


def test_footprint_is_what_the_budget_is_held_against() -> None:
    shape = describe(build("llama", **SIZES).config)
    held = footprint(
        shape, Candidate(micro_batch_size=8), Job(seq_len=LENGTH, global_batch=8, on_cpu=True).in_32_bits()
    )
    assert needs(Candidate(micro_batch_size=8)) == pytest.approx(held.peak + 0.4e9)
