"""A Trainer's checkpoints: whole or not at all, checked, and imported from the stock Trainer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_trainer import assert_same_training, last_three, reference
from transformers import Trainer, TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from typer.testing import CliRunner

import meshwright as mw
from meshwright.checkpoint.files import local_disk
from meshwright.checkpoint.sealed import Seal, check_seal
from meshwright_hf.launch.job import JOB_VARIABLE, RESTARTED_VARIABLE
from meshwright_hf.trainer.control import save_together_on_sigterm
from meshwright_hf.trainer.folders import PROGRESS, TrainerProgress, checkpoint_to_resume
from meshwright_tools.cli import app
from support.kills import counted, endings, fingerprint, try_faults
from support.tiers import crossing
from support.trainers import Rows, Run, arguments, fresh_accelerate, make_trainer, run_trainer

SAVING = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}


@pytest.mark.parametrize("plan", [{"dp": 2}, {"tp": 2}, crossing({"dp": 2, "zero_stage": 3})], ids=str)
def test_a_stock_checkpoint_comes_with_its_optimizer(plan: dict[str, Any], pool2: Any, tmp_path: Path) -> None:
    """Tolerance 1e-5: see test_trainer.py. Without the optimizer's state the losses differ by more than 1e-3."""
    run_trainer(tmp_path, **SAVING)
    for path in (tmp_path / "checkpoint-6").glob("*"):
        path.unlink()
    resumed = pool2.run(run_trainer, tmp_path, plan, max_steps=6, resume=str(tmp_path / "checkpoint-3"), timeout=200)
    assert_same_training(last_three(resumed[0]), last_three(reference(max_steps=6)))


def wrong_imports(folder: Path, plan: dict[str, Any]) -> list[str]:
    """The messages of a checkpoint of another batch, of another optimizer, and of one without its optimizer."""
    said = []
    checkpoint = str(folder / "checkpoint-3")
    cases: list[dict[str, Any]] = [{"per_device_train_batch_size": 1}, {"optim": "sgd"}, {}]
    for options in cases:
        if not options:
            dist.barrier()
            (folder / "checkpoint-3" / "optimizer.pt").unlink(missing_ok=True)
            dist.barrier()
        with pytest.raises(mw.CheckpointError) as error:
            run_trainer(folder / "run", plan, max_steps=6, resume=checkpoint, **options)
        said.append(str(error.value))
    return said


def test_stock_checkpoints_that_cannot_go_on(pool2: Any, tmp_path: Path) -> None:
    run_trainer(tmp_path, **SAVING)
    for batch, optimizer, missing in pool2.run(wrong_imports, tmp_path, {"dp": 2}, timeout=200):
        assert "batches of 4 rows" in batch and "has batches of 2" in batch
        assert "was saved by another kind of optimizer" in optimizer and "betas" in optimizer
        assert "has no optimizer.pt" in missing and "load_weights" in missing


def saved_by_rank(output_dir: Path, plan: dict[str, Any]) -> Run:
    return run_trainer(output_dir, plan, **SAVING)


@pytest.fixture(scope="module")
def saved(pool2: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoint-3 and checkpoint-6."""
    folder = tmp_path_factory.mktemp("saved")
    pool2.run(saved_by_rank, folder, {"dp": 2, "zero_stage": 1}, timeout=200)
    return folder


def test_every_damage_of_every_file_is_named(saved: Path, tmp_path: Path) -> None:
    original = saved / "checkpoint-6"
    files = sorted(path.relative_to(original) for path in original.rglob("*") if path.is_file())
    assert len(files) >= 11
    tried = 0
    for file in files:
        for damage in ("removed", "truncated", "flipped", "renamed", "a link"):
            folder = tmp_path / "checkpoint-6"
            shutil.copytree(original, folder)
            path = folder / file
            content = bytearray(path.read_bytes())
            if damage == "truncated":
                path.write_bytes(content[: len(content) // 2])
            elif damage == "flipped":
                content[len(content) * 2 // 3] ^= 4
                path.write_bytes(content)
            else:
                path.rename(path.with_name("elsewhere")) if damage == "renamed" else path.unlink()
                if damage == "a link":
                    path.symlink_to(original / file)
            with pytest.raises(mw.CheckpointError, match=file.name.replace(".", r"\.")):
                checkpoint_to_resume(str(tmp_path), str(folder))
            shutil.rmtree(folder)
            tried += 1
    (shutil.copytree(original, tmp_path / "checkpoint-6") / "optimizer.pt").write_bytes(b"foreign")
    with pytest.raises(mw.CheckpointError, match=r"optimizer\.pt is not a file of this checkpoint"):
        checkpoint_to_resume(str(tmp_path), str(tmp_path / "checkpoint-6"))
    print(f"{tried} damages, {tried} named")


def command(*words: str | Path) -> tuple[int, str]:
    found = CliRunner().invoke(app, [str(word) for word in words])
    return found.exit_code, found.output


def test_the_commands_understand_a_trainers_folder(saved: Path, tmp_path: Path) -> None:
    for name in ("checkpoint-3", "checkpoint-6"):
        shutil.copytree(saved / name, tmp_path / name)
    code, said = command("inspect", tmp_path)
    assert code == 0 and said.startswith(f"2 checkpoints: checkpoint-3, checkpoint-6\n\n{tmp_path / 'checkpoint-6'}\n")
    for shown in ("of the Trainer, sealed", "step            6", "dp2 zero1", "WHOLE: all ", "model.safetensors",
                  f"from_pretrained('{tmp_path / 'checkpoint-6'}') reads its weights"):  # fmt: skip
        assert shown in said, shown
    code, said = command("export", tmp_path, tmp_path / "out")
    assert code == 2 and "one-device files already" in said and "checkpoint-6')" in said
    assert not (tmp_path / "out").exists()
    code, said = command("report", tmp_path, "--json")
    assert code == 0 and json.loads(said)["runs"][0]["axes"]["step"] == [1, 2, 3, 4, 5, 6]

    path = tmp_path / "checkpoint-6" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    code, said = command("inspect", tmp_path / "checkpoint-6", "--json")
    found = json.loads(said)
    assert code == 1 and found["is_whole"] is False and "model.safetensors is damaged" in found["damages"][0]["problem"]
    code, said = command("inspect", tmp_path)
    assert code == 0 and f"\n{tmp_path / 'checkpoint-3'}\n" in said  # the newest whole one
    assert command("inspect", tmp_path / "checkpoint-6", "--no-check")[0] == 0
    (tmp_path / "checkpoint-3" / "meshwright_seal.json").unlink()
    code, said = command("inspect", tmp_path / "checkpoint-3")
    assert code == 1 and "meshwright_seal.json is missing" in said


def test_a_resumed_run_says_what_it_has_loaded(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved / "checkpoint-3"
    run_trainer(tmp_path, {}, max_steps=4, resume=str(folder))
    lines = [line for line in capsys.readouterr().err.splitlines() if "loaded" in line]
    assert lines == [f"meshwright: loaded {folder}, step 3, saved under dp2 zero1"]


def test_a_mesh_without_stages_of_an_earlier_version(tmp_path: Path) -> None:
    said = {"mesh": [2, 1], "global_batch": 4, "loader": None, "epoch_draws": None, "streams": None}
    (tmp_path / PROGRESS).write_text(json.dumps(said))
    read = TrainerProgress.read(tmp_path)
    assert read is not None and read.mesh == (1, 2, 1)  # pp, dp, tp


def test_the_newest_whole_one_is_taken(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("checkpoint-3", "checkpoint-6"):
        shutil.copytree(saved / name, tmp_path / name)
    assert checkpoint_to_resume(str(tmp_path), True) == str(tmp_path / "checkpoint-6")
    (tmp_path / "checkpoint-6" / "scheduler.pt").unlink()
    (tmp_path / "checkpoint-9").mkdir()  # of the stock Trainer, killed while it wrote the weights
    with caplog.at_level(logging.WARNING):
        assert checkpoint_to_resume(str(tmp_path), True) == str(tmp_path / "checkpoint-3")
    assert "checkpoint-9 is skipped" in caplog.text and "checkpoint-6 is skipped" in caplog.text
    assert "scheduler.pt is missing" in caplog.text
    shutil.rmtree(tmp_path / "checkpoint-3")
    with pytest.raises(mw.CheckpointError, match=r"(?s)no whole checkpoint.*checkpoint-9.*checkpoint-6"):
        checkpoint_to_resume(str(tmp_path), True)
    with pytest.raises(mw.CheckpointError, match="there is no checkpoint at"):
        checkpoint_to_resume(str(tmp_path), str(tmp_path / "checkpoint-3"))


def test_a_restart_goes_on_from_what_its_launch_has_saved(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from the checkpoints of an earlier run in the same folder, and not if the program says so."""
    older, newer = (Path(shutil.copytree(saved / name, tmp_path / name)) for name in ("checkpoint-3", "checkpoint-6"))
    first, second, third = (letter * 32 for letter in "abc")
    for folder, launches in ((older, [first]), (newer, [first, second])):
        dataclasses.replace(Seal.read(folder), launches=launches).write(folder)
    assert checkpoint_to_resume(str(tmp_path), None) is None
    for launched, found in ((first, newer), (second, newer), (third, None)):
        monkeypatch.setenv(RESTARTED_VARIABLE, launched)
        assert checkpoint_to_resume(str(tmp_path), None) == (found and str(found))
        assert checkpoint_to_resume(str(tmp_path), False) is None
        assert checkpoint_to_resume(str(tmp_path), str(older)) == str(found or older)
    monkeypatch.setenv(RESTARTED_VARIABLE, first)
    (newer / "scheduler.pt").unlink()
    assert checkpoint_to_resume(str(tmp_path), None) == str(older)
    shutil.rmtree(older)
    assert checkpoint_to_resume(str(tmp_path), None) is None


class Notes(TrainerCallback):
    """Writes a file into each checkpoint, and remembers what it sees."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.seen.append((folder / "trainer_state.json").is_file())
        if state.is_world_process_zero:
            with contextlib.suppress(OSError):  # a rank that is killed says nothing
                (folder / "note.txt").write_text("for people")


def test_a_push_comes_after_the_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also: the best model has its final path, in the state and in the checkpoint."""
    pushed = []

    def push(self: Any, folder: str) -> None:
        pushed.append((folder, Seal.read(Path(folder)).is_open, (Path(folder) / "note.txt").is_file()))

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    with fresh_accelerate():
        args = arguments(
            tmp_path, max_steps=2, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1
        )
        args.metric_for_best_model, args.greater_is_better = "eval_loss", False
        data = {"train_dataset": Rows(16), "eval_dataset": Rows(4), "callbacks": [Notes()]}
        trainer = make_trainer(args, {}, data=data)
        trainer.args.push_to_hub = True
        trainer.train()
    folders = [str(tmp_path / name) for name in ("checkpoint-1", "checkpoint-2")]
    assert pushed == [(folder, False, True) for folder in folders]
    assert trainer.state.best_model_checkpoint == folders[1]
    assert (
        json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["best_model_checkpoint"]
        == folders[1]
    )
    check_seal(tmp_path / "checkpoint-2")


def trainer_to_save(folder: Path, plan: dict[str, Any], **options: Any) -> Any:
    """A trainer after three steps, and a function that saves as its loop does."""
    args = arguments(folder, plan.get("dp", 1), max_steps=3, **options)
    notes = Notes()
    trainer = make_trainer(args, plan, data={"train_dataset": Rows(37), "callbacks": [notes]})
    trainer.notes = notes
    trainer.train()
    trainer.args.save_strategy = "steps"

    def save(step: int) -> None:
        trainer.state.global_step = step
        trainer.control.should_save = True
        loss = torch.zeros(())
        trainer._maybe_log_save_evaluate(loss, None, trainer.model, None, 0.0, None, 0.0)

    return trainer, save


def fail_at_each_step(folder: Path, kind: str, rank: int, every: int, replaces: bool) -> tuple[int, list[str]]:
    """Save checkpoint-6 beside an older checkpoint-3, which the rotation then removes, or over an older one."""
    with fresh_accelerate():
        trainer, save = trainer_to_save(folder, {"dp": 2, "zero_stage": 1}, save_total_limit=1)
        old = folder / ("checkpoint-6" if replaces else "checkpoint-3")
        save(6)
        new = fingerprint(folder / "checkpoint-6")
        assert trainer.notes.seen and all(trainer.notes.seen) and "note.txt" in new
        check_seal(folder / "checkpoint-6")
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "checkpoint-6")
        dist.barrier()
        weight = next(trainer.model.parameters())
        values = weight.detach().clone()
        with torch.no_grad():
            weight.add_(1)
        save(int(old.name[-1]))
        with torch.no_grad():
            weight.copy_(values)
        expected = [fingerprint(old), new]
        if expected[0] == new:
            return 0, ["the old one is not another one"]
        return try_faults(
            folder=folder,
            kind=kind,
            rank=rank,
            every=every,
            save=lambda: save(6),
            find=lambda: fingerprint(Path(checkpoint_to_resume(str(folder), True) or "")),
            expected=expected,
            names={"checkpoint-6"},
            added="note.txt",
        )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "replaces", "every"), endings(("full", True)))
def test_a_save_that_ends_early(kind: str, replaces: bool, every: int, pool2: Any, tmp_path: Path) -> None:
    """A load finds the old checkpoint or the new one, bitwise, and the next save leaves nothing else."""
    for rank in (0, 1):
        folder = tmp_path / str(rank) / "run"
        results = pool2.run(fail_at_each_step, folder, kind, rank, every, replaces, timeout=900)
        counted(results, f"Trainer, {kind}, rank {rank}, {'over' if replaces else 'beside'}")


class Asks(TrainerCallback):
    """Rank 1 alone asks for something after its second step."""

    def __init__(self, ask: Callable[[Any], None]) -> None:
        self.ask = ask

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if dist.get_rank() == 1 and state.global_step == 2:
            self.ask(control)


def save(control: Any) -> None:
    control.should_save = True


def stop(control: Any) -> None:
    control.should_save = control.should_training_stop = True


def preempt(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def asked_on_one_rank(folder: Path, plan: dict[str, Any], ask: Callable[[Any], None], logging_steps: int) -> Any:
    """The last step and the checkpoints of a run."""
    with fresh_accelerate():
        args = arguments(
            folder, plan.get("dp", 1), max_steps=60, gradient_accumulation_steps=1, logging_steps=logging_steps,
            enable_jit_checkpoint=ask is preempt,
        )  # fmt: skip
        trainer = make_trainer(args, plan, data={"train_dataset": Rows(37), "callbacks": [Asks(ask)]})
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, JITCheckpointCallback):
                callback.jit_manager.kill_wait = 0
        trainer.train()
        found = {path.name for path in folder.glob("checkpoint-*")}
        return trainer.state.global_step, found, checkpoint_to_resume(str(folder), True)


@pytest.mark.parametrize(
    ("ask", "plan", "logging_steps"),
    [(save, {"tp": 2}, 1000), (stop, {"dp": 2}, 1), (preempt, {"dp": 2}, 1000)],
    ids=["save", "stop", "SIGTERM"],
)
def test_what_one_rank_asks_for_happens_on_all(
    ask: Callable[[Any], None], plan: dict[str, Any], logging_steps: int, pool2: Any, tmp_path: Path
) -> None:
    """After the same step, or after the next one if the other rank has gone on; ranks that save alone would hang."""
    first, second = pool2.run(asked_on_one_rank, tmp_path, plan, ask, logging_steps, timeout=200)
    assert first == second
    (checkpoint,) = first[1]
    step = int(checkpoint.rpartition("-")[2])
    # Where all ranks log, they meet after each step. A signal comes to the program a moment after it was sent.
    assert step == 2 if logging_steps == 1 else 2 <= step < 60
    assert first[0] == (60 if ask is save else step)
    assert first[2] == str(tmp_path / checkpoint)


def test_in_a_scheduler_s_job_the_stock_callback_does_not_take_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the training with exit code 0, after which the scheduler does not start the job again."""
    monkeypatch.setenv(JOB_VARIABLE, "one")
    before, stock = signal.getsignal(signal.SIGTERM), JITCheckpointCallback()
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(enable_jit_checkpoint=True), callback_handler=SimpleNamespace(callbacks=[stock])
    )
    stock.set_trainer(trainer)
    save_together_on_sigterm(trainer)
    assert trainer.callback_handler.callbacks == [] and signal.getsignal(signal.SIGTERM) is before


def best_on_own_disk(folder: Path) -> str:
    own = folder / str(dist.get_rank())
    options: dict[str, Any] = {**SAVING, "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    with pytest.raises(mw.CheckpointError) as error, mock.patch.object(local_disk, "LATE", 0.2):
        run_trainer(own, {"dp": 2}, evaluated=4, gradient_accumulation_steps=1, **options)
    return str(error.value)


def test_a_best_model_on_the_disk_of_one_host_names_the_folder(pool2: Any, tmp_path: Path) -> None:
    for message in pool2.run(best_on_own_disk, tmp_path, timeout=200):
        assert re.search(r"this rank did not see \S+ within .*all hosts must save to one shared file system", message)
