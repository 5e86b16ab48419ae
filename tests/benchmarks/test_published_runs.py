"""The estimator against runs that others measured, and how such tables are read."""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.published_runs.__main__ import main
from benchmarks.published_runs.fit import Fit, choose, estimate, fit
from benchmarks.published_runs.score import LeaveOut, Score, band, held_out, splits, validate
from benchmarks.published_runs.table import Run, read_runs, summary
from meshwright.errors import PlanError
from meshwright_plan.machine.hardware import Coefficients, HardwareProfile
from meshwright_plan.memory.peak import peak_memory
from meshwright_plan.time.step import StepModel
from meshwright_tools.cli import app
from support.tiers import crossings

EXCERPT = Path(__file__).parents[1] / "data" / "published_runs_excerpt.csv"
SEEDS = (0, 1)
# The goals of the planner, with 8 rows of the same source; the excerpt is smaller than the table in
# evidence/planner.md, and one odd row weighs more. DGXC's 8-bit runs miss their 3 %: see there.
GOALS = {
    "vTrain A100 16-bit": 0.10,
    "llm-foundry H100-80GB 16-bit": 0.06,
    "llm-foundry A100-80GB 16-bit": 0.06,
    "llm-foundry A100-40GB 16-bit": 0.06,
    "BigScience A100-80GB 16-bit": 0.08,
    "DGXC H100-80GB 16-bit": 0.03,
    "DGXC H100-80GB 8-bit": 0.06,
}


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return read_runs(EXCERPT)


@functools.cache
def calibrated(source: str) -> list[Score]:
    """The scores of a source after 8 calibration rows, one for each seed."""
    members = [run for run in read_runs(EXCERPT) if run.group == source]
    return [score for seed in SEEDS for score in validate(members, calibrate_rows=8, seed=seed)]


@pytest.fixture(scope="module")
def catalogue(runs: list[Run]) -> list[Score]:
    return [score for score in validate(runs) if score.rows]


@pytest.mark.parametrize(
    "source", crossings(GOALS, only=[source for source in GOALS if source.startswith(("BigScience", "DGXC"))])
)
def test_eight_runs_are_enough(source: str) -> None:
    assert statistics.fmean(score.mean for score in calibrated(source)) <= GOALS[source]


@pytest.mark.crossing
def test_eight_runs_help_every_source(catalogue: list[Score]) -> None:
    before = {score.group: score.mean for score in catalogue}
    for source in GOALS:
        assert statistics.fmean(score.mean for score in calibrated(source)) < before[source]


@pytest.mark.crossing
def test_nine_of_ten_runs_are_in_the_band_after_calibration() -> None:
    """A band that is wide enough for everything would say nothing; the next test bounds it from above."""
    scores = [score for source in GOALS for score in calibrated(source)]
    covered = sum(score.covered * score.rows for score in scores) / sum(score.rows for score in scores)
    assert covered >= 0.88  # 90 % is the aim; of these few rows each counts half a percent


def test_bands_are_narrower_than_the_catalogues(runs: list[Run]) -> None:
    members = [run for run in runs if run.group == "DGXC H100-80GB 16-bit"]
    found = fit(choose(members, 8))
    assert max(band(found, run) for run in members) < HardwareProfile(name="catalogue").band / 2


def test_without_any_calibration(catalogue: list[Score]) -> None:
    """No source's rows are needed for an error of 20 %, nor for a band that nine of ten rows stay in."""
    assert statistics.fmean(score.mean for score in catalogue) <= 0.20
    assert sum(score.covered * score.rows for score in catalogue) / sum(score.rows for score in catalogue) >= 0.90


def test_more_devices_than_calibrated_on_are_not_flattered(runs: list[Run]) -> None:
    """DGXC's runs reach from 8 to 2,304 devices; a term that is missing at scale shows as a negative bias."""
    members = [run for run in runs if run.group == "DGXC H100-80GB 16-bit"]
    bias = [validate(members, calibrate_rows=8, seed=seed, leave="gpus")[0].bias for seed in SEEDS]
    assert statistics.fmean(bias) > -0.03


def test_the_band_covers_what_is_printed() -> None:
    """explain prints the estimate divided by, and times, 1 + band: the score must mean the same."""
    run = read_runs(EXCERPT)[0]
    seconds = estimate(run, Coefficients())
    profile = HardwareProfile(name="p", band=0.5)
    for ratio, inside in ((1.49, 1.0), (1.51, 0.0), (1 / 1.49, 1.0), (1 / 1.51, 0.0)):
        [score] = validate([dataclasses.replace(run, seconds=seconds * ratio)], profile=profile)
        assert score.covered == inside


def test_scatter_in_the_runs_widens_the_band(runs: list[Run]) -> None:
    members = [run for run in runs if run.group == "llm-foundry A100-40GB 16-bit"]
    exact = [dataclasses.replace(run, seconds=estimate(run, Coefficients())) for run in members]
    rough = [
        dataclasses.replace(run, seconds=estimate(run, Coefficients()) * (1.2 if index % 2 else 1 / 1.2))
        for index, run in enumerate(members)
    ]
    calm, wild = fit(exact), fit(rough)
    assert calm.noise < 0.04 < 0.1 < wild.noise
    assert band(wild, members[0]) > 3 * band(calm, members[0])
    assert calm.freedom > Fit(coefficients=Coefficients(), covariance=calm.covariance, noise=0.04, rows=0).freedom


@pytest.mark.parametrize("leave", ["rows", "model", "gpus", "test"])
def test_no_row_is_scored_that_calibrated(runs: list[Run], leave: LeaveOut) -> None:
    members = [run for run in runs if run.group == "llm-foundry A100-40GB 16-bit"]
    alike: dict[LeaveOut, Callable[[Run, Run], bool]] = {
        "rows": lambda a, b: a.line == b.line,
        "model": lambda a, b: (a.shape.hidden, a.shape.layers) == (b.shape.hidden, b.shape.layers),
        "gpus": lambda a, b: a.cluster.gpus >= b.cluster.gpus,
        "test": lambda a, b: held_out(a) == held_out(b),
    }
    count = 0
    for calibration, scored in splits(members, 4, 0, leave, Coefficients()):
        assert len(calibration) == 4
        assert not any(alike[leave](a, b) for a in calibration for b in scored)
        count += len(scored)
    assert count


def test_the_test_split_holds_whole_models_and_whole_sources(runs: list[Run]) -> None:
    sides: dict[tuple[int, int], set[bool]] = {}
    for run in runs:
        if run.group.split()[0] in ("torchtitan", "nanotron"):
            assert held_out(run)
        else:
            sides.setdefault((run.shape.hidden, run.shape.layers), set()).add(held_out(run))
    assert all(len(side) == 1 for side in sides.values())
    assert {True} in sides.values() and {False} in sides.values()


# -- what a table says ------------------------------------------------------------------------------------------------


def write(rows: list[dict[str, str]], folder: Path) -> Path:
    path = folder / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def sharded_row(**changed: str) -> dict[str, str]:
    """A row of the excerpt, changed to 16 data-parallel ranks that share their optimizer state."""
    with EXCERPT.open(newline="") as file:
        row = next(csv.DictReader(file))
    sizes = {"n_gpus": "16", "dp": "16", "tp": "1", "pp": "1", "vp": "1", "global_batch": "64", "micro_batch": "1"}
    return {**row, **sizes, "zero_stage": "1", "gpu": "GB200", "gpus_per_node": "8", **changed}


@pytest.mark.parametrize(
    ("written", "precision", "group"),
    [
        ("nvfp4", "fp4", "4-bit"),
        ("mxfp4", "fp4", "4-bit"),
        ("mxfp8", "fp8", "8-bit"),
        ("FP8-CS", "fp8", "8-bit"),
        ("amp_fp8", "fp8", "8-bit"),
        ("float8", "fp8", "8-bit"),
        ("float8-tensorwise", "fp8", "8-bit"),
        ("float8_rowwise", "fp8", "8-bit"),
        ("bf16_with_fp8_current_scaling_mixed", "fp8", "8-bit"),
        ("bf16-mixed", "bf16", "16-bit"),
        ("amp_bf16", "bf16", "16-bit"),
        ("bf16(fp32 grad acc)", "bf16", "16-bit"),
    ],
)
def test_precisions_are_known_by_name(tmp_path: Path, written: str, precision: str, group: str) -> None:
    [run] = read_runs(write([sharded_row(precision=written)], tmp_path))
    assert run.job.precision == precision and run.group.endswith(group)


@pytest.mark.parametrize(
    ("column", "written", "read"),
    [
        ("gpu", "H800", "h800"),
        ("gpu", "DGX-GB300", "gb300"),
        ("gpu", "NVIDIA B300 SXM", "b300"),
        ("gpu", "AMD Instinct MI355X", "mi355x"),
        ("gpu", "NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("recompute", "norm, act", "none"),
        ("recompute", "core_attn, layernorm", "selective"),
        ("recompute", "selective op", "per-op"),
        ("recompute", "selective", "selective"),
        ("recompute", "Full", "full"),
        ("zero_stage", "FSDP2", 3),
        ("zero_stage", "zero-1", 1),
        ("zero_stage", "distributed optimizer", 1),
        ("zero_stage", "DDP", 0),
        ("sp", "True", True),
    ],
)
def test_the_words_of_other_projects(tmp_path: Path, column: str, written: str, read: object) -> None:
    [run] = read_runs(write([sharded_row(**{column: written})], tmp_path))
    found = {"gpu": run.cluster.device.name, "recompute": run.plan.recompute, "sp": run.plan.sequence_parallel}
    assert {**found, "zero_stage": run.plan.zero_stage}[column] == read


@pytest.mark.parametrize(
    ("pp", "layers", "stages"),
    [(16, "14", (0, *[1] * 14, 0)), (16, "15", (*[1] * 15, 0)), (16, "16", None), (16, "13", "fewer than the 16")],
)
def test_megatron_can_count_the_embedding_and_the_loss_as_layers(
    tmp_path: Path, pp: int, layers: str, stages: tuple[int, ...] | str | None
) -> None:
    """The first and the last stage then have no layer: 126 layers on 128 virtual stages is a published run."""
    path = write([sharded_row(pp=str(pp), dp="1", layers=layers, params_B="")], tmp_path)
    if isinstance(stages, str):
        with pytest.raises(PlanError, match=stages):
            read_runs(path)
        return
    [run] = read_runs(path)
    assert run.plan.stages == stages
    assert estimate(run, Coefficients()) > 0 and peak_memory(run.shape, run.plan, run.job).total > 0


@pytest.mark.parametrize(
    ("cells", "word"),
    [
        ({"model": "Mixtral-8x7B"}, "Mixtral"),
        ({"model": "Qwen3-30B-A3B"}, "30B-A3B"),
        ({"model": "Unheard-of 40B-A2B"}, "40B-A2B"),
        ({"notes": "ep=8; dropless"}, "ep=8"),
        ({"num_experts": "64"}, "num_experts='64'"),
        ({"params_B": "600"}, "params_B='600', but hidden, layers, ffn and vocab make"),
        ({"notes": "LoRA, frozen base"}, "a part of the weights"),
        ({"gpu": "abacus"}, "gpu='abacus' is not known"),
        ({"gpu": "GH200"}, "gpu='GH200' is not known"),
        ({"gpu": "H100 NVL"}, "gpu='H100 NVL' is not known"),
        ({"notes": "TP2 EP8"}, "EP8"),
        ({"gpus_per_node": "0"}, "gpus_per_node='0' must be at least 1"),
        ({"n_gpus": "0", "dp": "0"}, "dp='0' must be at least 1"),
        ({"source": " ", "vp": " ", "seq_len": "4096.0", "zero_stage": "1.0", "notes": "step 8"}, None),
        ({"precision": "tf32"}, "precision='tf32' is not known"),
        ({"precision": "bf16/fp8"}, "precision='bf16/fp8' is not known"),
        ({"recompute": "norm, mlp"}, "recompute='norm, mlp': 'mlp' is not known"),
        ({"zero_stage": "hsdp"}, "zero_stage='hsdp' is not known"),
        ({"tp": "3"}, "is not n_gpus"),
        ({"recompute": "", "micro_batch": "4", "seq_len": "1000000"}, "even if all layers are recomputed"),
        ({"ep": "1", "active_params_B": ""}, None),
        ({"model": "Llama-4-Unlike 8B", "notes": "dense, no MoE; 8x400Gb/node"}, "Llama-4"),
        ({"notes": "dense, no MoE; 8x400Gb/node"}, None),
    ],
)
def test_one_row_that_cannot_be_used_is_dropped_with_a_line_and_the_others_are_read(
    tmp_path: Path, cells: dict[str, str], word: str | None
) -> None:
    rows = [sharded_row(), sharded_row(**cells), sharded_row(), sharded_row(**cells)]
    names = dict.fromkeys(name for row in rows for name in row)
    dropped: list[str] = []
    runs = read_runs(write([{name: row.get(name, "") for name in names} for row in rows], tmp_path), dropped)
    assert [run.line for run in runs] == ([2, 4] if word else [2, 3, 4, 5])
    assert len(summary(dropped)) == bool(word)
    if word:
        [line] = summary(dropped)
        assert "lines 3, 5: " in line and word in line


def test_a_table_as_a_spreadsheet_writes_it(tmp_path: Path) -> None:
    path = write([sharded_row()], tmp_path)
    path.write_text("\ufeff" + path.read_text().replace(",", " ,", 3), encoding="utf-8")
    assert len(read_runs(path)) == 1


def test_the_command_says_how_many_rows_it_used_and_refuses_a_table_without_any(tmp_path: Path) -> None:
    good, bad = sharded_row(), sharded_row(gpu="abacus")
    command = typer.Typer()
    command.command()(main)
    run = CliRunner()
    mixed = run.invoke(command, [str(write([good, bad], tmp_path))])
    assert mixed.exit_code == 0 and mixed.stdout.splitlines()[-1].endswith("1 of 2 rows used, 1 dropped")
    assert "dropped: " in mixed.stderr and "line 3: gpu='abacus' is not known" in mixed.stderr
    data = run.invoke(command, ["--json", str(write([good, bad], tmp_path))])
    assert json.loads(data.stdout) and "1 of 2 rows used" in data.stderr
    none = run.invoke(command, [str(write([bad] * 20, tmp_path))])
    assert none.exit_code == 2 and "none of its 20 rows can be used" in none.stderr
    assert "lines 2, 3, 4, 5, 6, 7 and 14 more: gpu='abacus'" in none.stderr


@pytest.mark.parametrize("option", ["--validate", "--calibrate-rows", "--seed", "--leave-out"])
def test_the_options_of_earlier_versions_name_the_command(option: str) -> None:
    result = CliRunner().invoke(app, ["plan", option, "8"])
    assert result.exit_code == 2 and "python -m benchmarks.published_runs" in result.stderr
    assert option not in CliRunner().invoke(app, ["plan", "--help"]).stdout


@pytest.mark.parametrize(
    ("notes", "shard"), [("", 16), ("zero1=-1", 16), ("4x100Gb/node zero1=8", 8), ("zero1=64", 16)]
)
def test_ranks_that_share_one_optimizer_state(tmp_path: Path, notes: str, shard: int) -> None:
    [run] = read_runs(write([sharded_row(notes=notes)], tmp_path))
    assert (run.plan.shard, run.plan.replicate, run.plan.dp) == (shard, 16 // shard, 16)


def test_zero_3_that_is_compared_with_pipelines_is_calibrated_on_its_own(tmp_path: Path) -> None:
    weights, piped = sharded_row(zero_stage="3"), sharded_row(pp="2", dp="8")
    assert len({run.group for run in read_runs(write([weights, piped], tmp_path))}) == 2
    assert len({run.group for run in read_runs(write([weights, sharded_row()], tmp_path))}) == 1


@pytest.mark.parametrize(
    ("pp", "batch", "micro", "count"),
    [("1", "64", 4, 1), ("2", "64", 4, 2), ("4", "64", 4, 4), ("4", "24", 1, 6), ("4", "8", 1, 2)],
)
def test_without_a_micro_batch_a_pipeline_runs_one_for_each_rank(
    tmp_path: Path, pp: str, batch: str, micro: int, count: int
) -> None:
    """torchtitan's default; a rank whose sequences do not divide runs them one at a time."""
    row = sharded_row(pp=pp, dp=str(16 // int(pp)), global_batch=batch, micro_batch="")
    [run] = read_runs(write([row], tmp_path))
    assert (run.plan.micro_batch_size, run.plan.gradient_accumulation_steps) == (micro, count)


def test_fsdp_in_a_pipeline_gathers_weights_once_per_step(tmp_path: Path) -> None:
    alone, piped = sharded_row(zero_stage="3"), sharded_row(zero_stage="3", pp="2", dp="8")
    runs = read_runs(write([alone, piped], tmp_path))
    assert [run.plan.zero_stage for run in runs] == [3, 1]
    assert len({run.group for run in runs}) == 1  # both are one program, unlike ZeRO-3 beside another's pipeline


# -- malformed tables -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("tp", "two", "tp='two' is not a number"),
        ("tp", "3", "is not n_gpus"),
        ("step_time_s", "-1", "must not be negative"),
        ("step_time_s", "nan", "must not be negative"),
        ("hidden", "", "hidden='' is not a number"),
        ("hidden", "0", "hidden=0 must be a positive integer"),
        ("global_batch", "7", "is not a multiple of dp x micro_batch"),
        ("recompute", "some", "must be none, selective or full"),
        ("gpu", "abacus", "abacus"),
        ("seq_len", "1.5", "is not a number"),
        ("precision", "tf32", "precision='tf32' is not known"),
        ("precision", "nvfp4", "a100-80 has none"),
        ("notes", "zero1=3", "3 ranks do not divide dp"),
    ],
)
def test_a_malformed_row_is_named_by_its_line(tmp_path: Path, column: str, value: str, words: str) -> None:
    with EXCERPT.open(newline="") as file:
        rows = list(csv.DictReader(file))[:3]
    if column == "notes":
        rows[1] = sharded_row()
    rows[1][column] = value
    path = write(rows, tmp_path)
    with pytest.raises(PlanError, match="line 3") as caught:
        read_runs(path)
    assert words in str(caught.value)


def test_a_short_row_a_missing_column_and_a_missing_file(tmp_path: Path) -> None:
    text = EXCERPT.read_text().splitlines()
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([*text[:3], "vTrain,GPT"]))
    with pytest.raises(PlanError, match="line 4: the row has more or fewer cells"):
        read_runs(path)
    path.write_text("\n".join([text[0].replace("hidden,", "width,"), text[1]]))
    with pytest.raises(PlanError, match="line 1: no column hidden"):
        read_runs(path)
    with pytest.raises(PlanError, match="no such file"):
        read_runs(tmp_path / "none.csv")
    with pytest.raises(PlanError, match="--calibrate-rows=-1"):
        validate([], calibrate_rows=-1)


def test_an_empty_source_scores_nothing() -> None:
    run = dataclasses.replace(read_runs(EXCERPT)[0], seconds=None)
    [score] = validate([run], calibrate_rows=8)
    assert score.rows == 0 and math.isfinite(score.mean)


MOE = Path(__file__).parents[1] / "data" / "published_moe_runs.csv"


def test_eight_runs_are_enough_for_models_with_experts() -> None:
    """Balanced routing by force. The four rows left are of models among the eight; without exchanges H100's are off."""
    runs = read_runs(MOE)
    assert len(runs) == 39 and all(run.shape.experts and run.plan.ep > 1 for run in runs)
    members = [run for run in runs if run.group == "Megatron-Bridge H100-80GB 8-bit"]
    scores = [validate(members, calibrate_rows=8, seed=seed)[0] for seed in SEEDS]
    assert statistics.fmean(score.median for score in scores) <= 0.10
    for run in members:
        step = StepModel(run.shape, run.cluster, Coefficients()).step(run.plan, run.job)
        assert step.experts > 0.05 * step.total


@pytest.mark.parametrize(
    ("cells", "word"),
    [
        ({"params_B": "20"}, "params_B=20"),
        ({"notes": "ep=3; moe experts=128 topk=8 head_dim=128"}, "ep=3 does not divide"),
        ({"notes": "ep=8; experts=128"}, "does not state their number and how many each token takes"),
        ({"notes": "ep=8 etp=2; experts=128 topk=8 head_dim=128"}, "etp cuts each expert"),
        ({"notes": "", "ep": "8", "num_experts": "128", "topk": "8", "head_dim": "128"}, None),
    ],
)
def test_columns_or_notes_state_the_experts(tmp_path: Path, cells: dict[str, str], word: str | None) -> None:
    with open(MOE, newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["model"] == "Qwen3-30B-A3B")
    path = write([{**row, **cells}], tmp_path)
    if word is not None:
        with pytest.raises(PlanError, match=word):
            read_runs(path)
        return
    [run] = read_runs(path)
    experts = run.shape.runs[0].experts
    assert experts is not None and (experts.count, experts.chosen, experts.width, run.plan.ep) == (128, 8, 768, 8)
