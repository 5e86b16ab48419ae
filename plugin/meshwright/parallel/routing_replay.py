"""Let a layer that backward runs again route each token to the experts of the forward pass.

A router's scores may have other rounding when they are computed again, where a kernel is not deterministic, and in
bfloat16 many scores are equal or nearly so. Another choice would give a wrong gradient, and ranks that share experts
would send other numbers of rows than in the forward pass. So the choices of ``torch.topk`` are kept, k numbers for each
token and layer, and what was chosen is read from the scores at these places. The scores keep their gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.parallel.method_chain import ChainStep

_FUNCTION = "_gradient_checkpointing_func"  # attribute of a transformers module: what runs it, and runs it again


class RoutingReplay:
    """The choices of the routers in the layers of one model that backward runs again."""

    def __init__(self) -> None:
        self.now: _Window | None = None  # what the running layer does; None for a layer that runs once

    def contexts(self) -> tuple[_Window, _Window]:
        """Return the contexts of the forward of a layer and of its repetition, as torch's ``checkpoint`` takes them."""
        choices: list[Tensor] = []
        return _Window(self, choices, replays=False), _Window(self, choices, replays=True)

    def attach(self, model: nn.Module) -> None:
        """Keep and replay the choices in the layers of a model that are recomputed now."""
        for module in model.modules():
            function = vars(module).get(_FUNCTION)
            # A reentrant checkpoint has no contexts, and a program's own context_fn stays.
            if isinstance(function, functools.partial) and not (
                function.keywords.get("use_reentrant") or "context_fn" in function.keywords
            ):
                setattr(module, _FUNCTION, functools.partial(function, context_fn=self.contexts))


class ReplayedBlock(ChainStep):
    """The ``forward`` of a module with a router and experts, which makes the choices of the forward pass again.

    Args:
        replay: the choices.
    """

    def __init__(self, replay: RoutingReplay):
        self.replay = replay

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self.replay.now is None:
            return self.method(*args, **kwargs)
        with _ChosenOnce(self.replay.now):
            return self.method(*args, **kwargs)


class AttachesReplay(ChainStep):
    """The method of a model by which a program turns recomputation on."""

    def __init__(self, model: nn.Module, replay: RoutingReplay):
        self.model, self.replay = model, replay

    def __call__(self, *args: object, **kwargs: object) -> object:
        result = self.method(*args, **kwargs)
        self.replay.attach(self.model)
        return result


@dataclass
class _Window:
    """The time in which a layer runs for the first time, or again."""

    replay: RoutingReplay
    choices: list[Tensor]
    replays: bool
    position: int = 0
    before: list[_Window | None] = field(default_factory=list)

    def __enter__(self) -> None:
        self.before.append(self.replay.now)
        self.replay.now, self.position = self, 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.replay.now = self.before.pop()

    def choose(self, choose: Callable[[], Tensor]) -> Tensor:
        """Return the next choice of the layer: a new one, or that of the forward pass."""
        if not self.replays:
            self.choices.append(choose())
        self.position += 1
        return self.choices[self.position - 1]


class _ChosenOnce(TorchFunctionMode):
    """Takes the choices of ``topk`` from a window, and the values from the scores at these places."""

    def __init__(self, window: _Window):
        super().__init__()
        self.window = window

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)

        def choose() -> Tensor:
            with torch.no_grad():
                indices: Tensor = func(*args, **kwargs).indices
                return indices

        scores = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        indices = self.window.choose(choose)
        return torch.return_types.topk((scores.gather(dim, indices), indices))
