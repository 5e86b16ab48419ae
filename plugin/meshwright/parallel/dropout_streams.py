"""Random streams of a model whose activations are partly replicated, partly sharded.

Ranks that hold the same activation must draw the same mask (or noise), ranks that hold different parts of one
must not. Every pass of a model has a stream of its own, in training and in evaluation, whatever draws from it: dropout
at any rate and in any mode, NEFTune's noise, a hook of the user's. The random state is switched at the borders between
replicated and sharded activations. Each such switch draws its seed from the state it leaves, so activation
checkpointing, which restores the state at a layer's start, replays the same masks in backward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from meshwright.parallel.collectives import Axis, agree

_MAX_SEED = 2**62

Restore = Callable[[], None]


class DropoutStreams:
    """The random streams of one model's forward passes.

    On one rank there is nothing to keep apart, and the model draws from torch's own random state.

    Args:
        tp: axis whose ranks share the replicated stream.
        dp: axis whose ranks never share one: their rows differ.
        seed: the same number on every rank.
    """

    def __init__(self, *, tp: Axis, dp: Axis, seed: int):
        self.tp, self.dp = tp, dp
        self._seed = seed
        self._passes = {"training": 0, "evaluation": 0}  # counted apart, so that an evaluation changes no mask

    def enter_model(self, device: torch.device, *, trains: bool) -> Restore:
        """Start a forward pass: one stream for each data-parallel rank, equal over the TP axis.

        Returns:
            The call that goes back to the state before.
        """
        if self.tp.size * self.dp.size == 1 or _is_capturing(device):
            return _nothing
        kind = "training" if trains else "evaluation"
        self._passes[kind] += 1
        text = f"{self._seed} {kind} {self._passes[kind]} {self.dp.rank}"
        return _switch(device, int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % _MAX_SEED)

    def state_dict(self) -> dict[str, int]:
        """Where the seeds of the next forward passes come from; the same on every rank, JSON."""
        return {"seed": self._seed, **self._passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self._seed = state["seed"]
        self._passes = {kind: state[kind] for kind in self._passes}

    def enter_shard(self, x: Tensor) -> Restore:
        """Start a stretch in which each rank of the TP axis holds another part of ``x``."""
        if self.tp.size == 1 or isinstance(x, FakeTensor) or _is_capturing(x.device):
            return _nothing
        seed = int(torch.randint(_MAX_SEED, ()))  # from the CPU's state: the device's would have to be waited for
        return _switch(x.device, seed + 1 + self.tp.rank)

    def enter_shared(self, x: Tensor) -> Restore:
        """Start a stretch, amid one of :meth:`enter_shard`, in which each rank of the TP axis holds all of ``x``.

        The ranks have no random state in common there, so the first one's seed is sent to the others.
        """
        if self.tp.size == 1 or isinstance(x, FakeTensor) or _is_capturing(x.device):
            return _nothing
        seed = torch.randint(_MAX_SEED, ()).to(x.device)
        return _switch(x.device, int(agree(seed, self.tp)))


class Rates:
    """The dropout rates inside a module, as they are now.

    Args:
        module: its dropout modules, and the rates that attention code keeps as plain numbers, are looked for once.
    """

    def __init__(self, module: nn.Module):
        self._places: list[tuple[nn.Module, str]] = [
            (part, "p") for part in module.modules() if isinstance(part, nn.modules.dropout._DropoutNd)
        ]
        for part in module.modules():
            self._places += [
                (part, name) for name, value in vars(part).items() if "dropout" in name and _is_rate(value)
            ]

    def is_any_on(self) -> bool:
        """Whether some of it drops anything in the next pass."""
        return any(part.training and getattr(part, name) > 0 for part, name in self._places)


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def dropout_seed() -> int:
    """A seed that follows from torch's random state and leaves it as it is, since loaders draw their orders from it."""
    state = torch.default_generator.get_state().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(state, digest_size=4).digest()) >> 1


def _nothing() -> None:
    """The way back from a state that was not left."""


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _switch(device: torch.device, seed: int) -> Restore:
    """Seed the CPU's random state, from which stretches draw their seeds, and the device's."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    if device.type != "cuda":
        return lambda: torch.set_rng_state(state)
    on_device = torch.cuda.get_rng_state(device)
    torch.cuda.manual_seed(seed)

    def restore() -> None:
        torch.set_rng_state(state)
        torch.cuda.set_rng_state(on_device, device)

    return restore
