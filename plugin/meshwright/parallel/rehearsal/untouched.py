"""Leaves the modules of a program, and its random states, as they were before a trial of them."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import OrderedDict, defaultdict
from collections.abc import Iterator

import torch
from torch import nn

from meshwright.parallel.foreign_hooks import is_foreign

_KINDS = (dict, OrderedDict, defaultdict, set, list)  # plain containers; others may refuse to be filled again
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def untouched(root: nn.Module, device: torch.device) -> Iterator[None]:
    """Undo all that the context sets in modules, such as hooks and parameters, and leave out the program's own hooks.

    The program's hooks do not run in the context: a hook may count its calls or keep what it sees. What a forward
    writes into objects that are no modules, such as a global, is not undone.

    Args:
        root: the module around all modules that may change.
        device: the device whose random state is kept.
    """
    modules = list(root.modules())
    before = [(module, dict(vars(module)), _contents(module)) for module in modules]
    of_python = random.getstate()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            for module in modules:
                for hooks in (vars(module)[name] for name in _HOOKS):
                    for key in [key for key, hook in hooks.items() if is_foreign(hook)]:
                        del hooks[key]
            yield
    finally:
        random.setstate(of_python)
        for module, own, contents in before:
            vars(module).clear()
            vars(module).update(own)
            for held, values in contents:
                held.clear()
                held.update(values) if isinstance(held, dict | set) else held.extend(values)


def _contents(module: nn.Module) -> list[tuple[dict | set | list, dict | set | list]]:  # type: ignore[type-arg]
    """Return the containers that a module holds, each with a copy, since handles of hooks refer to the containers."""
    return [(x, copy.copy(x)) for x in vars(module).values() if type(x) in _KINDS]
