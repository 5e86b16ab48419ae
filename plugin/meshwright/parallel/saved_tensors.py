"""What a module keeps from forward for backward: its saved tensors, and the choices that a recomputed layer makes
again.

torch calls only the innermost saved-tensor hooks. The hooks here pass tensors that they do not keep to
the outer hooks, so they can be nested in each other and in activation checkpointing. Selective checkpointing keeps the
results of operations, which it knows by their order; see :func:`unselected`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from meshwright.parallel.method_chain import ChainStep

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Takes a tensor to be saved; returns a function that returns the tensor, or None to leave it to the outer hooks.
Keep = Callable[[Tensor], Callable[[], Tensor] | None]


def push(keep: Keep) -> None:
    """Call ``keep``, before outer hooks, for every tensor that is saved until :func:`pop`."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(tensor: Tensor) -> object:
        if (get_back := keep(tensor)) is not None:
            return get_back
        if outer is None:
            return tensor.detach()  # its graph node would hold it, in a cycle that only backward frees
        packed = outer[0](tensor)
        return lambda: outer[1](packed)

    pack.is_checkpointing = is_checkpointing()  # type: ignore[attr-defined]
    torch._C._autograd._push_saved_tensors_default_hooks(pack, _unpack)


def pop() -> None:
    """Undo the innermost :func:`push`."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def keep(tensor: Tensor) -> Callable[[], Tensor]:
    """Save a tensor by hand, as the hooks in place would save it, and return a function that returns it."""
    tensor = tensor.detach()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return lambda: tensor
    packed = hooks[0](tensor)
    return lambda: hooks[1](packed)


def is_checkpointing() -> bool:
    """Return whether tensors saved now go to activation checkpointing, which drops and recomputes them."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if outer is None:
        return False
    return getattr(outer[0], "is_checkpointing", outer[0].__module__ == "torch.utils.checkpoint")


def unselected(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let selective checkpointing (``context_fn``) not see a function, whose operations differ when layers run again.

    Example:
        >>> @unselected
        ... def gather(): ...
    """

    @functools.wraps(function)
    def unseen(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        modes = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []
        rest = [mode for mode in modes if type(mode).__module__ != "torch.utils.checkpoint"]
        if len(rest) == len(modes):
            return function(*args, **kwargs)
        _put(modes, rest)
        try:
            return function(*args, **kwargs)
        finally:
            _put(rest, modes)

    return unseen


def _put(before: list[TorchDispatchMode], modes: list[TorchDispatchMode]) -> None:
    """Put these modes in the place of those that are on."""
    for _ in before:
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def memory(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's storage and offset. Unlike a data pointer, they exist for a traced step's fake tensors."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()


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
