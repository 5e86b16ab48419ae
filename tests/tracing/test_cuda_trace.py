"""A step on fake CUDA tensors: the host waits nowhere, and what would be wrong on CUDA is found."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.choose.given_plan import resolve_plan
from meshwright_tools.cli.trace_cuda import _nothing
from meshwright_tools.tracing.cuda_trace import CudaStep, chosen_ranks, compared_groups, order_problems, why_unavailable
from meshwright_tools.tracing.host_waits import Issued
from support.cuda_steps import FAULTS, OFFLOADS, PROGRAMS, WAITS
from support.tiers import crossings

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


@pytest.mark.parametrize(
    "program",
    crossings(
        PROGRAMS,
        but=[
            "dp2 zero3 bf16",
            "dp2 of the rank's items",
            "tp2+sp adapters with dropout, mask",
            "dp2 tp2+sp zero1",
            "cp2 ulysses autocast",
            "cp2 ring",
            "pp2 zb-h1",
            "pp2 of the rank's items",
            "tp2+sp olmo2",
            "dp2 zero3 evaluation",
            "dp2 ep2 zero1, all tokens to all",
        ],
        one_in=3,
    ),
)
def test_a_step_waits_nowhere_and_its_collectives_fit(program: str, found: Callable[[str], list[str]]) -> None:
    assert found(program) == []


@pytest.mark.parametrize("program", crossings(WAITS, only=["dp2 zero3 without some gradients", "dp2 ep2"]))
def test_a_rank_waits_once_where_sizes_or_gradients_are_known_to_the_device_alone(
    program: str, found: Callable[[str], list[str]]
) -> None:
    place = "optim/zero/zero_optimizer.py" if "zero" in program else "parallel/gradients/sync.py"
    if "ep2" in program:
        place = "parallel/experts/token_dispatchers.py"  # how many tokens travel, once for its one layer
    problems = [re.sub(r":\d+ ", " ", problem) for problem in found(program)]
    assert problems == [f"rank {rank}: the host waits: tolist in {place} (1 times)" for rank in (0, 1)]


@pytest.mark.parametrize("program", crossings(OFFLOADS, but=["dp2 zero3 bf16 offload"]))
def test_a_step_on_the_host_waits_for_the_gradients_of_each_bucket_alone(
    program: str, found: Callable[[str], list[str]]
) -> None:
    place = r"rank \d: the host waits: Event.synchronize in optim/offload.py:\d+ \([124] times\)"
    problems = found(program)
    assert problems and all(re.fullmatch(place, problem) for problem in problems), problems


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, found: Callable[[str], list[str]]) -> None:
    problems, (_, words) = found(fault), FAULTS[fault]
    assert any(words in problem for problem in problems), problems


def step_of(*issued: Issued) -> CudaStep:
    return CudaStep(waits=Counter(), copies=Counter(), early=Counter(), on_host=(), issued=issued)


def issued(kind: str, size: int, peer: int | None = None, **more: Any) -> Issued:
    return Issued(kind=kind, group="g", ranks=(0, 1), shape=(size,), devices=("cuda",), peer=peer, **more)


@pytest.mark.parametrize(("first", "second", "words"), [
    ([issued("allreduce_", 4)], [issued("allreduce_", 4)], None),
    ([issued("allreduce_", 4)], [issued("allreduce_", 5)], "rank 1 allreduce_ of [5]"),
    ([issued("allreduce_", 4)], [issued("allreduce_", 4, dtype="bfloat16")], "rank 1 allreduce_ of [4] bfloat16"),
    ([issued("broadcast_", 4, root=0)], [issued("broadcast_", 4, root=1)], "with root 1"),
    ([issued("allreduce_", 4)], [], "rank 1 nothing more"),
    ([issued("allreduce_", 4), issued("broadcast_", 4)], [issued("broadcast_", 4), issued("allreduce_", 4)], "ive 1"),
    ([issued("send", 4, 1)], [issued("recv_", 4, 0)], None),
    ([issued("send", 4, 1)], [issued("recv_", 3, 0)], "rank 0 sends 1 messages to rank 1"),
    ([issued("send", 4, 1)], [issued("recv_", 4, 0, dtype="float16")], "rank 0 sends 1 messages to rank 1"),
    ([issued("send", 4, 1), issued("send", 3, 1)], [issued("recv_", 3, 0), issued("recv_", 4, 0)], "rank 0 sends 2"),
])  # fmt: skip
def test_the_order_of_two_ranks(first: Any, second: Any, words: str | None) -> None:
    problems = order_problems({0: step_of(*first), 1: step_of(*second)})
    assert problems == [] if words is None else words in problems[0]


@pytest.mark.parametrize(("plan", "most", "ranks"), [
    ("dp2 tp2+sp zero1", 8, [0, 1, 2, 3]),
    ("dp8 tp8+sp zero1", 4, [0, 1, 2, 8]),
    ("dp8 tp8+sp zero1", 2, [0, 1]),
    ("pp2 dp8 tp2+sp mb1", 8, [0, 1, 2, 3, 16, 17, 18, 4][:8]),
    ("pp4 dp4 mb1", 5, [0, 1, 4, 8, 12]),
    ("cp8(hybrid-2)", 3, [0, 1, 2]),
])  # fmt: skip
def test_which_ranks_are_traced(plan: str, most: int, ranks: list[int]) -> None:
    assert chosen_ranks(resolve_plan(plan, "plan"), most) == sorted(ranks)


def test_groups_are_compared_if_two_of_their_ranks_are_traced() -> None:
    steps = {rank: step_of(issued("allreduce_", 4)) for rank in (0, 1)}
    assert compared_groups(steps) == 1
    assert compared_groups({0: steps[0]}) == 0


@pytest.mark.parametrize(("world_size", "traced", "groups", "words"), [
    (1, [0], 0, "nowhere"),
    (2, [0, 1], 1, "nowhere, and the ranks' collectives fit together"),
    (8, [0], 0, "nowhere; no two of the traced ranks share a process group, so no collectives were compared"),
    (8, [0, 1, 4], 3, "ranks 0, 1, 4 fit together in the process groups that two or more of them share (3)"),
])  # fmt: skip
def test_the_result_says_what_was_compared(world_size: int, traced: list[int], groups: int, words: str) -> None:
    assert _nothing({"world_size": world_size, "traced": traced, "compared_groups": groups}).endswith(words)
