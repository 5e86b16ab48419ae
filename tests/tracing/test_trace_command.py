"""``meshwright plan --trace``: the estimate beside what the plan did on fake tensors and ranks."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from meshwright.errors import PlanError
from meshwright_plan.job.adapters import Lora
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.shapes import describe
from meshwright_tools.cli import app
from meshwright_tools.tracing.compare import adapted, model_on_meta, trace_and_compare
from support.tiers import crossing

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 1000,
}
JOB = Job(seq_len=64, global_batch=8, on_cpu=True).in_32_bits()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_the_command_prints_both(config: Path) -> None:
    options = ["plan", "--model", str(config), "--gpus", "4", "--gpu", "cpu", "--seq-len", "64", "--global-batch", "8"]
    done = CliRunner().invoke(app, [*options, "--trace"])
    assert done.exit_code == 0, done.output
    table = done.output[done.output.index("bytes of rank 0") :]
    assert re.search(r"parameters .* (0\.99\d|1\.00\d)\n", table)  # traced with the batch itself
    assert re.search(r"peak .* (0\.9[5-9]|1\.0[0-4])\d\n", table)


SHARDED = Candidate(dp=2, tp=2, sequence_parallel=True, zero_stage=1, micro_batch_size=4)


@pytest.mark.parametrize(
    ("plan", "lora"),
    [
        (Candidate(micro_batch_size=8), None),
        (SHARDED, None),
        (Candidate(dp=2, micro_batch_size=1, gradient_accumulation_steps=4), None),
        (SHARDED, Lora(rank=8)),
    ],
)
def test_every_line_agrees(config: Path, plan: Candidate, lora: Lora | None) -> None:
    """Sizes to 5 %, collectives to the byte; of four micro-batches two are traced."""
    model = model_on_meta(config, torch.float32)
    model = model if lora is None else adapted(model, lora)
    text = trace_and_compare(model, describe(config), plan, dataclasses.replace(JOB, lora=lora))
    assert f"on {plan.world_size} fake ranks, {min(plan.gradient_accumulation_steps, 2)} of its micro-batches" in text
    sizes, _, traffic = text.partition("ratio\n")[2].partition("\n\n")
    ratios = [float(line.split()[-1]) for line in sizes.splitlines()]
    assert len(ratios) >= 4 and ratios == pytest.approx([1.0] * len(ratios), abs=0.05)
    counts = [line.split()[-2:] for line in traffic.splitlines()[1:]]
    assert all(estimated == traced for estimated, traced in counts) and bool(counts) == (plan.world_size > 1)


@pytest.mark.parametrize(
    ("plan", "stage", "rank"),
    [
        (Candidate(pp=2, dp=512, gradient_accumulation_steps=8), 1, 512),  # a rank of a thousand
        (Candidate(pp=2, schedule="zb-h1", dp=2, zero_stage=1, gradient_accumulation_steps=4), 0, 0),
        (Candidate(pp=2, tp=2, sequence_parallel=True, gradient_accumulation_steps=4, recompute="full"), None, 0),
        (Candidate(pp=2, gradient_accumulation_steps=4, recompute="full", recomputed_layers=1), 0, 0),
        crossing(
            Candidate(pp=2, cp=4, context="hybrid", ulysses=2, schedule="zb-h1", gradient_accumulation_steps=4), 1, 4
        ),
        (
            Candidate(pp=2, cp=4, context="ring", dp=2, zero_stage=1, gradient_accumulation_steps=4, recompute="full"),
            0,
            0,
        ),
    ],
    ids=["1f1b", "zb-h1", "the largest", "recompute of some", "cp, hybrid", "cp, ring"],
)
def test_any_stage_agrees(config: Path, plan: Candidate, stage: int | None, rank: int) -> None:
    """What is held to 1 %; the peak to a quarter, since a tiny model's temporary tensors are not small beside it."""
    text = trace_and_compare(model_on_meta(config, torch.float32), describe(config), plan, JOB, stage)
    assert f"on {plan.world_size} fake ranks" in text and f"bytes of rank {rank} " in text, text
    ratios = [float(line.split()[-1]) for line in text.partition("ratio\n")[2].splitlines()]
    assert ratios[:2] == pytest.approx([1.0, 1.0], abs=0.01) and ratios[2] == pytest.approx(1.0, abs=0.25), text


def test_what_cannot_be_traced(config: Path, tmp_path: Path) -> None:
    model, shape = model_on_meta(config, torch.float32), describe(config)
    with pytest.raises(PlanError, match=r"this version cannot run dp1 .*recompute=selective"):
        trace_and_compare(model, shape, Candidate(recompute="selective"), JOB)
    with pytest.raises(PlanError, match="--stage 2: dp1 pp2 zero0 mb1x4 has the stages 0 to 1"):
        trace_and_compare(model, shape, Candidate(pp=2, gradient_accumulation_steps=8), JOB, stage=2)
    with pytest.raises(PlanError, match="has no pipeline stages; leave --stage out"):
        trace_and_compare(model, shape, Candidate(gradient_accumulation_steps=8), JOB, stage=0)
    unknown = tmp_path / "unknown.json"
    unknown.write_text(json.dumps({**CONFIG, "model_type": "nobody_s"}))
    with pytest.raises(PlanError, match=r"unknown.json has model_type 'nobody_s', which transformers") as error:
        model_on_meta(unknown, torch.float32)
    assert "llama" not in str(error.value)
    unknown.write_text("[]")
    with pytest.raises(PlanError, match=r"transformers cannot make a causal LM from .*unknown.json"):
        model_on_meta(unknown, torch.float32)
    with pytest.raises(PlanError, match=rf"{tmp_path}/absent.json: no such file"):
        model_on_meta(tmp_path / "absent.json", torch.float32)
