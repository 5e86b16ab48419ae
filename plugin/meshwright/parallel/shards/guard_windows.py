"""Make sharded and partial parameters plain ``nn.Parameter`` objects while their module or optimizer uses them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.parallel.method_chain import ChainStep
from meshwright.parallel.shards.reads import reading_shards
from meshwright.parallel.shards.sharded_parameter import Shard, ShardedParameter
from meshwright.parallel.shards.stand_in import StandIn, become
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
