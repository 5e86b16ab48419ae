"""What the program and other libraries have put on a model: their hooks, and classes that distribute it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import nn

from meshwright.roles.brought import Brought, codes_of


def has_foreign_hooks(module: nn.Module, *, backward: bool = False) -> bool:
    """Return whether the program has forward hooks on a module itself.

    Args:
        module: the module.
        backward: whether backward hooks count too, and hooks that torch runs for every module.
    """
    own = hooks_of(module) if backward else [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(map(is_of_program, own)) or (backward and bool(hooks_of_all_modules()))


def hooks_of_all_modules() -> list[Callable[..., object]]:
    """Return the program's hooks that torch runs for every module."""
    every = nn.modules.module
    found = (
        every._global_forward_hooks,
        every._global_forward_pre_hooks,
        every._global_backward_hooks,
        every._global_backward_pre_hooks,
    )
    return [hook for hooks in found for hook in hooks.values() if is_foreign(hook)]


def hooks_of(module: nn.Module) -> list[Callable[..., object]]:
    """Return the hooks on a module itself, of forward and of backward."""
    return [hook for hooks in hook_tables(module) for hook in hooks.values()]


def hook_tables(module: nn.Module) -> tuple[Mapping[int, Callable[..., object]], ...]:
    """Return a module's tables of hooks: of forward, and of backward."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


@contextlib.contextmanager
def without_foreign_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Call no hooks of the program on these modules inside the context, neither in forward nor in backward."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    taken = [(vars(module), kind) for module in modules for kind in kinds if vars(module)[kind]]
    before = [of[kind] for of, kind in taken]
    for (of, kind), hooks in zip(taken, before, strict=True):
        of[kind] = type(hooks)((key, hook) for key, hook in hooks.items() if not is_of_program(hook))
    try:
        yield
    finally:
        for (of, kind), hooks in zip(taken, before, strict=True):
            of[kind] = hooks


def source_of(hook: Callable[..., object]) -> str:
    """Return a hook's name and the line at which it begins, for messages."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    code = getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
    name = getattr(hook, "__qualname__", type(hook).__qualname__).rpartition(".")[2]
    return name if code is None else f"{name}, {os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def is_of_program(hook: Callable[..., object]) -> bool:
    """Return whether a hook is the program's, or one of the runtime that calls it with whole values."""
    return is_foreign(getattr(hook, "of_program", hook))


def is_foreign(hook: Callable[..., object]) -> bool:
    """Return whether a hook is the program's own, and not one of the libraries around it.

    A tool that watches a rank's parts sets ``hook.watches_parts = True``; its hooks are left as they are.
    """
    files, brought = [code.co_filename for code in codes_of(hook)], Brought()
    is_of_library = bool(files) and all(map(brought.is_of_library, files))  # no library makes a function of C a hook
    return not is_of_library and not getattr(hook, "watches_parts", False)


def origin(hook: object) -> str:
    """Return where a hook's function was defined: the name of its module and its own."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{getattr(hook, '__module__', None) or type(hook).__module__}.{named.__qualname__}"


_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}


def wrapper_of(module: nn.Module) -> str | None:
    """Return the name of the class that distributes a module; None if there is none."""
    return next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS), None)
