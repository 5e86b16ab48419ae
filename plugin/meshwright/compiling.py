"""Keeps the runtime's own code out of torch.compile's graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame


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
