"""Keeps the runtime's own code out of torch.compile's graphs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame

from meshwright.config_fields import nearest
from meshwright.errors import PlanError


def check_compile_options(options: Any) -> None:
    """Raise a PlanError unless the value is a dict of arguments of ``torch.compile``, with a backend that exists."""
    if not isinstance(options, Mapping):
        raise PlanError(f"compile_options={options!r} must be a dict, for example {{'backend': 'inductor'}}")
    known = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    for name in options:
        if name not in known:
            near = nearest(str(name), known)
            raise PlanError(
                f"compile_options has {name!r}, which torch.compile does not take; "
                f"{f'write {near!r}' if near else 'remove it'}. It takes {', '.join(known)}"
            )
    backend = options.get("backend", "inductor")
    if isinstance(backend, str) and backend not in (backends := torch.compiler.list_backends(exclude_tags=())):
        near, usual = nearest(backend, backends), ", ".join(torch.compiler.list_backends())
        raise PlanError(
            f"compile_options={{'backend': {backend!r}}} is not a backend of torch.compile; "
            f"{f'write {near!r}' if near else 'remove it'}. Usual backends are {usual}"
        )


def leave_out_of_graphs() -> None:
    """Make dynamo skip the code of this package: graphs end at its functions, and its frames are not compiled."""
    from torch._dynamo import trace_rules

    root = __name__.partition(".")[0]
    folder = trace_rules._strip_init_py(sys.modules[root].__file__ or "")
    if folder not in trace_rules.SKIP_DIRS:
        trace_rules.add(root)


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


def without_compilation(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile(model)`` wrapped, whose parameters have one-device names."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner
