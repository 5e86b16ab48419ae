"""Training in bfloat16 as people run it: on one process in several orders of summation, and under a plan.

Results that are rounded to 8 bits depend on the order in which sums are taken. A plan is right if its run differs from
one run of one process as other runs of one process do, so no tolerance is chosen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from support.short_programs import distribute, gradients_of, weights_of

ROWS, LENGTH, STEPS, LR, MAX_NORM = 8, 24, 3, 1e-4, 1.0
# Losses and norms are float32 numbers, and float32 sums of autocast differ by its own rounding: 2**-24 for each addend.
FLOAT32 = 2.0**-20
# What a run trains: bfloat16 weights that the optimizer steps itself, or of which it steps float32 copies (masters), or
# float32 weights under autocast.
KINDS = ("bf16", "bf16 with masters", "autocast")
QUANTITIES = ("losses", "norms", "gradients", "weights")
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "dp2 zero1": {"dp": 2, "zero_stage": 1},
    "dp2 zero2": {"dp": 2, "zero_stage": 2},
    "dp2 zero3": {"dp": 2, "zero_stage": 3},
    "pp2": {"pp": 2},
    "pp2 zero1": {"pp": 2, "zero_stage": 1},
    "tp2": {"tp": 2},
    "tp2 zero1": {"tp": 2, "zero_stage": 1},
    "tp2+sp": SP,
    "tp2+sp zero1": {**SP, "zero_stage": 1},
    "cp2": {"cp": 2},
    "cp2 zero1": {"cp": 2, "zero_stage": 1},
}
# What a run trains, the plan, and a fault in it, which must be farther than each order.
FAULTS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "a sum in bfloat16 over dp": ("autocast", {"dp": 2, "zero_stage": 1, "reduce_dtype": "bfloat16"}, None),
    "no masters": ("bf16 with masters", {"dp": 2}, None),
    "the norm of a shard": ("bf16 with masters", {**SP, "zero_stage": 1}, "norm of a shard"),
}
Run = dict[str, dict[str, Tensor]]
Distances = dict[str, Tensor]


def build(kind: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config).to(torch.float32 if kind == "autocast" else torch.bfloat16).train()


def texts(seed: int) -> list[dict[str, Tensor]]:
    """Rows of nearly the same text, so that their gradients do not cancel and a rounded sum shows."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 96, (STEPS, 1, LENGTH), generator=generator).repeat(1, ROWS, 1).flatten(0, 1)
    places = torch.randint(0, LENGTH, (len(rows),), generator=generator)
    rows[torch.arange(len(rows)), places] = torch.randint(0, 96, (len(rows),), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def alone(kind: str, text: int, seed: int | None = None, *, in_halves: bool = False) -> Run:
    """Train on one process with stock torch, one row after the other; torch adds their gradients in the weights' dtype.

    Args:
        kind: one of ``KINDS``.
        text: the seed of the text.
        seed: the seed of the order of the rows; None for the order as it is.
        in_halves: whether the products of matrices are added in two halves too.
    """
    model = build(kind)
    generator = torch.Generator().manual_seed(seed or 0)
    weights = dict(model.named_parameters())
    stepped = (
        {n: nn.Parameter(p.detach().float().clone()) for n, p in weights.items()} if "masters" in kind else weights
    )
    optimizer = torch.optim.AdamW(stepped.values(), lr=LR)
    run = _empty()
    for step, batch in enumerate(DataLoader(texts(text), batch_size=ROWS)):
        order = torch.arange(ROWS) if seed is None else torch.randperm(ROWS, generator=generator)
        losses = []
        for place in order.split(1):
            with _autocast(kind), added_in_halves(seed or 0) if in_halves else contextlib.nullcontext():
                loss = model(**{name: x[place] for name, x in batch.items()}).loss
            (loss / ROWS).backward()
            losses.append(loss.detach().double())
        for name, p in stepped.items():
            if p is not weights[name]:
                p.grad, weights[name].grad = weights[name].grad.float(), None
        _record(run, step, torch.stack(losses).mean(), _gradients(stepped))
        # torch would round the norm of bfloat16 gradients to bfloat16, in any order to the same number.
        norm = nn.utils.get_total_norm([p.grad.float() for p in stepped.values() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(stepped.values(), MAX_NORM, norm)
        run["norms"][str(step)] = norm
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in stepped.items():
                weights[name].copy_(p)
    return _finished(run, weights_of(model, None))


def planned(kind: str, plan: dict[str, Any], fault: str | None, text: int) -> Run:
    """Train the same under a plan, one row at a time; rank 0 returns whole tensors.

    Args:
        kind: one of ``KINDS``.
        plan: the fields of the plan.
        fault: "norm of a shard", if each rank takes the norm of its own gradients alone.
        text: the seed of the text.
    """
    model = build(kind)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR)
    loader: Any = DataLoader(texts(text), batch_size=ROWS)
    model, optimizer, loader = distribute({"micro_batch_size": 1, **plan}, model, optimizer, loader)
    run = _empty()
    with contextlib.ExitStack() as stack:
        if fault is not None:
            stack.enter_context(mock.patch("meshwright.optim.clip_grad_norm.all_gather", lambda own, axis: own))
        for step, batch in enumerate(loader):
            with _autocast(kind):
                loss = model(**batch).loss
            loss.backward()
            _record(run, step, loss.detach().double(), gradients_of(model, plan) if step == 0 else {})
            run["norms"][str(step)] = mw.clip_grad_norm_(model, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return _finished(run, weights_of(model, plan))


def cells() -> list[tuple[str, str]]:
    """Each kind of training with its plans: ZeRO keeps masters of bfloat16 weights, and without it there are none."""
    with_masters = {name for name, plan in PLANS.items() if "zero_stage" in plan}
    of_kind = {"bf16": PLANS.keys() - with_masters, "bf16 with masters": with_masters, "autocast": PLANS.keys()}
    return [(kind, name) for kind in KINDS for name in PLANS if name in of_kind[kind]]


def adds_in_halves(plan: dict[str, Any]) -> bool:
    """Whether the ranks of a plan add products of matrices, or of attention, in parts that are rounded."""
    return "tp" in plan or "cp" in plan


def _empty() -> Run:
    return {quantity: {} for quantity in QUANTITIES}


def _record(run: Run, step: int, loss: Tensor, gradients: dict[str, Tensor]) -> None:
    run["losses"][str(step)] = loss
    if step == 0:
        run["gradients"] = {name: x.float().clone() for name, x in gradients.items()}


def _gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


def _finished(run: Run, weights: dict[str, Tensor]) -> Run:
    run["weights"] = {name: weights[name].float() for name in run["gradients"]} if weights else {}
    return run


def _autocast(kind: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast")


@contextlib.contextmanager
def added_in_halves(seed: int) -> Iterator[None]:
    """Add the products of matrices in two halves of their channels, as kernels do that split a sum."""
    generator, linear = torch.Generator().manual_seed(seed), F.linear
    halves: dict[int, tuple[Tensor, Tensor]] = {}

    def half(size: int) -> tuple[Tensor, Tensor]:
        if size not in halves:
            first, second = torch.randperm(size, generator=generator).chunk(2)
            halves[size] = first.sort().values, second.sort().values
        return halves[size]

    def split(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        low, high = half(weight.shape[0])  # backward adds the gradients of the input from these halves
        first, second = half(weight.shape[1])
        parts = [
            linear(x[..., first], w[:, first]) + linear(x[..., second], w[:, second])
            for w in (weight[low], weight[high])
        ]
        whole = torch.cat(parts, -1)[..., torch.cat([low, high]).argsort()]
        return whole if bias is None else whole + bias

    with mock.patch.object(F, "linear", split):
        yield


def distances(run: Run, base: Run, kind: str) -> Distances:
    """Return how far a run is from another: for each quantity the relative distances of its tensors.

    Weights are compared with how far they moved, and those that did not move in either run are left as equal.
    """
    start = {name: x.detach().double() for name, x in build(kind).named_parameters()}
    found: Distances = {}
    for quantity in QUANTITIES:
        assert run[quantity].keys() == base[quantity].keys(), quantity
        parts = []
        for name, expected in base[quantity].items():
            size = (expected - start[name] if quantity == "weights" else expected).double().norm()
            apart = (run[quantity][name].double() - expected).norm()
            parts.append(apart / size if apart else apart)
        found[quantity] = torch.stack(parts)
    return found


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the distances of a run lie among those of other orders of summation.

    Args:
        own: the root mean square of the distances of the run's tensors.
        typical: the median of the same over the orders.
        largest: the largest of the same over the orders.
        as_far: the number of runs, this one included, that are as far as this run or farther. It is 1 if no order is.
            If the run were one of the orders, this would happen in one of as many cases as there are runs.
    """

    own: float
    typical: float
    largest: float
    as_far: int


def place_among(run: Distances, orders: list[Distances]) -> dict[str, Place]:
    """Return the place of a run for each quantity.

    How far a run is, is the largest distance of a tensor in terms of the median over all runs, so that a fault in one
    small tensor shows.
    """
    result = {}
    for quantity in QUANTITIES:
        table = torch.stack([run[quantity], *(x[quantity] for x in orders)])
        how_far = torch.where(table > FLOAT32, table / table.median(0).values.clamp(min=FLOAT32), 0.0).amax(1)
        sizes = table.square().mean(1).sqrt()
        result[quantity] = Place(
            own=sizes[0].item(),
            typical=sizes[1:].median().item(),
            largest=sizes[1:].max().item(),
            as_far=int((how_far >= how_far[0]).sum()),
        )
    return result


def farthest(places_of: Callable[[int], dict[str, Place]]) -> tuple[dict[str, Place], list[str]]:
    """Return the places of a run, and the quantities in which it is the farthest with each of two texts.

    If the run were one of n orders, one of n ** 2 quantities would be.

    Args:
        places_of: returns the places with a text. The second text is not asked for if no quantity is farthest with the
            first.
    """
    first = places_of(0)
    outside = [quantity for quantity, place in first.items() if place.as_far == 1]
    if outside:
        second = places_of(1)
        outside = [quantity for quantity in outside if second[quantity].as_far == 1]
    return first, outside


def orders(kind: str, text: int, number: int, in_halves: bool) -> list[Distances]:
    """Return the distances of several orders from the first, on one process or, each a share of them, on all ranks."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    base = alone(kind, text)
    seeds = range(1 + rank, number + 1, ranks)
    own = [distances(alone(kind, text, seed, in_halves=in_halves), base, kind) for seed in seeds]
    if ranks == 1:
        return own
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, own)
    return [x for part in found for x in part]
