"""A program that hangs on one rank ends on all of them in time, with the rank and the line at which it hangs named."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

from harness.programs import run_program
from meshwright.faults.ending import Deadline
from meshwright.mesh import process_group
from meshwright_hf.launch.job import free_port
from support.ending import TIMEOUT, check, flat
from support.hangs import PLACES, STARTS, hangs, hold_the_gil, run_script, stop_here
from support.tiers import crossings

# No thread of Python runs in these, and only in the first does the kernel's signal reach code that writes the stack.
ENDED_BY_THE_KERNEL = ("gil", "stop")
BY_EITHER = ("loop", "worker", "gil", "stop")  # places where it matters whether rank 0 hangs, which has the referee
EVERYWHERE = ("before the call", "stop")  # places where it matters who started the ranks
BY_ONE_LAUNCHER = {"set-up": "launch", "worker": "torchrun", "end": "plain", "gil": "torchrun"}
IN_TIME = TIMEOUT + 15  # on a busy machine; without the timeout a rank would wait for minutes
TORCHRUN_ENDS = 15.0  # seconds that torchrun may take on a busy machine after all ranks have ended


@pytest.mark.parametrize(
    ("place", "victim"),
    crossings(
        [
            (place, victim)
            for number, place in enumerate(PLACES)
            for victim in range(2)
            if place != "before the call" and (place in BY_EITHER or victim == number % 2)
        ],
        but=[("loop", 1), ("worker", 0), ("gil", 0)],
        one_in=2,
    ),
)
def test_a_program_that_hangs_ends(place: str, victim: int) -> None:
    """Without a launcher: nobody but the rank itself and the kernel can end it."""
    outcomes = run_program(hangs, 2, place, victim, timeout=90.0)
    hung, other = outcomes[victim], outcomes[1 - victim]
    if place in ENDED_BY_THE_KERNEL:
        assert hung.code == -signal.SIGKILL and hung.after < IN_TIME, hung
        assert place == "stop" or "in hold_the_gil" in hung.output, hung.output
    else:
        why = "kept other ranks waiting for 4 s.*, so this process ends. Its main thread is here:"
        check(hung, rf"{why}.*hangs\.py\", line \d+, in (hang_here|wait_for_a_dead_lock|hangs)", within=IN_TIME)
    named = rf"rank {victim} \(host [^)]*\)"
    check(other, rf"{named}.*(kept other ranks waiting|stopped, hung)|did not come:.*{named}", within=IN_TIME)


def holds_the_gil_after_its_failure() -> None:
    Deadline().end(1.0)
    hold_the_gil()


def test_a_process_that_has_failed_and_hangs_exits_as_one_that_failed() -> None:
    """A launcher would say of a killed one that it was killed, which sounds like a lack of memory."""
    (outcome,) = run_program(holds_the_gil_after_its_failure, 1)
    assert outcome.code == 1 and 1 <= outcome.after < 10, outcome


def meets_a_stopped_store(port: int) -> None:
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT=str(port))  # rank 0 serves the store
    if os.environ["RANK"] == "0":
        process_group.await_ranks = lambda *_: stop_here()  # type: ignore[assignment]
    process_group.start_process_group(torch.device("cpu"), TIMEOUT)


def test_rank_0_is_stopped_before_the_guard_runs() -> None:
    """The store in which the others wait for it is stopped too, and torch's wait for an answer has no limit."""
    _, other = run_program(meets_a_stopped_store, 2, free_port(), timeout=60.0, may_remain=(0,))
    check(other, "waited 4 s for rank 0, which did not come to the set-up", within=IN_TIME)


@pytest.mark.parametrize(
    ("place", "start"),
    crossings(
        [*itertools.product(EVERYWHERE, STARTS), *BY_ONE_LAUNCHER.items()],
        but=[("set-up", "launch")],
        one_in=2,
    ),
)
def test_a_script_that_hangs_ends_however_it_was_started(start: str, place: str, preloaded_python: Path) -> None:
    """The launcher has ended too, and found the right rank; a rank that has not made the call writes its stack too."""
    victim = PLACES.index(place) % 2
    # Ranks end one another by their parent and environment, which are other ones in processes that were only forked.
    python = sys.executable if place in ("before the call", "stop") else str(preloaded_python)
    ended = run_script(start, place, victim, str(preloaded_python), python, patience=240.0)
    said = flat(ended.output)
    assert all(ended.codes) and ended.after < IN_TIME + (TORCHRUN_ENDS if start == "torchrun" else 0), ended
    assert re.search(rf"rank {victim} \(host [^)]*\)|for rank {victim}, which did not come to the set-up", said), said
    assert place == "stop" or re.search(r"hangs\.py(\", line |:)\d+", said), said
    if start == "launch":
        assert f"meshwright launch: rank {victim} " in said, said
    if start == "torchrun":
        assert re.search(rf"Root Cause.*?rank +: {victim} ", said), said
