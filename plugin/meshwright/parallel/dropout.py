"""Dropout masks for a model whose activations are partly replicated, partly sharded.

Ranks that hold the same activation must draw the same mask, ranks that hold different parts of one
must not. The random state is switched at the borders between the two. Each switch draws its seed from
the state it leaves, so activation checkpointing, which restores the state at a layer's start, replays
the same masks in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.parallel.collectives import Axis, agree

_MAX_SEED = 2**62

Restore = Callable[[], None]


class DropoutStreams:
    """The random streams of one model's forward passes.

    Args:
        model: the model; streams are switched only while it trains with some dropout above zero.
        tp: axis whose ranks share the replicated stream.
        dp: axis whose ranks never share one: their rows differ.
        seed: the same number on every rank.
    """

    def __init__(self, model: nn.Module, *, tp: Axis, dp: Axis, seed: int):
        self.tp, self.dp = tp, dp
        self._model = model
        self._seeds = torch.Generator().manual_seed(seed)
        self._has_dropout = _has_dropout(model)

    @property
    def is_active(self) -> bool:
        return self._has_dropout and self._model.training

    def enter_model(self, device: torch.device) -> Restore:
        """Start a forward pass: one stream for each data-parallel rank, equal over the TP axis.

        Returns:
            The call that goes back to the state before.
        """
        if not self.is_active:
            return _nothing
        seed = int(torch.randint(_MAX_SEED, (), generator=self._seeds))
        return _switch(device, seed + self.dp.rank)

    def state_dict(self) -> dict[str, str]:
        """Where the seeds of the next forward passes come from; the same on every rank, JSON."""
        return {"seeds": bytes(self._seeds.get_state().tolist()).hex()}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Go on from there."""
        self._seeds.set_state(torch.tensor(list(bytes.fromhex(state["seeds"])), dtype=torch.uint8))

    def enter_shard(self, x: Tensor) -> Restore:
        """Start a stretch in which each rank of the TP axis holds another part of ``x``."""
        if not self.is_active or self.tp.size == 1:
            return _nothing
        seed = int(torch.randint(_MAX_SEED, (), device=x.device))
        return _switch(x.device, seed + 1 + self.tp.rank)

    def enter_shared(self, x: Tensor) -> Restore:
        """Start a stretch, amid one of :meth:`enter_shard`, in which each rank of the TP axis holds all of ``x``.

        The ranks have no random state in common there, so the first one's seed is sent to the others.
        """
        if not self.is_active or self.tp.size == 1:
            return _nothing
        seed = torch.randint(_MAX_SEED, (), device=x.device)
        return _switch(x.device, int(agree(seed, self.tp)))


def _nothing() -> None:
    """The way back from a state that was not left."""


def _switch(device: torch.device, seed: int) -> Restore:
    rng: Any = torch.cuda if device.type == "cuda" else torch
    state = rng.get_rng_state()
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
    return lambda: rng.set_rng_state(state)


def _has_dropout(model: nn.Module) -> bool:
    """Dropout modules, and the rates that attention code keeps as a plain number."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float) and value > 0:
                return True
    return False
