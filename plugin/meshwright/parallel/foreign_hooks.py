"""Tells the program's own hooks on a model from those of the libraries that it uses."""

from __future__ import annotations

import functools
from collections.abc import Callable

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


def is_foreign(hook: Callable[..., object]) -> bool:
    """Return whether a hook is the program's own, and not one of the libraries around it."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__module__", None) or type(hook).__module__
    return owner.split(".")[0] not in _LIBRARIES
