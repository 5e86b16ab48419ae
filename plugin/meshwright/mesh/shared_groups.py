"""Process groups that all models of a process share."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshwright.mesh.process_group import backend_of_new_groups

# Keyed by the world's process group, so that a new world starts without groups.
_groups: WeakKeyDictionary[ProcessGroup, dict[tuple[tuple[int, ...], str], Any]] = WeakKeyDictionary()

# The threads of a gloo group end with the group's last reference, which must not outlive the interpreter.
atexit.register(_groups.clear)


def shared_group(ranks: Sequence[int], purpose: str) -> Any:
    """Return the process group of some ranks for a purpose; a second call for the same returns the same group.

    So a second model under the same plan, or a notebook that distributes a model many times, makes no new groups. Two
    models may share a group because every collective of a step ends within the step. Creating a group is collective:
    every rank of the world must make this call, and in the same order.

    Args:
        ranks: the global ranks of the group.
        purpose: what the group is for; groups of the same ranks for different purposes are different.

    Returns:
        The group, or torch's placeholder on a rank that is not a member.

    Example:
        >>> shared_group([0, 1], "pp0 to pp1") is shared_group([0, 1], "pp0 to pp1")  # doctest: +SKIP
        True
    """
    world = dist.group.WORLD
    assert world is not None, "groups are made in a world of processes"
    if world not in _groups:
        _groups.clear()
    known, key = _groups.setdefault(world, {}), (tuple(ranks), purpose)
    if key not in known:
        known[key] = dist.new_group(list(ranks), backend=backend_of_new_groups(), group_desc=f"mesh_{purpose}")
    return known[key]
