"""What a decoder's layers are given in a forward pass, with random values in place of the pass's own."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from meshwright.parallel.fake_passes.fake_pass import run_without_values

_PERIOD = 65521  # of the random values of a large tensor: a prime, so that no two of its rows are equal


class RandomValues:
    """Draws random values that are equal on all ranks and leave torch's random state as it is.

    Args:
        dtype: the dtype of floating-point values.
        device: their device.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self.begin()

    def begin(self) -> None:
        """Begin again, with the values of the first time."""
        self._draws = torch.Generator().manual_seed(0)

    def words(self, size: int, *shape: int) -> Tensor:
        """Return random words of a vocabulary."""
        return torch.randint(size, shape, generator=self._draws).to(self.device)

    def normal(self, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """Return values of a normal distribution."""
        size = torch.Size(shape).numel()
        drawn = torch.randn(min(size, _PERIOD), generator=self._draws, dtype=torch.float64)
        drawn = drawn.to(self.device, self.dtype)
        return drawn.repeat(-(-size // _PERIOD) or 1)[:size].view(shape)

    def weight(self, like: Tensor) -> nn.Parameter:
        """Return a parameter of the size of a weight: a matrix that keeps the size of its input, or a vector near 1."""
        if not like.is_floating_point():
            raise TypeError(f"a weight of {like.dtype} has no gradient")
        drawn = self.normal(like.shape)
        return nn.Parameter(drawn / like.shape[-1] ** 0.5 if like.ndim > 1 else 1 + drawn / 8)

    def buffer(self, like: Tensor) -> Tensor:
        """Return a copy of a buffer, which has the values that the program gave it, if it has any."""
        if not like.is_meta:
            return like.detach().to(self.device, self.dtype if like.is_floating_point() else like.dtype, copy=True)
        return self.argument(like)

    def argument(self, like: Tensor) -> Tensor:
        """Return an argument of a layer: positions in their order, masks that hide nothing, and random numbers."""
        if like.is_floating_point():
            return self.normal(like.shape)
        if like.dtype is torch.bool:
            return torch.ones(like.shape, dtype=torch.bool, device=self.device)
        positions = torch.arange(like.shape[-1] if like.ndim else 1, device=self.device, dtype=like.dtype)
        return positions.expand(like.shape) if like.ndim else positions[0]

    def arguments(self, given: Any) -> Any:
        """Return what a layer was given with values, one tensor for each that a pass without values had."""
        made: dict[int, Tensor] = {}

        def value(x: Tensor) -> Tensor:
            if id(x) not in made:
                made[id(x)] = self.argument(x)
            return made[id(x)]

        return tree_map_only(Tensor, value, given)


def calls_of(
    model: nn.Module, layers: Collection[nn.Module], *, rows: int, length: int, instead: str
) -> dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments that layers get in a pass without values, which ends with the last of them.

    Args:
        model: the decoder.
        layers: some of its layers.
        rows: the number of rows.
        length: the number of tokens of a row.
        instead: the plan to use if the decoder cannot be run in this way, for the message.

    Raises:
        PlanError: if the decoder cannot be run in this way.
    """
    found: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.setdefault(layer, (args, kwargs))
        if len(found) == len(layers):
            raise _Done

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_pre_hook(layer, keep))
        with contextlib.suppress(_Done):
            run_without_values(
                model, rows=rows, length=length, instead=instead, is_done=lambda: len(found) == len(layers)
            )
    return found


@contextlib.contextmanager
def _pre_hook(layer: nn.Module, hook: Any) -> Iterator[None]:
    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


class _Done(Exception):
    """Ends a pass that has shown what is asked."""
