"""Support for TRL's fused head, which reads the head's whole weight and computes the routers' loss by itself."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from meshwright.context.region import ContextRegion
from meshwright.errors import PlanError
from meshwright.layout.tensor_layout import layout_of
from meshwright.optim.runtime import Runtime
from meshwright.parallel.collectives import unsplit_rows
from meshwright.parallel.experts.counts import ExpertCounts
from meshwright.parallel.experts.load_balancing import LoadBalancing
from meshwright.parallel.method_chain import ChainStep, StepOrder, add_step, find_step

_MIXTRAL = "transformers.models.mixtral.modeling_mixtral"


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
    owner = _owner(model)
    add_step(owner, _WholeHead(owner, runtime))


def balance_fused_head(model: Any, runtime: Runtime) -> None:
    """Make the load-balancing loss that TRL's forward computes with Mixtral's function that of the global batch.

    Args:
        model: the model, changed in place.
        runtime: the model's runtime; nothing is changed if the model has no experts.
    """
    owner = _owner(model)
    if runtime.features.find(ExpertCounts) is None or runtime.mesh.size == 1:
        return
    if (step := find_step(owner, LoadBalancing)) is None:
        add_step(owner, _NoRouterLoss())
    elif _MIXTRAL not in step.modules:
        importlib.import_module(_MIXTRAL)
        step.modules.append(_MIXTRAL)


def _owner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class _NoRouterLoss(ChainStep):
    """The step of a model's forward that refuses a load-balancing loss which only TRL's forward computes."""

    order = StepOrder.WHOLE_HEAD

    def __call__(self, *args: object, **kwargs: object) -> object:
        if kwargs.get("fused_lm_head") and kwargs.get("output_router_logits"):
            raise PlanError(
                "TRL computes a load-balancing loss that the model's own forward does not have, from each rank's own "
                "tokens. Turn it off: router_aux_loss_coef=0.0 in the trainer's config"
            )
        return self.method(*args, **kwargs)


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
