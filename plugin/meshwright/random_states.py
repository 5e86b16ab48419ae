"""The random states from which what a program brings may draw, such as a collate function, and whether it drew."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Generator

DEEPEST = 4  # how deep a generator may be inside a collate function, such as the Trainer's around the user's
LONGEST = 64  # of the lists and dicts that are searched: longer ones hold samples
_GENERATORS = (Generator, np.random.Generator, np.random.RandomState, random.Random)


class RandomStates:
    """The states of torch, numpy and Python, and of the generators that some objects hold, when this is made.

    Args:
        holders: the objects, such as a dataset, a collate function or an optimizer.
    """

    def __init__(self, *holders: object):
        self._holders = holders
        self._held = [(x, _state_of(x)) for x in _generators(self._holders)]
        self._common = _common()

    @property
    def are_unchanged(self) -> bool:
        """Whether nothing was drawn since, and no generator was made."""
        return (
            len(_generators(self._holders)) == len(self._held)
            and _is_same(_common(), self._common)
            and all(_is_same(_state_of(x), state) for x, state in self._held)
        )

    def now(self) -> RandomStates:
        """Return the states that the same objects have now."""
        return RandomStates(*self._holders)

    def restore(self) -> None:
        """Set all states to those of the time when this was made."""
        of_torch, of_numpy, of_python = self._common
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)
        for x, state in self._held:
            if isinstance(x, Generator):
                x.set_state(state)
            elif isinstance(x, np.random.Generator):
                x.bit_generator.state = copy.deepcopy(state)
            elif isinstance(x, np.random.RandomState):
                x.set_state(state)
            else:
                x.setstate(state)


@contextmanager
def seeded(collate: Callable[..., Any], seed: int) -> Iterator[None]:
    """Seed what a collate function draws from, and restore all random states afterwards."""
    before = RandomStates(collate)
    seed_all(seed, seed % 2**32)
    try:
        yield
    finally:
        before.restore()


def seed_all(seed: int, of_numpy: int | list[int]) -> None:
    """Seed torch on the CPU, Python and numpy."""
    random.seed(seed)
    np.random.seed(of_numpy)
    torch.default_generator.manual_seed(seed)


class HostStates:
    """The states of numpy and Python when this is made."""

    def __init__(self) -> None:
        self._states = _of_host()

    @property
    def are_unchanged(self) -> bool:
        """Whether neither has drawn since."""
        return _is_same(_of_host(), self._states)


def _of_host() -> tuple[Any, ...]:
    return np.random.get_state(), random.getstate()


def _common() -> tuple[Any, ...]:
    return torch.get_rng_state(), *_of_host()


def _state_of(x: Any) -> Any:
    if isinstance(x, Generator | np.random.RandomState):
        return x.get_state()
    return copy.deepcopy(x.bit_generator.state) if isinstance(x, np.random.Generator) else x.getstate()


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, Mapping):
        return all(_is_same(value, other[name]) for name, value in one.items())
    if isinstance(one, tuple) and len(one) < 10:  # Python's 625 numbers are compared at once
        return all(_is_same(x, y) for x, y in zip(one, other, strict=True))
    return bool(one == other)


def _generators(holders: Iterable[object]) -> list[Any]:
    """Return the random generators inside of some objects, down to a depth."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    level = list(holders)
    for _ in range(DEEPEST + 1):
        parts: list[object] = []
        for value in level:
            if isinstance(value, _GENERATORS):
                found[id(value)] = value
            elif id(value) not in seen and not isinstance(value, type | ModuleType | str | int | float):
                seen.add(id(value))
                parts += parts_of(value)
        level = parts
    return list(found.values())


def parts_of(value: object) -> Iterator[object]:
    """Yield an object's attributes, what it is bound to and has around it, and the items of a short list or dict."""
    yield from getattr(value, "__dict__", {}).values()
    yield getattr(value, "__self__", None)
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    if isinstance(value, list | tuple | dict) and len(value) <= LONGEST:
        yield from value.values() if isinstance(value, dict) else value
    for cell in getattr(value, "__closure__", None) or ():
        with suppress(ValueError):  # a variable that its function has not set yet
            yield cell.cell_contents
