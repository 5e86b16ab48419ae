"""A step on fake CUDA tensors: the host waits nowhere, and what would be wrong on CUDA is found."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.tracing.cuda_order import order_problems
from meshwright.tracing.cuda_trace import CudaStep
from meshwright.tracing.fake_cuda import why_unavailable
from meshwright.tracing.host_waits import Issued
from support.cuda_steps import FAULTS, PROGRAMS

WORDS = {
    "reads_a_number": "the host waits: _local_scalar_dense",
    "copies_a_number": "a blocking copy: cpu to cuda",
    "uses_early": "used before its collective has ended",
    "stays_on_host": "not on the device: forgotten",
    "one_rank_sends_more": "rank 1 allreduce_",
    "gathers_a_list": "NCCL does not take as it is: allgather_",
}

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


@pytest.fixture(scope="module")
def found(preloaded_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[str]]]:
    """A function that returns what is found in a program or a fault; one process traces all of them."""
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *sys.path]), "OMP_NUM_THREADS": "1"}
    errors = tmp_path_factory.mktemp("cuda_trace") / "errors.txt"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            [preloaded_python, "-m", "support.cuda_steps"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        assert process.stdin and process.stdout

        def ask(name: str) -> list[str]:
            with contextlib.suppress(BrokenPipeError):  # of a process that has ended, which answers nothing either
                print(name, file=process.stdin, flush=True)
            answer = process.stdout.readline()
            assert answer, errors.read_text()[-4000:]
            return json.loads(answer)

        yield ask
        process.kill()  # also one that hangs


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_step_waits_nowhere_and_its_collectives_fit(program: str, found: Callable[[str], list[str]]) -> None:
    assert found(program) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, found: Callable[[str], list[str]]) -> None:
    problems = found(fault)
    assert any(WORDS[fault] in problem for problem in problems), problems


def step_of(*issued: Issued) -> CudaStep:
    return CudaStep(waits=Counter(), copies=Counter(), unawaited=Counter(), on_host=(), issued=issued)


def issued(kind: str, size: int, peer: int | None = None) -> Issued:
    return Issued(kind=kind, group="g", ranks=(0, 1), shape=(size,), devices=("cuda",), peer=peer)


@pytest.mark.parametrize(("first", "second", "words"), [
    ([issued("allreduce_", 4)], [issued("allreduce_", 4)], None),
    ([issued("allreduce_", 4)], [issued("allreduce_", 5)], "rank 1 allreduce_ of [5]"),
    ([issued("allreduce_", 4)], [], "rank 1 nothing more"),
    ([issued("allreduce_", 4), issued("broadcast_", 4)], [issued("broadcast_", 4), issued("allreduce_", 4)], "ive 1"),
    ([issued("send", 4, 1)], [issued("recv_", 4, 0)], None),
    ([issued("send", 4, 1)], [issued("recv_", 3, 0)], "rank 0 sends 1 messages to rank 1"),
    ([issued("send", 4, 1), issued("send", 3, 1)], [issued("recv_", 3, 0), issued("recv_", 4, 0)], "rank 0 sends 2"),
])  # fmt: skip
def test_the_order_of_two_ranks(first: Any, second: Any, words: str | None) -> None:
    problems = order_problems({0: step_of(*first), 1: step_of(*second)})
    assert problems == [] if words is None else words in problems[0]
