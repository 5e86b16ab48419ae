"""The order of checkpoints in a folder depends on no clock, and two jobs below one folder do not hurt each other."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from test_hostile import Small

import meshwright as mw
from meshwright.checkpoint.files import disk, local_disk, reading
from meshwright.checkpoint.files.reading import MAX_NUMBER, Lineage
from meshwright.checkpoint.format import part_files
from meshwright.checkpoint.format.checkpoint_folders import NAME, Manifest, newest_checkpoint
from meshwright.checkpoint.sealed import Seal, close_seal, sealed_folder
from support.edits import write_manifest

HOUR = 3600 * 10**9


class Job:
    """A program that saves below a folder, and may be resumed from it."""

    def __init__(self, parent: Path, name: str = ""):
        self.parent, self.name = parent, name
        self.model = Small(2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def save(self, step: int, **options: Any) -> None:
        mw.save_checkpoint(self.parent / f"{self.name}{step}", self.model, self.optimizer, step=step, **options)

    def load(self, folder: str = "") -> int:
        found = mw.load_checkpoint(self.parent / folder, self.model, self.optimizer)
        assert found is not None and found.step is not None
        return found.step


def left(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def set_clock(patch: pytest.MonkeyPatch, hours: float) -> None:
    now = time.time_ns
    patch.setattr("meshwright.checkpoint.format.rank_state.time.time_ns", lambda: int(now() + hours * HOUR))


def as_of_an_older_version(folder: Path) -> None:
    """Make a manifest as versions without numbers wrote it."""
    manifest = json.loads((folder / NAME).read_bytes())["manifest"]
    del manifest["number"], manifest["run"]
    write_manifest(folder, manifest)


def test_a_clock_that_goes_back_changes_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for step, hours in ((1, 0), (2, 1), (3, 0), (4, -1), (5, -30 * 24)):
        with pytest.MonkeyPatch.context() as patch:
            set_clock(patch, hours)
            job.save(step, keep=2)
        assert job.load() == step  # before: 2, and each save after it was removed at once
        assert left(tmp_path) == [str(kept) for kept in (step - 1, step) if kept]


def test_checkpoints_of_an_older_version_come_first(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for step in (1, 2):
        job.save(step)
        as_of_an_older_version(tmp_path / str(step))
    assert newest_checkpoint(tmp_path)[0].name == "2"  # type: ignore[index]
    other = Job(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        set_clock(patch, -24)
        other.save(3, keep=1)
    assert left(tmp_path) == ["1", "2", "3"]  # it has not gone on with their run
    assert other.load() == 3
    resumed = Job(tmp_path)
    assert resumed.load("2") == 2
    resumed.save(4, keep=2)
    assert left(tmp_path) == ["2", "3", "4"]


def test_jobs_remove_only_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two at a time, each with ``keep=2``; before, one died of a FileNotFoundError, and only the other's were left."""
    jobs, errors = [Job(tmp_path, "a"), Job(tmp_path, "b")], []

    def run(job: Job) -> None:
        try:
            for step in range(8):
                job.save(step, keep=2)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and left(tmp_path) == ["a6", "a7", "b6", "b7"]
    numbers = [Manifest.read(path).number for path in tmp_path.iterdir()]
    assert len({*numbers}) == 4 and max(numbers) == 16
    jobs[0].save(9, keep=2)
    assert jobs[1].load() == 9  # of the other run: the one that was saved last
    assert f"2 runs. The one that was saved last is taken, {tmp_path / 'a9'}" in caplog.text
    assert str(tmp_path / "b7") in caplog.text


def test_who_goes_on_with_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Job(tmp_path)
    for step in (1, 2, 3):
        first.save(step)
    second, third = Job(tmp_path), Job(tmp_path)
    assert second.load() == third.load() == 3
    second.save(4, keep=2)
    assert left(tmp_path) == ["3", "4"]  # the restarted job removes what it had saved before
    assert not caplog.records
    third.save(5, keep=1)  # another one that has been resumed from the same checkpoint is a run of its own
    first.save(6, keep=1)
    assert left(tmp_path) == ["3", "4", "5", "6"]
    second.save(7, keep=1)
    assert left(tmp_path) == ["5", "6", "7"]
    back = Job(tmp_path)
    assert back.load("5") == 5
    back.save(2)
    assert Job(tmp_path).load() == 2  # the last save, whatever its step


def test_races_of_removal_are_no_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    for step in (1, 2, 3):
        job.save(step)
    rename = disk.rename

    def another_is_faster(source: Path, target: Path) -> None:
        if ".removed-" in target.name:
            disk.remove_folder(source)
        rename(source, target)

    monkeypatch.setattr(disk, "rename", another_is_faster)
    job.save(4, keep=1)
    assert left(tmp_path) == ["4"]


@pytest.mark.parametrize("host", ["this", "another"])
def test_folders_of_a_save_in_progress_stay(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This host's are locked. Of another host, no lock is seen here: what was written to lately stays for a day."""
    with monkeypatch.context() as patch:
        if host == "another":
            patch.setattr(local_disk, "_host", lambda: "0123abcd")
            patch.setattr("fcntl.flock", lambda *_: None)
        living = local_disk.StagedFolder(tmp_path / "a", lambda _: True)
        (living.path / "part").write_text("half")
    job = Job(tmp_path)
    job.save(1)
    assert (living.path / "part").exists()
    day_ago = time.time() - 25 * 3600
    for path in (living.path / "part", living.path, living.path.parent):
        os.utime(path, (day_ago, day_ago))
    job.save(2)
    assert (living.path / "part").exists() == (host == "this")
    if host == "this":
        living.commit()
    living.close()
    assert left(tmp_path) == (["1", "2", "a"] if host == "this" else ["1", "2"])


def test_a_neighbour_cannot_stop_the_order(tmp_path: Path) -> None:
    """A neighbour's manifest is read up to a few bytes only, and a number after which none comes is an error."""
    Job(tmp_path).save(1)
    (tmp_path / "huge").mkdir()
    (tmp_path / "huge" / NAME).write_bytes(b"{")
    os.truncate(tmp_path / "huge" / NAME, 2**40)
    Job(tmp_path).save(2)
    assert Manifest.read(tmp_path / "2").number == 2
    manifest = json.loads((tmp_path / "1" / NAME).read_bytes())["manifest"]
    text = json.dumps({**manifest, "number": MAX_NUMBER}, indent=1)
    (tmp_path / "1" / NAME).write_text('{"digest":"","manifest":' + text)
    with pytest.raises(mw.CheckpointError, match=rf"1/{NAME} has the number {MAX_NUMBER}"):
        Job(tmp_path).save(3)
    assert left(tmp_path) == ["1", "2", "huge"]


def test_sealed_folders_have_numbers_too(tmp_path: Path) -> None:
    """Also: an open folder is closed rightly after the clock has gone back and a file has changed in place."""
    lineage = Lineage()
    for number in (1, 2):
        with sealed_folder(tmp_path / str(number), lineage=lineage, is_open=True) as folder:
            (folder / "a").write_text("old")
            (folder / "b").write_text("same")
        assert Seal.read(tmp_path / str(number)).number == number
    changed = tmp_path / "2" / "a"
    changed.write_text("new")
    os.utime(changed, (0, 0))  # before the seal, by a clock that went back
    before = Seal.read(tmp_path / "2").files
    close_seal(tmp_path / "2")
    after = Seal.read(tmp_path / "2")
    assert after.number == 2 and after.run == lineage.run and not after.is_open
    assert after.files["b"] == before["b"] and after.files["a"] != before["a"]


@pytest.mark.parametrize("kind", ["checkpoint", "seal"])
def test_what_another_program_saves_meanwhile_is_not_replaced(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = (tmp_path / "last").resolve()

    def save(of: Lineage, text: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        if kind == "seal":
            with sealed_folder(target, lineage=of) as hidden:
                (hidden / "a.json").write_text(text)
                meanwhile()
        else:
            job = Job(tmp_path, "last")
            job.model.weight.data.fill_(float(text))
            with mock.patch.object(Lineage, "of", lambda _: of), watched_part(meanwhile):
                mw.save_checkpoint(target, job.model, job.optimizer, step=int(text))

    def theirs() -> None:
        with mock.patch.dict(reading._SEEN):  # another process
            save(Lineage(), "2")

    def found() -> int:
        return int((target / "a.json").read_text()) if kind == "seal" else Manifest.read(target).step or 0

    own = Lineage()
    with pytest.raises(mw.CheckpointError, match=r"another program has saved to .*last.*such as .*last-2"):
        save(own, "1", theirs)
    assert found() == 2 and left(tmp_path) == ["last"]
    monkeypatch.setattr(reading, "_SEEN", {})
    save(Lineage(), "3")  # a new program that finds it there may replace it, as the rerun of a script does
    save(own, "4")  # and so may each part of this program
    theirs()
    with pytest.raises(mw.CheckpointError, match="another program"):
        save(own, "5")  # it alternates with another program
    assert found() == 2


@contextlib.contextmanager
def watched_part(meanwhile: Callable[[], None]) -> Iterator[None]:
    """Inside, call a function once when a rank writes its part."""
    write = part_files.RankPart.write

    def watched(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(part_files.RankPart, "write", write):
            meanwhile()
        return write(*args, **kwargs)

    with mock.patch.object(part_files.RankPart, "write", watched):
        yield
