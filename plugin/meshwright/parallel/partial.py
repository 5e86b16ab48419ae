"""Whole parameters of whose gradient each rank of tp computes a part: norms under sequence parallelism, and biases.

The runtime adds the parts up over tp. What the program computes from such a parameter outside of the model, a penalty
on weights for example, gives every rank the same gradient, which is counted once for each rank: it is named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.parallel.graph import in_backward, tensors_in
from meshwright.parallel.sharded import become
from meshwright.parallel.unreadable import reading_shards, record_if_any

logger = logging.getLogger(__name__)


class PartialParameter(nn.Parameter):
    """Warns when a gradient comes back to it by way of the program's own operations."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with reading_shards():
            result = func(*args, **(kwargs or {}))
            if torch.is_grad_enabled() and not in_backward():
                given = [x for x in tensors_in((args, kwargs)) if isinstance(x, PartialParameter) and x.requires_grad]
                for x in tensors_in(result) if given else ():
                    if x.grad_fn is not None:
                        x.register_hook(_Warning(given[0]))
        return result


class ModelWindow:
    """Partial parameters are plain ones while the layers run, or what holds them.

    Args:
        parameters: of the model.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.parameters = list(parameters)
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

    def close(self, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._become(nn.Parameter, PartialParameter)

    def _become(self, old: type, new: type) -> None:
        for parameter in self.parameters:
            if type(parameter) is old:  # quantised and fake ones have a class of their own
                become(parameter, new)


class _Warning:
    """A hook on what was computed from a partial parameter: says once that its gradient is counted too often."""

    has_warned = False

    def __init__(self, parameter: PartialParameter):
        record = record_if_any(parameter)
        self._name = "a parameter" if record is None else record.name
        self._ranks = 1 if record is None else len(record.layout.spans)

    def __call__(self, gradient: Tensor) -> None:
        if self._ranks > 1 and not _Warning.has_warned:
            _Warning.has_warned = True
            logger.warning(
                "a gradient comes back to %s through the program's own operations. Each of the %d ranks of tp computes "
                "a part of this parameter's gradient in the model, and the runtime adds them up, so that what all "
                "ranks compute alike, such as a penalty on weights, counts %d times. Use the optimizer's weight_decay, "
                "or divide that part of the loss by %d",
                self._name,
                self._ranks,
                self._ranks,
                self._ranks,
            )
