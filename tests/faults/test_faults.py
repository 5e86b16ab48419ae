"""Uneven work ends on all ranks, in time, with a message that names the rank and the cause."""

import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from harness.programs import mark_fault, run_program
from support.ending import DP2, TIMEOUT, TP2, check, flat, trainer
from support.models import build, labels_for, tokens
from support.tiers import crossing


def differing_collective(first, second) -> None:
    """Two steps, and then rank 1 calls another collective than rank 0."""
    step = trainer(DP2)
    step()
    step()
    rank = dist.get_rank()
    mark_fault()
    (first if rank == 0 else second)()
    print("went on in silence", flush=True)


def all_reduce(shape=(1000,), dtype=torch.float32, op=dist.ReduceOp.SUM, is_async=False):
    work = dist.all_reduce(torch.ones(shape, dtype=dtype), op, async_op=is_async)
    if is_async:
        work.wait()


def broadcast():
    dist.broadcast(torch.ones(1000), src=0)


def short_all_reduce():
    all_reduce((500,))


def bf16_all_reduce():
    all_reduce(dtype=torch.bfloat16)


def int32_all_reduce():
    all_reduce(dtype=torch.int32)


def two_by_three():
    all_reduce((2, 3))


def three_by_two():
    all_reduce((3, 2))


def maximum():
    all_reduce(op=dist.ReduceOp.MAX)


def async_all_reduce():
    all_reduce(is_async=True)


def async_short_all_reduce():
    all_reduce((500,), is_async=True)


def send_1000():
    dist.send(torch.ones(1000), 1)


def receive_500():
    dist.recv(torch.ones(500), 0)


def receive_int32():
    dist.recv(torch.ones(1000, dtype=torch.int32), 0)


DIFFERENT = {
    "other operation": (all_reduce, broadcast, r"allreduce\(sum\) of float32 \(1000,\).*broadcast\(root 0\)"),
    "other shape": (all_reduce, short_all_reduce, r"float32 \(1000,\).*float32 \(500,\)"),
    "other type, other size": (all_reduce, bf16_all_reduce, r"float32 \(1000,\).*bfloat16 \(1000,\)"),
    "other type, same size": (all_reduce, int32_all_reduce, r"float32 \(1000,\).*int32 \(1000,\)"),
    "other shape, same size": (two_by_three, three_by_two, r"\(2, 3\).*\(3, 2\)"),
    "other reduction": (all_reduce, maximum, r"allreduce\(sum\).*allreduce\(max\)"),
    "asynchronous": (async_all_reduce, async_short_all_reduce, r"float32 \(1000,\).*float32 \(500,\)"),
    "send of another size": (send_1000, receive_500, r"sends float32 \(1000,\).*receives float32 \(500,\)"),
    "send of another type": (send_1000, receive_int32, r"sends float32 \(1000,\).*receives int32 \(1000,\)"),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", DIFFERENT)
def test_collectives_that_differ_are_named_before_they_run(case):
    first, second, message = DIFFERENT[case]
    outcomes = run_program(differing_collective, 2, first, second)
    for outcome in outcomes:
        check(outcome, message, within=TIMEOUT)
        assert re.search(r"rank 0 \(host [^)]*dp=0 tp=0\).*rank 1 \(host [^)]*dp=1 tp=0\)", flat(outcome.output))


def uneven_steps(plan: mw.ParallelPlan) -> None:
    """Rank 1 trains two steps, rank 0 three; then both meet."""
    step = trainer(plan)
    for _ in range(3 - dist.get_rank()):
        step()
    mark_fault()
    dist.barrier()
    print("went on in silence", flush=True)


@pytest.mark.parametrize("plan", [DP2, TP2], ids=["dp2", "tp2"])
def test_an_uneven_number_of_steps(plan):
    for outcome in run_program(uneven_steps, 2, plan):
        check(outcome, r"(gradients|forward).*step 3.*rank 1.*barrier", within=TIMEOUT)


def skipped_step() -> None:
    """Seed 004: one rank leaves the loop, and the others wait for it in a reduction."""
    step = trainer(DP2)
    step()
    if dist.get_rank() == 1:
        mark_fault()
        return
    step()
    print("went on in silence", flush=True)


def test_a_rank_that_ends_early():
    first, second = run_program(skipped_step, 2)
    assert second.code == 0, second
    check(first, r"step 2.*rank 1 \(host .*dp=1 tp=0\): its program ended after step 1", within=TIMEOUT + 5)


def alone(what: str, ends: bool) -> None:
    """Rank 0 makes a call that every rank must make; rank 1 goes on with its step, or its program ends."""
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mw.to_distributed(model, optimizer, config=mw.ToDistributedConfig(plan=TP2, timeout_s=TIMEOUT))
    ids = tokens(2, 8)
    model(input_ids=ids, labels=labels_for(ids)).loss.backward()
    mark_fault()
    if dist.get_rank() == 0:
        if what == "save_checkpoint":
            mw.save_checkpoint("unused", model, optimizer)
        elif what == "save_pretrained":
            model.save_pretrained("unused")
        elif what == "generate":
            model.generate(ids, max_new_tokens=2)
        elif what == "the model":
            with torch.no_grad():
                model.eval()(input_ids=ids, labels=ids)
        else:
            getattr(mw, what)(model)
    if not ends:
        optimizer.step()
        model(input_ids=ids, labels=labels_for(ids)).loss.backward()
        print("went on in silence", flush=True)


ALONE = [
    ("save_checkpoint", False),
    crossing("save_checkpoint", True),
    crossing("save_pretrained", False),
    ("full_state_dict", False),
    crossing("generate", False),
    ("the model", False),
]


@pytest.mark.parametrize(("what", "ends"), ALONE)
def test_a_call_on_rank_0_alone_is_named(what: str, ends: bool):
    message = rf"rank 0 alone called {what}\(\), which every rank must call: take it out of `if rank == 0:`"
    if what == "the model":
        message = "rank 0 alone evaluated the model: evaluate on every rank"
    outcomes = run_program(alone, 2, what, ends)
    assert any(re.search(message, flat(outcome.output)) for outcome in outcomes), outcomes
    assert not any("went on in silence" in outcome.output for outcome in outcomes)


def other_inputs() -> None:
    step = trainer(TP2)
    step()
    mark_fault()
    step(12 + dist.get_rank())
    print("went on in silence", flush=True)


def test_inputs_that_differ_over_tensor_parallel_ranks():
    for outcome in run_program(other_inputs, 2):
        check(outcome, r"input_ids int64 \(2, 12\).*input_ids int64 \(2, 13\)", within=TIMEOUT)


def other_precision() -> None:
    """Autocast on one rank only: its gathers are half as large."""
    model = build("llama")
    model, _, _ = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=TP2, timeout_s=TIMEOUT))
    ids = tokens(2, 12)
    mark_fault()
    with torch.autocast("cpu", torch.bfloat16, enabled=dist.get_rank() == 1):
        model(input_ids=ids, labels=labels_for(ids)).loss.backward()
    print("went on in silence", flush=True)


def test_autocast_on_one_tensor_parallel_rank_only():
    for outcome in run_program(other_precision, 2):
        check(outcome, r"autocast to torch.bfloat16", within=TIMEOUT)


class SkipsOnRank1(torch.nn.Module):
    """A layer that the model of rank 1 leaves out: its collectives are missing there."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if dist.get_rank() == 1 else self.inner(x)


def other_layers() -> None:
    model = build("llama")
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(tp=2), timeout_s=TIMEOUT)
    model, _, _ = mw.to_distributed(model, config=config)
    model.model.layers[1].mlp = SkipsOnRank1(model.model.layers[1].mlp)
    ids = tokens(2, 12)
    mark_fault()
    for _ in range(3):
        model(input_ids=ids).logits.sum().backward()
    print("went on in silence", flush=True)


def test_layers_that_only_one_rank_runs():
    """Their shapes fit other collectives, so without the digest a wrong pairing would go on in silence."""
    for outcome in run_program(other_layers, 2):
        check(outcome, r"first difference at collective \d+:.*rank 0 .*: allreduce.*rank 1", within=TIMEOUT + 5)


def dropped_layers() -> None:
    """Each rank leaves out another layer of four; their weights have equal shapes."""
    model = build("llama", num_hidden_layers=4)
    model, _, _ = mw.to_distributed(model, plan="dp2 zero3", config=mw.ToDistributedConfig(timeout_s=TIMEOUT))
    ids = tokens(2, 12)
    model.model.config.num_hidden_layers = 3
    layers = list(model.model.layers)
    del model.model._modules["layers"], layers[1 + dist.get_rank()]
    model.model.__dict__["layers"] = layers
    mark_fault()
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
    print("went on in silence", flush=True)


def test_layers_that_ranks_leave_out_under_zero_3_are_named():
    named = r"with model.layers.\d.\S+, which all ranks gather together"
    for outcome in run_program(dropped_layers, 2):
        check(outcome, rf"first difference at collective \d+:.*rank 0.*{named}.*rank 1.*{named}", within=TIMEOUT + 5)


def inverted_groups() -> None:
    step = trainer(DP2)
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    step()
    mark_fault()
    for group in groups if dist.get_rank() == 0 else reversed(groups):
        dist.all_reduce(torch.ones(8), group=group)
    print("went on in silence", flush=True)


def test_two_groups_in_inverted_order():
    for outcome in run_program(inverted_groups, 2):
        check(outcome, r"ranks \[0, 1\] must do the same.*allreduce.*allreduce", within=TIMEOUT)


def subgroup_mismatch() -> None:
    """Ranks 1 and 2 are a group; rank 2 calls the world's collective instead."""
    step = trainer(mw.ParallelPlan(dp=3))
    group = dist.new_group([1, 2])
    step()
    mark_fault()
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(8), group=group)
    dist.all_reduce(torch.ones(4))
    print("went on in silence", flush=True)


def test_a_collective_of_a_subgroup_on_one_of_its_ranks_only():
    outcomes = run_program(subgroup_mismatch, 3)
    for outcome in outcomes:
        check(outcome, r"float32 \(8,\).*float32 \(4,\)|rank \d .*DivergenceError", within=TIMEOUT + 5)


def timeouts() -> list[float]:
    trainer(DP2)
    groups = list(dist.distributed_c10d._world.pg_map)
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_every_group_has_the_timeout_of_the_config(pool2):
    for found in pool2.run(timeouts):
        assert len(found) >= 3  # the world and the axes
        assert set(found) == {TIMEOUT}


def wrapped(fault: str) -> None:
    """The same faults under DataParallel, on a model that is no transformer."""
    module = torch.nn.Linear(4, 4)
    ddp = mw.DataParallel(module, timeout_s=TIMEOUT)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        if dist.get_rank() == 1 and step == 2:
            mark_fault()
            if fault == "skip":
                continue
            if fault == "raise":
                raise OSError("the disk is full")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        ddp(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("went on in silence", flush=True)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        # Rank 0 is the last to come: rank 1 has left after one step less.
        ("skip", r"step 4: rank 1 \(host .*dp=1\): its program ended after step 3"),
        ("raise", r"rank 1 \(host .*dp=1\): step 2, OSError: the disk is full"),
        ("kill", r"rank 1 \(host .*dp=1\): its process ended abruptly"),
    ],
)
def test_data_parallel(fault, message):
    first, _ = run_program(wrapped, 2, fault)
    check(first, message, within=5)


def wrapped_subgroup() -> None:
    """A subgroup alone cannot start a guard, and must not wait for the others to do so."""
    dist.init_process_group("gloo")
    group = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        ddp = mw.DataParallel(torch.nn.Linear(4, 4), group=group, timeout_s=TIMEOUT)
        ddp(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    dist.destroy_process_group()
    print("trained", flush=True)


def test_data_parallel_over_a_part_of_the_world():
    for outcome in run_program(wrapped_subgroup, 3):
        assert (outcome.code, "trained" in outcome.output) == (0, True), outcome


def halves() -> None:
    """A correct program: each half of the ranks trains a model of its own, for its own number of steps."""
    step = trainer(mw.ParallelPlan(dp=4))
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    ddp = mw.DataParallel(torch.nn.Linear(4, 4), group=groups[half], timeout_s=TIMEOUT)
    for _ in range(1 + half):
        ddp(torch.ones(2, 4)).sum().backward()
    step()
    print("trained", flush=True)


def test_parts_of_the_world_may_take_other_numbers_of_steps():
    for outcome in run_program(halves, 4):
        assert (outcome.code, "trained" in outcome.output) == (0, True), outcome


def uneven_passes() -> None:
    """A wrong program: rank 1 adds one more pass to its gradients than rank 0 before both reduce them."""
    ddp = mw.DataParallel(torch.nn.Linear(4, 4), timeout_s=TIMEOUT)
    for _ in range(1 + dist.get_rank()):
        with ddp.no_sync():
            ddp(torch.ones(2, 4)).sum().backward()
    ddp(torch.ones(2, 4)).sum().backward()


def test_ranks_that_accumulate_different_numbers_of_passes():
    for outcome in run_program(uneven_passes, 2):
        assert outcome.code != 0, outcome
        assert re.search(r"rank 0 .*gradients, step 2(.|\n)*rank 1 .*gradients, step 3", outcome.output), outcome


def second_thread() -> None:
    """A correct program: a thread of rank 0 starts its collectives before, one of rank 1 after the main thread's."""
    step = trainer(DP2)
    group = dist.new_group([0, 1])

    def gather() -> None:
        if dist.get_rank() == 1:
            time.sleep(1)
        dist.all_reduce(torch.ones(4), group=group)

    thread = threading.Thread(target=gather)
    thread.start()
    for _ in range(3):
        step()
        dist.all_reduce(torch.ones(2))
    thread.join()
    print("trained", flush=True)


def test_collectives_of_a_second_thread_are_its_own_business():
    for outcome in run_program(second_thread, 2):
        assert (outcome.code, "trained" in outcome.output) == (0, True), outcome


def caught(plan: str, is_of_pass: bool) -> None:
    """A loop that catches errors goes on after one that rank 1 alone has, of its forward pass or of the loop."""
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = tokens(12, 8)
    if is_of_pass:
        ids[7, 3] = 5000
    rows = [{"input_ids": x, "labels": x} for x in ids]
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    # Longer than the test waits: what broke the group ends it, and no timeout does.
    config = mw.ToDistributedConfig(plan=plan, timeout_s=60)
    model, optimizer, loader = mw.to_distributed(model, optimizer, loader, config=config)
    mark_fault()
    for number, batch in enumerate(loader):
        try:
            if not is_of_pass and number == 1 and dist.get_rank() == 1:
                [][number]
            model(**batch).loss.backward()
            optimizer.step()
        except (RuntimeError, IndexError):
            pass
        optimizer.zero_grad()
    mw.full_state_dict(model)
    print("went on in silence", flush=True)


CAUGHT = {
    "a rank's pass": (
        "dp2 zero3",
        True,
        r"rank 1 .*: its program caught \w*Error: .*forward pass of step 2 at .*test_faults",
    ),
    "a rank's loop": ("dp2", False, r"the batch of the loader: 2 on rank 0 .*; 3 on rank 1"),
}


@pytest.mark.parametrize("case", CAUGHT)
def test_a_loop_that_catches_errors_ends_with_the_first_cause(case: str):
    plan, is_of_pass, message = CAUGHT[case]
    for outcome in run_program(caught, 2, plan, is_of_pass):
        check(outcome, message, within=20)
