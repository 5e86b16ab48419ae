"""A rank that raises, is killed, is stopped or is interrupted ends all ranks, in time, with its name and the cause."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import meshwright as mw
from harness.programs import mark_fault, run_program
from meshwright.checkpoint.format import part_files
from meshwright.faults import equal_errors
from meshwright.faults.ending import in_short
from meshwright.faults.equal_errors import is_first_to_say, say_equal_texts_once
from support.anatomies import mixtral
from support.ending import DP2, TIMEOUT, TP2, check, flat, trained, trainer
from support.models import tokens
from support.tiers import crossing


def failing(plan: mw.ParallelPlan) -> None:
    step = trainer(plan)
    step()
    if dist.get_rank() == 1:
        mark_fault()
        raise OSError("the disk is full")
    step()
    print("went on in silence", flush=True)


@pytest.mark.parametrize("plan", [DP2, TP2], ids=["dp2", "tp2"])
def test_an_exception_on_one_rank_ends_all(plan):
    first, second = run_program(failing, 2, plan)
    check(second, r"Traceback.*OSError: the disk is full", within=5)
    check(first, r"rank 1 \(host .*=1.*\): step 1, OSError: the disk is full \(.*test_ended_ranks.py:\d+\)", within=5)
    check(first, "cannot go on with the comparison of the ranks' forward pass in step 2: rank 1", within=5)


def makes_fewer_passes(has_labels: bool) -> None:
    """Rank 1 accumulates the gradients of two batches, and rank 0 those of three, with experts on both of them."""
    model, optimizer, _ = trained(mw.ParallelPlan(dp=2, ep=2), mixtral())
    ids = tokens(2, 12)
    for number in range(4 - dist.get_rank()):
        if number == 3 - dist.get_rank():
            mark_fault()
            optimizer.step()
            optimizer.zero_grad()
        output = model(input_ids=ids, **({"labels": ids} if has_labels else {}))
        (output.loss if has_labels else output.logits.square().mean()).backward()
    print("went on in silence", flush=True)


@pytest.mark.parametrize("has_labels", [crossing(True), False], ids=["labels", "own loss"])
def test_a_pass_that_one_rank_of_experts_leaves_out_is_named(has_labels):
    for outcome in run_program(makes_fewer_passes, 2, has_labels):
        check(outcome, r"optimizer\.step\(\): called 0 times on rank 0 .*; called 1 times on rank 1", within=5)


def failing_child(victim: int, exits: bool) -> None:
    """A rank raises in a process of multiprocessing, or exits by an error code as in one of torch.multiprocessing."""
    step = trainer(DP2)
    step()
    try:
        if dist.get_rank() == victim:
            mark_fault()
            raise OSError("the disk is full")
        step()
    except OSError:
        if exits:
            sys.exit(1)
        raise


@pytest.mark.parametrize(("victim", "exits"), [(0, False), (1, True)], ids=["raises", "exits"])
def test_the_cause_is_that_of_a_process_of_multiprocessing(victim, exits):
    outcomes = run_program(failing_child, 2, victim, exits, is_child=True)
    how = r"its program ended by sys\.exit\(1\) while it handled " if exits else ""
    check(
        outcomes[1 - victim], rf"rank {victim} \(host .*={victim}.*\): step 1, {how}OSError: the disk is full", within=5
    )
    assert outcomes[victim].code == 1 and "OSError: the disk is full" in outcomes[victim].output, outcomes


def raises_and_cleans_up() -> None:
    """As many scripts do: the group is destroyed in a finally, before the exception reaches the top."""
    step = trainer(DP2)
    step()
    try:
        if dist.get_rank() == 1:
            mark_fault()
            raise OSError("the disk is full")
        step()
    finally:
        dist.destroy_process_group()


def test_the_cause_survives_a_finally_that_destroys_the_group():
    """List B: the others were told that its program ended, not why."""
    first, second = run_program(raises_and_cleans_up, 2)
    check(second, r"Traceback.*OSError: the disk is full", within=5)
    check(first, r"rank 1 \(host .*=1.*\): step 1, OSError: the disk is full", within=8)


def catches_and_exits() -> None:
    """As other scripts do: the exception is caught, so that nothing prints it, and the program ends with a code."""
    step = trainer(DP2)
    step()
    try:
        if dist.get_rank() == 1:
            mark_fault()
            raise OSError("the disk is full")
        step()
    except Exception:
        sys.exit(3)
    finally:
        dist.destroy_process_group()


def test_the_cause_survives_a_program_that_catches_it_and_exits():
    first, second = run_program(catches_and_exits, 2)
    cause = r"rank 1 \(host .*=1.*\): step 1, its program ended by sys\.exit\(3\) while it handled OSError: the disk is"
    assert second.code == first.code == 3, (first, second)
    assert re.search(cause, flat(second.output)), second
    assert first.after < 8 and second.after < 5, (first, second)


def changes_its_mind() -> None:
    """A correct program: it calls sys.exit, catches that, and trains on."""
    step = trainer(DP2)
    step()
    if dist.get_rank() == 1:
        with contextlib.suppress(SystemExit):
            sys.exit(3)
    step()
    mark_fault()
    if dist.get_rank() == 0:
        time.sleep(3)
        print("saved", flush=True)


def test_a_program_that_catches_its_own_exit_is_left_in_peace():
    outcomes = run_program(changes_its_mind, 2)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert "saved" in outcomes[0].output


def dies_before_the_set_up() -> None:
    if dist_size() == 3 and os.environ["RANK"] in "12":
        mark_fault()
        os.kill(os.getpid(), signal.SIGKILL)
    trainer(mw.ParallelPlan(dp=3))


def test_ranks_that_never_come_to_the_set_up_are_named():
    outcomes = run_program(dies_before_the_set_up, 3)
    check(outcomes[0], r"PeerFailedError: rank 0 waited 4 s for ranks 1 and 2, which did not come", within=TIMEOUT + 5)


def signalled(number: int, victim: int) -> None:
    """A rank is killed or stopped in the middle of training."""
    step = trainer(mw.ParallelPlan(dp=2, tp=2) if dist_size() == 4 else DP2)
    step()
    step()
    if dist.get_rank() == victim:
        mark_fault()
        os.kill(os.getpid(), number)
    for _ in range(10_000):
        step()


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others_within_5_seconds(victim):
    outcomes = run_program(signalled, 2, signal.SIGKILL, victim)
    assert outcomes[victim].code == -signal.SIGKILL
    check(outcomes[1 - victim], rf"rank {victim}\b.*ended abruptly", within=5)


def test_a_killed_rank_ends_all_of_a_larger_mesh():
    outcomes = run_program(signalled, 4, signal.SIGKILL, 3)
    for rank in range(3):
        check(outcomes[rank], r"rank 3 \(host .*dp=1 tp=1\): its process ended abruptly", within=5)


@pytest.mark.parametrize("victim", [0, crossing(1)])
def test_a_stopped_rank_ends_the_others_within_the_timeout_and_5_seconds(victim):
    outcomes = run_program(signalled, 2, signal.SIGSTOP, victim, may_remain=(victim,))
    assert outcomes[victim].code == -signal.SIGKILL  # a launcher's SIGTERM would not have ended it
    check(outcomes[1 - victim], rf"rank {victim}\b.*(stopped|heartbeat|answer)", within=TIMEOUT + 5)


def killed_with_children() -> None:
    """Rank 0 is killed while a data loader's worker, forked from it, lives on."""
    step = trainer(DP2)
    step()
    if dist.get_rank() == 0:
        if os.fork() == 0:
            time.sleep(15)
            os._exit(0)
        mark_fault()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(20)


def test_a_killed_rank_is_missed_although_its_forked_workers_live():
    outcomes = run_program(killed_with_children, 2)
    check(outcomes[1], r"rank 0 \(host [^)]*dp=0 tp=0\): its process ended abruptly", within=5)


def interrupted() -> None:
    step = trainer(DP2)
    step()
    if dist.get_rank() == 1:
        # A suite in the background of a shell inherits that SIGINT is ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        mark_fault()
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(20)


def test_an_interrupt_of_one_rank_ends_all_even_those_that_wait_for_nobody():
    first, second = run_program(interrupted, 2)
    assert second.code == 1
    check(first, r"rank 1 \(.*KeyboardInterrupt", within=5)


def ends_apart(last: int) -> None:
    """A correct program: after the last step, one rank has more to do than the others."""
    step = trainer(DP2)
    step()
    mark_fault()
    if dist.get_rank() == last:
        time.sleep(3)
        print("saved", flush=True)


@pytest.mark.parametrize(("last", "is_child"), [(0, False), crossing(1, False), (0, True)], ids=["0", "1", "child"])
def test_a_rank_that_finishes_later_is_left_in_peace(last, is_child):
    outcomes = run_program(ends_apart, 2, last, is_child=is_child)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert "saved" in outcomes[last].output
    assert "Traceback" not in outcomes[0].output + outcomes[1].output


def handled() -> None:
    """A correct program: an exception that one rank handles is nobody else's business."""
    step = trainer(DP2)
    step()
    if dist.get_rank() == 1:
        try:
            raise OSError("try again")
        except OSError:
            time.sleep(1)
    step()
    print("trained", flush=True)


def test_an_exception_that_is_handled_ends_nobody():
    for outcome in run_program(handled, 2):
        assert (outcome.code, "trained" in outcome.output) == (0, True), outcome


SCRIPT = """
import sys
import torch
import torch.distributed as dist
import meshwright as mw
from support.models import build, labels_for, tokens

model, _, _ = mw.to_distributed(build("llama"), config=mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2)))
ids = tokens(2, 12)
for step in range(10):
    if step == 3 and dist.get_rank() == 1:
        raise OSError("the disk is full")
    model(input_ids=ids, labels=labels_for(ids)).loss.backward()
"""


@pytest.mark.crossing
def test_torchrun_ends_with_the_cause(tmp_path, preloaded_python):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = subprocess.run(
        [preloaded_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,  # less than the two minutes that rank 0 would wait for a rank that hangs
    )
    assert run.returncode == 1
    assert "OSError: the disk is full" in run.stderr


def at_rank(monkeypatch: pytest.MonkeyPatch, folder: Path, rank: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / str(rank) / "error.json"))
    monkeypatch.setattr(equal_errors, "_installed", None)


def test_ranks_with_equal_tracebacks_print_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end_of(rank: int, message: str) -> str:
        at_rank(monkeypatch, tmp_path, rank)
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        say_equal_texts_once()
        try:
            raise ValueError(message)
        except ValueError as error:
            sys.excepthook(type(error), error, error.__traceback__)
        return capsys.readouterr().err

    first, same, other, broken = (end_of(*of) for of in ((2, "full"), (0, "full"), (1, "empty"), (3, "full")))
    assert first.startswith("Traceback") and first.endswith("ValueError: full\n")
    assert same == broken == "ValueError: full (rank 2 has printed the same traceback)\n"
    assert other.startswith("Traceback") and other.endswith("ValueError: empty\n")
    for claim in tmp_path.glob("*/ended-*/speaks-for"):
        claim.write_text("")  # the rank that was to print has died
    assert end_of(0, "full") == first


def test_ranks_with_equal_warnings_of_libraries_print_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = logging.getLogger("a_library")

    def said_by(rank: int, record: str, path: str) -> str:
        at_rank(monkeypatch, tmp_path, rank)
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        monkeypatch.setattr(warnings, "showwarning", shows)
        handler = logging.StreamHandler(sys.stderr)
        monkeypatch.setattr(library, "handlers", [handler])
        say_equal_texts_once()
        library.handle(logging.LogRecord("a_library", logging.WARNING, path, 1, record, (), None))
        warnings.showwarning(FutureWarning(record), FutureWarning, path, 1)
        return capsys.readouterr().err

    def shows(message: object, category: type, filename: str, *_: object) -> None:
        print(f"{category.__name__}: {message}", file=sys.stderr)

    theirs, own = "/x/site-packages/a_library/b.py", "/x/train.py"
    both = "deprecated\nFutureWarning: deprecated\n"
    assert [said_by(rank, "deprecated", theirs) for rank in (1, 0, 1)] == [both, "", both]  # a rank may say it again
    assert said_by(0, "of rank 0", theirs) != ""
    with (tmp_path / "of_the_rank").open("w") as file:
        monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(file)])
        assert said_by(0, "deprecated", theirs) == ""
        # Arguments that do not fit: the handlers tell of it, and nothing is raised.
        library.handle(logging.LogRecord("a_library", logging.WARNING, theirs, 1, "no place", (FutureWarning,), None))
    assert (tmp_path / "of_the_rank").read_text() == "deprecated\n" and "Logging error" in capsys.readouterr().err
    monkeypatch.setattr(logging.root, "handlers", [])
    assert [said_by(rank, "of the program", own) for rank in (0, 1)] == [
        "of the program\nFutureWarning: of the program\n"
    ] * 2


FRAMES = """gloo broke at 0x7f01
Exception raised from wait at socket.cpp:3 (most recent call first):
frame #0: c10::Error::Error(std::string) + 0x9c (0x7f01 in libc10.so)
frame #1: <unknown function> + 0x5d (0x7f02 in libtorch.so)
"""


def ends_alike() -> None:
    """Both ranks end with an error of C++, whose addresses differ, and log the same warning before."""
    logging.getLogger("meshwright.optim").warning("the loss is large")
    logging.getLogger("other").warning("of the program")
    say_equal_texts_once()
    logging.getLogger("meshwright.optim").warning("the loss is large")
    raise RuntimeError(FRAMES.replace("7f0", f"7f{os.environ['RANK']}"))


def test_ranks_that_end_alike_speak_with_one_voice(tmp_path: Path) -> None:
    """Tracebacks of C++ differ in addresses and prefixes only: the first rank prints one and names the ranks.

    Rank 2 prints into a stream of its own, as one that torchrun hides: it speaks for no one, and no one for it.
    """
    outcomes = run_program(launched_on_one_host, 3, str(tmp_path), timeout=60.0)
    assert [outcome.code for outcome in outcomes] == [1, 1, 1]
    shared, hidden = (tmp_path / "shared").read_text(), (tmp_path / "hidden").read_text()
    assert shared.count("(the same on ranks 0, 1)") == 1 and "the same" not in hidden
    for texts in (shared, hidden):
        assert texts.count("Traceback") == texts.count("gloo broke") == 1, texts
        assert "frame #" not in texts and "Exception raised from" not in texts
    assert (shared.count("the loss is large"), shared.count("of the program")) == (3, 2)
    assert (hidden.count("the loss is large"), hidden.count("of the program")) == (2, 1)


def launched_on_one_host(folder: str) -> None:
    os.environ |= {"TORCHELASTIC_ERROR_FILE": f"{folder}/{os.environ['RANK']}/error.json", "LOCAL_WORLD_SIZE": "2"}
    with (Path(folder) / ("hidden" if os.environ["RANK"] == "2" else "shared")).open("a") as stream:
        os.dup2(stream.fileno(), 2)
    ends_alike()


def test_a_rank_may_repeat_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for rank in (1, 1, 0):
        at_rank(monkeypatch, tmp_path, rank)
        said.append(is_first_to_say("once"))
    assert said == [True, True, False]


def saves_while_a_rank_dies(folder: str) -> None:
    """Rank 1 is killed while both save in the background; rank 0 gets SIGTERM at once, and leaves the group."""
    model, optimizer, step = trained(DP2)
    step()

    def write(self: part_files.RankPart, *args: Any) -> Any:
        if dist.get_rank() == 1:
            mark_fault()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args)

    def leave(*_: object) -> None:
        raise SystemExit(143)

    original, part_files.RankPart.write = part_files.RankPart.write, write  # type: ignore[method-assign]
    signal.signal(signal.SIGTERM, leave)
    try:
        mw.save_checkpoint(folder, model, optimizer, asynchronous=True)
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
    finally:
        dist.destroy_process_group()


def test_a_save_in_the_background_ends_with_the_rank_for_which_it_waits(tmp_path: Path) -> None:
    """The thread of the save is no daemon, so the interpreter waits for it."""
    first, second = run_program(saves_while_a_rank_dies, 2, str(tmp_path / "save"), timeout=60.0)
    assert second.code == -signal.SIGKILL
    assert first.code != 0 and first.after < 6, first
    assert re.search(r"rank 1 \(host [^)]*dp=1 tp=0\): its process ended abruptly", flat(first.output)), first.output


def test_an_assertion_of_a_device_is_one_line() -> None:
    """CUDA's advice after it names neither the assertion nor the rank that prints it."""
    advice = "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert'.\nFor debugging consider ..."
    said = "CUDA error: device-side assert triggered; this rank has printed what was asserted"
    assert in_short(RuntimeError(advice)) == f"RuntimeError: {said}"
