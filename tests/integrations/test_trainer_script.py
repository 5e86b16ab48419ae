"""Scripts as people have them: one built like transformers' run_clm.py, and the example."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import LlamaForCausalLM

import meshwright as mw
from support.clm_script import main
from support.models import build
from support.trainers import fresh_accelerate
from support.words import WORDS, tokenizer, write_text


def run_script(argv: list[str]) -> mw.ParallelPlan:
    from meshwright_hf.trainer import MeshwrightTrainer

    with fresh_accelerate():
        return mw.plan_of(main(argv, MeshwrightTrainer).model)


def argv(folder: Path, output_dir: Path, rows: int) -> list[str]:
    options = {
        "model_name_or_path": folder / "model",
        "train_file": folder / "train.txt",
        "output_dir": output_dir,
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": rows,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
    flags = ["--do_train", "--do_eval", "--use_cpu", "--disable_tqdm", "True"]
    return [*(part for name, value in options.items() for part in (f"--{name}", str(value))), *flags]


def test_a_script_like_run_clm_needs_one_other_name(pool2: Any, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    write_text(tmp_path / "train.txt", lines=60)
    plan = pool2.run(run_script, argv(tmp_path, tmp_path / "planned", 2), timeout=200)[0]  # the planner's
    assert plan.world_size == 2
    with fresh_accelerate(), contextlib.redirect_stdout(io.StringIO()):
        main(argv(tmp_path, tmp_path / "one", 2 * plan.dp))
    found, expected = (
        {**json.loads((tmp_path / name / "train_results.json").read_text()), **eval_results(tmp_path / name)}
        for name in ("planned", "one")
    )
    for key in ("train_loss", "eval_loss", "perplexity"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5)  # as in test_trainer.py
    assert (found["eval_accuracy"], found["eval_blocks"]) == (expected["eval_accuracy"], expected["eval_blocks"])
    assert LlamaForCausalLM.from_pretrained(tmp_path / "planned").config.vocab_size == len(WORDS) + 3
    assert (tmp_path / "planned" / "tokenizer.json").is_file()


def eval_results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "eval_results.json").read_text())


def run_example(*options: str) -> str:
    from examples import trainer_train

    output = io.StringIO()
    with fresh_accelerate(), mock.patch.object(sys, "argv", ["train", *options]), contextlib.redirect_stdout(output):
        trainer_train.main()
    return output.getvalue().splitlines()[-1]


def test_the_example(pool2: Any, tmp_path: Path) -> None:
    alone = float(run_example("--output-dir", str(tmp_path / "one")).split(":")[1].strip(" }"))
    assert alone < 5.4  # it learns: the first loss is log(256) = 5.55
    options = ("--tp", "2", "--output-dir", str(tmp_path / "tp"))
    assert float(pool2.run(run_example, *options, timeout=200)[0].split(":")[1].strip(" }")) == pytest.approx(
        alone, rel=1e-5
    )
    # From the checkpoint at the end under another plan there is nothing left to do, and the same model is evaluated.
    options = ("--dp", "2", "--zero-stage", "1", "--resume", "--output-dir", str(tmp_path / "tp"))
    assert float(pool2.run(run_example, *options, timeout=200)[0].split(":")[1].strip(" }")) == pytest.approx(
        alone, rel=1e-5
    )
