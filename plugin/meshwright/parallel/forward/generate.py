"""The ranks of a distributed model take part in ``generate`` alike, and sample the tokens of one device.

One device goes on until all rows have ended. So the ranks end in the random state of the one with the longest text.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.faults.every_rank import on_every_rank
from meshwright.faults.guard import Guard
from meshwright.mesh.axes import Axis, Mesh
from meshwright.parallel.collectives import agree
from meshwright.parallel.draws.device_draws import DeviceDraws
from meshwright.parallel.forward.refused_arguments import GENERATE, check_arguments
from meshwright.parallel.method_chain import ChainStep
from meshwright.roles.adapters import without_wrappers


class GenerateTogether(ChainStep):
    """The step of a model's ``generate``, which every rank must call.

    The ranks of tp process the same rows, so they begin with the random state of their first rank. If it has the seed
    of a one-device run, they draw that run's tokens. All ranks end in the same random state.

    Args:
        model: a model, or an adapter's wrapper around one.
        mesh: the axes.
        guard: the guard that checks that all ranks of tp call ``generate``; None on one process.
        draws: what is sampled.
        spreads_experts: whether ranks that read different rows hold different experts.
        gathers: whether each forward pass gathers weights, so that every rank must run as many as the longest text.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        guard: Guard | None,
        draws: DeviceDraws,
        *,
        spreads_experts: bool,
        gathers: bool,
    ):
        self.model, self.mesh, self.guard, self.draws = model, mesh, guard, draws
        self.spreads_experts, self.gathers = spreads_experts, gathers

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.generate(*args, **kwargs)

    @on_every_rank
    def generate(self, *args: object, **kwargs: object) -> object:
        """Generate tokens; every rank must make the call."""
        check_arguments(without_wrappers(self.model)[1], {GENERATE: self}, self.mesh)
        if self.spreads_experts:
            raise PlanError(
                "generate makes another number of tokens on each rank of dp, and under ParallelPlan.ep="
                f"{self.mesh.ep.size} and etp={self.mesh.etp.size} they wait for each other in every layer. Save the "
                "model (model.save_pretrained) and generate on one device"
            )
        device = next(self.model.parameters()).device
        if self.mesh.tp.size > 1:
            if self.guard is not None:
                self.guard.meet("generate", self.mesh.tp.group)
            _take_first_state(device, self.mesh.tp)
        batch = {**({getattr(self.model, "main_input_name", "inputs"): args[0]} if args else {}), **kwargs}
        with self.draws.generating(self.model, batch, device, sys._getframe(), self.guard):
            return self.method(*args, **{"synced_gpus": True, **kwargs} if self.gathers else kwargs)


def _take_first_state(device: torch.device, tp: Axis) -> None:
    torch.set_rng_state(agree(torch.get_rng_state().to(device), tp).cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(agree(torch.cuda.get_rng_state(device).to(device), tp).cpu(), device)
