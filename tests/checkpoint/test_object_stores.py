"""Checkpoints at URLs: whole or not at all where nothing can be renamed, whatever ends a save, and refused by name."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem
from test_checkpoints import contents
from test_crashes import Run, attempt
from torch import nn
from transformers import TrainingArguments
from typer.testing import CliRunner

import meshwright as mw
from meshwright.checkpoint.files import reading
from meshwright.checkpoint.files.place import Url, place
from meshwright.checkpoint.format.checkpoint_folders import NAME, Manifest
from meshwright.errors import CheckpointError, RemoteError
from meshwright_hf.trainer.checks import check_arguments
from meshwright_tools.checkpoints.export_checkpoint import export_checkpoint
from meshwright_tools.cli import app
from support.exact import Float64
from support.faulty_disk import Killed
from support.object_stores import SharedStore, fail_at


class Small:
    """A model of one process that saves to a store of its own."""

    def __init__(self, root: str):
        self.root, self.files = root, MemoryFileSystem()
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def save(self, name: str, **options: Any) -> Any:
        with torch.no_grad():
            self.model.weight.fill_(options["step"])
        return mw.save_checkpoint(f"{self.root}/{name}", self.model, self.optimizer, **options)

    def load(self, name: str = "", **options: Any) -> Any:
        done = mw.load_checkpoint(f"{self.root}/{name}".rstrip("/"), self.model, self.optimizer, **options)
        assert done is None or self.model.weight.unique().tolist() == [done.step]
        return done

    def names(self) -> list[str]:
        """The files, without the tags in their names."""
        paths = self.files.find(self.root)
        return sorted(re.sub(r"(part-\d+)-[0-9a-f]{8}", r"\1", path.partition("/run/")[2]) for path in paths)

    def put(self, name: str) -> None:
        self.files.pipe_file(f"{self.root}/{name}", b"1")


@pytest.fixture
def small(request: pytest.FixtureRequest) -> Small:
    return Small(f"memory://{request.node.name}/run")


def test_a_run_in_a_store(small: Small, tmp_path: Path, capsys: Any, caplog: Any) -> None:
    assert small.load(missing_ok=True) is None
    for step in (1, 2, 3):
        folder = small.save(f"step-{step}", step=step, keep=2, asynchronous=step == 2)
    assert folder == f"{small.root}/step-3" and small.load().folder == folder
    assert f"meshwright: loaded {folder}, step 3\n" in capsys.readouterr().err
    of_one = ["checkpoint.json", "part-00000.json", "part-00000.safetensors"]
    assert small.names() == [f"step-{step}/{name}" for step in (2, 3) for name in of_one]

    # A save of the same name replaces all files, and a load takes what a load has returned.
    before = small.files.find(folder)
    small.save("step-3", step=4)
    assert small.load(missing_ok=True).step == small.load("step-3").step == 4
    assert mw.load_checkpoint(small.load().folder, small.model, small.optimizer).step == 4
    assert len(small.files.find(folder)) == 3 and not {*before[1:]} & {*small.files.find(folder)}

    # A copy on the disk is a checkpoint too, which a save of another form replaces.
    small.files.get(f"{folder}/", f"{tmp_path}/copied/", recursive=True)
    assert mw.load_checkpoint(tmp_path / "copied", small.model, small.optimizer).step == 4
    mw.save_checkpoint(tmp_path / "copied", small.model, small.optimizer)
    assert sorted(path.name for path in (tmp_path / "copied").iterdir()) == of_one

    # Weights alone, and the commands.
    other = nn.Linear(4, 4)
    mw.load_weights(other, small.root)
    assert torch.equal(other.weight, small.model.weight)
    result = CliRunner().invoke(app, ["inspect", small.root, "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["is_whole"] and [row["step"] for row in found["checkpoints"]] == [2, 4]
    assert CliRunner().invoke(app, ["export", small.root, str(tmp_path / "out")]).exit_code == 0
    mw.load_weights(other, tmp_path / "out")
    small.files.put(str(tmp_path / "out" / "model.safetensors"), f"{small.root}/published/model.safetensors")
    mw.load_weights(other, f"{small.root}/published")

    # What is damaged is skipped and stays, and a save that has not ended is no checkpoint.
    assert caplog.text == ""
    path = next(path for path in small.files.find(folder) if path.endswith(".safetensors"))
    content = small.files.cat_file(path)
    small.files.pipe_file(path, content[:-1])
    assert small.load().step == 2 and "step-3 is not a whole checkpoint and is skipped" in caplog.text
    small.files.pipe_file(path, content[:-1] + b"1")
    result = CliRunner().invoke(app, ["inspect", folder])
    assert result.exit_code == 1 and "is not what was saved" in result.stdout
    small.files.rm_file(f"{folder}/{NAME}")
    with pytest.raises(CheckpointError, match="its save did not end"):
        small.load("step-3")
    assert small.load("step-3", missing_ok=True) is None and small.load().step == 2


def test_small_tensors_come_in_few_requests(small: Small) -> None:
    """Each request takes a round trip to the store, whatever its size."""
    small.model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    small.optimizer = torch.optim.AdamW(small.model.parameters())
    small.model(torch.ones(8)).sum().backward()
    small.optimizer.step()
    folder = mw.save_checkpoint(f"{small.root}/step-1", small.model, small.optimizer, step=1)
    before = mw.full_state_dict(small.model)
    for parameter in small.model.parameters():
        parameter.data.zero_()
    with mock.patch.object(
        MemoryFileSystem, "cat_ranges", autospec=True, side_effect=MemoryFileSystem.cat_ranges
    ) as asked:
        mw.load_checkpoint(folder, small.model, small.optimizer)
    paths = [path for call in asked.call_args_list for path in call.args[1] if path.endswith(".safetensors")]
    assert len(paths) <= 4  # of 160 tensors: two of the header, one of all tensors but the last
    for name, value in mw.full_state_dict(small.model).items():
        assert torch.equal(value, before[name])


def test_what_is_not_a_checkpoint_stays(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    small.put("other/notes.txt")
    with pytest.raises(CheckpointError, match=r"run/other holds something else than a checkpoint of Meshwright"):
        small.save("other", step=1)
    small.save("a", step=1)
    small.put("a/notes.txt")
    small.save("b", step=2, keep=1)
    assert "a/notes.txt" in small.names() and small.load("a").step == 1
    own = small.save("b", step=3)
    with monkeypatch.context() as another_program:
        another_program.setattr(reading, "_SEEN", {})
        Small(small.root).save("b", step=4)
    with pytest.raises(CheckpointError, match=r"another program has saved to .*run/b since"):
        small.save("b", step=5)
    assert small.load().step == 4 and len(small.files.find(own)) == 3


def test_a_store_that_does_not_answer_is_not_an_empty_one(small: Small, caplog: Any) -> None:
    """A run that resumes would begin anew, and one that saves would forget the order."""
    for step in (1, 2):
        small.save(f"step-{step}", step=step)
    refuse = mock.Mock(side_effect=PermissionError("Access Denied"))
    for method in ("ls", "cat_ranges", "info"):
        with mock.patch.object(MemoryFileSystem, method, refuse), pytest.raises(RemoteError, match="Access Denied"):
            small.load(missing_ok=True)
    with mock.patch.object(MemoryFileSystem, "cat_ranges", refuse), pytest.raises(RemoteError):
        small.save("step-3", step=3)
    with mock.patch.object(MemoryFileSystem, "pipe_file", refuse), pytest.raises(RemoteError):
        small.save("step-2", step=4)
    assert small.load().step == 2 and len(small.names()) == 6
    with mock.patch.object(MemoryFileSystem, "rm_file", refuse):  # after the commit it is no failure
        small.save("step-2", step=3, keep=1)
    assert small.load().step == 3 and len(small.names()) == 8 and "The new checkpoint is complete" in caplog.text
    small.save("step-2", step=4, keep=1)
    assert len(small.names()) == 3


def test_what_works_on_local_disks_only_is_refused(tmp_path: Path) -> None:
    model, url = nn.Linear(2, 2), "s3://bucket/run/step-1"
    optimizer = torch.optim.AdamW(model.parameters())
    for call in (
        lambda: mw.save_weights(model, url),
        lambda: mw.save_optimizer(model, optimizer, url),
        lambda: mw.load_optimizer(model, optimizer, url),
        lambda: export_checkpoint(tmp_path, url),
        lambda: check_arguments(TrainingArguments(output_dir=url)),
    ):
        with pytest.raises(CheckpointError, match=r"works on local disks only, and s3://bucket/run/step-1 is a URL"):
            call()
    for wrong, why in {
        "memory://step-1": "is in no folder; save to one below it, such as memory://step-1/step-1",
        "simplecache::s3://bucket/run": "neither a path nor the URL of one store",
        "unknown://bucket/run/a": "cannot be opened: Protocol not known",
    }.items():
        with pytest.raises(CheckpointError, match=why):
            mw.save_checkpoint(wrong, model, optimizer)
    assert place("file:///runs/a") == Path("/runs/a") and place("runs/s3:/a") == Path("runs/s3:/a")
    assert (Url("s3://b/c/") / "d", Url("s3://b/c").parent, Url("memory://") / "a") == (
        "s3://b/c/d",
        "s3://b",
        "memory://a",
    )


def ended_saves(root: str, kind: str, victim: int, every: int) -> tuple[int, list[str]]:
    """End the save of number 2 over that of number 1 at steps; return how often, and what went wrong."""
    with Float64():
        logging.disable(logging.WARNING)
        run, wrong, rank = Run(), [], dist.get_rank()
        failure = Killed() if kind == "kill" else PermissionError("Access Denied")

        def save(name: str, number: float, **options: Any) -> None:
            run.fill(number)
            mw.save_checkpoint(f"{root}/{name}", run.model, run.optimizer, step=int(number), **options)

        save("counted/a", 1)
        fail_at(None)
        save("counted/a", 2, keep=1)
        logs: list[Any] = [None] * 2
        dist.all_gather_object(logs, SharedStore.steps)
        # Of the writes to one file, which are alike, every 20th.
        log = list(enumerate(logs[victim]))
        chosen = [number for number, name in log if not name.startswith("write") or number % 20 == 1][::every]
        for number in chosen:
            parent = f"{victim}-{number}"
            save(f"{parent}/older", 0)
            save(f"{parent}/a", 1)
            fail_at(number if rank == victim else None, failure)
            with contextlib.suppress(Killed, OSError, RuntimeError, CheckpointError):
                save(f"{parent}/a", 2, keep=1)
            failed = SharedStore.steps[-1:]
            fail_at(None)
            gc.collect()
            for folder in (f"{root}/{parent}/a", f"{root}/{parent}"):
                run.fill(7)
                loaded = mw.load_checkpoint(folder, run.model, run.optimizer)
                if run.numbers() not in ({1.0}, {2.0}) or {float(loaded.step)} != run.numbers():
                    wrong.append(f"{number} {failed}: {folder} has {run.numbers()}, step {loaded.step}")
            # What is left goes with the next save to the folder, and a day later with the next save beside it.
            place = root.removeprefix("shared://")
            dist.barrier()
            for path in Path(place, parent).rglob("*") if rank == 0 else ():
                os.utime(path, (0, 0))
            save(f"{parent}/a", 3, keep=1)
            left = {str(path.relative_to(place)) for path in Path(place, parent).rglob("*") if path.is_file()}
            whole = {NAME, *Manifest.read(Url(f"{root}/{parent}/a")).files}
            if left != {f"{parent}/a/{name}" for name in whole}:
                wrong.append(f"{number} {failed}: {sorted(left)} are left")
            dist.barrier()
        return len(chosen), wrong


def in_the_pool(root: str, cases: list[tuple[str, int, int]]) -> Any:
    # A simulated kill on one rank is an error of the collectives on the other, as the death of a process is.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.faults.together.attempt", attempt)
        return [ended_saves(f"{root}/{case[0]}", *case) for case in cases]


def test_a_save_to_a_store_that_ends_at_any_step(pool2: Any, tmp_path: Path) -> None:
    cases = [("kill", 0, 1), ("kill", 1, 2), ("error", 0, 5)]  # the first rank writes last, and removes
    for total, wrong in pool2.run(in_the_pool, f"shared://{tmp_path}", cases, timeout=200)[0]:
        assert total > 1 and not wrong, "\n".join(wrong)


def save_under(plan: dict[str, Any], root: str) -> None:
    with Float64():
        run = Run()
        mw.save_checkpoint(f"{root}/a", run.model, run.optimizer, step=3)


def test_another_plan_loads_from_a_store(pool2: Any, tmp_path: Path) -> None:
    """What two ranks have saved to a store and to the disk is the same, and one process continues from it."""
    pool2.run(save_under, {}, f"shared://{tmp_path}/store")
    pool2.run(save_under, {}, str(tmp_path / "disk"))
    store, disk = contents(Url(f"shared://{tmp_path}/store/a")), contents(tmp_path / "disk" / "a")
    assert store.keys() == disk.keys() and all(torch.equal(store[key], disk[key]) for key in store)
