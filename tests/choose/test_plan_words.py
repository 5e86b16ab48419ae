"""A plan in words, as a dict, as a file or as a ParallelPlan: one plan, and an error that says what to write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.choose.given_plan import (
    PLAN_VARIABLE,
    config_with,
    given_plan,
    plan_of_fields,
    read_plan,
    resolve_plan,
    save_plan,
)
from meshwright.plan.config import PLAN_FIELDS
from meshwright.plan.parts import METHODS
from meshwright.plan.schedule import SCHEDULES
from meshwright.plan.text import format_plan, parse_plan
from meshwright_plan.job.candidate import Candidate

pytestmark = pytest.mark.quick

sizes = st.integers(1, 4096)
contexts = st.one_of(
    st.just({}),
    st.builds(dict, cp=sizes, context=st.sampled_from(["gather", "ulysses", "ring"])),
    st.builds(lambda u, n: {"cp": u * n, "context": "hybrid", "ulysses": u}, st.integers(2, 8), st.integers(2, 8)),
).map(lambda fields: {} if fields.get("cp") == 1 else fields)
plans = st.builds(
    lambda context, **fields: fields | context,
    context=contexts,
    dp=sizes,
    tp=sizes,
    sequence_parallel=st.booleans(),
    zero_stage=st.integers(0, 3),
    recompute=st.sampled_from(["none", "full"]),
).flatmap(
    lambda fields: st.one_of(
        st.just(fields),
        sizes.map(lambda n: {**fields, "micro_batch_size": n}),
        sizes.map(lambda n: {**fields, "gradient_accumulation_steps": n}),
    )
)


@settings(deadline=None)
@given(plans)
def test_what_is_printed_is_read_again(fields: dict[str, Any]) -> None:
    plan = mw.ParallelPlan(**fields)
    assert resolve_plan(plan.label) == resolve_plan(format_plan(fields)) == plan
    assert resolve_plan(plan.label.upper().replace(" ", ", ")) == plan
    assert resolve_plan(json.dumps(fields)) == resolve_plan(fields) == plan


@settings(deadline=None)
@given(
    st.builds(
        Candidate,
        dp=sizes,
        replicate=st.integers(1, 8),
        tp=sizes,
        sequence_parallel=st.booleans(),
        cp=st.integers(1, 4),
        context=st.sampled_from(METHODS),
        ulysses=st.integers(2, 4),
        pp=st.integers(1, 4),
        schedule=st.sampled_from(SCHEDULES),
        chunks=st.integers(2, 4),
        stages=st.none() | st.lists(st.integers(1, 12), min_size=1, max_size=9).map(tuple),
        micro_batch_size=sizes,
        gradient_accumulation_steps=sizes,
        zero_stage=st.integers(0, 3),
        recompute=st.sampled_from(["none", "selective", "full"]),
        recomputed_layers=st.none() | st.integers(1, 9),
    )
)
def test_the_planners_own_words(plan: Candidate) -> None:
    """Each label that the planner can print is the plan that it saves, also where this version cannot run it."""
    if plan.zero_stage == 0 or plan.dp % plan.replicate or plan.dp == plan.replicate:
        plan = plan.copy(replicate=1)
    if plan.pp == 1:
        plan = plan.copy(schedule="1f1b", stages=None)
    if plan.schedule != "interleaved":
        plan = plan.copy(chunks=None)
    if plan.cp == 1 or plan.context != "hybrid":
        plan = plan.copy(ulysses=None, context="gather" if plan.cp == 1 or plan.context == "hybrid" else plan.context)
    if plan.recompute != "full":
        plan = plan.copy(recomputed_layers=None)
    plan = plan.copy(sequence_parallel=plan.sequence_parallel and plan.tp > 1)
    size = plan.micro_batch_size if plan.gradient_accumulation_steps > 1 else None
    wanted = {"dp": plan.dp, "zero_stage": plan.zero_stage, **plan.changed, "micro_batch_size": size}
    wanted.pop("gradient_accumulation_steps", None)
    if plan.stages is not None:
        wanted["stages"] = list(plan.stages)
    assert parse_plan(plan.label) == wanted
    if plan.runs_today:
        assert made(lambda: resolve_plan(plan.label)) == made(lambda: plan.plan)


def made(make: Callable[[], mw.ParallelPlan]) -> mw.ParallelPlan | None:
    """The plan; None if its fields do not fit each other."""
    try:
        return make()
    except mw.PlanError:
        return None


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("dp2 x tp2", {"dp": 2, "tp": 2}),
        ("DP2,TP2+SP,zero1", {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1}),
        ("tp=2 sp", {"tp": 2, "sequence_parallel": True}),
        ("tp=2 sequence_parallel=no zero=1", {"tp": 2, "sequence_parallel": False, "zero_stage": 1}),
        ("dp4(2x2) zero0", {"dp": 4, "zero_stage": 0}),
        ("mb4x1", {"micro_batch_size": None}),
        ("mb4x2 recompute=full", {"micro_batch_size": 4, "recompute": "full"}),
        ("cp4", {"cp": 4}),
        ("cp4(ring) dp2", {"cp": 4, "context": "ring", "dp": 2}),
        ("CP8(Hybrid-2)", {"cp": 8, "context": "hybrid", "ulysses": 2}),
        ("cp=4 context=ulysses", {"cp": 4, "context": "ulysses"}),
        ("pp2 cp2(ring) mb1", {"pp": 2, "cp": 2, "context": "ring", "micro_batch_size": 1}),
        ("dp2 reduce=bf16", {"dp": 2, "reduce_dtype": "bfloat16"}),
        ("zero1 offload=optimizer", {"zero_stage": 1, "offload": "optimizer"}),
        ("dp2 reduce_dtype=bfloat16", {"dp": 2, "reduce_dtype": "bfloat16"}),
        ("tp2 zero_stage=1 tp2", {"tp": 2, "zero_stage": 1}),
    ],
)
def test_other_ways_to_write_it(text: str, fields: dict[str, Any]) -> None:
    assert parse_plan(text) == fields
    assert resolve_plan(text) == mw.ParallelPlan(**fields)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("dp2 tq2", r"'tq2' is not a word of a plan; did you mean tp2\? The words are dp2, tp2"),
        ("dp2 zeor1", r"'zeor1' is not a word of a plan; did you mean zero1"),
        ("dp tp2", r"'dp' is not a word of a plan; did you mean dp2"),
        ("dp2 tp2 dp4", "gives dp twice, as 2 and 4"),
        *(
            (theirs, f"'{theirs.split()[-1]}' is not a word of a plan; write {ours}. The words")
            for theirs, ours in (
                ("dp2 fsdp2", "zero3"),
                ("fsdp", "zero3"),
                ("fsdp8", "dp8 zero3"),
                ("fsdp12", "dp12 zero3"),
                ("hsdp", "zero3"),
                ("FULL_SHARD", "zero3"),
                ("ddp", "dp2"),
                ("tp2 zero-1", "zero1"),
                ("zero_2", "zero2"),
                ("mp4", "tp4"),
                ("dp2 gas4", "ga4"),
                ("dp2 mbs4", "mb4"),
                ("tp2 ac", "recompute=full"),
            )
        ),
        ("pp_degree=2", "a plan has no field 'pp_degree'; write pp=N"),
        ("dp2 --tp_size=2", "a plan has no field 'tp_size'; write tp=N"),
        ("fast please", "'fast' is not a word of a plan"),
        ("tp2+sp(4)", "not a word of a plan"),
        ("cp4(circle)", "context='circle' must be 'gather', 'ulysses', 'ring' or 'hybrid'"),
        ("cp4(hybrid)", "context='hybrid' with ulysses=None and cp=4: set ulysses"),
        ("cp4(hybrid-3)", "context='hybrid' with ulysses=3 and cp=4: set ulysses"),
        ("cp_size=2", "a plan has no field 'cp_size'; write cp=N"),
        ("ulysses_size=2", "a plan has no field 'ulysses_size'; write cp=N, context='ulysses'"),
        ("zero7", "zero_stage=7 must be 0, 1, 2 or 3"),
        ("dp0", "dp must be a positive integer, not 0"),
        ("pp2(zb-h2)", "schedule='zb-h2' must be"),
        ("pp2 zero3", "set zero_stage=1"),
        ("recompute=selective", "recompute='selective' is not available"),
        ("dp2 reduce=fp16", "reduce_dtype='fp16' must be None or 'bfloat16'"),
        ("tensor_parallel=2", "a plan has no field 'tensor_parallel'; write tp="),
        ("fastest", "fastest: no such plan; write one with meshwright plan --save, or give the plan in words"),
        ("   ", "'   ' has no words; write for example 'dp2 tp2"),
        ("plans/mine.yaml", "plans/mine.yaml: no such plan"),
        (Path("dp2"), "dp2: no such plan"),
        ({"dp": 2, "tensor_parallel_size": 2}, "has no field 'tensor_parallel_size'; write tp="),
        ({"dp": "2"}, r"dp must be a positive integer, not '2'; write ParallelPlan\(dp=2\)"),
        ({2: 2}, "has no field 2"),
        (4, "plan=4 must be a meshwright.ParallelPlan, its words"),
        (mw.ParallelPlan, "must be a meshwright.ParallelPlan, its words"),
        (Candidate(recompute="selective"), "Plan again without --allow-future"),
        (Candidate(tp=0), "tp must be a positive integer"),
    ],
)
def test_no_plan(plan: Any, message: str) -> None:
    with pytest.raises(mw.PlanError, match=message):
        resolve_plan(plan)


PLAN_FILE = "# by hand\ndp: 2\ntp: 2\nsequence_parallel: {}\nzero_stage: 1  # of ZeRO\n"


@pytest.mark.parametrize(
    ("written", "meant"),
    [("true", True), ("True", True), ("yes", True), ("false", False), ("False", False), ("no", False), ("off", False)],
)
def test_yaml_words_for_true_and_false(written: str, meant: bool, tmp_path: Path) -> None:
    """Row 43: ``sequence_parallel: False`` in a plan file was read as true."""
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN_FILE.format(written))
    assert resolve_plan(path).sequence_parallel is meant
    assert resolve_plan(str(path)) == resolve_plan(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('sequence_parallel: "no"\n', "plan.yaml: ParallelPlan.sequence_parallel='no' is a string and must be True or"),
        ("sequence_paralel: true\n", "no field 'sequence_paralel'; write sequence_parallel. Its fields are dp, tp"),
        ("dp: 2.0\n", r"dp must be a positive integer, not 2.0; write ParallelPlan\(dp=2\)"),
        ("dp: true\n", "dp must be a positive integer, not True"),
        ("dp: two\n", "dp must be a positive integer, not 'two'"),
        ("dp 2\n", "is not 'key: value'; a plan has one field per line, as in 'dp: 2'"),
        ("dp: [2\n", r"line 2: .*a plan has one field per line"),
        ("- dp\n", "is not 'key: value'"),
        ("", "None is not 'key: value'"),
        ("version: 2\ndp: 2\n", "the plan has version 2, but this version of meshwright reads version 1"),
        ("a: &a [1]\nb: &b [*a, *a]\n", r"line 1: it has a reference or a tag"),
        ("dp: !!timestamp 2001-01-01\n", "a reference or a tag"),
        ("dp: 2001-99-99\n", "dp must be a positive integer, not '2001-99-99'"),
        ("dp: 1:30\n", "dp must be a positive integer, not '1:30'"),
        ("dp: 9999999999999999999\n", "dp must be a positive integer, not '9999999999999999999'"),
        (f"dp: {'9' * 5000}\n", "'dp' is '9{20,}, and must be a value of at most 1000 characters"),
        ("dp: 2\ndp: 4\n", "'dp' is there twice"),
        ("[" * 30_000, "plan.yaml"),
        (f"{'x' * 900}: 1\n", "a name in it is 'x{20,}, and must be a text of at most 100"),
        (f"[{'1, ' * 9000}]", r"a list of 9000 is not 'key: value'"),
        (f"version: [{'1, ' * 9000}]", r"the plan has version a list of 9000"),
        ("#" * 70_000, "it has more than 65536 bytes"),
    ],
)
def test_a_plan_file_that_is_wrong(content: str, message: str, tmp_path: Path) -> None:
    """Row 43: a wrong field is named with its file, in a few words however large the file is."""
    path = tmp_path / "plan.yaml"
    path.write_text(content)
    with pytest.raises(mw.PlanError, match=message) as error:
        resolve_plan(path)
    assert str(path) in str(error.value) and len(str(error.value)) < 1000


@settings(max_examples=20, deadline=None)
@given(plans)
def test_a_saved_plan_reads_back(fields: dict[str, Any]) -> None:
    """Every value that ``meshwright plan --save`` writes keeps its type."""
    import tempfile

    of_batch = {"micro_batch_size": fields.get("micro_batch_size", 1), "gradient_accumulation_steps": 2}
    plan = Candidate(**fields | of_batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        save_plan(plan, path, comment="a: comment\nwith two lines")
        assert mw.ParallelPlan(**read_plan(path)) == plan.plan


@pytest.mark.parametrize(
    "text", ["dp2 tp2", '{"dp": 2, "tp": 2}', '{"tp":2,"dp":2}', "{'dp': 2, 'tp': 2}", "{dp: 2, tp: 2}"]
)
def test_the_environment_takes_what_the_keyword_takes(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLAN_VARIABLE, text)
    assert given_plan(mw.ToDistributedConfig()) == mw.ParallelPlan(dp=2, tp=2)


def test_keyword_and_config() -> None:
    plan = mw.ParallelPlan(dp=2, tp=2)
    for form in (plan, "dp2 tp2", {"dp": 2, "tp": 2}):
        assert given_plan(config_with(None, form)) == plan
        assert given_plan(config_with(mw.ToDistributedConfig(bucket_size_mb=1.0), form)) == plan
        assert given_plan(mw.ToDistributedConfig(plan=form)) == plan
    config = mw.ToDistributedConfig(sequence_parallel=True)
    assert given_plan(config_with(config, "dp2 tp2")) == mw.ParallelPlan(dp=2, tp=2, sequence_parallel=True)
    assert config.plan is None
    with pytest.raises(mw.PlanError, match=r"plan='dp2' and config=ToDistributedConfig\(plan='dp2 zero0'\) both give"):
        config_with(mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2)), "dp2")
    with pytest.raises(mw.PlanError, match="both give a plan"):
        config_with(mw.ToDistributedConfig(plan="auto"), "dp2")


def test_every_field_has_its_words() -> None:
    changed = {
        "dp": 3, "tp": 3, "cp": 3, "ep": 3, "etp": 3, "pp": 3, "sequence_parallel": True, "zero_stage": 1,
        "micro_batch_size": 3, "gradient_accumulation_steps": 3, "recompute": "full", "reduce_dtype": "bfloat16",
        "offload": "optimizer",
    }  # fmt: skip
    of_context = {"context": "ring", "ulysses": 3}
    of_pipeline = {"schedule": "zbv", "chunks": 3, "stages": [1, 3, 2]}
    for name in PLAN_FIELDS:
        if name in changed:
            assert parse_plan(format_plan({name: changed[name]}))[name] == changed[name]
        elif name in of_context:
            fields = {"cp": 6, "context": "hybrid" if name == "ulysses" else "ring", name: of_context[name]}
            assert parse_plan(format_plan(fields))[name] == of_context[name]
        elif name == "recomputed_layers":
            assert parse_plan(format_plan({"recompute": "full", name: 3}))[name] == 3
        elif name == "dtype":  # a property of the model, which only a plan file notes
            assert parse_plan(format_plan({name: "bfloat16"})) == parse_plan(format_plan({}))
        else:
            fields = {"pp": 3, "schedule": "interleaved" if name == "chunks" else "1f1b", name: of_pipeline[name]}
            assert parse_plan(format_plan(fields))[name] == of_pipeline[name]
    assert plan_of_fields({}, "nothing") == mw.ParallelPlan()
