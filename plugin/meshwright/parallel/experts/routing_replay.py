"""Let a layer that backward runs again route each token to the experts of the forward pass.

A router's scores may have other rounding when they are computed again, where a kernel is not deterministic, and in
bfloat16 many scores are equal or nearly so. Another choice would give a wrong gradient, and ranks that share experts
would send other numbers of rows than in the forward pass. So the choices of ``torch.topk`` are kept, k numbers for each
token and layer, and what was chosen is read from the scores at these places. The scores keep their gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.parallel.method_chain import ChainStep
from meshwright.parallel.replay import Replay, ReplayWindow


class ReplayedBlock(ChainStep):
    """The ``forward`` of a module with a router and experts, which makes the choices of the forward pass again.

    Args:
        replay: the choices.
    """

    def __init__(self, replay: Replay):
        self.replay = replay

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self.replay.now is None:
            return self.method(*args, **kwargs)
        with _ChosenOnce(self.replay.now):
            return self.method(*args, **kwargs)


class _ChosenOnce(TorchFunctionMode):
    """Takes the choices of ``topk`` from a window, and the values from the scores at these places."""

    def __init__(self, window: ReplayWindow):
        super().__init__()
        self.window = window

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)

        def choose() -> Tensor:
            with torch.no_grad():
                indices: Tensor = func(*args, **kwargs).indices
                return indices

        scores = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        indices = self.window.find(choose)
        return torch.return_types.topk((scores.gather(dim, indices), indices))
