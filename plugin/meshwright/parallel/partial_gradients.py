"""Whole parameters of whose gradient each rank of tp computes a part: norms under sequence parallelism, and biases.

The runtime adds the parts up over tp. What the program computes from such a parameter outside of the model, a penalty
on weights for example, gives every rank the same gradient. Each rank therefore takes its share of that one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.parallel.autograd_graph import in_backward, tensors_in
from meshwright.parallel.shard_reads import reading_shards, record_if_any
from meshwright.parallel.sharded_parameter import become


class PartialParameter(nn.Parameter):
    """Divides a gradient that comes back to it by way of the program's own operations by the ranks that compute it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with reading_shards():
            if not torch.is_grad_enabled() or in_backward():
                return func(*args, **(kwargs or {}))
            partial = {id(x): x for x in tensors_in((args, kwargs)) if isinstance(x, PartialParameter)}
            first = torch.autograd._get_sequence_nr()
            with _own_casts():
                result = func(*args, **(kwargs or {}))
            for x in partial.values():
                if x.requires_grad:
                    # An operation in place may return nothing; its graph is that of an argument.
                    _take_a_share((result, args, kwargs), x, first)
        return result


@contextlib.contextmanager
def _own_casts() -> Iterator[None]:
    """Autocast casts a parameter once for the model and the program; here the program's cast is one of its own."""
    is_cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(is_cached)


class ModelWindow:
    """Partial parameters are plain ones while the layers run, or what holds them.

    Args:
        model: that has them.
        parameters: of the model.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter]):
        self.parameters = list(parameters)
        ids = {id(p) for p in self.parameters}
        self._places = [
            (module, name, p) for module in model.modules() for name, p in module._parameters.items() if id(p) in ids
        ]
        self._depth = 0
        self.close()

    def over(self, module: nn.Module) -> None:
        """Open it while a module runs."""
        module.register_forward_pre_hook(self.open, prepend=True)
        module.register_forward_hook(self.close, always_call=True)

    def open(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._become(PartialParameter, nn.Parameter)
            if torch.is_grad_enabled():
                self._check_places()

    def close(self, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._become(nn.Parameter, PartialParameter)

    def _become(self, old: type, new: type) -> None:
        for parameter in self.parameters:
            if type(parameter) is old:  # quantised and fake ones have a class of their own
                become(parameter, new)

    def _check_places(self) -> None:
        """Refuse other tensors in the parameters' places, whose gradients nothing adds up over tp."""
        for module, name, parameter in self._places:
            found = module._parameters.get(name)
            if found is not None and found is not parameter and found.requires_grad:
                record = record_if_any(parameter)
                raise ValueError(
                    f"the model runs with another tensor in the place of {name if record is None else record.name}, as "
                    "torch.func.functional_call does. Of its gradient each rank of tp computes a part, and the runtime "
                    "adds up those of the model's own parameters only. Leave this parameter out of the call, compute "
                    "it by torch.nn.utils.parametrize inside of the model, or use a plan with tp=1"
                )


def _take_a_share(changed: Any, parameter: PartialParameter, first: int) -> None:
    """Of the gradient that comes back to a parameter by way of an operation.

    Args:
        changed: what the operation returned or may have written.
        parameter: that it was given.
        first: the sequence number of the graph's first node that the operation made.
    """
    record = record_if_any(parameter)
    ranks = 1 if record is None else len(record.layout.spans)
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
    """A hook on a node of the graph: of some of the gradients that it computes each rank takes its share."""

    def __init__(self, places: list[int], ranks: int):
        self.places, self.ranks = places, ranks

    def __call__(self, gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        shared = list(gradients)
        for place in self.places:
            if (gradient := shared[place]) is not None:
                shared[place] = gradient / self.ranks
        return tuple(shared)
