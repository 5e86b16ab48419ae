"""Parameters in the step of an optimizer that steps them whole: the owned ones are whole, others cannot be read."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.parallel.shards.stand_in import StandIn, become


class SteppedElsewhere(StandIn, nn.Parameter):
    """A parameter that another rank steps now, so that what this rank writes into it would be lost."""

    MESSAGE = (
        "while an optimizer steps that needs whole parameters, each rank has some of them whole, in "
        "optimizer.param_groups, and this one is on another rank. In a hook of the step, use the parameters of "
        "optimizer.param_groups, each by itself; or do this in the loop, before or after optimizer.step()"
    )


class OwnedParameter:
    """Gives a model's parameter the values and the gradient of the whole one, which this rank steps.

    Optimizers and hooks may know the parameter by its identity. The whole one is stepped itself where the parameter is
    of a class that cannot have other values, such as a traced or a quantised one.

    Args:
        parameter: the model's parameter.
        whole: the whole parameter, with its gradient.
    """

    def __init__(self, parameter: nn.Parameter, whole: nn.Parameter):
        self.whole, self._kind = whole, type(parameter)
        self.stepped = parameter if _is_ours(self._kind) else whole
        # An assignment of another dtype or device to .data makes torch drop the node that hooks of the program know.
        self._swaps = (whole.dtype, whole.device) != (parameter.dtype, parameter.device)
        self._data: Tensor = parameter.data
        self._gradient = parameter.grad
        if self.stepped is not parameter:
            return
        become(parameter, nn.Parameter)
        if self._swaps:
            torch._C._swap_tensor_impl(parameter, whole)
        else:
            parameter.grad = None
            parameter.data = whole.data
            parameter.grad = whole.grad
            whole.grad = None

    def give_back(self) -> None:
        """Give the whole parameter what was made of its values, and the model's parameter what it had."""
        if self.stepped is self.whole:
            return
        if self._swaps:
            torch._C._swap_tensor_impl(self.stepped, self.whole)
            self.whole.grad = None
        else:
            self.whole.data, self.stepped.grad = self.stepped.data, None
            self.stepped.data = self._data
            self.stepped.grad = self._gradient
        become(self.stepped, self._kind)


class LentParameter:
    """Makes a parameter that another rank steps raise if it is read or written."""

    def __init__(self, parameter: nn.Parameter):
        self._parameter, self._kind = parameter, type(parameter)
        if _is_ours(self._kind):
            become(parameter, SteppedElsewhere)

    def give_back(self) -> None:
        """Give the parameter its class again."""
        if type(self._parameter) is SteppedElsewhere:
            become(self._parameter, self._kind)


def _is_ours(kind: type) -> bool:
    """Return whether a parameter's class is torch's own, or one that the runtime has given to it."""
    return kind is nn.Parameter or issubclass(kind, StandIn)
