"""Draws random programs: a plan and a few traits, so that all pairs are drawn equally often."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from conformance.random_programs.trait import EQUAL, Trait
from conformance.random_programs.traits import TRAITS

PLANS: dict[str, int] = {  # a plan in words -> number of processes
    "tp2": 2,
    "tp2+sp": 2,
    "tp2 ga2": 2,
    "dp2": 2,
    "dp2 zero1": 2,
    "dp2 zero2": 2,
    "dp2 zero3": 2,
    "dp2 ga2": 2,
    "dp2 zero3 ga2": 2,
    "dp2 recompute=full": 2,
    "cp2": 2,
    "cp2(ring)": 2,
    "cp2(ulysses)": 2,
    "pp2 mb1": 2,
    "pp2(gpipe) mb2": 2,
    "pp2x2 mb1": 2,
    "pp2(zb-h1) mb1": 2,
    "pp2(zbv) mb1": 2,
    "dp4": 4,
    "dp4 zero3": 4,
    "dp2 tp2": 4,
    "dp2 tp2+sp zero1": 4,
    "dp2 tp2+sp zero3": 4,
    "tp4+sp": 4,
    "dp2 cp2 zero3": 4,
    "cp4(hybrid-2)": 4,
    "tp2+sp cp2(ring)": 4,
    "dp2 pp2 zero1 mb1": 4,
    "tp2 pp2 mb1": 4,
    "pp2 cp2(ring) mb1": 4,
}
# Of four programs, one has a single trait, so that no other trait's refusal hides what it does, and three have a pair.
# A pair is joined by some of the traits that are always equal.
ALONE, PAIRED = 1, 3
USUAL = (0, 1, 2)


def _stride(plans: Sequence[str]) -> int:
    """Return a step through the plans that visits all of them."""
    return next(step for step in (7, 11, 13) if len(plans) % step)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program: its plan and the names of its traits. The seed also determines the data."""

    seed: int
    plan: str
    names: tuple[str, ...]

    @staticmethod
    def drawn(seed: int) -> Program:
        """Return the program of a seed."""
        turn, place = divmod(seed, ALONE + PAIRED)
        if place < ALONE:
            singles = _singles()
            # Each time around, a trait alone meets another plan.
            index, around = turn % len(singles), turn // len(singles)
            plans = _plans_of(singles[index : index + 1])
            return Program(
                seed=seed, plan=plans[(index * _stride(plans) + around) % len(plans)], names=(singles[index],)
            )
        pairs, source = _pairs(), random.Random(seed)
        names = list(pairs[(turn * PAIRED + place - ALONE) % len(pairs)])
        for _ in range(source.choice(USUAL)):
            fitting = [name for name in _usual() if all(TRAITS[name].fits(TRAITS[other]) for other in names)]
            names.append(source.choice(fitting))
        plans = _plans_of(names)
        return Program(
            seed=seed, plan=plans[(seed * _stride(plans) + seed // len(plans)) % len(plans)], names=tuple(sorted(names))
        )

    @property
    def traits(self) -> list[Trait]:
        return [TRAITS[name] for name in self.names]

    @property
    def words(self) -> str:
        """The plan, with what traits add to it."""
        return " ".join([self.plan, *(trait.words for trait in self.traits if trait.words)])

    @property
    def world_size(self) -> int:
        return PLANS[self.plan]

    @property
    def layers(self) -> int:
        """The number of layers: one for each stage, and at least two."""
        return 4 if "x2" in self.plan or "zbv" in self.plan else 2

    def __str__(self) -> str:
        return f"{self.seed} under {self.plan}: {' + '.join(self.names) or 'plain'}"


def _plans_of(names: list[str]) -> list[str]:
    """Return the plans of a program with some traits: not those with micro-batches, if a trait adds these.

    A plan of 2 ranks takes a third of the time of a plan of 4 ranks, so it is there twice.
    """
    has_words = any(TRAITS[name].words for name in names)
    plans = [plan for plan in PLANS if not (has_words and (" mb" in plan or " ga" in plan))]
    return [plan for plan in plans for _ in range(4 // PLANS[plan])]


@functools.cache
def _singles() -> list[str]:
    return random.Random(1).sample(sorted(TRAITS), len(TRAITS))


@functools.cache
def _usual() -> list[str]:
    return [name for name, trait in TRAITS.items() if trait.may == EQUAL]


@functools.cache
def _pairs() -> list[tuple[str, str]]:
    """Return all pairs of traits that a program may have, in an order that spreads each trait evenly."""
    names = sorted(TRAITS)
    pairs = [
        (first, second)
        for index, first in enumerate(names)
        for second in names[index + 1 :]
        if TRAITS[first].fits(TRAITS[second])
    ]
    random.Random(2).shuffle(pairs)
    return pairs
