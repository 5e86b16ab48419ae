"""A few of the programs of ``python -m conformance.random_programs``, which runs 2,000, and its planted faults."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conformance.random_programs.compare import FAULTS, judge, largest_difference, of_failures, of_numbers
from conformance.random_programs.draw import PLANS, Program
from conformance.random_programs.plants import PLANTS
from conformance.random_programs.run import Numbers, run
from conformance.random_programs.summary import MARKS, table
from conformance.random_programs.traits import TRAITS
from harness import WorkerPool
from harness.messages import Failure
from support.tiers import crossings


@pytest.fixture(scope="module")
def pools(request: pytest.FixtureRequest) -> Iterator[dict[int, Any]]:
    """The session's pools, and one process for the runs without a plan."""

    class Pools(dict[int, Any]):
        def __missing__(self, size: int) -> Any:
            return request.getfixturevalue(f"pool{size}")

    alone = WorkerPool(1)
    yield Pools({1: alone})
    alone.close()


def program(*names: str, plan: str = "dp2") -> Program:
    return Program(seed=1, plan=plan, names=names)


# Each has traits of other kinds, and together they have each axis. They are named, since a new trait changes all draws.
PROGRAMS = {
    "tp2": ("packed", "accumulation with no_sync"),
    "dp2 zero3": ("gemma2", "padded left", "thawed during the run", "two groups"),
    "dp2": ("shared mlp", "collator: transformers' seq2seq, right", "weight decay by hand"),
    "pp2x2 mb1": ("a frozen embedding", "a cosine schedule", "loss ** 2"),
    "dp2 zero2": ("a scaled weight on lm_head", "own loss with global_mean", "a smaller last batch"),
    "cp2(ulysses)": ("rope yarn", "rows of 11 tokens", "RMSprop"),
    "dp2 tp2+sp zero1": ("collator: multiple of 8, right", "Adagrad", "accumulation by hand"),
    "tp4+sp": ("one key/value head", "evaluation", "loss / 3"),
}


@pytest.mark.parametrize("plan", crossings(PROGRAMS, but=["tp2", "dp2 zero3", "pp2x2 mb1"], quick=["dp2"]))
def test_a_random_program_is_equal_or_told(plan: str, pools: dict[int, Any]) -> None:
    outcome = judge(program(*PROGRAMS[plan], plan=plan), pools)
    assert not outcome.is_fault, f"{outcome.verdict}: {outcome.program}\n{outcome.why}\n{outcome.details}"


# Fault that is planted -> the program that shows it, and the verdicts that it may get.
FOUND: dict[str, tuple[Program, set[str]]] = {
    "loss of one rank doubled": (program(), {"SILENT", "false alarm"}),
    "loss of all ranks scaled": (program(), {"SILENT"}),
    "half of a bucket turned": (program(), {"SILENT"}),
    "hooks installed twice": (program(plan="tp2"), {"SILENT", "raw", "false alarm"}),
    "a collator for each rank": (program("collator: longest, left"), {"SILENT", "raw", "refused"}),
    "no plan is applied": (program(), {"nothing compared"}),
    "a weight is not stepped": (program(), {"SILENT"}),
    "an error of torch": (program(), {"raw"}),
    "an error on one rank": (program(), {"raw"}),
    "a hang": (program(), {"hang"}),
    "a needless refusal": (program(), {"false alarm"}),
    "nothing is compared": (program(), {"nothing compared"}),
    "a rank says another loss": (program(), {"SILENT"}),
}


@pytest.mark.parametrize(
    "plant",
    crossings(
        PLANTS,
        only=["a hang", "an error on one rank", "loss of all ranks scaled", "a rank says another loss"],
    ),
)
def test_a_planted_fault_is_found(plant: str, pools: dict[int, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if plant == "a hang":  # Meshwright's own timeout, three times this, would end a program whose ranks wait
        monkeypatch.setattr("conformance.random_programs.compare.TIMEOUT", 2.0)
    planted, verdicts = FOUND[plant]
    outcome = judge(planted, pools, plant=plant)
    assert outcome.verdict in verdicts, outcome


def test_every_fault_that_can_be_planted_is() -> None:
    assert set(FOUND) == set(PLANTS)


def test_the_programs_of_the_planted_faults_are_equal_without_them(pools: dict[int, Any]) -> None:
    for plan in ("dp2", "tp2"):
        assert judge(program(plan=plan), pools).verdict == "equal"


def test_what_differs_is_found() -> None:
    expected = Numbers(losses=[1.0, 2.0], said=[[1, 2]])
    assert largest_difference([Numbers(losses=[1.0, 2.0], said=[[1, 2]])], expected)[0] == 0
    assert largest_difference([Numbers(losses=[1.0, 2.1], said=[[1, 2]])], expected)[0] > 1e-2
    assert largest_difference([Numbers(losses=[1.0, float("nan")], said=[[1, 2]])], expected)[0] > 1e-2
    assert largest_difference([Numbers(losses=[1.0, 2.0], said=[[1, 3]])], expected)[0] > 1e-2
    assert largest_difference([Numbers(losses=[1.0])], expected)[0] > 1e-2
    ours, theirs = (Numbers(weights={"w": torch.tensor([1.0, x])}) for x in (2.0, 2.1))
    assert largest_difference([ours], theirs)[0] > 1e-2
    assert largest_difference([Numbers()], theirs)[0] > 1e-2


def test_a_comparison_of_nothing_is_a_fault() -> None:
    whole = {"losses": [1.0, 2.0, 3.0], "weights": {"w": torch.ones(2)}, "moved": 0.1}
    for lost in ({"losses": []}, {"weights": {}}, {"moved": 0.0}, {"losses": [1.0, 2.0, float("nan")]}):
        expected = Numbers(**{**whole, **lost})
        ranks = [Numbers(**{**whole, **lost}, plan="dp2 zero0")] * 2
        assert of_numbers(program(), ranks, expected).verdict == "nothing compared"
    ranks = [Numbers(**whole, plan="dp2 zero0")] * 2
    assert of_numbers(program(), ranks, Numbers(**whole)).verdict == "equal"
    assert of_numbers(program(), ranks[:1], Numbers(**whole)).verdict == "nothing compared"


def failure(kind: str, message: str, *, time: float = 0.0) -> Failure:
    return Failure(time, kind, message, f'File "/python/torch/nn.py", line 1, in f\n    g()\n{kind}: {message}')


@pytest.mark.parametrize(
    "failures, trait, verdict",
    [
        ([failure("PlanError", "two layers share an MLP; set tp=1")] * 2, "shared mlp", "refused"),
        ([failure("PlanError", "two layers share an MLP; set tp=1")] * 2, "SGD with momentum", "false alarm"),
        ([failure("PlanError", "this cannot be")] * 2, "shared mlp", "raw"),
        ([failure("PlanError", "two layers share an MLP; set tp=1")], "shared mlp", "raw"),
        ([failure("RuntimeError", "sizes differ; set tp=1")] * 2, "shared mlp", "raw"),
        ([failure("ValueError", "raised by torch; set tp=1")] * 2, "shared mlp", "raw"),
        ([failure("PeerFailedError", "rank 0 has failed"), failure("KeyError", "'x'")], "shared mlp", "raw"),
        ([failure("WorkerDied", "ended with exit code -11")] * 2, "shared mlp", "raw"),
    ],
)
def test_only_an_error_with_a_cure_on_each_rank_is_a_refusal(failures: list[Failure], trait: str, verdict: str) -> None:
    assert of_failures(program(trait), failures, 2).verdict == verdict


def test_pairs_are_drawn_evenly() -> None:
    drawn = [Program.drawn(seed) for seed in range(2000)]
    assert drawn[:500] == [Program.drawn(seed) for seed in range(500)]
    plans = Counter(each.plan for each in drawn)
    assert set(plans) == set(PLANS)
    assert max(plans.values()) < 3 * min(plans.values())
    traits = Counter(name for each in drawn for name in each.names)
    assert set(traits) == set(TRAITS)
    alone = Counter(each.names[0] for each in drawn if len(each.names) == 1)
    assert set(alone) == set(TRAITS)
    assert all(a.fits(b) for each in drawn for a in each.traits for b in each.traits if a is not b)


# Kinds whose every trait changes the numbers of one device; the others are, say, another way to write the same.
CHANGE = {
    *("sharing", "parametrization", "state", "batch-wide", "batch", "collator", "factor", "rope", "family"),
    *("write", "freezing", "optimizer"),
}


@pytest.mark.parametrize("kind", crossings(sorted({trait.kind for trait in TRAITS.values()}), but=["rope"]))
def test_each_trait_is_valid_on_one_process(kind: str) -> None:
    plain = run(program(), distributed=False)
    for trait in TRAITS.values():
        if trait.kind == kind:
            numbers = run(program(trait.name), distributed=False)
            assert numbers.moved > 1e-6, trait.name
            assert all(math.isfinite(loss) for loss in numbers.losses), trait.name
            assert kind not in CHANGE or largest_difference([numbers], plain)[0] > 1e-8, trait.name


def test_the_table_shows_the_worst_verdict(pools: dict[int, Any]) -> None:
    right, wrong = (judge(program("Adagrad"), pools, plant=plant) for plant in (None, "nothing is compared"))
    row = next(line for line in table([right, wrong, right]).splitlines() if line.startswith("Adagrad"))
    assert row.split()[1:].count(MARKS["nothing compared"]) == 1
    assert set(MARKS) >= set(FAULTS)
