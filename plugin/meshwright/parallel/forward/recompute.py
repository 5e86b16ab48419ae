"""Turn on recomputation of layers in backward, which transformers' models implement."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from meshwright.errors import PlanError
from meshwright.faults.memory_digest import has_values
from meshwright.parallel.async_numbers import is_deferred
from meshwright.parallel.autograd_graph import in_backward, tensors_in
from meshwright.parallel.batch.schema import CACHES
from meshwright.parallel.forward.writes import WritesInRecompute
from meshwright.roles.decoder import towers_of

_FLAG = "gradient_checkpointing"  # attribute of a transformers module: whether backward recomputes it
_FUNCTION = "_gradient_checkpointing_func"  # attribute of the same module: what calls it
_FIRST = 3  # calls of each layer whose result is compared with what backward computes; one on a GPU


def can_recompute(model: nn.Module) -> bool:
    """Return whether a model can recompute its layers in backward."""
    return _switch(model) is not None


def check_recompute(model: nn.Module, layers: int | None) -> None:
    """Raise if a model cannot recompute its layers, or so many of them.

    Args:
        model: the decoder.
        layers: number of layers to recompute; None for all.
    """
    name = type(model).__name__
    if not can_recompute(model):
        raise PlanError(f"ParallelPlan.recompute='full': {name} cannot recompute its layers. Leave recompute out")
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
    recomputed = [layer for layer in found[:count] if layer not in by_program]
    WritesInRecompute.over(model, recomputed)
    model.register_forward_pre_hook(_refuse_keys, with_kwargs=True)
    names = {module: name for name, module in model.named_modules()}
    for layer in recomputed:
        if (function := getattr(layer, _FUNCTION, None)) is not None:
            setattr(layer, _FUNCTION, _Compared(names[layer], function))
    for layer in found[count:]:
        setattr(layer, _FLAG, False)


def _has_keys(cache: Any) -> bool:
    if hasattr(cache, "get_seq_length"):
        return bool(cache.get_seq_length())
    return isinstance(cache, Tensor) or bool(cache)


def _refuse_keys(model: nn.Module, args: object, kwargs: dict[str, object]) -> None:
    if (
        model.training
        and torch.is_grad_enabled()
        and (given := [name for name in CACHES if _has_keys(kwargs.get(name))])
    ):
        raise PlanError(
            f"the model is given {given[0]} in training, such as the prefixes of an adapter, and layers that "
            "recompute='full' runs again do not read it, so they would compute something else. Use recompute='none'"
        )


class _Compared:
    """Calls a layer by a checkpoint function, and raises if backward computes something else than the pass has.

    Then the program has changed what the layer reads before backward came, such as the adapter that is active, the
    mode, or a hook. A pass without recomputation uses what forward has read.

    Args:
        name: the layer's name.
        function: the checkpoint function.
    """

    def __init__(self, name: str, function: Callable[..., Any]):
        self._name, self.__wrapped__, self._calls = name, function, 0

    def __call__(self, layer: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        given = list(tensors_in((args, kwargs)))
        if not torch.is_grad_enabled() or not all(map(has_values, given)):
            return self.__wrapped__(layer, *args, **kwargs)
        self._calls += 1
        # Without a tensor the layer was called by keywords, which are bound to the function.
        waits = not given or any(is_deferred(x.device) for x in given)
        if self._calls > (1 if waits else _FIRST):
            return self.__wrapped__(layer, *args, **kwargs)
        first: list[Tensor] = []

        def compared(*args: object, **kwargs: object) -> Any:
            output = layer(*args, **kwargs)
            size, rounding = _size(output)
            if not has_values(size):
                return output
            if not in_backward():
                first[:] = [size]
            elif first and not torch.allclose(size, first[0], rtol=rounding, atol=0.0, equal_nan=True):
                torch.autograd.Variable._execution_engine.queue_callback(self._refuse)
            return output

        with set_checkpoint_early_stop(False):  # otherwise the result is not computed again
            return self.__wrapped__(compared, *args, **kwargs)

    def _refuse(self) -> None:
        """Raise at the end of backward."""
        raise PlanError(
            f"{self._name} computes something else when recompute='full' runs it again in backward than in the "
            "forward pass, so the program has changed what it reads in between: an adapter, a hook or a context that "
            "is active in forward alone, or model.eval(). Change it after loss.backward(), or use recompute='none'"
        )


def _size(output: object) -> tuple[Tensor, float]:
    """Return the norm of the first tensor of a result, and how far a repetition may be from it.

    The order of sums may differ, as in atomic additions, and experts scale tokens by scores that are computed again.
    """
    x = next(x for x in tensors_in(output) if x.is_floating_point()).detach()
    norm = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
    return norm, min(torch.finfo(x.dtype).eps ** 0.75, 0.01)


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
    """Return the method that turns recomputation on, or None; transformers gives one to models that raise in it."""
    name = recompute_switch(model) if getattr(model, "supports_gradient_checkpointing", True) else None
    return None if name is None else getattr(model, name)
