"""Finds the calls at the two borders of a decoder's layers, also if a module runs at several places of the decoder."""

from __future__ import annotations

from torch import nn
from torch.utils.hooks import RemovableHandle

from meshwright.compiling import without_compilation
from meshwright.errors import PlanError
from meshwright.roles import Decoder


class RegionBorders:
    """The first layer and the module after which the layers have ended: the final norm, else the last layer.

    Args:
        structure: the decoder's structure.

    Attributes:
        first: the first layer.
        is_first_again: whether the first layer runs at a later place too.
        last: the final norm or the last layer.
    """

    def __init__(self, structure: Decoder):
        layers = structure.layers
        self.first, self.last = layers[0], structure.final_norm or layers[-1]
        self.is_first_again = layers.count(self.first) > 1
        self._calls = self._calls_left = max(1, layers.count(self.last))
        self._depth = 0  # of running layers that have the final norm inside
        self._handles: list[RemovableHandle] = []
        self._stacks = [
            (name, stack, stack[0], stack[-1])
            for stack, name in structure.facts.names.items()
            if isinstance(stack, nn.ModuleList) and self.first in list(stack)
        ]
        for layer in dict.fromkeys(layers):
            if layer is not self.last and self.last in structure.facts.inside(layer):
                self._handles.append(layer.register_forward_pre_hook(self._enter))
                self._handles.append(layer.register_forward_hook(self._leave, always_call=True))

    def check(self) -> None:
        """Raise if the program has changed which layers are at the borders.

        Raises:
            PlanError: another layer stands in the place of the first one, or of the last if no final norm follows.
        """
        for name, stack, first, last in self._stacks:
            now = list(map(without_compilation, stack))  # a compiled layer runs the hooks of the one inside
            if now[:1] != [first] or (last is self.last and now[-1:] != [last]):
                raise PlanError(
                    f"{name} has another layer at its {'start' if now[:1] != [first] else 'end'} than at the call of "
                    "to_distributed, which cuts the tokens before the first layer and joins them after the last, so "
                    f"the ranks would have tokens that do not belong together. Change {name} before to_distributed, or "
                    'use a plan without sequence parallelism and cp, such as plan="tp2"'
                )

    def begin(self) -> None:
        """Begin a pass through the layers."""
        self._calls_left = self._calls

    def has_ended(self) -> bool:
        """Return whether the call of ``last`` that ends now is the one after which the layers have ended."""
        if self._depth:
            return False
        self._calls_left -= 1
        return self._calls_left == 0

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, layer: nn.Module, args: tuple[object, ...]) -> None:
        self._depth += 1

    def _leave(self, layer: nn.Module, args: tuple[object, ...], output: object) -> None:
        self._depth -= 1
