"""Tells the program's own hooks on a model from those of the libraries that it uses."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

from torch import nn

# Hooks of these libraries are on every model, or only move and record tensors.
_LIBRARIES = ("meshwright", "meshwright_hf", "torch", "transformers", "accelerate", "peft", "trl", "deepspeed")


def has_foreign_hooks(module: nn.Module, *, backward: bool = False) -> bool:
    """Return whether the program has forward hooks on a module itself.

    Args:
        module: the module.
        backward: whether backward hooks count too, and hooks that torch runs for every module.
    """
    return any(map(is_foreign, [*_hooks_of(module), *(_other_hooks_of(module) if backward else ())]))


def _hooks_of(module: nn.Module) -> list[Callable[..., object]]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _other_hooks_of(module: nn.Module) -> list[Callable[..., object]]:
    every = nn.modules.module
    found = (
        module._backward_hooks,
        module._backward_pre_hooks,
        every._global_forward_hooks,
        every._global_forward_pre_hooks,
        every._global_backward_hooks,
        every._global_backward_pre_hooks,
    )
    return [hook for hooks in found for hook in hooks.values()]


@contextlib.contextmanager
def without_foreign_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Call no hooks of the program on these modules inside the context, neither in forward nor in backward."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    taken = [(vars(module), kind) for module in modules for kind in kinds if vars(module)[kind]]
    before = [of[kind] for of, kind in taken]
    for (of, kind), hooks in zip(taken, before, strict=True):
        of[kind] = type(hooks)((key, hook) for key, hook in hooks.items() if not is_foreign(hook))
    try:
        yield
    finally:
        for (of, kind), hooks in zip(taken, before, strict=True):
            of[kind] = hooks


def is_foreign(hook: Callable[..., object]) -> bool:
    """Return whether a hook is the program's own, and not one of the libraries around it."""
    return origin(hook).split(".")[0] not in _LIBRARIES


def origin(hook: object) -> str:
    """Return where a hook's function was defined: the name of its module and its own."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{getattr(hook, '__module__', None) or type(hook).__module__}.{named.__qualname__}"
