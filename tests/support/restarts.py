"""Runs under a launcher whose ranks are killed at random, or stopped."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.launchers import run_command

SCRIPT = Path(__file__).with_name("killed_script.py")
RANKS = 2
PLANS = ("dp2 zero1", "tp2+sp", "dp2 zero3")


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a run is made.

    Args:
        kind: of the program: ``"loop"`` or ``"trainer"``.
        plan: in words, for two ranks.
        steps: that it trains.
        timeout: seconds that a rank may be silent.
    """

    kind: str
    plan: str
    steps: int = 20
    timeout: float = 60.0

    def arguments(self, folder: Path) -> list[str]:
        return [str(SCRIPT), self.kind, str(folder), str(self.steps), str(self.timeout)]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended.

    Args:
        code: the launcher's exit code.
        output: what all its processes printed.
        result: the digest of the weights; None if the run did not come to its end.
        faults: what was done to it.
        after: seconds from the last fault to the launcher's end.
    """

    code: int
    output: str
    result: str | None
    faults: list[str]
    after: float


def disturbed(run: Run, folder: Path, kills: int, seed: int) -> Ended:
    """Run a program under ``meshwright launch`` with restarts, and kill one of its ranks at random several times."""
    draw = random.Random(seed)

    def disturb(faults: list[str], is_over: Callable[[], bool]) -> None:
        for attempt in range(kills):
            victim = draw.randrange(RANKS)
            in_set_up, delay, steps = draw.random() < 0.25, draw.random(), draw.randint(1, 6)
            pids = [folder / f"pid-{attempt}-{rank}" for rank in range(RANKS)]
            before = _progress(folder)
            if not _wait(lambda pids=pids: all(_read(path) for path in pids), is_over):
                return
            if in_set_up:
                time.sleep(5 * delay)
            elif _wait(lambda goal=before + steps: _progress(folder) >= goal, is_over):
                time.sleep(0.1 * delay)  # some of these are in a save, some in a step
            if is_over():
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(_read(pids[victim])), signal.SIGKILL)
                where = "in the set-up" if in_set_up else f"after {_progress(folder)} notes"
                faults.append(f"SIGKILL of rank {victim} {where}")

    return _watched(run, folder, disturb, ["--max-restarts", str(kills)])


def stopped(run: Run, folder: Path, victim: int, *, by_torchrun: bool) -> Ended:
    """Run a program under a launcher, and stop one of its ranks for ever after some steps."""

    def disturb(faults: list[str], is_over: Callable[[], bool]) -> None:
        if _wait(lambda: _progress(folder) >= 3 + victim, is_over):
            os.kill(int(_read(folder / f"pid-0-{victim}")), signal.SIGSTOP)
            faults.append(f"SIGSTOP of rank {victim}")

    return _watched(run, folder, disturb, None if by_torchrun else [])


def _watched(
    run: Run, folder: Path, disturb: Callable[[list[str], Callable[[], bool]], None], options: list[str] | None
) -> Ended:
    """Run under ``meshwright launch`` with these options, or under torchrun if there are none."""
    folder.mkdir(parents=True, exist_ok=True)
    over, faults, last = threading.Event(), [], [time.monotonic()]

    def keep_time() -> None:
        disturb(faults, over.is_set)
        last[0] = time.monotonic()

    thread = threading.Thread(target=keep_time)
    thread.start()
    try:
        if options is None:
            code, output = _torchrun(run, folder)
        else:
            given = ["--cpu", "--plan", run.plan, *options, "--", *run.arguments(folder)]
            ended = run_command("launch", *given, folder=folder, timeout=900)
            code, output = ended.code, ended.output
    finally:
        end = time.monotonic()
        over.set()
        thread.join()
    result = folder / "result"
    return Ended(
        code=code, output=output, faults=faults, after=end - last[0],
        result=result.read_text() if result.exists() else None,
    )  # fmt: skip


def _torchrun(run: Run, folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
         *run.arguments(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
             "MESHWRIGHT_PLAN": run.plan},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def _wait(condition: Callable[[], bool], is_over: Callable[[], bool]) -> bool:
    while not is_over():
        if condition():
            return True
        time.sleep(0.005)
    return False


def _progress(folder: Path) -> int:
    return _read(folder / "progress").count("\n")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
