"""Each kind of plan against one process on the same device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
import torch.distributed as dist

from conformance.gpu.ranks import RankPools, rank_pools
from conformance.gpu.section import Check, Place, Section, attempt, not_run
from conformance.gpu.training import PROGRAMS, Numbers, in_another_order, largest_difference, relative_error, trained
from meshwright.choose.given_plan import resolve_plan

# The plan in words, and the program that it trains.
PLANS = (
    ("dp2 tp2+sp zero1", "llama"),
    ("dp2", "llama"),
    ("tp2+sp", "llama"),
    ("tp2", "llama"),
    ("dp2 zero1", "llama"),
    ("dp2 zero2", "llama"),
    ("dp2 zero3", "llama"),
    ("dp2 zero1 offload=optimizer", "llama"),
    ("dp2 zero3 offload=optimizer", "llama"),
    ("pp2 mb1", "llama"),
    ("cp2(ring)", "llama"),
    ("cp2(ulysses)", "llama"),
    ("cp2(gather)", "llama"),
    ("dp2 ep2", "mixtral"),
    ("tp2+sp ep2", "mixtral"),
    ("tp2+sp recompute=full", "llama"),
    ("pp2 tp2+sp mb1", "llama"),
    ("dp2 cp2(ring) zero1", "llama"),
    ("dp2 tp2+sp zero3 recompute=full", "llama"),
    ("pp2(zb-h1) mb1", "llama"),
    ("cp4(hybrid-2)", "llama"),
    ("dp2 tp2+sp zero1", "llama, LoRA"),
    ("dp2 tp2+sp zero1", "llama, packed"),
    ("cp2(ring)", "llama, packed"),
    ("pp2(interleaved) mb1", "llama with 4 layers"),
    ("pp2(zbv) mb1", "llama with 4 layers"),
)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16)

# In float64 and float32 only the order of sums differs: about 1e-16 and 1e-7 for each sum, over some hundred terms.
_EXACT, _SINGLE = 1e-10, 2e-5
# In bfloat16 each result is rounded to 8 bits, in the plan as on one device, and an order of summation is a draw of the
# error. For a dense model its sizes over some ten thousand gradients differ by a few percent. With experts, one or two
# orders in ten send a token to another of two experts that are nearly as good, and have several times the error of the
# others. A plan may have the largest error of these orders, and the few percent.
_ORDERS, _HALF = 12, 1.3
_NO_ROUNDING = 0.1  # a hundredth is usual; gradients of two models that have nothing in common are 1.4 apart
_FAULT = 1.001  # the factor of a planted fault


class NumbersOfPlans(Section):
    """Trains each plan in three precisions."""

    name = "numbers"
    question = "Does each kind of plan give the numbers of one process, on this device?"
    share = 6.0

    def run(self, place: Place) -> Iterator[Check]:
        with rank_pools() as pools:
            references = _References(pools, place.device)
            if place.is_cuda:
                yield from attempt("NCCL with one rank", _one_rank_of_nccl, pools)
                yield from attempt(_ALONE.name, _ALONE.checks, references, place)
            for plan, program in PLANS:
                ranks = resolve_plan(plan).world_size
                for backend in ("gloo", "nccl") if ranks <= place.gpus else ("gloo",):
                    case = _Case(plan, program, backend)
                    if PROGRAMS[program].lora is not None and find_spec("peft") is None:
                        yield not_run(case.name, "peft")
                        continue
                    yield from attempt(case.name, case.checks, references, place)


@dataclass(frozen=True)
class _References:
    """The runs on one device, each of which is made once."""

    pools: RankPools
    device: str
    made: dict[tuple[str, torch.dtype], Numbers] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    def of(self, program: str, dtype: torch.dtype) -> Numbers:
        if (program, dtype) not in self.made:
            (self.made[program, dtype],) = self.pools.run(1, trained, None, dtype, self.device, program)
        return self.made[program, dtype]

    def largest_error(self, program: str) -> float:
        """Return the largest error in bfloat16 of orders of summation on one device."""
        if program not in self.largest:
            exact = self.of(program, torch.float64)
            (largest,) = self.pools.run(1, largest_error_of_orders, program, exact, self.device)
            assert largest < _NO_ROUNDING, "in bfloat16 another model was trained than in float64"
            self.largest[program] = largest
        return self.largest[program]


@dataclass(frozen=True)
class _Case:
    plan: str
    program: str
    backend: str

    @property
    def name(self) -> str:
        return f"{self.plan}, {self.program}, {self.backend}"

    def checks(self, references: _References, place: Place) -> Iterator[Check]:
        ranks, factor = resolve_plan(self.plan).world_size, _FAULT if place.plants else 1.0
        for dtype in _DTYPES:
            given = (self.plan, dtype, place.device, self.program, factor)
            found = references.pools.run(ranks, trained, *given, backend=self.backend)[0]
            what, expected = f"{self.name}, {str(dtype).removeprefix('torch.')}", references.of(self.program, dtype)
            if dtype is torch.bfloat16:
                exact = references.of(self.program, torch.float64)
                own, of_one = relative_error(found, exact), relative_error(expected, exact)
                largest = references.largest_error(self.program)
                yield Check(
                    what=f"{what}: error of gradients against float64, relative to the largest of one process's orders",
                    figure=own / largest,
                    goal=_HALF,
                    details={"plan": own, "one process": of_one, f"largest of {_ORDERS} orders": largest},
                )
            else:
                is_exact = dtype is torch.float64
                difference = largest_difference(found, expected, weights=is_exact)
                yield Check(what=what, figure=difference, goal=_EXACT if is_exact else _SINGLE)


def largest_error_of_orders(program: str, exact: Numbers, device: str) -> float:
    """Return the largest error of the gradients in bfloat16 over several orders of summation."""
    runs = (in_another_order(program, torch.bfloat16, device, seed) for seed in range(_ORDERS))
    return max(relative_error(run, exact) for run in runs)


_ALONE = _Case("tp1", "llama", "nccl")  # needs one GPU


def _one_rank_of_nccl(pools: RankPools) -> Check:
    (wrong,) = pools.run(1, _collectives_alone, backend="nccl")
    return Check(what="NCCL with one rank: results of five collectives that differ", figure=wrong, goal=0.0)


def _collectives_alone() -> int:
    """Return how many collectives of a group of one rank do not give back what they are given."""
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.arange(8.0, device=device)
    found = {name: torch.zeros_like(x) for name in ("gather", "scatter", "exchange")}
    reduced, sent = x.clone(), x.clone()
    dist.all_reduce(reduced)
    dist.broadcast(sent, 0)
    dist.all_gather_into_tensor(found["gather"], x)
    dist.reduce_scatter_tensor(found["scatter"], x)
    dist.all_to_all_single(found["exchange"], x)
    return sum(not torch.equal(x, y) for y in itertools.chain((reduced, sent), found.values()))
