"""DataParallel against one process that sees all rows: gradients, buckets, overlap, unused parameters, refusals."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import logging
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.parallel import gradients, replicas
from support.exact import relative_difference

ROOT = Path(__file__).resolve().parent.parent
Gradients = dict[str, Tensor | None]


class Tanh(torch.autograd.Function):
    """The custom function of the documentation's example."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y.square())


@dataclasses.dataclass
class Output:
    loss: Tensor
    hidden: list[Tensor]


class Net(nn.Module):
    """Three layers between an embedding-like first and a head; ``kind`` says how they are used."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(4, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(6, 4)
        if kind == "tied":
            self.head.weight = nn.Parameter(self.first.weight.detach().t().clone())
            self.first.register_parameter("weight", None)
        if kind == "reentrant shared":  # nothing is unused, so that buckets start as early as they can
            nn.ModuleList([*self.layers[1:], self.unused]).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        weight = self.head.weight.t() if self.kind == "tied" else self.first.weight
        x = nn.functional.linear(x, weight, self.first.bias)
        for layer in self.layers:
            if self.kind in ("checkpoint", "reentrant"):
                x = checkpoint(lambda y, layer=layer: layer(y).tanh(), x, use_reentrant=self.kind == "reentrant")
            elif self.kind == "reentrant shared":
                x = checkpoint(lambda y: self.layers[0](y).tanh(), x, use_reentrant=True)
            else:
                x = Tanh.apply(layer(x))
        y = self.head(x) * self.scale
        if self.kind == "only used on one rank" and dist.is_initialized() and dist.get_rank() == 1:
            y = y + self.unused(x)
        if self.kind == "dict":
            return {"loss": y.square().mean(), "deep": [(x,)]}
        if self.kind == "dataclass":
            return Output(loss=y.square().mean(), hidden=[x])
        return y


def loss_of(output: Any) -> Tensor:
    if isinstance(output, dict):
        return output["loss"] + output["deep"][0][0].mean()
    if isinstance(output, Output):
        return output.loss + output.hidden[0].mean()
    return output.square().mean()


def rows(rank: int, batch: int = 0) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * batch + rank), dtype=torch.float64)


def net(kind: str = "plain", seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(kind).double()


def gradients_of(model: nn.Module) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def one_process(kind: str, batches: int = 1, ranks: int = 2) -> Gradients:
    """The mean over ranks of the gradients of each rank's loss."""
    model = net(kind)
    for rank in range(ranks):
        for batch in range(batches):
            (loss_of(model(rows(rank, batch))) / ranks).backward()
    return gradients_of(model)


def assert_equal(actual: Gradients, expected: Gradients) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        found = actual[name]
        if gradient is None or found is None:
            assert gradient is found, name
        else:
            # float64, and only the order of sums differs; one rank's own gradient is off by more than 0.01.
            assert relative_difference(found, gradient) < 1e-12, name


def assert_all_equal(actual: list[Gradients], expected: Gradients) -> None:
    for of_rank in actual:
        assert_equal(of_rank, expected)


def backward_once(kind: str, **options: Any) -> Gradients:
    model = net(kind, seed=dist.get_rank())  # the first rank's weights count
    ddp = mw.DataParallel(model, **options)
    loss_of(ddp(rows(dist.get_rank()))).backward()
    return gradients_of(ddp)


KINDS = ["plain", "tied", "checkpoint", "reentrant", "reentrant shared", "dict", "dataclass"]
SMALL = {"comm_buffer_size": 0.0004, "last_comm_buffer_size": 0.0001}  # about 400 and 100 bytes: many buckets


@pytest.mark.parametrize("find_unused_parameters", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_one_process(kind: str, find_unused_parameters: bool, pool2: Any) -> None:
    expected = one_process(kind)
    actual = pool2.run(backward_once, kind, find_unused_parameters=find_unused_parameters, **SMALL)
    assert_all_equal(actual, expected)
    # What would be wrong is caught: the ranks' own gradients differ from their mean.
    own = one_process(kind, ranks=1)
    scale, mean = own["scale"], expected["scale"]
    assert scale is not None and mean is not None and relative_difference(scale, mean) > 0.01


def test_four_ranks_in_default_buckets(pool4: Any) -> None:
    assert_all_equal(pool4.run(backward_once, "plain"), one_process("plain", ranks=4))


@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_a_parameter_used_on_one_rank_only(find_unused_parameters: bool, pool2: Any) -> None:
    actual = pool2.run(backward_once, "only used on one rank", find_unused_parameters=find_unused_parameters, **SMALL)
    first, second = actual
    assert_equal(first, second)
    model = net()
    loss_of(model(rows(0))).backward()
    x = rows(1)
    hidden = model.first(x)
    for layer in model.layers:
        hidden = layer(hidden).tanh()
    loss_of(model.head(hidden) * model.scale + model.unused(hidden)).backward()
    assert_equal(first, {n: None if p.grad is None else p.grad / 2 for n, p in model.named_parameters()})


class Gate(nn.Module):
    """Rank 0 uses ``branch`` where its gradient is exactly zero, rank 1 does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch, self.nobody = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return x + 0 * self.branch(x) if dist.get_rank() == 0 else x


def weights_after_decay() -> tuple[dict[str, Tensor], list[bool]]:
    ddp = mw.DataParallel(Gate())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1, weight_decay=0.5)
    for batch in range(2):
        ddp(rows(dist.get_rank(), batch).float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ddp(rows(0).float()).mean().backward()
    return dict(ddp.state_dict()), [p.grad is None for p in ddp.module.nobody.parameters()]


def test_a_zero_gradient_and_none_do_not_drive_the_ranks_apart(pool2: Any) -> None:
    (first, none), (second, _) = pool2.run(weights_after_decay)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert none == [True, True]


def accumulate(by_hand: bool, zeros: bool) -> tuple[Gradients, list[bool]]:
    ddp = mw.DataParallel(net(), **SMALL)
    loss_of(ddp(rows(dist.get_rank(), 7))).backward()
    ddp.zero_grad(set_to_none=not zeros)
    refused = []

    def clip() -> None:
        try:
            mw.clip_grad_norm_(ddp, 1e9)
            refused.append(False)
        except ValueError:
            refused.append(True)

    with ddp.no_sync():
        for batch in range(2):
            loss_of(ddp(rows(dist.get_rank(), batch))).backward()
    clip()
    with ddp.no_sync() if by_hand else contextlib.nullcontext():
        loss_of(ddp(rows(dist.get_rank(), 2))).backward()
    clip()
    if by_hand:
        mw.fused_allreduce_gradients(list(ddp.parameters()), None)
        clip()
    return gradients_of(ddp), refused


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_no_sync_then_a_pass_outside_or_by_hand(by_hand: bool, zeros: bool, pool2: Any) -> None:
    expected = one_process("plain", batches=3)
    for actual, refused in pool2.run(accumulate, by_hand, zeros):
        if zeros:  # gradients that were zeroed, not dropped, are zeros where one process has None
            actual = {name: None if expected[name] is None else grad for name, grad in actual.items()}
        assert_equal(actual, expected)
        assert refused == ([True, True, False] if by_hand else [True, False])


def unsynchronised() -> tuple[list[int], Tensor]:
    ddp = mw.DataParallel(net())
    with counted() as sizes, ddp.no_sync():
        loss_of(ddp(rows(dist.get_rank()))).backward()
    x = rows(dist.get_rank()).requires_grad_()
    with counted() as more:
        torch.autograd.grad(loss_of(ddp(x)), x)
    assert ddp.scale.grad is not None and not more
    return sizes, ddp.scale.grad


def test_no_sync_and_autograd_grad_send_nothing(pool2: Any) -> None:
    (sizes, first), (_, second) = pool2.run(unsynchronised)
    assert sizes == [] and first != second


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Elements of each all-reduce that starts inside."""
    sizes: list[int] = []

    def start(flat: Tensor, axis: Any) -> Callable[[], Tensor]:
        sizes.append(flat.numel())
        return started(flat, axis)

    started = gradients.start_all_reduce
    with mock.patch.object(gradients, "start_all_reduce", start):
        yield sizes


def bucket_sizes(comm_mb: float, last_mb: float, half: tuple[int, ...] = ()) -> list[int]:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
    for layer in half:
        model[layer].bfloat16()
    ddp = mw.DataParallel(model, comm_buffer_size=comm_mb, last_comm_buffer_size=last_mb)
    with counted() as sizes:
        sum(p.float().sum() for p in model.parameters()).backward()
    assert all(p.grad is not None for p in ddp.parameters())
    return sizes


KIB = 1 / 1024


@pytest.mark.parametrize(
    ("comm_mb", "last_mb", "layers"),
    [
        (25, 1, [8]),
        (3 * KIB, 1 * KIB, [3, 3, 1, 1]),
        (3 * KIB, 2 * KIB, [3, 3, 2]),
        (100 * KIB, 2.5 * KIB, [6, 2]),
        (0.5 * KIB, 0.25 * KIB, [1] * 8),  # a layer is larger than a bucket: one each
    ],
)
def test_bucket_sizes(comm_mb: float, last_mb: float, layers: list[int], pool2: Any) -> None:
    # A layer is 1 KiB: 256 elements, and one that tells whether there is a gradient.
    assert pool2.run(bucket_sizes, comm_mb, last_mb)[0] == [257 * count for count in layers]


def test_buckets_of_two_dtypes_are_ordered_by_their_last_gradient(pool2: Any) -> None:
    # Layers 7 and 1 are float32 and 1 KiB each, those between bfloat16 and half of that. Backward completes
    # {6, 5, 4, 3}, then {2}, then {7, 1}; {0} is the last bucket.
    sizes = pool2.run(bucket_sizes, 2 * KIB, 1 * KIB, half=(2, 3, 4, 5, 6))[0]
    assert sizes == [257 * 4, 257, 257 * 2, 257]


class Checkpointed(nn.Sequential):
    """Every parameter is inside of a reentrant checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def reductions() -> tuple[int, int]:
    model = Checkpointed(*(nn.Linear(4, 4) for _ in range(3)))
    ddp = mw.DataParallel(model, comm_buffer_size=80 / 2**20, last_comm_buffer_size=1 / 2**20)
    x = rows(dist.get_rank()).float().requires_grad_()
    with counted() as sizes:
        ddp(x).sum().backward()
    return len(sizes), sum(p.grad is not None for p in model.parameters())


def test_passes_nested_in_backward_do_not_synchronise_on_their_own(pool2: Any) -> None:
    # Three layers of a weight and a bias: a bucket each, but for the first layer, whose weight is the last bucket.
    assert pool2.run(reductions) == [(4, 6)] * 2


def started_before_the_end(model: nn.Module, **options: Any) -> tuple[int, int]:
    """How many buckets had started when the first layer's gradient came, and how many there are."""
    ddp = mw.DataParallel(model, **options, **SMALL)
    early: list[int] = []
    x = rows(dist.get_rank()).requires_grad_()
    with counted() as sizes:
        output = ddp(x)
        x.register_hook(lambda _: early.append(len(sizes)))
        loss_of(output).backward()
    return early[0], len(sizes)


def overlap(find_unused_parameters: bool) -> tuple[int, int]:
    return started_before_the_end(net(), find_unused_parameters=find_unused_parameters)


def test_buckets_start_during_backward_and_unused_parameters_hold_them_up_only_unless_found(pool2: Any) -> None:
    # Net.unused comes last in the model, so it is in the first bucket.
    waited, count = pool2.run(overlap, False)[0]
    found, same = pool2.run(overlap, True)[0]
    assert count == same >= 5
    assert waited == 0 and found >= count - 2


def use_late(inside_a_checkpoint: bool) -> None:
    model = net()
    ddp = mw.DataParallel(model, find_unused_parameters=not inside_a_checkpoint, **SMALL)
    x = torch.ones(1, 6, dtype=torch.float64, requires_grad=True)
    if inside_a_checkpoint:
        aside = checkpoint(model.unused, x, use_reentrant=True) + model.unused(x.detach())
    else:
        aside = model.unused(x)
    # What is computed first has its backward last.
    (loss_of(ddp(rows(dist.get_rank()))) + aside.sum()).backward()


@pytest.mark.parametrize(
    ("inside_a_checkpoint", "advice"), [(False, "find_unused_parameters"), (True, "use_reentrant")]
)
def test_a_gradient_that_comes_too_late_is_an_error(inside_a_checkpoint: bool, advice: str, pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(use_late, inside_a_checkpoint):
        assert kind == "ValueError" and "unused" in message and advice in message


def several_passes() -> dict[str, Gradients]:
    """Backward passes that a plain loop never makes; the hooks of all of them see the same model."""
    results: dict[str, Gradients] = {}
    rank = dist.get_rank() if dist.is_initialized() else None
    ranks = (0, 1) if rank is None else (rank,)

    def run(name: str, step: Callable[[nn.Module, int], None]) -> None:
        model: nn.Module = net()
        if rank is not None:
            model = mw.DataParallel(model, **SMALL)
        for of_rank in ranks:
            step(model, of_rank)
        results[name] = gradients_of(model)

    def twice(model: nn.Module, rank: int) -> None:
        loss = loss_of(model(rows(rank))) / len(ranks)
        loss.backward(retain_graph=True)
        loss.backward()

    def two_forwards(model: nn.Module, rank: int) -> None:
        (loss_of(model(rows(rank))) * loss_of(model(rows(rank, 1))) / len(ranks)).backward()

    def penalty(model: nn.Module, rank: int) -> None:
        x = rows(rank).requires_grad_()
        loss = loss_of(model(x))
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        ((loss + slope.square().sum()) / len(ranks)).backward()

    for step in (twice, two_forwards, penalty):
        run(step.__name__, step)
    return results


def test_several_passes_and_a_gradient_penalty(pool2: Any) -> None:
    expected = several_passes()
    for actual in pool2.run(several_passes):
        for name, of_one_process in expected.items():
            assert_equal(actual[name], of_one_process)


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return (self.left if left else self.right)(x)


def two_branches_before_one_backward(order: tuple[bool, bool]) -> list[bool]:
    ddp = mw.DataParallel(Either(), find_unused_parameters=True, **SMALL)
    x = rows(dist.get_rank()).float()
    sum(ddp(x, left).sum() for left in order).backward()
    mean = (rows(0) + rows(1)).float().sum(0).expand(4, 4) / 2
    # float32, and sums of ten numbers.
    return [torch.allclose(layer.weight.grad, mean, atol=1e-5) for layer in (ddp.left, ddp.right)]


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_what_one_forward_leaves_unused_another_may_use(order: tuple[bool, bool], pool2: Any) -> None:
    assert pool2.run(two_branches_before_one_backward, order) == [[True, True]] * 2


def pass_after_an_error() -> tuple[int, Gradients]:
    ddp = mw.DataParallel(net(), find_unused_parameters=True, **SMALL)
    planned = ddp.first.weight.register_hook(_fail)
    with counted() as sizes, pytest.raises(RuntimeError, match="planned"):
        loss_of(ddp(rows(dist.get_rank()))).backward()
    planned.remove()
    ddp.zero_grad()
    loss_of(ddp(rows(dist.get_rank()))).backward()
    return len(sizes), gradients_of(ddp)


def _fail(grad: Tensor) -> Tensor:
    raise RuntimeError("planned")


def test_a_pass_that_raised_leaves_nothing_to_the_next(pool2: Any) -> None:
    for started, actual in pool2.run(pass_after_an_error):
        assert started > 1
        assert_equal(actual, one_process("plain"))


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
        ("sparse", ["table", "sparse=False"]),
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
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match=r"copy its \.module"):
            copied(ddp)
    mw.DataParallel(copy.deepcopy(ddp.module))
    state = mw.full_state_dict(ddp)
    assert list(state) == (names if dist.get_rank() == 0 else [])


def test_the_wrapper_behaves_as_the_module(pool2: Any) -> None:
    pool2.run(behave_as_the_module)


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


def test_the_example_with_the_wrapper_joins_the_launchers_processes() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
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
