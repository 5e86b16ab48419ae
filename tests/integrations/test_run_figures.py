"""The figures of a run in the logs of the Trainer, accelerate and DeepSpeed."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.tracking import GeneralTracker, on_main_process
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import meshwright as mw
from meshwright.monitor.monitor import monitor_of
from meshwright.monitor.records import read_records
from meshwright.optim.runtime import runtime_of
from meshwright_hf.accelerate import prepare
from meshwright_hf.trainer import MeshwrightTrainer
from support.accelerated import accelerator as fresh
from support.accelerated import dataset
from support.engines import own_world
from support.models import build
from support.trainers import GLOBAL_BATCH, LENGTH, Rows, arguments, fresh_accelerate

NAMES = {
    "seconds_per_step", "tokens_per_second", "tokens_per_second_per_device", "peak_memory_gib", "peak_memory_rank",
    "slowest_rank", "slowest_rank_behind_ms",
}  # fmt: skip


class Tracker(TrainerCallback):
    """Stands in for a reporting integration, which the Trainer calls before a user's callbacks."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.seen.append(dict(logs))


def trained(folder: Path) -> tuple[list[dict[str, float]], str]:
    tracker = Tracker()
    with fresh_accelerate(), contextlib.redirect_stderr(io.StringIO()) as said:
        options = mw.ToDistributedConfig(plan="dp2", logging_dir=folder / "log")
        args = arguments(folder, dp=2, max_steps=4, logging_steps=2)
        trainer = MeshwrightTrainer(build("llama"), args, train_dataset=Rows(64), meshwright=options)
        trainer.callback_handler.callbacks.insert(0, tracker)
        trainer.train()
        monitor_of(trainer._runtime).close()
    return tracker.seen, said.getvalue()


def test_the_trainers_trackers_get_the_figures(pool2: Any, tmp_path: Path) -> None:
    (seen, said), (others, silent) = pool2.run(trained, tmp_path, timeout=200)
    assert len(seen) == 2 and all(set(logs) >= NAMES | {"loss", "grad_norm"} for logs in seen)
    for logs, step in zip(seen, read_records(tmp_path / "log").steps, strict=True):
        assert (step["loss"], step["norm"]) == (logs["loss"], logs["grad_norm"])
        assert step["tokens"] == 2 * 2 * GLOBAL_BATCH * LENGTH  # steps, accumulation
        assert step["left"] is not None  # max_steps is the Trainer's
    assert "22,176 parameters, on 2 x cpu" in said and "\nstep 2" not in said  # the Trainer prints its logs itself
    assert "meshwright:" not in silent and not any(set(logs) & NAMES for logs in others)


class Listed(GeneralTracker):
    """A tracker that keeps what it is told."""

    name = "listed"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    @property
    def tracker(self) -> Any:
        return self.seen

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.seen.append(values)


def accelerated(plan: str) -> tuple[list[dict[str, Any]], str]:
    tracker = Listed()
    with fresh(log_with=tracker) as accelerator, contextlib.redirect_stderr(io.StringIO()) as said:
        model = build("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = DataLoader(dataset(48), batch_size=2)
        model, optimizer, loader = prepare(accelerator, model, optimizer, loader, plan=plan)
        accelerator.init_trackers("run")
        for step, batch in enumerate(loader):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                accelerator.wait_for_everyone()
                monitor_of(runtime_of(model)).reporter.close()  # the line of step 1 has been put together
                accelerator.log({"loss": loss.item(), "mine": 3.0, "slowest_rank": -1}, step=step)
                break
    return tracker.seen, said.getvalue()


def test_accelerates_trackers_get_the_figures(pool2: Any) -> None:
    (seen, said), (others, silent) = pool2.run(accelerated, "dp2", timeout=200)
    assert len(seen) == 1 and set(seen[0]) == NAMES | {"loss", "mine"}
    assert seen[0]["mine"] == 3.0 and seen[0]["slowest_rank"] == -1  # the program's own value
    assert "22,176 parameters, on 2 x cpu" in said and "\nstep 1" not in said
    assert others == [] and silent == ""


@own_world
def engined(folder: Path) -> tuple[list[float], str]:
    from meshwright_hf.deepspeed import initialize

    with contextlib.redirect_stderr(io.StringIO()) as said:
        settings = {
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        }  # fmt: skip
        options = mw.ToDistributedConfig(logging_steps=2, logging_dir=folder)
        engine, *_ = initialize(model=build("llama"), config=settings, plan=mw.ParallelPlan(dp=2), options=options)
        norms = []
        for step in range(8):
            ids = torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            if step % 2:
                norms.append(float(engine.get_global_grad_norm()))
        monitor_of(runtime_of(engine.module)).close()
    return norms, said.getvalue()


def test_a_deepspeed_engine_shows_its_steps(pool2: Any, tmp_path: Path) -> None:
    (norms, said), (_, silent) = pool2.run(engined, tmp_path, timeout=250)
    found = read_records(tmp_path).steps
    assert [step["step"] for step in found] == [1, 2, 4]  # steps of the optimizer, not calls of engine.step
    assert [step["norm"] for step in found] == [norms[0], norms[1], norms[3]]
    assert all(step["lr"] == 1e-3 for step in found)
    assert [step["tokens"] for step in found] == [n * 2 * 2 * 2 * LENGTH for n in (1, 1, 2)]
    assert "\nstep 4" in said and "meshwright:" not in silent
