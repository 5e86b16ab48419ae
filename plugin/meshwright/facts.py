"""What one walk over a model shows, before anything of it is cut.

Whoever decides about a model asks its facts, and does not walk over the model again::

    Facts(model)                       one walk: every module by its names, in the order of the model
      .modules, .names, .parameters    by name, and the first name of each module
      .inside(module)                  a module and all that is in it: a slice of the walk
    layer_stack(facts), ...            what a room finds in them, once, if it is marked by @fact

A plan replaces no module, so what it installs reads the same facts. Parameters are read from the modules each time:
facts that held them would keep whole weights alive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

T = TypeVar("T")


class Facts:
    """The modules and parameters of a model, as one walk shows them.

    They hold until the model is changed.

    Args:
        model: the model.

    Attributes:
        modules: the modules by name; a module with several names is listed under each.
        names: the first name of each module, in the order of the model.

    Example::

        facts = Facts(model)
        decoder = find_decoder(facts)
        facts.names[decoder.layers[0]]  # "model.layers.0"
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._take(list(model.named_modules(remove_duplicate=False)))

    def _take(self, walk: list[tuple[str, nn.Module]]) -> None:
        self._walk = walk
        self.modules: Mapping[str, nn.Module] = dict(walk)
        self._places: dict[nn.Module, int] = {}
        for place, (_, module) in enumerate(walk):
            self._places.setdefault(module, place)
        self.names: Mapping[nn.Module, str] = {module: walk[place][0] for module, place in self._places.items()}
        self.found: dict[Hashable, Any] = {}

    def inside(self, module: nn.Module) -> tuple[nn.Module, ...]:
        """Return a module and all modules in it, each once, in their order."""
        if module not in self._places:  # which a getter of the model has returned
            return tuple(module.modules())
        return tuple(dict.fromkeys(inner for _, inner in self.named_inside(module)))

    def named_inside(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield a module of the model and all modules in it, each by every name that it has in there."""
        start = self._places[module]
        name, _ = self._walk[start]
        yield "", module
        prefix = f"{name}." if name else ""
        for place in range(start + 1, len(self._walk)):  # a slice would copy all that follows
            inner, found = self._walk[place]
            if not inner.startswith(prefix):
                return
            yield inner.removeprefix(prefix), found

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the modules have now, by name; one with several names is listed under each.

        They are not kept, since facts outlive the whole weights of a model that is cut.
        """
        return {
            f"{name}.{own}".removeprefix("."): parameter
            for name, module in self._walk
            for own, parameter in module._parameters.items()
            if parameter is not None
        }

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that the modules have now, each once, with its first name."""
        seen: set[int] = set()
        for name, parameter in self.parameters.items():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def tensors(self) -> Iterator[Tensor]:
        """Yield the parameters and buffers that the modules have now, each once."""
        buffers = (x for module in self.names for x in module._buffers.values() if x is not None)
        yield from {id(x): x for x in (*self.parameters.values(), *buffers)}.values()

    def parameters_inside(self, *modules: nn.Module) -> dict[nn.Parameter, None]:
        """Return the parameters in modules of the model, each once, in their order."""
        found = (p for module in modules for inner in self.inside(module) for p in inner._parameters.values())
        return dict.fromkeys(p for p in found if p is not None)

    @staticmethod
    def of(model: nn.Module | Facts) -> Facts:
        """Return the facts of a model, or the facts that are given."""
        return model if isinstance(model, Facts) else Facts(model)

    def part(self, module: nn.Module) -> Facts:
        """Return what the same walk shows of a module of the model, such as the decoder inside of adapters."""
        part = Facts.__new__(Facts)
        part.model = module
        part._take(list(self.named_inside(module)))
        return part


def fact(find: Callable[[Facts], T]) -> Callable[[nn.Module | Facts], T]:
    """Mark a function that finds something in the facts of a model: its result is kept there.

    The function then takes a model too, for callers that have no facts of it.
    """

    @functools.wraps(find)
    def cached(model: nn.Module | Facts) -> T:
        facts = Facts.of(model)
        if find not in facts.found:
            facts.found[find] = find(facts)
        result: T = facts.found[find]
        return result

    return cached
