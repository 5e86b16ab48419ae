"""A Trainer and an Accelerator with pickle taken away: who still writes or reads a pickle, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.accelerated import Run as Script
from support.accelerated import resume_script, run_script
from support.no_pickle import NoPickle
from support.trainers import Run, run_trainer

PLAN = {"dp": 2, "zero_stage": 1}
# SECURITY.md lists the same. weights_only=True reads tensors, numbers, texts and containers, and runs no code.
SAVE = "torch.serialization calls pickle.Pickler"  # inside torch.save
TRAINER = {
    SAVE,
    "meshwright_hf.trainer.checkpoints calls torch.save",  # training_args.bin, scheduler.pt
    "meshwright.checkpoint.one_device.stock_optimizer calls torch.load(weights_only=True)",  # scheduler.pt
    "transformers.trainer calls torch.save",  # rng_state_*.pth
    "transformers.trainer calls torch.load(weights_only=True)",
}
ACCELERATE = {
    SAVE,
    "accelerate.checkpointing calls torch.save",  # random_states_*.pkl
    "accelerate.utils.other calls torch.save",  # scheduler.bin
    "accelerate.utils.other calls torch.load(weights_only=True)",
    # To check both before they are used.
    "meshwright.checkpoint.one_device.stock_optimizer calls torch.load(weights_only=True)",
}
WORKERS = {"multiprocessing", "torch.utils.data"}  # a DataLoader and its own worker processes


def train_and_resume(folder: Path) -> tuple[set[str], Run, Run]:
    options: dict[str, Any] = {"max_steps": 4, "dataloader_num_workers": 1}
    with pytest.MonkeyPatch.context() as patch:
        found = NoPickle(patch, TRAINER | WORKERS).found
        whole = run_trainer(folder, PLAN, save_strategy="steps", save_steps=2, **options)
        resumed = run_trainer(folder, PLAN, resume=str(folder / "checkpoint-2"), **options)
    return found, whole, resumed


def script_and_resume(folder: Path) -> tuple[set[str], Script, Script]:
    with pytest.MonkeyPatch.context() as patch:
        found = NoPickle(patch, ACCELERATE).found
        whole = run_script(PLAN, torch.float32, save_after=10, directory=str(folder / "state"))
        resumed = resume_script(PLAN, torch.float32, str(folder / "state"))
    return found, whole, resumed


@pytest.mark.parametrize(
    ("program", "listed"), [(train_and_resume, TRAINER), (script_and_resume, ACCELERATE)], ids=["Trainer", "accelerate"]
)
def test_pickle_is_used_only_where_it_is_listed(program: Any, listed: set[str], pool2: Any, tmp_path: Path) -> None:
    ranks = pool2.run(program, tmp_path, timeout=200)
    assert set().union(*(found for found, _, _ in ranks)) - WORKERS == listed
    for _, whole, resumed in ranks:
        half = len(whole.losses) // 2
        assert half and resumed.losses[-half:] == whole.losses[half:]
