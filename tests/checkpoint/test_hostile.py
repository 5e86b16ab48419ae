"""Hostile checkpoints are errors: no code runs, no file outside the folder is read, and the memory stays bounded."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import meshwright as mw
from harness.programs import run_program
from meshwright_tools.cli import app
from support.hostile import CHECKPOINTS, FILE, MARK, OPTIMIZERS, WEIGHTS, safetensors, tensor, to_format_1
from support.optimizer_files import to_whole_tensors
from support.tiers import crossing

MEMORY = 64 * 2**20  # bytes beside those of the files, sparse ones of a terabyte aside
CODE = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "ctypes.dlopen"}
NVML = "libnvidia-ml.so.1"  # a CUDA build of torch counts its devices by this library


class Small(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


def objects() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Small(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.ones(3, 2)
    optimizer.step()
    return model, optimizer


def load_checkpoint(folder: Path) -> None:
    mw.load_checkpoint(folder, *objects())


def load_weights(folder: Path) -> None:
    mw.load_weights(Small(2), folder)  # the tensor of every header


def write_weights(path: Path) -> None:
    safetensors({"weight": tensor()})(path)


def load_optimizer(folder: Path) -> None:
    mw.load_optimizer(*objects(), folder)


def run_command(name: str, folder: Path) -> str:
    """Return the name of an exception that a command did not handle, if it raised one."""
    arguments = [name, str(folder), *([str(folder.parent / "exported")] if name == "export" else [])]
    error = CliRunner().invoke(app, arguments).exception
    return "" if error is None or isinstance(error, SystemExit) else repr(error)


class Watch:
    """Records what runs code, and what opens files of ``outside``."""

    def __init__(self, outside: Path) -> None:
        self.outside, self.seen, self.is_on = str(outside), [], False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event == "ctypes.dlopen" and arguments[0] == NVML:
            return
        if event in CODE:
            self.seen.append(f"{event} {arguments!r}"[:200])
        elif event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            path = os.fsdecode(arguments[0])
            is_refused = flags & os.O_NOFOLLOW and os.path.islink(path)
            real = os.path.realpath(path)
            if not is_refused and (real.startswith(self.outside) or real in ("/etc/passwd", "/dev/zero")):
                self.seen.append(f"open {path}")


def peak() -> int:
    """Return the largest memory of this process since ``forget_peak``, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def size_of(folder: Path) -> int:
    sizes = [path.lstat().st_size for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
    return sum(size for size in sizes if size < 2**30)


def attempt(load: Callable[[Path], None], folder: Path) -> str:
    try:
        load(folder)
    except mw.CheckpointError:
        return ""
    except BaseException as error:
        return f"a raw {error!r}"[:500]
    return "no error"


def program(place: str, kind: str) -> None:
    """Print what is wrong with each load of a hostile folder, as one line of JSON."""
    parent = Path(place)
    model, optimizer = objects()
    is_checkpoint = kind.startswith("checkpoint")

    def save_checkpoint(folder: Path) -> None:
        mw.save_checkpoint(folder, model, optimizer, step=1)
        if kind == "checkpoint of format 1":
            to_format_1(folder)

    def save_optimizer(folder: Path) -> None:
        mw.save_optimizer(model, optimizer, folder)
        to_whole_tensors(folder)  # the other form has the manifest of a checkpoint

    save, load, corpus = {
        "checkpoint": (save_checkpoint, load_checkpoint, CHECKPOINTS),
        "weights": (lambda to: write_weights(to / FILE), load_weights, WEIGHTS),
        "optimizer": (save_optimizer, load_optimizer, OPTIMIZERS),
    }[kind.partition(" ")[0]]
    if kind == "weights":
        (parent / "whole").mkdir()
    save(parent / "whole")
    load(parent / "whole")  # what is not damaged loads, and all that is imported once is
    if is_checkpoint:
        assert not run_command("inspect", parent / "whole")
        assert not run_command("export", parent / "whole")
    watch = Watch(parent / "case" / "outside")
    for name, change in corpus.items():
        shutil.rmtree(parent / "case", ignore_errors=True)
        folder = parent / "case" / "saved"
        shutil.copytree(parent / "whole", folder)
        change(folder)
        forget_peak()
        before, start = peak(), time.monotonic()
        watch.seen, watch.is_on = [], True
        found = [problem] if (problem := attempt(load, folder)) else []
        if is_checkpoint:
            failures = {command: run_command(command, folder) for command in ("inspect", "export")}
            found += [f"{command}: {text}" for command, text in failures.items() if text]
        watch.is_on = False
        seconds, grown = time.monotonic() - start, peak() - before
        found += watch.seen
        if MARK in os.environ:
            found.append("code ran")
        if grown > size_of(folder) + MEMORY:
            found.append(f"{grown:,} bytes of memory for {size_of(folder):,} bytes of files")
        if seconds > 20:
            found.append(f"{seconds:.0f} s")
        print("CASE " + json.dumps([name, found, grown, seconds]), flush=True)


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is measured in /proc")
@pytest.mark.parametrize("kind", ["checkpoint", crossing("checkpoint of format 1"), "weights", "optimizer"])
def test_nothing_hostile_gets_through(kind: str, tmp_path: Path) -> None:
    (outcome,) = run_program(program, 1, str(tmp_path), kind, timeout=200)
    lines = [json.loads(line[5:]) for line in outcome.output.splitlines() if line.startswith("CASE ")]
    wrong = [f"{name}: {'; '.join(found)}" for name, found, *_ in lines if found]
    assert not wrong, "\n".join(wrong)
    corpus = {"checkpoint": CHECKPOINTS, "weights": WEIGHTS, "optimizer": OPTIMIZERS}[kind.partition(" ")[0]]
    assert outcome.code == 0 and [name for name, *_ in lines] == list(corpus), outcome.output[-3000:]


def test_the_corpus_is_large() -> None:
    assert len(CHECKPOINTS) + len(WEIGHTS) + len(OPTIMIZERS) >= 60
