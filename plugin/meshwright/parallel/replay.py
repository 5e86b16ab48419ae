"""Let a layer that backward runs again find what it found in its forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from torch import nn

from meshwright.parallel.method_chain import ChainStep

_FUNCTION = "_gradient_checkpointing_func"  # attribute of a transformers module: what runs it, and runs it again
_WRAPPED = "__wrapped__"

T = TypeVar("T")


class Replay:
    """What the layers of one model that backward runs again have found in their forward pass."""

    def __init__(self) -> None:
        self.now: ReplayWindow | None = None  # what the running layer does; None for a layer that runs once

    def contexts(self) -> tuple[ReplayWindow, ReplayWindow]:
        """Return the contexts of the forward of a layer and of its repetition, as torch's ``checkpoint`` takes them."""
        found: list[Any] = []
        return ReplayWindow(self, found, replays=False), ReplayWindow(self, found, replays=True)

    def attach(self, model: nn.Module) -> None:
        """Keep and replay what is found in the layers of a model that are recomputed now."""
        for module in model.modules():
            owner, name = vars(module), _FUNCTION
            if _WRAPPED in (inner := getattr(owner.get(name), "__dict__", {})):  # what compares results calls it
                owner, name = inner, _WRAPPED
            function = owner.get(name)
            # A reentrant checkpoint has no contexts, and a program's own context_fn stays.
            if isinstance(function, functools.partial) and not (
                function.keywords.get("use_reentrant") or "context_fn" in function.keywords
            ):
                owner[name] = functools.partial(function, context_fn=self.contexts)


class AttachesReplay(ChainStep):
    """The method of a model by which a program turns recomputation on."""

    def __init__(self, model: nn.Module, replay: Replay):
        self.model, self.replay = model, replay

    def __call__(self, *args: object, **kwargs: object) -> object:
        result = self.method(*args, **kwargs)
        self.replay.attach(self.model)
        return result


@dataclass
class ReplayWindow:
    """The time in which a layer runs for the first time, or again."""

    replay: Replay
    found: list[Any]
    replays: bool
    position: int = 0
    before: list[ReplayWindow | None] = field(default_factory=list)

    def __enter__(self) -> None:
        self.before.append(self.replay.now)
        self.replay.now, self.position = self, 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.replay.now = self.before.pop()

    def find(self, find: Callable[[], T]) -> T:
        """Return the next finding of the layer: a new one, or that of the forward pass."""
        if not self.replays:
            self.found.append(find())
        self.position += 1
        found: T = self.found[self.position - 1]
        return found
