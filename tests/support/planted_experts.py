"""Faults of models with experts, each planted in the distributed program as a bug of the runtime would be.

They are those that other programs have had, or that a change could bring. A comparison of losses alone misses many.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from meshwright.checkpoint.one_device import whole_tensors
from meshwright.layout.row_layout import RowLayout
from meshwright.layout.tensor_layout import TensorLayout, layout_of
from meshwright.mesh.axes import Axis, Mesh
from meshwright.optim import elementwise, gradients, trained_parameters
from meshwright.optim.elementwise import Reads
from meshwright.optim.zero.zero_optimizer import ReduceScatter
from meshwright.parallel.autograd_graph import in_backward
from meshwright.parallel.experts import load_balancing
from meshwright.parallel.experts import slices as expert_slices
from meshwright.parallel.experts import token_dispatchers as expert_dispatch
from meshwright.parallel.experts.slices import OutputBiasOnce
from meshwright.parallel.experts.token_dispatchers import ExpertDispatch
from meshwright.parallel.gradients.buckets import Bucket
from meshwright.parallel.tensor_parallel.block_boundary import BlockHooks
from meshwright.plan.text import parse_plan
from meshwright.roles.blocks import experts
from support.anatomies import build, loader
from support.exact import Float64
from support.models import SIZES
from support.planted_hooks import of_runtime
from support.replicas import uncompared
from support.whole_runs import train_whole

ROUTER = "model.layers.0.mlp.gate.weight"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
Plant = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault.

    Args:
        plan: the plan under which it shows.
        model: the model of ``support.anatomies`` in which it shows.
        plant: makes a context in which this process has the fault.
        shows: a result of ``support.whole_runs`` that is wrong.
        unseen: a result that is right, so that a test that looks only there would miss the fault.
    """

    plan: str
    model: str
    plant: Plant
    shows: str
    unseen: str = ""


def _calls(change: Callable[..., tuple[Any, ...]]) -> Plant:
    """Change the arguments with which experts are called."""
    call = ExpertDispatch.__call__
    return lambda: mock.patch.object(ExpertDispatch, "__call__", lambda self, *args: call(self, *change(*args)))


def _undivided() -> AbstractContextManager[object]:
    make = trained_parameters.GradientSync
    return mock.patch.object(
        trained_parameters, "GradientSync", lambda *args, scale=1.0, **options: make(*args, **options)
    )


def _own_statistics(*axes: str) -> Plant:
    """The load-balancing loss takes what it sums from some axes only."""
    reduce = load_balancing.all_reduce

    def some(x: Tensor, axis: Axis) -> Tensor:
        return reduce(x, axis) if axis.name in axes else x

    return lambda: mock.patch.object(load_balancing, "all_reduce", some)


def _first_rows() -> AbstractContextManager[object]:
    """Each rank of tp reads the mask of the first rank's tokens."""
    counted = load_balancing.counted_rows

    def of_the_first(*args: Any, tp: Axis, **options: Any) -> Tensor:
        return counted(*args, tp=dataclasses.replace(tp, rank=0), **options)

    return mock.patch.object(load_balancing, "counted_rows", of_the_first)


def _copies_over_dp() -> AbstractContextManager[object]:
    return mock.patch.object(gradients, "stepped_over", lambda layout, mesh: mesh.tokens)


@contextlib.contextmanager
def _none_on_idle_ranks() -> Iterator[None]:
    step = torch.optim.AdamW.step

    def step_without_zeros(self: torch.optim.AdamW, *args: Any) -> object:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None and not parameter.grad.as_subclass(Tensor).any():
                parameter.grad = None
        return step(self, *args)

    with (
        mock.patch.object(torch.optim.AdamW, "step", step_without_zeros),
        mock.patch.object(elementwise, "is_known", lambda _: True),  # otherwise it would step whole parameters
        mock.patch.object(elementwise, "reads_of", lambda own: [Reads.ELEMENT for _ in own.param_groups]),
    ):
        yield


def _own_router_gradient() -> AbstractContextManager[object]:
    average: Callable[..., None] = Bucket.average_copies

    def average_the_others(self: Bucket, flat: Tensor, tp: Axis) -> None:
        own = [(part, part.clone()) for p, part in self.segments(flat) if layout_of(p).name == ROUTER]
        average(self, flat, tp)
        for part, before in own:
            part.copy_(before)

    return mock.patch.object(Bucket, "average_copies", average_the_others)


def _out_of_order() -> AbstractContextManager[object]:
    """The weights of a token's experts are taken as the router had them, not in the order of the experts."""
    take = expert_dispatch.take_rows

    def take_in_place(x: Tensor, index: Tensor) -> Tensor:
        return take(x, index.sort().values if x.shape[1] == 1 else index)

    return mock.patch.object(expert_dispatch, "take_rows", take_in_place)


def _routed_again() -> AbstractContextManager[object]:
    """Recomputation sends some tokens elsewhere."""
    call = ExpertDispatch.__call__

    def call_again(self: ExpertDispatch, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if in_backward():
            index = index.roll(1, 0)
        return call(self, hidden, index, weights)

    return mock.patch.object(ExpertDispatch, "__call__", call_again)


def _reduced_twice() -> AbstractContextManager[object]:
    """What the experts that every token takes return is summed over tp twice."""
    reduce = BlockHooks._reduce

    @of_runtime
    def reduce_twice(self: BlockHooks, module: nn.Module, args: Any, output: Any) -> Tensor | None:
        reduced = reduce(self, module, args, output)
        is_shared = "shared_expert" in layout_of(module.get_parameter("weight")).name
        return reduced * self.axis.size if reduced is not None and is_shared else reduced

    return mock.patch.object(BlockHooks, "_reduce", reduce_twice)


def _local_numbers() -> AbstractContextManager[object]:
    """A save writes each rank's experts under their own numbers on the rank."""
    assemble = whole_tensors.assemble

    def write_over(part: Tensor, layout: TensorLayout, mesh: Mesh) -> Tensor | None:
        whole = assemble(part, layout, mesh)
        if whole is not None and layout.is_over_ep:
            half = len(whole) // 2
            whole[half:] = whole[: len(whole) - half]
        return whole

    return mock.patch.object(whole_tensors, "assemble", write_over)


def _zero_is_none() -> AbstractContextManager[object]:
    start = ReduceScatter.start

    def start_and_forget(self: ReduceScatter, bucket: Bucket, flat: Tensor) -> Callable[[], None]:
        finish = start(self, bucket, flat)

        def finish_and_forget() -> None:
            finish()
            for piece in self._of[id(bucket)].slices:
                if piece.shard.grad is not None and not piece.shard.grad.as_subclass(Tensor).any():
                    piece.shard.grad = None

        return finish_and_forget

    return mock.patch.object(ReduceScatter, "start", start_and_forget)


def _own_slice() -> AbstractContextManager[object]:
    """What the slices of experts send back to a token and its router is not summed over the slices."""

    def gather(x: Tensor, axis: Axis) -> Tensor:
        parts = list(expert_slices.all_gather(x.detach(), axis).chunk(axis.size))
        parts[axis.rank] = x
        return torch.cat(parts)

    return mock.patch.object(expert_slices, "gather_rows", gather)


def _one_piece() -> AbstractContextManager[object]:
    """The rows of the gate and those that it scales are cut as if they were one matrix."""
    even = RowLayout.even
    return mock.patch.object(
        experts.RowLayout, "even", lambda size, ranks, dim=0, *, parts=None: even(size, ranks, dim)
    )


def _two_halves() -> AbstractContextManager[object]:
    """Channels that alternate are cut as if those of the gate came first."""
    even = RowLayout.even

    def of_halves(size: int, ranks: int, dim: int = 0, *, parts: Any = None) -> RowLayout:
        return even(size, ranks, dim, parts=(size // 2,) * 2 if size == 2 * SIZES["intermediate_size"] else parts)

    return mock.patch.object(experts.RowLayout, "even", of_halves)


def _bias_on_every_rank() -> AbstractContextManager[object]:
    return mock.patch.object(OutputBiasOnce, "__call__", lambda self, *args: self.method(*args))


def _detached(hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    return hidden, index, weights.detach()


def _other_slots(hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    return hidden, index, weights.flip(-1)


FAULTS: dict[str, Fault] = {
    "gradients of experts are not divided by ep": Fault(
        plan="dp2 ep2", model="mixtral", plant=_undivided, shows=f"gradient of {EXPERTS}", unseen="loss 0"
    ),
    "the load-balancing loss of a rank's tokens": Fault(
        plan="dp2", model="mixtral, balanced", plant=_own_statistics(), shows=f"gradient of {ROUTER}"
    ),
    "the routers' weights are detached": Fault(
        plan="dp2 ep2", model="mixtral", plant=_calls(_detached), shows=f"gradient of {ROUTER}", unseen="loss 0"
    ),
    "the weights of other slots": Fault(plan="dp2 ep2", model="mixtral", plant=_calls(_other_slots), shows="loss 0"),
    "a norm that counts experts once per rank of dp": Fault(
        plan="dp2 ep2", model="mixtral", plant=_copies_over_dp, shows="norm 0", unseen=f"gradient of {EXPERTS}"
    ),
    "no gradient on an idle rank": Fault(
        plan="dp2 ep2",
        model="mixtral, idle experts",
        plant=_none_on_idle_ranks,
        shows=f"weight {EXPERTS}",
        unseen="loss 0",
    ),
    "a router's gradient is not summed under sp": Fault(
        plan="tp2+sp", model="mixtral", plant=_own_router_gradient, shows=f"gradient of {ROUTER}", unseen="loss 0"
    ),
    "weights that are not in the order of the experts": Fault(
        plan="dp2 ep2", model="mixtral", plant=_out_of_order, shows="loss 0"
    ),
    "recomputation routes again": Fault(
        plan="dp2 ep2 recompute=full",
        model="mixtral",
        plant=_routed_again,
        shows=f"gradient of {EXPERTS}",
        unseen="loss 0",
    ),
    "the load-balancing loss is summed over dp, not over sp": Fault(
        plan="tp2+sp", model="mixtral, balanced", plant=_own_statistics("dp"), shows=f"gradient of {ROUTER}"
    ),
    "a mask that is not cut under sp": Fault(
        plan="tp2+sp", model="mixtral, balanced", plant=_first_rows, shows=f"gradient of {ROUTER}"
    ),
    "the result of a shared expert is summed twice": Fault(
        plan="tp2+sp", model="qwen2_moe", plant=_reduced_twice, shows="loss 0"
    ),
    "the gradient of a token is not summed over slices of experts": Fault(
        plan="dp2 etp2", model="mixtral", plant=_own_slice, shows=f"gradient of {ROUTER}", unseen="loss 0"
    ),
    "gate and up are cut as one piece": Fault(plan="dp2 etp2", model="mixtral", plant=_one_piece, shows="loss 0"),
    "alternating gate and up are cut as halves": Fault(
        plan="dp2 etp2", model="gpt_oss", plant=_two_halves, shows="loss 0"
    ),
    "the bias of experts on every rank": Fault(
        plan="dp2 etp2", model="gpt_oss", plant=_bias_on_every_rank, shows="loss 0"
    ),
    "experts are saved under their numbers on a rank": Fault(
        plan="dp2 ep2", model="mixtral", plant=_local_numbers, shows=f"weight {EXPERTS}", unseen="loss 0"
    ),
    "ZeRO takes a gradient of zeros for none": Fault(
        plan="dp2 ep2 zero1",
        model="mixtral, idle experts",
        plant=_zero_is_none,
        shows=f"weight {EXPERTS}",
        unseen="loss 0",
    ),
}


def train(name: str, *, is_planted: bool) -> dict[str, Tensor]:
    """Return the results of a fault's model: in this rank of its plan with the fault, or on one device without it."""
    fault = FAULTS[name]
    plan = parse_plan(fault.plan) if is_planted else None
    with Float64(), fault.plant() if is_planted else nullcontext(), uncompared():
        return train_whole(build(fault.model), plan, functools.partial(loader, fault.model))


def faulty(name: str) -> nn.Module:
    """Return a fault's model; in a distributed program the process has the fault from then on."""
    fault = FAULTS[name]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        fault.plant().__enter__()
    return build(fault.model)
