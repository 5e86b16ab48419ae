"""``meshwright plan``: its questions, its files and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from meshwright.choose.given_plan import resolve_plan
from meshwright_tools.cli import app

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 32000,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return path


def run(config: Any, options: str, *command: str) -> Any:
    return CliRunner().invoke(app, ["plan", *command, "--model", str(config), "--gpu", "h100", *options.split()])


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("weigh", "--tp 2 --zero-stage 1 --gpus 8"),
        ("weigh", "--plan dp8 --plan dp8,zero1 --json"),
        ("sweep", "--gpus 8,16"),
        ("sweep", "--tokens 1B --days 1 --json"),
    ],
)
def test_weigh_and_sweep_answer_as_plan_alone_does_with_their_options(config: Path, command: str, options: str) -> None:
    one, other = run(config, options, command), run(config, options)
    assert (one.exit_code, one.output) == (other.exit_code, other.output) and one.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("weigh --model {}", "plan weigh: no plan is given"),
        ("sweep --model {}", "plan sweep: every setting has one value"),
        ("weigh --model {} --dp 2 --gpus 2,4", "plan weigh: a plan of your own is estimated for one setting"),
        ("--model {} weigh --dp 2", "write --model after weigh"),
    ],
)
def test_what_weigh_and_sweep_refuse(config: Path, arguments: str, message: str) -> None:
    done = CliRunner().invoke(app, ["plan", *arguments.format(config).split()])
    assert done.exit_code == 2 and message in done.output, done.output


def test_a_model_with_experts_is_read_from_its_modules(tmp_path: Path) -> None:
    routed = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "head_dim": 128}
    path = tmp_path / "routed.json"
    path.write_text(json.dumps({**CONFIG, **routed, "model_type": "qwen3_moe"}))
    sizes = "--ep 4 --zero-stage 1 --gpus 8 --expert-load 1.5"
    answer = json.loads(run(path, f"{sizes} --json", "weigh").output)
    assert answer["plans"][0]["label"].startswith("dp8 ep4 zero1") and answer["job"]["expert_load"] == 1.5
    expert, layer = 3 * 1024 * 512, 8 * 1024 + 3 * 1024 * 1024 + 2 * 1024 + 2 * 128  # router, attention, norms
    total = 8 * (8 * expert + layer) + 2 * 32000 * 1024 + 1024
    assert answer["model"]["parameters"] == total
    assert answer["model"]["active_parameters"] == total - 8 * 6 * expert
    traced = run(path, "--ep 4 --zero-stage 1 --gpus 8 --trace", "weigh")
    assert traced.exit_code == 2 and "depends on their values" in traced.output


def test_a_precision_that_trains_after_a_call_says_the_call(config: Path, tmp_path: Path) -> None:
    saved = tmp_path / "plan.yaml"
    shown = run(config, f"--precision fp8 --save {saved}")
    assert shown.exit_code == 0 and "matrix multiplications in fp8" in shown.output
    assert "convert_to_float8_training" in shown.output and "--mixed_precision fp8" in shown.output and saved.exists()
    traced = run(config, "--precision fp8 --trace")
    assert traced.exit_code == 2 and "this version cannot trace in fp8 yet" in traced.output


def test_a_comparison_of_devices_warns_of_each_whose_published_runs_leave_the_band(config: Path) -> None:
    shown = run(config, "--gpu h100,b200,mi300x --gpus 8", "sweep")
    assert shown.exit_code == 0 and "published runs on h100" not in shown.output
    assert all(shown.output.count(f"published runs on {name} that were compared") == 1 for name in ("b200", "mi300x"))
    found = json.loads(run(config, "--gpu b200 --gpus 8 --json").output)
    assert [warning.split(" that")[0] for warning in found["warnings"]] == ["9 published runs on b200"]
    rows = json.loads(run(config, "--gpu h100,b200 --gpus 8 --json", "sweep").output)
    assert [len(row["warnings"]) for row in rows] == [0, 1]


def test_widths_that_float8_does_not_take_after_tp_have_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "narrow.json"
    path.write_text(json.dumps({**CONFIG, "intermediate_size": 2080}))  # 16 x 130
    assert run(path, "--tp 2 --gpus 8 --precision fp8", "weigh").exit_code == 0
    done = run(path, "--tp 4 --gpus 8 --precision fp8", "weigh")
    assert done.exit_code == 2 and "ffn=2080 over tp=4 is no multiple of 16" in done.output, done.output
    assert run(path, "--tp 4 --gpus 8", "weigh").exit_code == 0
    path.write_text(json.dumps({**CONFIG, "num_key_value_heads": 2}))
    done = run(path, "--tp 4 --gpus 8 --precision fp8", "weigh")
    assert done.exit_code == 2 and "tp=4 ranks would share 2 key heads" in done.output, done.output


@pytest.mark.parametrize(("gpu", "precision"), [("b200", "fp4")])
def test_a_precision_that_cannot_train_is_said_and_no_plan_is_saved(
    config: Path, tmp_path: Path, gpu: str, precision: str
) -> None:
    options = ["plan", "--model", str(config), "--gpu", gpu, "--precision", precision]
    shown = CliRunner().invoke(app, options)
    assert shown.exit_code == 0 and f"matrix multiplications in {precision}" in shown.output
    assert f"this version cannot train in {precision} yet" in shown.output
    answer = json.loads(CliRunner().invoke(app, [*options, "--json"]).output)
    assert not any(plan["runs_today"] for plan in answer["plans"])
    for output in (["--save", str(tmp_path / "plan.yaml")], ["--emit", "accelerate"], ["--trace"]):
        done = CliRunner().invoke(app, [*options, *output])
        assert done.exit_code == 2 and "To run it" not in done.output
        assert f"this version cannot train in {precision} yet, so dp" in done.output
    assert not (tmp_path / "plan.yaml").exists()


def test_cpus_train_in_32_bits(config: Path) -> None:
    done = CliRunner().invoke(app, ["plan", "--model", str(config), "--gpu", "cpu", "--gpus", "2", "--json"])
    job = json.loads(done.output)["job"]
    assert job["on_cpu"] and (job["dtype"], job["element_bytes"]) == ("float32", 4)


def test_a_run_has_a_bill(config: Path) -> None:
    done = run(config, "--gpus 8 --tokens 1B --price 2 --json")
    first = json.loads(done.output)["plans"][0]
    plan, run_of = resolve_plan(first["plan"]), first["run"]  # the plan can be given back
    assert plan.dp * first["micro_batch_size"] * first["gradient_accumulation_steps"] == 64 and plan.world_size == 8
    assert run_of["steps"] == -(-(10**9) // (64 * 4096)) and run_of["cost"] == pytest.approx(2 * run_of["gpu_hours"])
    assert "Whole run: 1 B tokens in 3,815 steps" in run(config, "--gpus 8 --tokens 1B").output


@pytest.mark.parametrize(
    "option", ["--gpus 8,16", "--seq-len 1024,2048", "--global-batch 8,64", "--interconnect 10,400 --gpus 16"]
)
def test_several_values_are_a_table(config: Path, option: str) -> None:
    rows = json.loads(run(config, f"{option} --json").output)
    assert len(rows) == 2 and all(row["tokens_per_second_per_gpu"] > 0 for row in rows)
    assert "tokens/s/GPU" in run(config, option).output


def test_gpus_are_compared_with_their_prices_and_one_without_a_plan_says_why(config: Path) -> None:
    options = "--gpu a100,h100 --precision fp8 --gpus 2 --tokens 1B --price 1,2"
    command = ["plan", "sweep", "--model", str(config), *options.split()]
    table = CliRunner().invoke(app, command).output
    assert "gpu=a100-80: --precision fp8 needs matrix units of 8 bits" in table and "h100-sxm  dp2" in table
    without, row = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert without["gpu"] == "a100-80" and "8 bits" in without["reason"]
    assert row["gpu"] == "h100-sxm" and row["price_per_gpu_hour"] == 2


def test_own_sizes_are_own_words(config: Path) -> None:
    sizes = run(config, "--tp 2 --sequence-parallel --zero-stage 1 --micro-batch-size 2 --gpus 8 --json")
    words = CliRunner().invoke(
        app, ["plan", "--model", str(config), "--gpu", "h100", "--plan", "dp4 tp2+sp zero1 mb2", "--json"]
    )
    assert json.loads(sizes.output) == json.loads(words.output)
    assert json.loads(sizes.output)["plans"][0]["label"] == "dp4 tp2+sp zero1 mb2x8"
    huge = run(config, "--dp 1 --global-batch 4096 --seq-len 8192")
    assert huge.exit_code == 1 and "does not fit, by" in huge.output


def test_a_saved_plan_holds_the_dtype_and_runs(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    done = run(config, f"--gpus 8 --dp 8 --zero-stage 1 --recompute full --recomputed-layers 3 --save {path}")
    assert done.exit_code == 0 and f"meshwright launch --plan {path} train.py" in done.output
    assert yaml.safe_load(path.read_text())["dtype"] == "bfloat16"
    plan = resolve_plan(path)
    assert (plan.dtype, plan.recomputed_layers, plan.label) == ("bfloat16", 3, "dp8 zero1 mb8 recompute=full(3)")
    emitted = run(config, "--gpus 8 --emit accelerate").output
    assert "mixed_precision: bf16" in emitted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--price 2", "--price 2 needs the tokens of the run"),
        ("--days 3", "--days needs the tokens of the run"),
        ("--days 3 --gpus 8 --tokens 1B", "leave one of them out"),
        ("--gpus 8,16 --global-batch 64,128", "--gpus and --global-batch have several values"),
        ("--gpus 8,16 --save x.yaml", "--save is about one plan"),
        ("--gpus 8,16 --tp 2", "estimated for one setting"),
        ("--tp 3 --gpus 8", "--gpus 8 is not divisible by tp=3"),
        ("--tp 16", "heads=8 of tiny is not divisible by tp=16"),
        ("--zero-stage 1 --dp 8 --plan dp8", "both give a plan"),
        ("--recomputed-layers 2 --dp 2", "set recompute='full'"),
        ("--tokens 1B --days 0.0001", "is fast enough"),
        ("--gpus 8 --tokens 1e400", "must be a number of tokens above zero"),
        ("--gpus 8 --stage 1", "write --trace too"),
        ("--precision bf16,fp6", "--precision='fp6' is not known; write bf16, fp8, fp4"),
        ("--precision bf16,bf16", "gives bf16 twice"),
        ("--tokens 1B --price 2,3", "has 2 prices for 1 GPU types"),
        ("--tokens 1B --price two", "--price='two' must be the price of a GPU-hour"),
        ("--every-setting", "write --html plan.html too"),
        ("--days 3 --tokens 1B --precision bf16,fp8", "give one value of --precision"),
        ("--precision bf16,fp8 --plan dp8", "estimated for one setting"),
        ("--html x.html --gpus 8,16", "--html is about one plan"),
        ("--gpus 8 --save missing/plan.yaml", "there is no directory missing; create it"),
        ("--gpus 8 --html .", "is a directory; choose a file in it"),
        ("--gpus 8 --context ring", "--context has an effect with --cp only; write --cp 2 too"),
        ("--gpus 8 --sequence-parallel", "--sequence-parallel has an effect with --tp only"),
        ("--zero-stage 1", "write --gpus 8, or sizes such as --dp 8"),
        ("--plan dp8 --plan dp4", "'dp8' has 8 and 'dp4' has 4 devices"),
    ],
)
def test_what_is_refused(config: Path, options: str, message: str) -> None:
    done = run(config, options)
    assert done.exit_code == 2 and message in done.output, done.output


def test_a_plan_that_cannot_run_is_not_saved(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright_plan.job.candidate import Candidate

    monkeypatch.setattr(Candidate, "runs_today", property(lambda plan: False))
    done = run(config, f"--gpus 8 --allow-future --save {tmp_path / 'plan.yaml'}")
    assert done.exit_code == 2 and "cannot run in this version; leave out --allow-future" in done.output
    assert not (tmp_path / "plan.yaml").exists()


def test_a_hub_id_is_read_from_the_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    done = run("acme/tiny-1B", "--gpus 8")
    assert done.exit_code == 2 and "hf download acme/tiny-1B config.json" in done.output
    for revision, layers in (("aaa", 4), ("bbb", 8)):
        folder = tmp_path / "models--acme--tiny-1B" / "snapshots" / revision
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    refs = tmp_path / "models--acme--tiny-1B" / "refs"
    refs.mkdir()
    (refs / "main").write_text("aaa")
    model = json.loads(run("acme/tiny-1B", "--gpus 8 --json").output)["model"]
    assert model["name"] == "tiny-1B" and model["parameters"] < 110e6  # main, of four layers


def test_a_model_type_has_its_default_config() -> None:
    model = json.loads(run("qwen3", "--gpus 8 --json").output)["model"]
    with torch.device("meta"):
        qwen3 = Qwen3ForCausalLM(Qwen3Config())
    expected = sum(x.numel() for x in qwen3.parameters())
    assert model["name"] == "qwen3" and model["parameters"] == expected
    assert "a model type of transformers, such as qwen3" in run("qwenx", "--gpus 8").output


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gemma3", "text_config": CONFIG, "vision_config": {"hidden_size": 8}}, "is a multimodal model"),
        ({"model_type": "llama4", "text_config": CONFIG | {"num_local_experts": 16}}, "is a mixture-of-experts model"),
        (CONFIG | {"num_experts": 4}, "is a mixture-of-experts model"),
    ],
)
def test_models_that_the_runtime_refuses(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(fields))
    done = run(path, "--gpus 8")
    assert done.exit_code == 2 and message in done.output


def test_help_is_in_groups() -> None:
    alone = CliRunner().invoke(app, ["plan", "--help"]).output
    assert "  --html" in alone and "  weigh" in alone and "  --tp" not in alone and "  --days" not in alone
    text = CliRunner().invoke(app, ["plan", "weigh", "--help"]).output
    for group in ("What is trained, and where:", "The whole run: days, GPU-hours and cost:", "A plan of your own"):
        assert group in text
    options = text[text.index("What is trained") :]
    assert options.index("  --tokens") < options.index("  --micro-batch-size") < options.index("  --save")
