"""Which ranks step which parameters whole."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from meshwright.layout.blocks import numel
from meshwright.layout.tensor_layout import layout_of
from meshwright.mesh.axes import Mesh
from meshwright.optim.gradients import Gradients

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
