"""Unsharded parameters with partial gradients: norms under sequence parallelism, and biases.

Each rank of tp computes a part of such a gradient, and the runtime sums the parts. If the program uses such a parameter
outside of the model, for example in a penalty on weights, every rank gets the same gradient from this use. Each rank
therefore divides the gradient of this use by the number of ranks.

Make sharded and partial parameters plain ``nn.Parameter`` objects while their module or optimizer uses them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.facts import Facts
from meshwright.layout.tensor_layout import layout_if_any
from meshwright.parallel.autograd_graph import in_backward, tensors_in
from meshwright.parallel.method_chain import ChainStep
from meshwright.parallel.shards.sharded_parameter import Shard, ShardedParameter
from meshwright.parallel.shards.stand_in import StandIn, become, reading_shards
from meshwright.parallel.shards.state_of_parts import open_state


class Window:
    """Makes sharded parameters plain ``nn.Parameter`` objects between the hooks :meth:`open` and :meth:`close`."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.parameters: list[nn.Parameter] = [p for p in parameters if type(p) is ShardedParameter]

    def open(self, *_: object) -> None:
        for parameter in self.parameters:
            become(parameter, nn.Parameter)

    def close(self, *_: object) -> None:
        for parameter in self.parameters:
            become(parameter, ShardedParameter)

    def over(self, module: nn.Module) -> None:
        """Keep the window open while ``module`` runs."""
        if self.parameters:
            module.register_forward_pre_hook(self.open, prepend=True)
            module.register_forward_hook(self.close, always_call=True)


class OnShards(ChainStep):
    """Runs a method that is exact on shards, such as merging a low-rank adapter: each rank merges its own rows."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        with reading_shards():
            return self.method(*args, **kwargs)


class StepWindow:
    """Gives an optimizer's parameters and gradients the classes ``nn.Parameter`` and ``Tensor`` during its step.

    torch's optimizers choose their kernels by the class of a parameter. The state can be read in the step alone, too.
    """

    def __init__(self) -> None:
        self._opened: list[tuple[Tensor, type]] = []
        self._state = contextlib.ExitStack()

    def over(self, optimizer: Optimizer) -> None:
        optimizer.register_step_pre_hook(self.open)
        optimizer.register_step_post_hook(self.close)

    def open(self, optimizer: Optimizer, args: tuple[object, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self._state.enter_context(open_state(optimizer))
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if isinstance(parameter, StandIn):
                self._opened.append((parameter, type(parameter)))
                become(parameter, nn.Parameter)
            gradient = parameter.grad
            if isinstance(gradient, Shard):
                self._opened.append((gradient, type(gradient)))
                become(gradient, Tensor)
        named = {name: self._closed(optimizer, x) for name, x in (kwargs or {}).items()}
        return tuple(self._closed(optimizer, x) for x in args), named

    def _closed(self, optimizer: Optimizer, argument: object) -> object:
        """Wrap the program's closure so that the window is closed while it runs; return other arguments as they are."""
        if not callable(argument):
            return argument

        def closure() -> object:
            self.close()
            result = argument()
            self.open(optimizer)  # not if it raises, which ends the step
            return result

        return closure

    def close(self, *_: object) -> None:
        for tensor, kind in self._opened:
            become(tensor, kind)
        self._opened = []
        self._state.close()


# These make no graph. An optimizer's zero_grad() reads and writes the gradient of each parameter.
_PROPERTIES = frozenset(("grad", "requires_grad", "shape", "dtype", "device", "__set__"))


class PartialParameter(StandIn, nn.Parameter):
    """A parameter that divides gradients of the program's own operations by the number of ranks that compute them."""

    __repr__ = nn.Parameter.__repr__  # type: ignore[assignment]

    @classmethod
    def run(cls, func: Callable[..., Any], name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        with reading_shards():
            if name in _PROPERTIES or not torch.is_grad_enabled() or in_backward():
                return func(*args, **kwargs)
            partial = {id(x): x for x in tensors_in((args, kwargs)) if isinstance(x, PartialParameter)}
            first = torch.autograd._get_sequence_nr()
            with _own_casts():
                result = func(*args, **kwargs)
            for x in partial.values():
                if x.requires_grad:
                    # An in-place operation may return None; its graph nodes then belong to an argument.
                    _take_a_share((result, args, kwargs), x, first)
        return result


@contextlib.contextmanager
def _own_casts() -> Iterator[None]:
    """Disable autocast's cache, so that the program and the model do not share a cast of a parameter."""
    is_cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(is_cached)


class ModelWindow(Window):
    """Makes partial parameters plain ``nn.Parameter`` objects while the layers, or modules that hold them, run.

    Args:
        facts: what the model shows.
        parameters: the model's partial parameters.
    """

    def __init__(self, facts: Facts, parameters: Iterable[nn.Parameter]):
        self.parameters = list(parameters)
        ids = {id(p) for p in self.parameters}
        self._places = [
            (module, name, p) for module in facts.names for name, p in module._parameters.items() if id(p) in ids
        ]
        self._depth = 0
        self.close()

    def open(self, *_: object) -> None:
        self._depth += 1
        if self._depth == 1:
            self._become(PartialParameter, nn.Parameter)
            if torch.is_grad_enabled():
                self._check_places()

    def close(self, *_: object) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._become(nn.Parameter, PartialParameter)

    def _become(self, old: type, new: type) -> None:
        for parameter in self.parameters:
            if type(parameter) is old:  # quantised and fake parameters have other classes
                become(parameter, new)

    def _check_places(self) -> None:
        """Raise if another tensor replaces a parameter, since nothing would sum that tensor's gradient over tp."""
        for module, name, parameter in self._places:
            found = module._parameters.get(name)
            if found is not None and found is not parameter and found.requires_grad:
                layout = layout_if_any(parameter)
                raise ValueError(
                    f"the model runs with another tensor in the place of {name if layout is None else layout.name}, as "
                    "torch.func.functional_call does. Each rank of tp computes a part of that tensor's gradient, but "
                    "the runtime sums the parts only for the model's own parameters. Leave this parameter out of the "
                    "call, compute it inside the model with torch.nn.utils.parametrize, or use ParallelPlan(tp=1)"
                )


def _take_a_share(changed: Any, parameter: PartialParameter, first: int) -> None:
    """Divide the gradient that an operation passes back to a parameter by the number of ranks that compute it.

    Args:
        changed: the tensors that the operation returned or may have written.
        parameter: the parameter, an argument of the operation.
        first: the sequence number of the first graph node that the operation created.
    """
    layout = layout_if_any(parameter)
    ranks = 1 if layout is None else len(layout.over("tp").spans)
    nodes: set[Any] = {x.grad_fn for x in tensors_in(changed)} if ranks > 1 else set()
    seen: set[Any] = {None}
    while nodes := nodes - seen:
        node = nodes.pop()
        seen.add(node)
        if node._sequence_nr() < first:
            continue
        edges = [following for following, _ in node.next_functions]
        own = [index for index, following in enumerate(edges) if getattr(following, "variable", None) is parameter]
        if own:
            node.register_hook(_Share(own, ranks))
        nodes |= set(edges)


class _Share:
    """A hook on an autograd node that divides some of its gradients by the number of ranks."""

    def __init__(self, places: list[int], ranks: int):
        self.places, self.ranks = places, ranks

    def __call__(self, gradients: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
        shared = list(gradients)
        for place in self.places:
            if (gradient := shared[place]) is not None:
                shared[place] = gradient / self.ranks
        return tuple(shared)
