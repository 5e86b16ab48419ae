"""What DataParallel refuses, what it equalises, how it behaves as its module; groups, meshes and the examples."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright.parallel.replicas import replicate_model as replicas
from support.replicas import (
    SMALL,
    Gradients,
    Net,
    assert_all_equal,
    assert_equal,
    gradients_of,
    loss_of,
    net,
    one_process,
    rows,
)

ROOT = Path(__file__).resolve().parents[2]


class Everything(nn.Module):
    """Parameters and buffers of many dtypes and layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(3)
        self.scalar = nn.Parameter(torch.randn(()))
        self.low = nn.Parameter(torch.randn(3, 5).bfloat16())
        self.frozen = nn.Parameter(torch.randn(40), requires_grad=False)
        self.register_buffer("flag", torch.rand(9) > 0.5)
        self.register_buffer("short", torch.randint(100, (7,), dtype=torch.int16))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("hidden", torch.randn(2), persistent=False)


def whole_state(limit: int) -> tuple[dict[str, Tensor], bool]:
    torch.manual_seed(dist.get_rank())
    model = Everything()
    before = {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    with mock.patch.object(replicas, "BROADCAST_BYTES", limit):
        mw.DataParallel(model)
    after = {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    return after, all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("limit", [2**20, 50])
def test_all_ranks_start_with_the_first_ranks_parameters_and_buffers(limit: int, pool2: Any) -> None:
    (first, first_kept), (second, second_kept) = pool2.run(whole_state, limit)
    assert first_kept and not second_kept
    assert all(torch.equal(first[name], second[name]) for name in first)


UNREADABLE = ("meta", "meta on one rank", "lazy")


def wrap(change: str) -> None:
    model: nn.Module = Net()
    options: dict[str, Any] = {}
    only_second = dist.is_initialized() and dist.get_rank() == 1
    match change:
        case "strategy":
            options["strategy"] = object
        case "comm size":
            options["comm_buffer_size"] = 0
        case "last size":
            options["last_comm_buffer_size"] = float("nan")
        case "sizes differ":
            options["comm_buffer_size"] = 10 + dist.get_rank()
        case "no module":
            model = [model]  # type: ignore[assignment]
        case "all frozen":
            model.requires_grad_(False)
        case "meta":
            model.to("meta")
        case "meta on one rank":
            model.to("meta" if only_second else "cpu")
        case "sparse":
            model.add_module("table", nn.Embedding(3, 4, sparse=True))
        case "twice":
            model = mw.DataParallel(model)
        case "twice inside":
            mw.DataParallel(model)
        case "torch":
            model = nn.parallel.DistributedDataParallel(model)
        case "lazy":
            model.add_module("lazy", nn.LazyLinear(3))
        case "dtensor":
            nn.Module.register_parameter(model, "sharded", _dtensor())
        case "shape" if only_second:
            model.add_module("layers", nn.ModuleList([nn.Linear(6, 5)]))
        case "frozen on one rank" if only_second:
            model.get_parameter("head.bias").requires_grad_(False)
        case "one more buffer" if only_second:
            model.register_buffer("late", torch.zeros(2))
    before = copy.deepcopy(model.state_dict()) if isinstance(model, Net) and change not in UNREADABLE else {}
    try:
        mw.DataParallel(model, **options)
    finally:
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def _dtensor() -> nn.Parameter:
    from torch.distributed.tensor import distribute_tensor

    mesh = mw.ProcessMesh([0, 1], ["dp"]).to_device_mesh("cpu")
    return nn.Parameter(distribute_tensor(torch.zeros(4), mesh))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("strategy", ["strategy", "deprecated"]),
        ("comm size", ["comm_buffer_size=0", "above 0"]),
        ("last size", ["last_comm_buffer_size=nan"]),
        ("sizes differ", ["comm_buffer_size=10", "comm_buffer_size=11", "rank(s) 1"]),
        ("no module", ["torch.nn.Module", "list"]),
        ("all frozen", ["no trainable parameter"]),
        ("meta", ["scale is on the meta device"]),
        ("meta on one rank", ["rank(s) 1", "meta device", "rank(s) 0: no problem"]),
        ("sparse", ["table", "sparse = False"]),
        ("twice", ["wrapped by DataParallel"]),
        ("twice inside", ["DataParallel already"]),
        ("torch", ["DistributedDataParallel"]),
        ("lazy", ["lazy.weight", "forward pass"]),
        ("dtensor", ["sharded", "DTensor"]),
        ("shape", ["layers.0.weight (6, 6)", "layers.0.weight (5, 6)", "rank(s) 0:", "rank(s) 1:"]),
        ("frozen on one rank", ["head.bias", "trainable", "frozen", "rank(s) 1:"]),
        ("one more buffer", ["buffer late", "nothing more", "rank(s) 0:"]),
    ],
)
def test_what_cannot_be_wrapped_is_refused_on_every_rank(change: str, words: list[str], pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(wrap, change):
        assert kind == "ValueError"
        assert all(word in message for word in words), message


def wrap_distributed() -> None:
    from support.models import build

    plan = mw.ParallelPlan(dp=2)
    model, *_ = mw.to_distributed(build("llama"), config=mw.ToDistributedConfig(plan=plan))
    mw.DataParallel(model)


def test_a_distributed_model_is_refused(pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(wrap_distributed):
        assert kind == "ValueError" and "to_distributed" in message


def freeze_and_thaw() -> list[bool]:
    model = net()
    model.first.requires_grad_(False)
    ddp = mw.DataParallel(model, **SMALL)
    model.head.requires_grad_(False)
    loss_of(ddp(rows(dist.get_rank()))).backward()
    missing = [model.head.weight.grad is None, model.layers[0].weight.grad is None]
    model.head.requires_grad_(True)
    ddp.zero_grad()
    loss_of(ddp(rows(dist.get_rank()))).backward()
    assert model.head.weight.grad is not None
    total = model.head.weight.grad.clone()
    dist.all_reduce(total)
    missing.append(not torch.allclose(total, 2 * model.head.weight.grad))
    model.first.requires_grad_(True)
    with pytest.raises(ValueError, match=r"first\.weight, first\.bias: frozen when DataParallel was made"):
        ddp(rows(0))
    return missing


def test_freezing_later_works_and_thawing_is_an_error(pool2: Any) -> None:
    assert pool2.run(freeze_and_thaw) == [[True, False, False]] * 2


def behave_as_the_module() -> None:
    model = Everything()
    names = list(model.state_dict())
    ddp = mw.DataParallel(model)
    assert ddp.module is model and ddp.scalar is model.scalar and ddp.conv.kernel_size == (3, 3)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ddp.nothing
    assert list(ddp.state_dict()) == names
    kept: dict[str, Tensor] = {}
    assert ddp.state_dict(destination=kept, prefix="x.", keep_vars=True) is kept
    assert list(kept) == [f"x.{name}" for name in names] and kept["x.scalar"] is model.scalar
    zeros = {name: torch.zeros_like(value) for name, value in ddp.state_dict().items()}
    assert not ddp.load_state_dict(zeros).missing_keys and not model.frozen.any()
    assert [name for name, _ in ddp.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert list(ddp.parameters()) == list(model.parameters())
    assert not ddp.eval().module.norm.training and ddp.train().module.norm.training
    mw.DataParallel(copy.deepcopy(ddp.module))
    state = mw.full_state_dict(ddp)
    assert list(state) == (names if dist.get_rank() == 0 else [])


def test_the_wrapper_behaves_as_the_module(pool2: Any) -> None:
    pool2.run(behave_as_the_module)


def train_copies(path: str) -> list[Gradients]:
    ddp = mw.DataParallel(net(), find_unused_parameters=True)
    if dist.get_rank() == 0:
        torch.save(ddp, path)
    dist.barrier()
    loaded = torch.load(path, weights_only=False)
    assert loaded.find_unused_parameters and loaded.module is not ddp.module
    found = []
    for copied in (loaded, copy.deepcopy(ddp), ddp):
        loss_of(copied(rows(dist.get_rank()))).backward()
        found.append(gradients_of(copied))
    return found


def test_a_wrapper_can_be_saved_and_copied_as_torchs(pool2: Any, tmp_path: Any) -> None:
    for rank in pool2.run(train_copies, str(tmp_path / "ddp.pt")):
        for gradients in rank:
            assert_equal(gradients, one_process("plain"))


def change_dtype() -> Gradients:
    ddp = mw.DataParallel(net().float()).double()
    ddp.load_state_dict(net().state_dict())
    loss_of(ddp(rows(dist.get_rank()))).backward()
    return gradients_of(ddp)


def test_the_dtype_may_change_later(pool2: Any) -> None:
    assert_all_equal(pool2.run(change_dtype), one_process("plain"))


def clip_by_torch() -> tuple[float, float, Gradients]:
    ddp = mw.DataParallel(net())
    loss_of(ddp(rows(dist.get_rank()))).backward()
    ours = mw.clip_grad_norm_(ddp, 1e9).item()
    theirs = nn.utils.clip_grad_norm_(ddp.parameters(), 0.01).item()
    return ours, theirs, gradients_of(ddp)


def test_torch_clipping_is_right_since_gradients_are_whole(pool2: Any) -> None:
    model = net()
    for name, gradient in one_process("plain").items():
        model.get_parameter(name).grad = gradient
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01).item()
    for ours, theirs, clipped in pool2.run(clip_by_torch):
        assert ours == pytest.approx(norm, rel=1e-12) and theirs == pytest.approx(norm, rel=1e-12)  # float64
        assert_equal(clipped, gradients_of(model))


def in_groups(how: str) -> tuple[Gradients, str]:
    """Ranks 0, 1 and ranks 2, 3 share a batch."""
    mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["tp", "dp"])
    device_mesh = mesh.to_device_mesh("cpu")
    rank, problem = dist.get_rank(), ""
    if how == "group":
        ddp = mw.DataParallel(net(), group=device_mesh["dp"].get_group())
        loss_of(ddp(rows(rank % 2))).backward()
        return gradients_of(ddp), problem
    model = net()
    loss_of(model(rows(rank if how == "2-d mesh" else rank % 2))).backward()
    try:
        mw.fused_allreduce_gradients(model.parameters(), mesh[rank // 2])
    except ValueError as error:
        problem = str(error)
    mw.fused_allreduce_gradients(model.parameters(), mesh if how == "2-d mesh" else device_mesh["dp"])
    return gradients_of(model), problem


@pytest.mark.parametrize("how", ["group", "1-d mesh", "2-d mesh"])
def test_the_ranks_of_a_group_or_mesh(how: str, pool4: Any) -> None:
    expected = one_process("plain", ranks=4 if how == "2-d mesh" else 2)
    for actual, problem in pool4.run(in_groups, how):
        assert_equal(actual, expected)
        assert how == "group" or "to_device_mesh" in problem


def fuse_uneven() -> tuple[list[bool], float]:
    """Only rank 0 has a gradient of ``head``; nobody has one of ``unused``."""
    model = net()
    hidden = model.first(rows(0))
    for layer in model.layers:
        hidden = layer(hidden).tanh()
    (model.head(hidden) if dist.get_rank() == 0 else hidden).sum().backward()
    mw.fused_allreduce_gradients(model.parameters())
    assert model.head.bias.grad is not None
    return [p.grad is None for p in model.unused.parameters()], model.head.bias.grad[0].item()


def test_fusing_gradients_that_only_some_ranks_have(pool2: Any) -> None:
    assert pool2.run(fuse_uneven) == [([True, True], 2.5)] * 2  # the mean of 5 rows' ones and nothing


def fuse_sharded() -> None:
    from support.models import build

    model, *_ = mw.to_distributed(build("llama"), config=mw.ToDistributedConfig(plan=mw.ParallelPlan(tp=2)))
    mw.fused_allreduce_gradients(model.parameters())


def test_fusing_shards_is_refused(pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(fuse_sharded):
        assert kind == "ValueError" and "sharded" in message


def test_one_process_passes_through(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "meshwright"):
        ddp = mw.DataParallel(net())
    assert "one process" in caplog.text
    with ddp.no_sync():
        loss_of(ddp(rows(0))).backward()
    mw.fused_allreduce_gradients(ddp.parameters())
    assert mw.clip_grad_norm_(ddp, 1e9) > 0
    assert_equal(gradients_of(ddp), one_process("plain", ranks=1))
    assert list(mw.full_state_dict(ddp)) == list(ddp.state_dict())


def weights_printed(output: str) -> list[str]:
    return re.findall(r"weights after training: (-?[0-9.]+)", output)


def run_by_hand() -> list[str]:
    from examples.primitives.no_sync_by_hand import main

    with contextlib.redirect_stdout(io.StringIO()) as output:
        main()
    return weights_printed(output.getvalue())


def test_the_example_by_hand(pool2: Any) -> None:
    first, second = pool2.run(run_by_hand)
    assert len(first) == 1 and first == second


@pytest.mark.crossing
def test_the_example_with_the_wrapper_joins_the_launchers_processes(preloaded_python: Path) -> None:
    command = [str(preloaded_python), "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    result = subprocess.run(
        [*command, "examples/primitives/data_parallel_wrapper.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    first, second = weights_printed(result.stdout)
    assert first == second


def threads_after_training() -> int:
    model = mw.DataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    return threading.active_count() + len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(sys.platform != "linux", reason="counts native threads in /proc")
def test_a_model_that_is_gone_leaves_no_process_group_behind(pool2):
    """Each group has threads of its own; a cycle through autograd's hooks would keep them all."""
    counts = [pool2.run(threads_after_training)[0] for _ in range(4)]
    assert counts[-1] <= counts[1]
