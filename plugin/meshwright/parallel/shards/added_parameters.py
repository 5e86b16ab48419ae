"""Errors for what is added to a distributed model, such as adapters, or replaced in it.

No rank would reduce the gradients of added parameters, and under ZeRO no rank would step them: the ranks' copies would
drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules import module as torch_module

from meshwright.errors import PlanError
from meshwright.layout.tensor_layout import layout_if_any


class AddedParameters:
    """Looks for parameters without a layout whenever a module or a parameter was registered in any model.

    Without a registration a look costs one comparison, since walking over a deep model takes milliseconds.

    Args:
        model: the distributed model, whose parameters have layouts.
    """

    def __init__(self, model: nn.Module):
        _Registrations.count_from_now_on()
        self._model, self._seen = model, _Registrations.number

    def check(self) -> None:
        """Raise if parameters were added since the model was distributed.

        Raises:
            PlanError: if there are such parameters.
        """
        number = _Registrations.number
        if number != self._seen:
            check_none_added(self._model.named_parameters())
            self._seen = number


def check_none_added(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise a PlanError if some of a distributed model's named parameters were added after it was distributed."""
    # The tensors of torch.func.functional_call take the parameters' places during a pass.
    added = [name for name, p in parameters if isinstance(p, nn.Parameter) and layout_if_any(p) is None]
    if added:
        others = f" and {len(added) - 1} more parameter(s)" if len(added) > 1 else ""
        raise PlanError(
            f"{added[0]}{others}: added after the model was distributed, so no rank would reduce their gradients and "
            "the ranks' copies would drift apart. Add adapters and layers first, and distribute the model with them: "
            "model = get_peft_model(model, config); model, optimizer, loader = to_distributed(model, optimizer, loader)"
        )


class KeptModules:
    """Raises in a layer's first pass if the model's forward has replaced modules in it, which have lost their hooks.

    BigBird's forward chooses an attention by the number of tokens.

    Args:
        layer: a layer whose modules have hooks.
    """

    def __init__(self, layer: nn.Module):
        self._modules = dict(layer.named_modules())
        self._handle = layer.register_forward_pre_hook(self._check)

    def _check(self, layer: nn.Module, args: object) -> None:
        now = set(layer.modules())
        lost = [(name, module) for name, module in self._modules.items() if module not in now]
        if lost:
            name, module = lost[0]
            raise PlanError(
                f"{name} of {type(layer).__name__}, a {type(module).__name__}, was replaced after the model was "
                "distributed, so tp no longer cuts it. Replace it before to_distributed; if the model's forward does "
                "so, as for short rows, choose the module in the config, such as "
                "config.attention_type='original_full', or use ParallelPlan(tp=1)"
            )
        self._handle.remove()
        self._modules = {}


class _Registrations:
    """Counts the modules and parameters that are registered in modules of this process."""

    number = 0
    _is_counting = False

    @classmethod
    def count_from_now_on(cls) -> None:
        if not cls._is_counting:
            cls._is_counting = True
            torch_module.register_module_module_registration_hook(cls._count)
            torch_module.register_module_parameter_registration_hook(cls._count)

    @classmethod
    def _count(cls, *_: object) -> None:
        cls.number += 1
