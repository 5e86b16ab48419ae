"""What hinders a save: old folders that stay, locks of others, file systems that are late, full or hang."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.checkpoint.files import disk, local_disk
from meshwright.checkpoint.files.local_disk import StagedFolder, staged_path
from meshwright.checkpoint.format import background, part_files
from meshwright.checkpoint.format.part_files import RankPart
from meshwright.errors import CheckpointError


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Path]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())

    def save(name: str, **options: Any) -> Path:
        return mw.save_checkpoint(tmp_path / name, model, optimizer, **options)

    return save


def newest(folder: Path) -> int | None:
    model = nn.Linear(4, 4)
    return mw.load_checkpoint(folder, model, torch.optim.AdamW(model.parameters())).step


def test_old_folders_that_stay_are_no_failure(job: Any, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """As on NFS, where a file that a reader holds open is renamed and stays: three saves, then the file is free."""
    job("a", step=1, keep=1)
    real = disk.remove_folder

    def busy(path: Path) -> None:
        if ".saving-" in path.name:
            return real(path)
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(disk, "remove_folder", busy)
    for step, name in enumerate(("b", "b", "c"), start=2):  # also in place of one that is there
        job(name, step=step, keep=1)
        assert newest(tmp_path) == step
    assert "The new checkpoint is complete" in caplog.text
    monkeypatch.undo()
    job("d", step=5, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_who_locks_the_folder_delays_a_save_and_says_so(
    job: Any, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """Anybody who may read a folder can lock it, and a stopped neighbour keeps its lock."""
    monkeypatch.setattr(local_disk, "LOCK_TIME", 0.2)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        start = time.monotonic()
        job("a", step=1)
        assert time.monotonic() - start < 5
    finally:
        os.close(descriptor)
    assert newest(tmp_path) == 1
    assert "another program has held the lock" in caplog.text and "fuser" in caplog.text


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_locks_are_refused_a_save_works(
    number: int, job: Any, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    local_disk._say_unlocked.cache_clear()
    left = tmp_path / f".a.saving-00000000-{local_disk._host()}"  # of a job that may still run
    left.mkdir()
    for step in (1, 2):
        job("a", step=step)
    assert newest(tmp_path) == 2 and left.is_dir()
    assert caplog.text.count("refuses locks") == 1


def test_another_job_cannot_remove_a_folder_that_has_just_been_made(tmp_path: Path, monkeypatch: Any) -> None:
    """It takes the folder for a leftover before that is locked: the save goes on in another folder."""
    real, made = disk.make_folder, []

    def make(path: Path) -> None:
        real(path)
        if ".saving-" in path.name and not made:
            made.append(path)
            local_disk.remove_leftovers(tmp_path)
            assert not path.exists()

    monkeypatch.setattr(disk, "make_folder", make)
    staging = StagedFolder(tmp_path / "a", lambda _: True)
    local_disk.remove_leftovers(tmp_path)
    assert staging.path.is_dir() and not staging.path.is_relative_to(made[0])
    staging.commit()
    staging.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_rank_writes_beside_its_own_target_alone(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(local_disk, "LATE", 0.2)
    target = tmp_path / "step-1"
    for hidden in (
        "../x/.step-1.saving-01234567",
        ".step-2.saving-01234567",
        ".step-1.replaced-01234567",
        "/x",
        "step-1",
    ):
        with pytest.raises(CheckpointError, match="no hidden folder beside"):
            staged_path(target, hidden)
    with pytest.raises(
        CheckpointError, match=r"did not see .* within 0.2 s, which rank 0 has made: all hosts must save"
    ):
        staged_path(target, ".step-1.saving-01234567")


def test_a_folder_that_a_host_sees_late_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / ".a.saving-01234567" / "a"
    threading.Timer(0.3, lambda: path.mkdir(parents=True)).start()
    assert staged_path(tmp_path / "a", ".a.saving-01234567") == path


def test_a_full_disk_is_named(job: Any, tmp_path: Path, monkeypatch: Any) -> None:
    job("a", step=1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "write", full)
    words = r"needs [\d,]+ bytes, and [\d,]+ bytes are free in .*What was saved there before is whole.*b'$"
    with pytest.raises(OSError, match=words) as error:
        job("b", step=2)
    assert error.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match=r"bytes are free in .*whole.*out'$"):
        from meshwright_tools.checkpoints.export_checkpoint import export_checkpoint

        export_checkpoint(tmp_path / "a", tmp_path / "out")
    monkeypatch.undo()
    assert newest(tmp_path) == 1 and sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_save_that_hangs_is_named(job: Any, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """Alone, without another rank that could miss it: at once in the log, and by the next save."""
    go_on, write = threading.Event(), RankPart.write

    def hang(self: RankPart, *args: Any) -> Any:
        go_on.wait()
        return write(self, *args)

    monkeypatch.setattr(part_files.RankPart, "write", hang)
    monkeypatch.setattr(background, "ToDistributedConfig", lambda: mw.ToDistributedConfig(timeout_s=0.4))
    job("a", step=1, asynchronous=True)
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(TimeoutError, match=r"a has not moved on for 0.4 s, at .*in hang"),
    ):
        job("b", step=2)
    assert "has not moved on" in caplog.text
    go_on.set()
    monkeypatch.undo()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            job("c", step=3)
            break
        except TimeoutError:  # until the thread has ended
            time.sleep(0.05)
    assert newest(tmp_path) == 3
