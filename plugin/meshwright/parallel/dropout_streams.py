"""Random streams of a model in which some activations are replicated and others are sharded.

Ranks that hold the same activation must draw the same mask (or noise), and ranks that hold different parts of an
activation must draw different masks. Every forward pass, in training and in evaluation, has its own stream for
everything that draws: dropout at any rate and in any mode, NEFTune's noise, a user's hook. The random state is switched
at the borders between replicated and sharded activations.

Seeds are computed on the host, so that no switch waits for a device or another rank. A stream's seed has a shared half,
which is equal on the ranks of an axis in their own streams too, and a half of its own. A switch derives the new
stream's seed from the seed of the current one; the switch back goes on with the next seed. torch keeps the seed in the
CPU's random state. Activation checkpointing restores that state at a layer's start, so it replays the same masks.

These streams hold with ``draws="rank"``, and for what ``parallel/draws/`` cannot place.
``generate`` starts with the random state of the first rank of tp.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshwright.facts import Facts
from meshwright.mesh.axes import Axis, Mesh
from meshwright.outside_files import Check, integer, record
from meshwright.parallel.autograd_graph import in_backward

_MAX_SEED = 2**62
_NEXT, _SHARED, _OWN = 1, 2, 3  # what a seed is derived for: the next, a shared or an own stream (_OWN + r for rank r)

Restore = Callable[[], None]

# What ``DropoutStreams.state_dict`` returns.
STREAMS: Check = record(
    {"seed": integer(-(2**63), 2**63 - 1), "training": integer(), "evaluation": integer()}, {"stopped": integer()}
)


class DropoutStreams:
    """The random streams of one model's forward passes.

    On one rank the model draws from torch's own random state.

    Args:
        mesh: the axes. Ranks of tp and of cp share the stream of replicated activations. Ranks that read different rows
            never share a stream, and neither do ranks of pp, since their layers differ.
        seed: the seed of the streams, the same on every rank.
    """

    def __init__(self, *, mesh: Mesh, seed: int):
        self._mesh, self.tp, self.cp = mesh, mesh.tp, mesh.cp
        self._seed = seed
        self._of_one_device: deque[int] = deque(maxlen=16)  # the last seeds of passes that drew as one device does
        self.is_on = True  # whether ranks draw from streams; otherwise what one device draws
        self.has_stopped = False  # whether they have drawn as one device, until something could not be placed
        self._passes = {"training": 0, "evaluation": 0}  # separate, so that evaluation changes no training mask

    @property
    def moment(self) -> str:
        """The seed and the number of training passes, which are equal on all ranks before each step."""
        return f"{self._seed:x}.{self._passes['training']}"

    def enter_model(self, device: torch.device, *, trains: bool) -> Restore:
        """Switch to the stream of a new forward pass. The stream differs between ranks that read different rows and
        between stages, but not between ranks of tp or cp.

        Args:
            device: the device on which the pass draws.
            trains: whether the pass trains; training and evaluation passes are counted separately.

        Returns:
            A function that restores the previous random state.
        """
        dp, pp = self._mesh.dp, self._mesh.pp
        if self._mesh.size == 1 or is_capturing(device):
            return _nothing
        kind = self.count(trains=trains)
        text = f"{self._seed} {kind} {self._passes[kind]} {dp.rank}"
        if pp.size > 1:
            text += f" pp{pp.rank}"
        return _switch(device, int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % _MAX_SEED)

    def begin_as_one_device(self, *, trains: bool) -> None:
        """Begin a pass that draws from no stream. It is counted, so that all ranks have the same counts."""
        self.count(trains=trains)
        if (seed := torch.initial_seed()) not in self._of_one_device:
            self._of_one_device.append(seed)

    def count(self, *, trains: bool) -> str:
        """Count a pass, and return its kind."""
        kind = "training" if trains else "evaluation"
        self._passes[kind] += 1
        return kind

    def state_dict(self) -> dict[str, int]:
        """Return the seed and pass counts that determine the seeds of later passes.

        The dict is JSON-serialisable and equal on all ranks.
        """
        return {"seed": self._seed, **self._passes, **({"stopped": 1} if self.has_stopped else {})}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a :meth:`state_dict`."""
        self._seed = state["seed"]
        self._passes = {kind: state[kind] for kind in self._passes}
        if state.get("stopped"):
            self.stop()

    def stop(self) -> None:
        """Draw from streams from the next pass on, as before a resumption."""
        self.is_on = self.has_stopped = True

    def enter_shard(self, x: Tensor) -> Restore:
        """Switch to this rank's own stream, for code in which each rank of the TP axis holds a part of ``x``."""
        return self._enter(x, self.tp, _OWN + self.tp.rank)

    def enter_part(self, x: Tensor) -> Restore:
        """Switch to a stream of this rank's own tokens, for code in which each rank of cp holds a part of ``x``."""
        return self._enter(x, self.cp, _OWN + self.cp.rank)

    def enter_shared(self, x: Tensor) -> Restore:
        """Inside :meth:`enter_shard`, switch to a shared stream, for code in which every rank holds all of ``x``."""
        return self._enter(x, self.tp, _SHARED)

    def enter_whole(self, x: Tensor) -> Restore:
        """Inside :meth:`enter_part`, switch to a shared stream, for code in which every rank of cp has all of ``x``."""
        return self._enter(x, self.cp, _SHARED)

    def _enter(self, x: Tensor, axis: Axis, purpose: int) -> Restore:
        # What backward computes again draws from what its forward has drawn from: its state, and so its seed, is back.
        is_of_one_device = bool(self._of_one_device) and in_backward() and torch.initial_seed() in self._of_one_device
        return _enter_derived(x, axis, purpose) if self.is_on and not is_of_one_device else _nothing


class Rates:
    """The current dropout rates inside a module.

    Args:
        facts: what the model shows.
        module: the module, searched once for dropout modules and for rates that attention code keeps as plain numbers.
    """

    def __init__(self, facts: Facts, module: nn.Module):
        inside = facts.inside(module)
        self._places: list[tuple[nn.Module, str]] = [
            (part, "p") for part in inside if isinstance(part, nn.modules.dropout._DropoutNd)
        ]
        for part in inside:
            self._places += [
                (part, name) for name, value in vars(part).items() if "dropout" in name and _is_rate(value)
            ]

    def is_any_on(self) -> bool:
        """Return whether any dropout is active in the next pass."""
        return any(part.training and getattr(part, name) > 0 for part, name in self._places)


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def dropout_seed() -> int:
    """Return a seed derived from torch's random state. The state stays as it is, since loaders draw orders from it."""
    state = torch.default_generator.get_state().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(state, digest_size=4).digest()) >> 1


def _enter_derived(x: Tensor, axis: Axis, purpose: int) -> Restore:
    """Switch to a stream derived from the current one; the returned function goes on with the next one."""
    device = x.device  # the returned function may live until the next pass, so it must not keep x
    if axis.size == 1 or is_capturing(device):
        return _nothing
    seed = torch.initial_seed()
    _seed(device, _derived(seed, purpose))
    return lambda: _seed(device, _derived(seed, _NEXT))


def _derived(seed: int, purpose: int) -> int:
    """Return the seed of another stream.

    Args:
        seed: the seed of the current stream: its upper 32 bits are shared, its lower 32 bits may be the rank's own.
        purpose: the purpose of the new seed: _NEXT, _SHARED, or _OWN plus a rank's coordinate.
    """
    shared = _mixed(seed >> 32, min(purpose, _OWN))
    own = shared if purpose == _SHARED else _mixed(seed, purpose)
    return shared >> 32 << 32 | own & 0xFFFFFFFF  # torch's generator for the CPU uses the lower half only


def _mixed(seed: int, purpose: int) -> int:
    """Return the 64 bits of a counter-based generator (splitmix64); each bit depends on all bits of the seed."""
    x = (seed + purpose * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _nothing() -> None:
    """Restore nothing, since no state was switched."""


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _switch(device: torch.device, seed: int) -> Restore:
    """Seed the random states of the CPU and the device; the returned function restores both."""
    state = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    _seed(device, seed)

    def restore() -> None:
        torch.set_rng_state(state)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)

    return restore


def _seed(device: torch.device, seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
