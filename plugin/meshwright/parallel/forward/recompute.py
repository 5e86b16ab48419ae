"""Turn on recomputation of layers in backward, which transformers' models implement."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from meshwright.errors import PlanError
from meshwright.parallel.forward.writes import WritesInRecompute
from meshwright.roles.decoder import towers_of

_FLAG = "gradient_checkpointing"  # attribute of a transformers module: whether backward recomputes it


def can_recompute(model: nn.Module) -> bool:
    """Return whether a model can recompute its layers in backward."""
    return _switch(model) is not None


def can_recompute_some(model: nn.Module) -> bool:
    """Return whether a model can recompute some of its layers, each of which has a flag of its own."""
    return can_recompute(model) and bool(_layers(model))


def check_recompute(model: nn.Module, layers: int | None) -> None:
    """Raise a PlanError if a model cannot recompute its layers, or so many of them.

    Args:
        model: the decoder.
        layers: number of layers to recompute; None for all.
    """
    name = type(model).__name__
    if not can_recompute(model):
        raise PlanError(f"ParallelPlan.recompute='full': {name} has no gradient_checkpointing_enable")
    if layers is None:
        return
    count = len(_layers(model))
    if count == 0:
        raise PlanError(
            f"ParallelPlan.recomputed_layers={layers}: {name} recomputes all of its layers or none; leave "
            "recomputed_layers out"
        )
    if layers > count:
        raise PlanError(
            f"ParallelPlan.recomputed_layers={layers}, but {name} has {count} layers; give at most {count}, or leave "
            "recomputed_layers out to recompute all"
        )


def recompute_layers(model: nn.Module, layers: int | None = None, own: Collection[nn.Module] | None = None) -> None:
    """Make a model recompute its layers in backward; ``check_recompute`` must have passed.

    Args:
        model: the decoder.
        layers: number of the decoder's layers to recompute, from the first on; None for all. Towers are recomputed too,
            unless the program turns this off for one: ``tower.gradient_checkpointing_disable()``.
        own: the layers that this rank of a pipeline holds, of which so many are recomputed; None for all.
    """
    switch = _switch(model)
    assert switch is not None
    found = _layers(model)
    by_program = {layer for layer in found if getattr(layer, _FLAG)}  # which writes twice on one device too
    switch({"use_reentrant": False})
    if own is not None:
        inside = {id(module) for layer in own for module in layer.modules()}
        found = [layer for layer in found if id(layer) in inside]
    count = len(found) if layers is None else layers
    WritesInRecompute.over(model, [layer for layer in found[:count] if layer not in by_program])
    for layer in found[count:]:
        setattr(layer, _FLAG, False)


def recompute_switch(model: nn.Module) -> str | None:
    """Return the name of the method that turns recomputation on, the new or the deprecated one, or None."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    return next((name for name in names if hasattr(model, name)), None)


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder's layers with a flag of their own, in order; its own flag and those of towers do not count."""
    of_towers = {module for tower in towers_of(model) for module in tower.modules()}
    flagged = [module for module in model.modules() if hasattr(module, _FLAG) and module not in of_towers]
    return [m for m in flagged if not any(hasattr(inner, _FLAG) for inner in m.modules() if inner is not m)]


def _switch(model: nn.Module) -> Callable[[dict[str, bool]], object] | None:
    """Return the method that turns recomputation on, or None."""
    name = recompute_switch(model)
    return None if name is None else getattr(model, name)
