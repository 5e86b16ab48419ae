"""The worker pools: results, errors, hangs and the isolation of runs."""

import os
import random
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from harness import WorkerError, WorkerHang, WorkerPool
from meshwright.mesh.process_mesh import ProcessMesh


@pytest.fixture(scope="module")
def pool():
    """A pool of this file's own: some tests here kill it, and it starts fast."""
    pool = WorkerPool(2)
    yield pool
    pool.close()


def nothing() -> None:
    pass


def total(value: int, *, scale: int) -> torch.Tensor:
    tensor = torch.tensor([value + dist.get_rank()]) * scale
    dist.all_reduce(tensor)
    return tensor


def rank_and_world_size() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])


def random_numbers() -> tuple[float, float, float]:
    torch.set_default_dtype(torch.float64)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def default_dtype_and_threads() -> tuple[str, int]:
    return str(torch.get_default_dtype()), torch.get_num_threads()


def process_id() -> int:
    return os.getpid()


def fail_on(ranks: tuple[int, ...], then_wait: bool = False) -> str:
    if dist.get_rank() in ranks:
        raise LookupError(f"rank {dist.get_rank()} lost it")
    if then_wait:
        dist.barrier()
    return "fine"


def return_a_lambda():
    return lambda: None


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("about to stall")
        stall()
    dist.barrier()


def stall() -> None:
    threading.Event().wait()


def fail_while_the_other_stalls() -> None:
    if dist.get_rank() == 0:
        raise LookupError("rank 0 lost it")
    stall()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words", flush=True)
        os._exit(7)
    dist.barrier()


def make_groups(count: int) -> tuple[int, str]:
    """The groups that exist now, and the name of the last one made here."""
    existing = len(dist.distributed_c10d._world.pg_names)
    for _ in range(count):
        group = dist.new_group([0, 1])
        dist.barrier(group)
    return existing, group.group_name


def threads_before_tensors_of_a_mesh(dim_name: str) -> int:
    """DTensor remembers the meshes of its operations, and a mesh holds the groups that it has made."""
    threads = len(psutil.Process().threads())
    mesh = ProcessMesh([[0, 1]], dim_names=["one", dim_name]).to_device_mesh("cpu")
    x = distribute_tensor(torch.ones(4), mesh, [Replicate(), Shard(0)])
    (x + x).full_tensor()
    return threads


def leave_a_message_for_nobody() -> None:
    """Rank 0 sends what rank 1 never receives; the next run must not see it."""
    if dist.get_rank() == 0:
        dist.isend(torch.full((1,), 13), 1)


def receive_one() -> int:
    tensor = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        dist.send(torch.full((1,), 7), 1)
    else:
        dist.recv(tensor, 0)
    return tensor.item()


def test_results_come_back_by_rank(pool2, pool4):
    assert pool2.run(rank_and_world_size) == [(0, 2, 0), (1, 2, 1)]
    assert pool4.run(rank_and_world_size) == [(rank, 4, rank) for rank in range(4)]
    assert [tensor.tolist() for tensor in pool2.run(total, 10, scale=2)] == [[42], [42]]


def test_workers_live_on_and_every_run_starts_the_same(pool):
    workers = pool.run(process_id)
    first = pool.run(random_numbers)
    assert first[0] == first[1]
    assert pool.run(default_dtype_and_threads) == [("torch.float32", 1)] * 2
    assert pool.run(random_numbers) == first
    assert pool.run(process_id) == workers


def test_groups_and_messages_do_not_leak_between_runs(pool):
    assert pool.run(make_groups, 3) == pool.run(make_groups, 3)
    assert pool.run(make_groups, 1)[0][0] == 1
    pool.run(leave_a_message_for_nobody)
    assert pool.run(receive_one) == [0, 7]


def test_the_threads_of_groups_do_not_pile_up(pool):
    assert len({max(pool.run(threads_before_tensors_of_a_mesh, name)) for name in "abc"}) == 1


def test_an_error_on_one_rank_is_reported_with_its_traceback(pool):
    workers = pool.run(process_id)
    with pytest.raises(WorkerError) as caught:
        pool.run(fail_on, (1,))
    report = str(caught.value)
    assert "---- rank 1 failed\nTraceback" in report
    assert "in fail_on" in report
    assert "LookupError: rank 1 lost it" in report
    assert "rank 0" not in report
    assert pool.run(process_id) == workers


def test_ranks_that_wait_for_a_failed_one_fail_after_it(pool):
    with pytest.raises(WorkerError) as caught:
        pool.run(fail_on, (1,), then_wait=True)
    assert str(caught.value).startswith("---- rank 1 failed")
    assert "---- rank 0 failed" in str(caught.value)
    assert pool.run(total, 0, scale=1) == [1, 1]


def test_errors_expected_on_every_rank(pool):
    assert pool.run_expecting_error(fail_on, (0, 1)) == [
        ("LookupError", "rank 0 lost it"),
        ("LookupError", "rank 1 lost it"),
    ]
    with pytest.raises(AssertionError, match=r"no error was raised on ranks \[0\]; the others did:\n---- rank 1"):
        pool.run_expecting_error(fail_on, (1,))
    with pytest.raises(AssertionError, match=r"no error was raised on ranks \[0, 1\]$"):
        pool.run_expecting_error(nothing)


def test_a_result_that_cannot_travel_is_an_error(pool):
    with pytest.raises(WorkerError, match="pickle"):
        pool.run(return_a_lambda)
    assert pool.run(nothing) == [None, None]


def test_a_hang_is_reported_with_every_stack_and_the_pool_recovers(pool):
    workers = pool.run(process_id)
    with pytest.raises(WorkerHang) as caught:
        pool.run(hang_on, 1, timeout=1)
    report = str(caught.value)
    assert report.startswith("ranks [0, 1] of 2 did not answer within 1 s")
    rank0, rank1 = report.split("---- rank ")[1:]
    assert rank0.startswith("0: output and stack")
    assert "in barrier" in rank0
    assert "in hang_on" in rank0
    assert "about to stall" in rank1
    assert "in stall" in rank1
    assert set(pool.run(process_id)).isdisjoint(workers)


def test_a_hang_after_an_error_is_found_early_and_names_the_error(pool, monkeypatch):
    monkeypatch.setattr(pool, "grace", 0.5)
    pool.run(nothing)
    with pytest.raises(WorkerHang) as caught:
        pool.run(fail_while_the_other_stalls)
    report = str(caught.value)
    assert report.startswith("ranks [1] of 2 did not answer 0.5 s after another rank failed")
    assert "LookupError: rank 0 lost it" in report
    assert "in stall" in report


@pytest.mark.parametrize(("end", "code"), [("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", -9)])
def test_a_preloaded_program_ends_as_python_would(end: str, code: int, preloaded_python: Path):
    """Or a launcher would take a killed rank for one that ended by itself."""
    program = f"import os, sys; print('torch' in sys.modules, flush=True); {end}"
    ended = subprocess.run([preloaded_python, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.returncode) == ("True\n", code)


STARTS_OTHERS = """
import multiprocessing, os, signal, subprocess, sys
signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
code = "import sys; sys.exit(8 if 'torch' in sys.modules else 9)"
spawned = multiprocessing.get_context("spawn").Process(target=exec, args=(code,))
spawned.start()
spawned.join()
print(spawned.exitcode, subprocess.run([sys.executable, "-c", code]).returncode, flush=True)
signal.pause()
"""


def test_a_preloaded_program_hears_signals_and_starts_preloaded_ones(preloaded_python: Path):
    with subprocess.Popen([preloaded_python, "-c", STARTS_OTHERS], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout.readline() == "8 8\n"
        program.send_signal(signal.SIGUSR1)
        assert program.wait(60) == 7


def test_a_worker_that_dies_is_reported_with_its_last_words(pool):
    with pytest.raises(WorkerError) as caught:
        pool.run(die_on, 1)
    report = str(caught.value)
    assert report.startswith("---- rank 1 failed\nthe process of rank 1 ended with exit code 7\nlast words")
    assert pool.run(nothing) == [None, None]
