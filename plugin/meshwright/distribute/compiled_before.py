"""Models that the program has compiled before it distributes them.

A compiled module only calls the plain one, so the program's object stays valid while the plain one is distributed in
place. From then on it compiles what ``torch.compile`` compiles of any distributed model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from meshwright.compiling import is_compiled_function, without_compilation
from meshwright.errors import PlanError
from meshwright.roles.adapters import wrapped


@contextlib.contextmanager
def plain_module(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the plain module of a model, to be distributed in place, without compiled modules among its children.

    A child that ``torch.compile(child)`` wrapped is put back into its parent and compiled by ``child.compile()`` with
    the same arguments, so that parameters have one-device names. If the body raises, every wrapper returns to its
    place.

    Args:
        model: the program's model, plain, or compiled as a whole or in parts.
    """
    inner = without_compilation(model)
    undo = contextlib.ExitStack()
    modules = list(inner.modules())
    is_compiled = inner is not model or any(module._compiled_call_impl is not None for module in modules)
    for parent in modules:
        for name, child in parent._modules.items():
            if child is not None and (plain := without_compilation(child)) is not child:
                is_compiled = True
                undo.callback(parent._modules.__setitem__, name, child)
                parent._modules[name] = plain
                called = inner if plain is _innermost(inner) else plain
                undo.callback(setattr, called, "_compiled_call_impl", called._compiled_call_impl)
                compiler: Any = child.dynamo_ctx
                called._compiled_call_impl = compiler(called._call_impl)  # as called.compile() does
    with undo:
        yield inner
        undo.pop_all()
    if is_compiled:
        # Graphs of calls before this one are of the plain program, and count against dynamo's limit of variants.
        torch.compiler.reset()


def check_compiled(model: nn.Module, engine: str | None = None) -> None:
    """Raise a PlanError if the runtime's hooks would be inside the code that the program has compiled.

    Args:
        model: the program's model.
        engine: the training engine that adds hooks of its own; see ``ToDistributedConfig.engine``.
    """
    for name, module in model.named_modules():
        owner = f"model.{name}" if name else "model"
        if is_compiled_function(vars(module).get("forward")) and not _is_wrapper(module):
            raise PlanError(
                f"{owner}.forward is a function that torch.compile made, and would run inside one graph with the "
                f"plan's collectives; write {owner}.compile(...) instead of {owner}.forward = torch.compile("
                f"{owner}.forward, ...)"
            )
        if engine is not None and (module._compiled_call_impl is not None or _is_wrapper(module)):
            raise PlanError(
                f"the model is compiled ({owner}), but {engine} adds its own hooks to the modules; pass the plain "
                "module, and leave torch.compile out"
            )


def _innermost(model: nn.Module) -> nn.Module:
    """Return the module inside PEFT's wrappers, which call its forward and not the module itself."""
    while (child := wrapped(model)) is not None:
        model = without_compilation(child[1])
    return model


def _is_wrapper(module: nn.Module) -> bool:
    return without_compilation(module) is not module
