"""Keeps the runtime's own code out of torch.compile's graphs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame

P = ParamSpec("P")
T = TypeVar("T")

# The living functions that have a code in common: of all models of the process, as dynamo's counts of variants are.
_sharing: WeakKeyDictionary[CodeType, WeakSet[Any]] = WeakKeyDictionary()


def leave_out_of_graphs(module: str = __name__) -> None:
    """Make dynamo skip the code of a package: graphs end at its functions, and its frames are not compiled.

    Args:
        module: the name of a module in the package, by default in this one.
    """
    from torch._dynamo import trace_rules

    root = module.partition(".")[0]
    folder = trace_rules._strip_init_py(sys.modules[root].__file__ or "")
    if folder not in trace_rules.SKIP_DIRS:
        trace_rules.add(root)


def allow_variants(modules: Iterable[nn.Module]) -> None:
    """Let dynamo compile as many variants of each module's forward as if no two functions had their code in common.

    Dynamo counts the variants of a code. What a decorator returns has the same code for each function that it
    decorates, so that a layer and its attention would share one limit, and run eagerly beyond it.

    Args:
        modules: modules that are compiled, with the modules in them.
    """
    for module in modules:
        function: Any = type(module).forward
        while (code := getattr(function, "__code__", None)) is not None:
            _sharing.setdefault(code, WeakSet()).add(function)
            function = getattr(function, "__wrapped__", None)
    most = max(map(len, _sharing.values()), default=1)
    if most > 1:
        from torch._dynamo import config

        config.recompile_limit = max(config.recompile_limit, _stated_limit() * most)


@functools.cache
def _stated_limit() -> int:
    """Return how many variants of one code dynamo compiles before this module has raised the number."""
    from torch._dynamo import config

    limit: int = config.recompile_limit
    return limit


def active_backend() -> Any:
    """Return the backend of the ``torch.compile`` inside which this function was called; None outside."""
    callback = get_eval_frame_callback()
    if not callable(callback):
        return None
    from torch._dynamo.eval_frame import innermost_backend

    return innermost_backend(callback)


def pause_compiling() -> Callable[[], Any]:
    """Run what follows without compiling it, and return a function that ends the pause."""
    callback = set_eval_frame(None)
    return lambda: set_eval_frame(callback)


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to run eagerly, with all functions that it calls, if its caller is compiled."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        resume = pause_compiling()
        try:
            return function(*args, **kwargs)
        finally:
            resume()

    return call


def real_object(value: Any) -> Any:
    """Return the object for which a compiled caller passed the stand-in of its graph.

    If a placement is made in compiled code, and the graph ends there, AOTAutograd returns the stand-in with which it
    traced the graph.
    """
    return value.real_obj if type(value).__name__ == "FakeScriptObject" else value


def without_compilation(model: nn.Module, call: str = "") -> nn.Module:
    """Return the module that ``torch.compile(model)`` wrapped, whose parameters have one-device names.

    Args:
        model: the module, compiled or not.
        call: a user's call that takes the module first, for the error if it is none.

    Raises:
        ValueError: if ``call`` is given, and the model is not a module.
    """
    if call and not isinstance(model, nn.Module):
        raise ValueError(f"the model is of type {type(model).__name__}, not a torch.nn.Module; write mw.{call}")
    while (inner := model._modules.get("_orig_mod")) is not None:
        model = inner
    return model


def is_compiled_function(function: object) -> bool:
    """Return whether ``torch.compile(function)`` made a function."""
    return hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False)
