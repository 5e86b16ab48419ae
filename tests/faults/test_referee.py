"""The rules by which ranks are compared and given up: no sockets, no processes, a clock of our own."""

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import AllreduceOptions, BroadcastOptions, ReduceOp

from meshwright.faults.collective_log import LENGTH, Log, describe, first_difference
from meshwright.faults.every_rank import Wishes
from meshwright.faults.referee import AGREED, Post, Referee

pytestmark = pytest.mark.quick


def referee(ranks: int, timeout: float = 10.0) -> Referee:
    made = Referee(timeout)
    for rank in range(ranks):
        made.join(rank, f"rank {rank}", now=0.0)
        made.beat(rank, "step 1", now=0.0)
    return made


def ask(made: Referee, rank: int, key: str, ranks, what: str = "x", now: float = 0.0) -> list[Post]:
    return made.ask(rank, key, made.group(ranks), what, "", now)


def answers(posts: list[Post]) -> dict[int, dict]:
    return {rank: post.body for post in posts if post.channel == "answer" for rank in post.ranks}


def notices(posts: list[Post]) -> dict[int, str]:
    return {rank: post.body["failed"] for post in posts if "failed" in post.body for rank in post.ranks}


def test_ranks_that_agree_go_on_together_when_the_last_has_come():
    made = referee(3)
    assert ask(made, 2, "a", (0, 1, 2)) == []
    assert ask(made, 0, "a", (0, 1, 2)) == []
    assert answers(ask(made, 1, "a", (0, 1, 2))) == {rank: {"agreed": True} for rank in range(3)}


def test_ranks_that_differ_all_hear_what_each_said():
    made = referee(2)
    ask(made, 0, "a", (0, 1), "sum")
    found = answers(ask(made, 1, "a", (0, 1), "max"))
    assert found == {rank: {"differ": {"rank 0": "sum", "rank 1": "max"}, "together": True} for rank in range(2)}
    assert ask(made, 0, "a", (0, 1)) == []  # and nothing of it is left


@pytest.mark.parametrize(
    ("questions", "circle"),
    [
        ([("a", (0, 1)), ("b", (0, 1))], {0, 1}),
        ([("a", (0, 1)), ("a", (1, 2)), ("c", (0, 2))], {0, 1, 2}),
        ([("a", (0, 1, 2)), ("b", (1, 2)), ("a", (0, 1, 2))], {1, 2}),
    ],
    ids=["two groups inverted", "three ranks in a ring", "a subgroup against the world"],
)
def test_ranks_that_wait_for_each_other_are_told_at_the_next_look(questions, circle):
    made = referee(len(questions))
    for rank, (key, ranks) in enumerate(questions):
        assert made.tick(now=0.0) == ask(made, rank, key, ranks, f"{key}{ranks}") == []
    found = answers(made.tick(now=0.0))
    assert found.keys() == circle
    assert all(body["differ"].keys() == {f"rank {r}" for r in circle} for body in found.values())


def test_a_rank_that_waits_for_one_that_computes_is_in_no_circle():
    made = referee(3)
    assert ask(made, 0, "a", (0, 1)) == []
    assert ask(made, 2, "b", (1, 2)) == []
    assert made.tick(now=0.0) == []
    assert answers(ask(made, 1, "a", (0, 1))).keys() == {0, 1}


def test_the_end_of_a_rank_reaches_who_waits_for_it_and_a_failure_reaches_all():
    made = referee(4)
    ask(made, 0, "a", (0, 1))
    ask(made, 2, "b", (2, 3))
    posts = made.fail(1, "step 3, OSError: full")
    assert answers(posts) == {0: {"gone": "rank 1: step 3, OSError: full"}}
    assert notices(posts) == dict.fromkeys((0, 2, 3), "rank 1: step 3, OSError: full")


def test_a_rank_that_left_in_good_order_matters_only_to_who_waits_for_it():
    made = referee(2)
    assert made.leave(1, "its program ended after step 4") == []
    assert made.lose(1) == []  # the end of its connection, after its word
    assert answers(ask(made, 0, "a", (0, 1))) == {0: {"gone": "rank 1: its program ended after step 4"}}


def test_a_connection_that_ends_without_a_word_is_a_death():
    made = referee(3)
    made.beat(2, "step 7, barrier", now=1.0)
    posts = made.lose(2)
    assert notices(posts).keys() == {0, 1}
    assert "ended abruptly" in notices(posts)[0]
    assert "step 7, barrier" in notices(posts)[0]


def test_the_first_cause_is_kept():
    made = referee(3)
    made.fail(1, "OSError")
    assert notices(made.lose(2))[0] == "rank 1: OSError"
    assert answers(made.report(0, now=1.0))[0]["cause"] == "rank 1: OSError"
    assert answers(ask(made, 0, "a", (0, 2)))[0] == {"gone": "rank 1: OSError"}


def test_silence_of_the_whole_timeout_is_reported_once():
    made = referee(2, timeout=10.0)
    made.beat(0, "step 1", now=9.0)
    assert made.tick(now=9.5) == []
    assert "rank 1: stopped, hung or cut off" in notices(made.tick(now=10.5))[0]
    assert made.tick(now=11.0) == []


def test_a_question_that_nobody_else_asks_ends_with_the_names_of_who_did_not_come():
    made = referee(3, timeout=10.0)
    ask(made, 0, "a", (0, 1, 2), now=0.0)
    ask(made, 1, "a", (0, 1, 2), now=9.0)
    made.beat(2, "step 1, forward", now=10.0)
    found = answers(made.tick(now=10.5))
    assert found.keys() == {0}
    assert "rank 2: step 1, forward" in found[0]["gone"]
    assert "rank 1" not in found[0]["gone"]


def test_who_gives_up_waiting_for_a_rank_without_heartbeat_learns_its_process():
    """It must end that process before it ends itself: a launcher names the one that ended first."""
    made = referee(2, timeout=10.0)
    made.join(1, "rank 1", now=0.0, process={"pid": 7})
    ask(made, 0, "a", (0, 1), now=0.0)
    made.beat(0, "step 1", now=10.0)
    made.beat(1, "step 1", now=6.0)
    assert answers(made.tick(now=10.5))[0]["silent"] == [{"pid": 7}]


def late(posts: list[Post]) -> dict[int, str]:
    return {rank: post.body["late"] for post in posts if "late" in post.body for rank in post.ranks}


def test_a_rank_for_which_the_others_have_waited_in_vain_is_told_and_they_are_told_first():
    """Rank 3 runs code of the program. Rank 2 waits for it in a collective, and ranks 0 and 1 for rank 2."""
    made = referee(5, timeout=10.0)
    ask(made, 0, "a", (0, 1, 2), now=0.0)
    ask(made, 1, "a", (0, 1, 2), now=1.0)
    for rank in (0, 1, 4):
        made.beat(rank, "step 1", now=10.0)
    made.beat(2, "step 1, allreduce", waits_for=(2, 3), now=10.0)
    made.beat(3, "step 1, forward, at train.py:7 in step", now=10.0)
    posts = made.tick(now=10.5)
    assert late(posts) == {3: "rank 3 kept other ranks waiting for 10 s: step 1, forward, at train.py:7 in step"}
    assert notices([post for post in posts if "failed" in post.body]).keys() == {0, 1, 2, 4}
    assert "late" in posts[-1].body  # rank 3 ends at once, and may be the hub's own
    assert late(made.tick(now=11.5)) == {}  # once


def test_a_timeout_in_a_collective_finds_the_rank_that_runs_code_of_the_program():
    made = referee(3, timeout=10.0)
    made.beat(1, "step 1, allreduce", waits_for=(0, 1), now=10.0)
    assert late(made.report(0, now=10.0)) == {}  # its connection broke: no rank was awaited
    assert late(made.report(0, now=10.0, waited_for=(0, 1))) == {}  # both wait
    made.beat(1, "step 1, forward", now=10.0)
    assert late(made.report(0, now=10.0, waited_for=(0, 1))).keys() == {1}


def wishes(posts: list[Post]) -> set[int]:
    return {rank for post in posts if "wish" in post.body for rank in post.ranks}


def test_a_rank_that_raised_in_a_pass_and_went_on_is_told_once_the_others_wait_in_it():
    for is_alike in (False, True):
        made = referee(2, timeout=100.0)
        made.raised(1, "caught IndexError and went on")
        if is_alike:
            made.raised(0, "caught IndexError and went on")
        ask(made, 1, "forward pass", (0, 1), now=1.0)
        for now in (2.0, 3.0, 4.0):
            made.beat(0, "a gather", now, waits_for=(0, 1))
            assert made.tick(now) == []
        made.beat(0, "a gather", 5.5, waits_for=(0, 1))
        posts = made.tick(5.5)
        if is_alike:  # the other rank has raised too, and may come late
            assert posts == []
            assert answers(ask(made, 0, "forward pass", (0, 1), now=6.0)) == {0: AGREED, 1: AGREED}
        else:
            assert answers(posts)[1]["gone"] == notices(posts)[0] == "rank 1: caught IndexError and went on"


def test_a_wish_calls_the_others_and_waits_for_none_that_has_gone_on():
    made = referee(3)
    assert wishes(ask(made, 1, "wish 4", (0, 1, 2), "should_save")) == {0, 2}
    assert wishes(ask(made, 0, "wish 4", (0, 1, 2), "")) == set()  # it was called already
    assert answers(made.passed(2, "wish 4")) == {rank: {"passed": True} for rank in (0, 1)}
    for rank in (0, 1):
        ask(made, rank, "wish 5", (0, 1, 2), "should_save" * rank)
    found = answers(ask(made, 2, "wish 5", (0, 1, 2), ""))
    assert found[2]["differ"] == {"rank 0": "", "rank 1": "should_save", "rank 2": ""}
    assert len(found) == 3


def test_a_wish_never_makes_a_circle():
    """A rank that waits for the one with the wish has gone on; the answer of its listening thread may come later."""
    made = referee(2)
    ask(made, 0, "wish 4", (0, 1), "should_save")
    ask(made, 1, "gradients", (0, 1))
    assert answers(made.tick(now=1.0)) == {0: {"passed": True}}
    assert answers(ask(made, 0, "gradients", (0, 1))) == {0: AGREED, 1: AGREED}


@pytest.mark.parametrize(("comes", "passed"), [(0, False), (1, True)], ids=["before", "after"])
def test_a_rank_hears_of_a_wish_before_or_after_the_point(comes: int, passed: bool):
    """It meets the others at the next point that both can reach, and at none after that."""
    mine = Wishes()
    assert [mine.come(False) for _ in range(comes)] == [None] * comes
    assert mine.has_passed("wish 1") is passed
    assert mine.come(False) == f"wish {comes + 1}"
    assert not mine.has_passed(f"wish {comes + 1}")  # it waits there
    mine.meet()
    assert mine.come(False) is None


def test_sends_meet_receives_in_order_by_slot():
    made = referee(2)
    assert made.send(0, 1, "a", "x") == []
    assert made.send(0, 1, "b", "y") == []
    assert answers(made.receive(1, 0, "b", "y", waits=True, now=0.0)) == {1: {"agreed": True}}
    assert made.receive(1, 0, "a", "x", waits=False, now=0.0) == []
    posts = [*made.send(0, 1, "a", "x"), *made.receive(1, 0, "a", "z", waits=True, now=0.0)]
    assert answers(posts)[1]["differ"] == {"rank 0": "sends x", "rank 1": "receives z"}
    assert notices(posts).keys() == {0}


def test_the_description_of_a_collective_holds_what_must_be_equal():
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.MAX
    assert describe("allreduce", ([x], options), {}) == "allreduce(max) of bfloat16 (2, 3)"
    root = BroadcastOptions()
    root.rootRank = 1
    assert describe("broadcast", ([x],), {"opts": root}) == "broadcast(root 1) of bfloat16 (2, 3)"
    # A rank's own share is no difference.
    assert describe("gather", ([[x, x]], [x]), {}) == describe("gather", ([], [x]), {})
    assert describe("scatter", ([x], [[x, x]]), {}) == describe("scatter", ([x], []), {})
    assert describe("alltoall_base", (x, x[:1], [1], [2]), {}) == describe("alltoall_base", (x[:1], x, [2], [1]), {})


def test_the_first_difference_is_found_also_when_its_beginning_is_forgotten():
    logs = [Log(), Log()]
    for i in range(3 * LENGTH):
        logs[0].add(f"op {i}")
        if i != 3 * LENGTH - 5:
            logs[1].add(f"op {i}")
    text = first_difference({str(rank): log.recent() for rank, log in enumerate(logs)})
    assert text is not None
    assert f"0: op {3 * LENGTH - 5}" in text
    assert f"1: op {3 * LENGTH - 4}" in text
    assert logs[0].digest != logs[1].digest
    assert first_difference({"0": logs[0].recent(), "1": logs[0].recent()}) is None


def work_of_a_meeting(ranks: int) -> int:
    """Return how many instructions of the interpreter the referee runs for one meeting of all ranks."""
    made, count = referee(ranks), 0
    group = made.group(range(ranks))

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        posts = [post for rank in range(ranks) for post in made.ask(rank, "step", group, "same", "", 1.0)]
        made.tick(2.0)
    finally:
        sys.settrace(before)
    assert [post.body for post in posts] == [{"agreed": True}]
    return count


def test_the_work_of_a_meeting_is_linear_in_the_ranks() -> None:
    """If each question made the referee look at all ranks, four times the ranks would take 16 times the work."""
    few, many = work_of_a_meeting(64), work_of_a_meeting(256)
    assert many < 4.4 * few
