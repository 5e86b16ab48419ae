"""Support for TRL's fused head, which reads the head's whole weight without calling the module."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from meshwright.context.region import ContextRegion
from meshwright.layout.tensor_layout import layout_of
from meshwright.optim.runtime import Runtime
from meshwright.parallel.collectives import unsplit_rows
from meshwright.parallel.method_chain import ChainStep, StepOrder, add_step


def gather_for_fused_head(model: Any, runtime: Runtime) -> None:
    """Gather the whole head for calls of the forward with ``fused_lm_head=True``; other calls are unchanged.

    TRL's trainers replace the model's forward before the model is sharded. TRL's forward multiplies hidden states by
    ``get_output_embeddings().weight`` tile by tile, so with a rank's own rows the softmax would cover only part of the
    vocabulary. Under ZeRO stage 3 the head has values only during its own forward, which TRL does not call.

    Args:
        model: the model, changed in place.
        runtime: the model's runtime; nothing is changed if each rank has the whole head.
    """
    is_whole = runtime.mesh.tp.size == runtime.mesh.cp.size == 1 and runtime.weights is None
    if is_whole or not hasattr(model, "get_output_embeddings"):
        return
    owner = model.get_base_model() if hasattr(model, "get_base_model") else model
    add_step(owner, _WholeHead(owner, runtime))


class _WholeHead(ChainStep):
    """The step of a model's forward that gathers the head where TRL's forward reads it."""

    order = StepOrder.WHOLE_HEAD

    def __init__(self, owner: Any, runtime: Runtime):
        self.owner, self.runtime = owner, runtime

    def __call__(self, *args: object, **kwargs: object) -> object:
        if not kwargs.get("fused_lm_head"):
            return self.method(*args, **kwargs)
        owner, runtime = self.owner, self.runtime
        find_head = owner.get_output_embeddings
        with contextlib.ExitStack() as stack:
            if (region := runtime.features.find(ContextRegion)) is not None:
                stack.enter_context(region.joining())  # TRL's loss shifts the labels of the whole row

            def find_whole_head() -> SimpleNamespace:
                head = find_head()
                if runtime.weights is not None:
                    stack.enter_context(runtime.weights.lent(head))
                return _whole(head, runtime)

            owner.get_output_embeddings = find_whole_head  # TRL's forward calls this once, after the backbone
            try:
                return self.method(*args, **kwargs)
            finally:
                del owner.get_output_embeddings


def _whole(head: nn.Linear, runtime: Runtime) -> SimpleNamespace:
    """Return the whole head. All ranks compute the same gradient for it, so each rank keeps its own rows."""
    bias = None if head.bias is None else _gathered(head.bias, runtime)
    return SimpleNamespace(weight=_gathered(head.weight, runtime), bias=bias)


def _gathered(parameter: Tensor, runtime: Runtime) -> Tensor:
    layout = layout_of(parameter)
    if not layout.is_sharded:
        return parameter
    assert layout.over("tp").dim == 0
    return unsplit_rows(parameter.as_subclass(Tensor), runtime.mesh.tp)[: layout.shape[0]]
