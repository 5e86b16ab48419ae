"""Saves in the background on several ranks: what goes wrong on one is said on all, and the next save is whole."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.checkpoint.format import part_files, rank_state
from meshwright.checkpoint.format.background import Background
from meshwright.checkpoint.format.part_files import RankPart
from meshwright.checkpoint.format.rank_state import RankState
from meshwright.faults.guard import active_guard
from support.models import build, labels_for, tokens


def trained(plan: str) -> tuple[Any, Any]:
    model: Any = build("llama")
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer, _ = mw.to_distributed(model, optimizer, plan=plan)
    ids = tokens(2, 8)
    rows = slice(None) if mw.plan_of(model).dp == 1 else slice(dist.get_rank() // 2, dist.get_rank() // 2 + 1)
    model(input_ids=ids[rows], labels=labels_for(ids)[rows]).loss.backward()
    optimizer.step()
    return model, optimizer


def saved_after_mistakes(folder: str) -> list[str]:
    """Each mistake is one rank's alone; the words on this rank."""
    model, optimizer = trained("dp2 tp2")
    said = []

    def save(**extra: Any) -> None:
        try:
            mw.save_checkpoint(Path(folder) / "now", model, optimizer, asynchronous=True, **extra)
            mw.wait_for_checkpoints(model)
            said.append("saved")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    save(extra={"best": object()} if dist.get_rank() == 1 else {})

    plan = RankState.planned
    if dist.get_rank() == 2:
        RankState.planned = lambda *_: exec("raise MemoryError('none left')")  # type: ignore[method-assign]
    save()
    RankState.planned = plan  # type: ignore[method-assign]

    # A weight of rows that only the ranks 0 and 2 hold: 1 and 3 find nothing wrong in theirs.
    weight = model.model.layers[0].mlp.up_proj.weight.detach().as_subclass(torch.Tensor)
    kept = weight.clone()
    if dist.get_rank() == 0:
        weight.mul_(2)
    save()
    weight.copy_(kept)
    save()
    loaded = mw.load_checkpoint(Path(folder) / "now", model, optimizer)
    assert loaded is not None and torch.equal(weight, kept)
    return said


def test_what_goes_wrong_on_one_rank_is_said_on_all(pool4: Any, tmp_path: Path) -> None:
    for extra, planning, weights, good in pool4.run(saved_after_mistakes, str(tmp_path)):
        assert extra.startswith("CheckpointError") and "extra is not JSON" in extra
        assert "none left" in planning
        assert "DivergenceError" in weights and "up_proj" in weights
        assert good == "saved"


def saved_while_a_rank_hangs(folder: str) -> tuple[str, str, float]:
    """torch's store, which anybody who reaches it may write, has no part in a save; rank 1 then hangs in one."""
    model, optimizer = trained("dp2")
    with mock.patch.object(dist.distributed_c10d, "_get_default_store", side_effect=RuntimeError("the open store")):
        mw.save_checkpoint(Path(folder) / "good", model, optimizer, asynchronous=True)
        mw.wait_for_checkpoints(model)
    go_on, write, start = threading.Event(), RankPart.write, time.monotonic()

    def hang(*arguments: Any) -> Any:
        if dist.get_rank() == 1:
            go_on.wait()
        return write(*arguments)

    guard = active_guard()
    assert guard is not None
    with mock.patch.object(guard, "timeout", 1.0), mock.patch.object(RankPart, "write", hang):
        mw.save_checkpoint(Path(folder) / "bad", model, optimizer, asynchronous=True)
        said = ""
        try:
            mw.wait_for_checkpoints(model)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - start
    go_on.set()
    Background.of(model)._thread and Background.of(model)._thread.join()
    Background.of(model)._error = None
    mw.save_checkpoint(Path(folder) / "next", model, optimizer, asynchronous=True)
    mw.wait_for_checkpoints(model)
    loaded = mw.load_checkpoint(Path(folder), model, optimizer)
    return said, loaded.folder.name, seconds


def test_a_rank_that_hangs_in_the_background_is_named_on_all(pool2: Any, tmp_path: Path) -> None:
    (first, newest, seconds), (second, _, _) = pool2.run(saved_while_a_rank_hangs, str(tmp_path))
    assert "rank 1 failed, so every rank stops: TimeoutError" in first
    assert all("bad has not moved on for 1 s, at " in said and "in hang" in said for said in (first, second))
    assert newest == "next" and seconds < 10


def bytes_in_the_snapshot(folder: str) -> tuple[int, int]:
    model, _ = trained("pp2 mb1")
    found: list[torch.Tensor] = []

    def as_of_now(values: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        present = part_files.as_of_now(values)
        found.append(present())
        return present

    rank_state.as_of_now = as_of_now
    mw.save_checkpoint(Path(folder) / "now", model, None, asynchronous=True)
    rank_state.as_of_now = part_files.as_of_now
    mw.wait_for_checkpoints(model)
    return sum(x.nbytes for x in found), sum(p.nbytes for p in build("llama").parameters())


def test_weights_of_other_stages_take_no_memory(pool2: Any, tmp_path: Path) -> None:
    (first, whole), (second, _) = pool2.run(bytes_in_the_snapshot, str(tmp_path))
    assert first + second == whole


def test_a_configuration_that_cannot_be_copied_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = build("llama")
    model.config.lock = threading.Lock()
    with pytest.raises(TypeError):
        copy.deepcopy(model.config)
    mw.save_checkpoint(tmp_path / "now", model, None)
    assert "no config.json, since it cannot be copied" in caplog.text
    assert mw.load_checkpoint(tmp_path / "now", model, None) is not None
