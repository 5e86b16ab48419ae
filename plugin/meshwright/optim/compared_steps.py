"""Compares what ranks have made of parameters that all of them step, each beside others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.errors import OptimizerMismatchError
from meshwright.faults.memory_digest import memory_digest
from meshwright.mesh.axes import Axis, Mesh
from meshwright.optim.chained import members
from meshwright.parallel.collectives import all_gather

Result = tuple[int, str | None, Tensor | None]


class ComparedSteps:
    """Finds out in each step whether an update of a parameter depends on more than that parameter.

    The results of ranks differ if an update, or a hook of the step, reads other parameters, since these are others on
    each rank. Draws of random numbers are found by the states of the generators.

    Args:
        device: the device of the parameters.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._states: list[Tensor] = []

    def begin(self) -> None:
        """Called before a step."""
        self._states = self._random_states()

    def compare(self, optimizer: Optimizer, results: Sequence[Result], mesh: Mesh, ranks: Axis) -> None:
        """Compare the results of a step; every rank makes the call.

        Args:
            optimizer: the optimizer that has stepped.
            results: for each group its index, and the name and the values of the parameter that all ranks of this stage
                have stepped, if there is one.
            mesh: the mesh of the ranks.
            ranks: the axis of all ranks.

        Raises:
            OptimizerMismatchError: on every rank, if the results differ, or if a rank has drawn random numbers.
        """
        if ranks.size == 1:
            return
        nothing = torch.zeros((), dtype=torch.int64, device=self._device)
        own = [nothing if x is None else memory_digest(x).to(self._device) for *_, x in results]
        has_drawn = not all(map(torch.equal, self._states, self._random_states()))
        *found, draws = all_gather(torch.stack([*own, nothing + has_drawn]).view(1, -1), ranks).T.tolist()
        if any(draws):
            raise _error(optimizer, f"drew random numbers in its step on rank {draws.index(1)}")
        stages = [place["pp"] for place in mesh.places]
        for (group, name, _), digests in zip(results, found, strict=True):
            for rank, digest in enumerate(digests):
                first = stages.index(stages[rank])
                if digest != digests[first]:
                    raise _error(
                        optimizer,
                        f"made of {name or 'a parameter'}, of its group {group}, other values on rank {first} than on "
                        f"rank {rank}, which stepped it beside other parameters",
                    )

    def _random_states(self) -> list[Tensor]:
        on_device = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *on_device]


def _error(optimizer: Optimizer, what: str) -> OptimizerMismatchError:
    name = " and ".join(type(each).__name__ for each in members(optimizer))
    return OptimizerMismatchError(
        f"{name} {what}. So the step, or a hook of it, does not update each parameter from that parameter alone (or "
        "its kernels round otherwise in each run), and each rank has some of the parameters whole. Clip gradients by "
        "mw.clip_grad_norm_(model, 1.0) in place of a hook; use a plan that leaves weights and state whole (tp=1, "
        "pp=1, zero_stage=0); or, if each element is updated from that element alone, pass "
        "ToDistributedConfig(optimizer_reads='element')"
    )
