"""Tensors that go through host memory: what arrives, and how a run is told that its ranks share a GPU."""

from __future__ import annotations

import json
import os
import re
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.gpu.training import Numbers, trained
from harness.programs import run_program
from meshwright.errors import PlanError
from meshwright.mesh.host import check_device_num
from meshwright.mesh.host_wire import OPERATIONS, SHARE_GPUS, shares_gpus, through_host
from meshwright.mesh.process_group import backend_for

CUDA = torch.device("cuda", 0)


class Wire(TorchDispatchMode):
    """Sends CPU tensors as the wire sends those of a GPU; the operations inside are gloo's own."""

    used: ClassVar[set[str]] = set()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        name = func._schema.name.removeprefix("c10d::")
        if func.namespace == "c10d" and name in OPERATIONS:
            self.used.add(name)
            return through_host(name)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def everything(rank: int) -> list[Tensor]:
    """Run each operation that the wire replaces; return what this rank has afterwards."""
    found: list[Tensor] = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        x = (torch.arange(6) + 10 * rank).to(dtype)
        summed, largest, sent, at_root = (x.clone() for _ in range(4))
        dist.all_reduce(summed)
        dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True).wait()
        dist.broadcast(sent, 1)
        dist.reduce(at_root, 0)
        gathered, within, exchanged, received, scattered = (x.new_zeros(size) for size in (12, 12, 6, 6, 6))
        dist.all_gather_into_tensor(gathered, x)
        own = within[6 * rank : 6 * rank + 6].copy_(x)
        dist.all_gather_into_tensor(within, own, async_op=True).wait()
        part = x.new_zeros(3)
        dist.reduce_scatter_tensor(part, x)
        dist.all_to_all_single(exchanged, x)
        sizes = [[1, 1], [5, 5]][rank]
        uneven = x.new_zeros(sum(sizes))
        dist.all_to_all_single(uneven, x, sizes, [1, 5])
        listed = [torch.zeros_like(x) for _ in range(2)]
        dist.all_gather(listed, x)
        at_first = [torch.zeros_like(x) for _ in range(2)] if rank == 0 else None
        dist.gather(x, at_first, 0)
        dist.scatter(scattered, [x, x + 1] if rank == 0 else None, 0)
        # Both ranks send before they receive, which only messages without waiting can do.
        large = torch.full((1 << 20,), rank).to(dtype)
        for_large = torch.zeros_like(large)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, large, 1 - rank), dist.P2POp(dist.irecv, for_large, 1 - rank)]
        ):
            work.wait()
        if rank:
            dist.send(x, 0)
        else:
            dist.recv(received, 1)
        at_root = at_root if rank == 0 else x
        found += [summed, largest, sent, at_root, gathered, within, part, exchanged, uneven, scattered, received]
        found += [*listed, *(at_first or []), for_large[::4096]]
    return found


def with_and_without_the_wire() -> None:
    """Compare all operations and a training run, to the bit, before and after the wire is opened."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    before, run_before = everything(rank), trained("dp2 zero1", torch.float64, "cpu")
    with Wire():
        after = everything(rank)
        run_after = trained("dp2 zero1", torch.float64, "cpu")
    assert Wire.used >= set(OPERATIONS) - {"alltoall_", "reduce_scatter_", *(["recv_"] if rank else [])}, Wire.used
    differing = sum(not torch.equal(x, y) for x, y in zip(before, after, strict=True))
    print("found", json.dumps([len(after), differing, is_same(run_before, run_after)]), flush=True)


def is_same(one: Numbers, other: Numbers) -> bool:
    weights = all(torch.equal(x, other.weights[name]) for name, x in one.weights.items())
    return one.losses == other.losses and one.norms == other.norms and weights


def test_what_goes_through_host_memory_arrives() -> None:
    for rank, outcome in enumerate(run_program(with_and_without_the_wire, 2, timeout=60)):
        assert outcome.code == 0, outcome.output
        (found,) = re.findall(r"found (.*)", outcome.output)
        assert json.loads(found) == [4 * (16 if rank == 0 else 14), 0, True]


def waits_twice() -> None:
    dist.init_process_group("gloo")
    x = torch.ones(2)
    with Wire():
        work = dist.all_reduce(x, async_op=True)
    assert x.tolist() == [1, 1], "the result is there before the wait"
    work.wait()
    work.wait()
    assert x.tolist() == [2, 2]


def test_a_result_comes_with_the_wait() -> None:
    assert [outcome.code for outcome in run_program(waits_twice, 2)] == [0, 0]


def test_only_the_environment_lets_ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert backend_for(CUDA) == "cpu:gloo,cuda:nccl" and not shares_gpus()
    with pytest.raises(PlanError, match="this host has 2 GPUs"):
        check_device_num(4, CUDA)
    monkeypatch.setenv(SHARE_GPUS, "1")
    assert backend_for(CUDA) == "gloo" and shares_gpus()
    check_device_num(4, CUDA)
    monkeypatch.setenv(SHARE_GPUS, "yes")
    with pytest.raises(PlanError, match=r"MESHWRIGHT_SHARE_GPUS='yes'.* must be 1"):
        shares_gpus()
