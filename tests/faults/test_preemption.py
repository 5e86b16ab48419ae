"""A signal to one rank makes all of them save after the same step and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.faults import preemption as listening
from meshwright.faults.preemption import PREEMPTED
from support.decoder import LENGTH, VOCAB, make_decoder


@pytest.fixture
def as_before() -> Any:
    """Puts the handlers of signals back; the processes of a pool run other tests."""
    yield from restored()


def restored() -> Any:
    before = {number: signal.getsignal(number) for number in listening.SIGNALS}
    listening._heard.clear()
    yield
    listening._heard.clear()
    for number, handler in before.items():
        signal.signal(number, handler)


def preempted(folder: Path, number: int, victims: list[int], at: int) -> tuple[int, str, object]:
    """Train until the ranks are to end; return the step, the reason and the exit code."""
    around = restored()
    next(around)
    try:
        torch.manual_seed(0)
        model = make_decoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, _ = mw.to_distributed(model, optimizer, plan="dp2")
        preemption = mw.Preemption()
        ids = torch.arange(2 * LENGTH).reshape(2, LENGTH).mul(7).remainder(VOCAB)[dist.get_rank() :][:1]
        for step in range(1, 60):
            loss, _ = model(ids, labels=ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() in victims and step == at:
                os.kill(os.getpid(), number)
            if preemption.is_due():
                mw.save_checkpoint(folder, model, optimizer, step=step)
                try:
                    preemption.leave()
                except SystemExit as end:
                    return step, preemption.reason, end.code
        return 60, "", None
    finally:
        next(around, None)


@pytest.mark.parametrize(
    ("number", "victims", "at"),
    [
        pytest.param(signal.SIGUSR1, [1], 3, marks=pytest.mark.quick),
        (signal.SIGTERM, [0, 1], 3),
        (signal.SIGTERM, [0], 1),
    ],
)
def test_all_ranks_save_after_the_same_step(
    number: int, victims: list[int], at: int, pool2: Any, tmp_path: Path
) -> None:
    """In the step of the signal, or in the next one if the other rank has already gone on."""
    first, second = pool2.run(preempted, tmp_path / "saved", number, victims, at)
    assert first == second
    step, reason, code = first
    assert at <= step < 60 and code == PREEMPTED
    assert reason.startswith(f"{signal.Signals(number).name} to rank ")


def test_without_a_signal_no_step_costs_a_message_and_none_is_due(pool2: Any, tmp_path: Path) -> None:
    assert pool2.run(preempted, tmp_path, signal.SIGUSR1, [], 0) == [(60, "", None)] * 2


@pytest.mark.usefixtures("as_before")
def test_one_process_is_due_at_once() -> None:
    preemption = mw.Preemption([signal.SIGUSR1])
    assert not preemption.is_due()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert preemption.is_due() and preemption.reason is not None
    with pytest.raises(SystemExit) as end:
        preemption.leave()
    assert end.value.code == PREEMPTED == 75


@pytest.mark.usefixtures("as_before")
def test_a_thread_cannot_be_the_first_to_listen() -> None:
    said: list[str] = []

    def make() -> None:
        try:
            mw.Preemption()
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("made")

    for _ in range(2):
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        listening.listen()
    assert "only in its main thread" in said[0] and "listen() there first" in said[0]
    assert said[1] == "made"


def test_a_signal_that_came_before_the_program_could_listen_counts() -> None:
    """meshwright launch starts the processes of a job with SIGUSR1 blocked, which would end a process that imports."""
    program = (
        "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); import meshwright as mw; "
        "preemption = mw.Preemption(); print(preemption.is_due())"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert done.stdout.strip() == "True", done.stderr
