"""Operations that a model cannot run while its layers are spread over the ranks of pp; each raises with the cure."""

from __future__ import annotations

from torch import nn

from meshwright.parallel.method_override import RefusedMethod


def refuse_generating(model: nn.Module) -> None:
    """Make ``model.generate`` raise, if the model has one."""
    if callable(getattr(model, "generate", None)):
        message = (
            "generate needs the keys and values of all layers on one rank, and under ParallelPlan.pp > 1 each rank has "
            "those of its stage. Save the model (model.save_pretrained) and generate on one device or under a plan "
            "with pp=1"
        )
        object.__setattr__(model, "generate", RefusedMethod(message))


def refuse_copying(model: nn.Module) -> None:
    """Make ``copy.deepcopy(model)`` raise."""
    message = (
        "a model whose layers are spread over the ranks of pp cannot be copied. For an average of its weights or a "
        "frozen copy, use a plan with pp=1"
    )
    object.__setattr__(model, "__deepcopy__", RefusedMethod(message))
