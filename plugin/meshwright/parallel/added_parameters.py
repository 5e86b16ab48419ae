"""An error for parameters that a program adds to a distributed model, such as adapters, before they are trained.

No rank would reduce their gradients, and under ZeRO no rank would step them: the ranks' copies would drift apart.
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
