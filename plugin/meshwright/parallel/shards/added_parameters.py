"""Errors for what is added to a distributed model, such as adapters, or put in another place of it.

No rank would reduce the gradients of added parameters, and under ZeRO no rank would step them: the ranks' copies would
drift apart. The stages of a pipeline hold parameters by their places in the model.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules import module as torch_module

from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.layout.tensor_layout import layout_if_any


class AddedParameters:
    """Looks for parameters without a layout whenever a module or a parameter was registered in any model.

    Without a registration a look costs the lengths of lists, since walking over a deep model takes milliseconds.

    Args:
        facts: what the distributed model shows, whose parameters have layouts.
        is_staged: whether each parameter must stay in its place, since the stages of a pipeline hold it there.
    """

    def __init__(self, facts: Facts, *, is_staged: bool = False):
        _Registrations.count_from_now_on()
        self._model, self._is_staged = facts.model, is_staged
        self._lists = [module for module in facts.names if isinstance(module, nn.ModuleList)]
        self._seen, self._places = self._moment(), _places(facts.parameters.items()) if is_staged else {}

    def _moment(self) -> tuple[int, ...]:
        return _Registrations.number, *map(len, self._lists)  # a deletion registers nothing

    def check(self) -> None:
        """Raise if parameters were added since the model was distributed, or moved between the stages of a pipeline.

        Raises:
            PlanError: if there are such parameters.
        """
        moment = self._moment()
        if moment == self._seen:
            return
        check_none_added(self._model.named_parameters())
        now = _places(self._model.named_parameters(remove_duplicate=False)) if self._is_staged else {}
        if now != self._places:
            name = next(name for name in {**self._places, **now} if self._places.get(name) != now.get(name))
            raise PlanError(
                f"{name} is another parameter than when the model was distributed, or is gone, but the stages of the "
                "pipeline hold each parameter by its place, so this rank may have no values for it. Swap, remove or "
                "tie modules before to_distributed, or use ParallelPlan(pp=1)"
            )
        self._seen = moment


def _places(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, int]:
    return {name: id(parameter) for name, parameter in parameters}


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
        facts: what the model of the layer shows.
        layer: a layer whose modules have hooks.
    """

    def __init__(self, facts: Facts, layer: nn.Module):
        self._modules = dict(facts.named_inside(layer))
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
