"""Which ranks step which parameters whole, and whether those that several ranks step come out equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.errors import OptimizerMismatchError
from meshwright.faults.memory_digest import memory_digest
from meshwright.layout.blocks import numel
from meshwright.layout.tensor_layout import layout_of
from meshwright.mesh.axes import Axis, Mesh
from meshwright.optim.chained import members
from meshwright.optim.gradients import Gradients
from meshwright.parallel.collectives import all_gather
from meshwright.random_states import RandomStates

_FEW = 2**16  # elements, which every rank may step beside its own
_SHARE = 1 / 16  # of the elements that a rank owns, as far as that is more


def owners_of(groups: Sequence[Sequence[nn.Parameter]], mesh: Mesh, gradients: Gradients) -> dict[int, tuple[int, ...]]:
    """Return the ranks that step each parameter of this stage, by its id. Each rank steps about equally many elements.

    A parameter's owner is the rank that has most of it between steps, as far as no rank steps more than its share by
    this rule. So little has to be sent, since most of a bucket's parameters lie in the segment of one rank. Of each
    group, all ranks of the stage step the smallest parameter, if it is small: the owner, which comes first, and the
    others to compare with it.

    Args:
        groups: the parameters of each group that are stepped whole.
        mesh: the ranks.
        gradients: which elements of the parameters each rank has between steps.
    """
    ranks = [rank for rank, place in enumerate(mesh.places) if place["pp"] == mesh.pp.rank]
    load = dict.fromkeys(ranks, 0)
    owners: dict[int, tuple[int, ...]] = {}
    held = [(p, layout_of(p).shape.numel()) for group in groups for p in group if layout_of(p).is_held]
    share = sum(size for p, size in held if p.requires_grad) / len(ranks)
    for parameter, size in sorted(held, key=lambda pair: (not pair[0].requires_grad, -pair[1])):
        layout, _ = gradients.part_of(parameter)
        parts = {rank: numel(layout.blocks(mesh.places[rank])) for rank in ranks}
        owner = max(ranks, key=lambda rank: (parts[rank], -load[rank]))
        if load[owner] + size > share:
            owner = min(ranks, key=lambda rank: load[rank])
        owners[id(parameter)] = (owner,)
        load[owner] += size
    sizes = {id(p): size for p, size in held if p.requires_grad and size}
    smallest = [min((p for p in group if id(p) in sizes), key=lambda p: sizes[id(p)], default=None) for group in groups]
    rest = max(_FEW, share * _SHARE)
    for parameter in sorted((p for p in smallest if p is not None), key=lambda p: sizes[id(p)]):
        rest -= sizes[id(parameter)]
        if rest >= 0:
            (owner,) = owners[id(parameter)]
            owners[id(parameter)] = (owner, *(rank for rank in ranks if rank != owner))
    return owners


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
        self._states, self._on_device = RandomStates(), self._state_on_device()

    def begin(self) -> None:
        """Called before a step."""
        self._states, self._on_device = RandomStates(), self._state_on_device()

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
        has_drawn = not (self._states.are_unchanged and torch.equal(self._on_device, self._state_on_device()))
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

    def _state_on_device(self) -> Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.empty(0)


def _error(optimizer: Optimizer, what: str) -> OptimizerMismatchError:
    name = " and ".join(type(each).__name__ for each in members(optimizer))
    return OptimizerMismatchError(
        f"{name} {what}. So the step, or a hook of it, does not update each parameter from that parameter alone (or "
        "its kernels round otherwise in each run), and each rank has some of the parameters whole. Clip gradients by "
        "mw.clip_grad_norm_(model, 1.0) in place of a hook; use a plan that leaves weights and state whole (tp=1, "
        "pp=1, zero_stage=0); or, if each element is updated from that element alone, pass "
        "ToDistributedConfig(optimizer_reads='element')"
    )
