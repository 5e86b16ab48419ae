"""A large all-gather over gloo is one broadcast of each rank's rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import GLOO_BROADCASTS_FROM, all_gather, all_gather_into, start_all_gather

WIDTH = 64


class Names(TorchDispatchMode):
    """Records the names of the collectives that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


def gathered(dtype: torch.dtype, is_large: bool) -> tuple[list[bool], list[str]]:
    """Return whether each form of a gather gives every rank's rows, and the collectives that ran."""
    axis = Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    limit = GLOO_BROADCASTS_FROM // (dtype.itemsize * WIDTH)
    rows = limit if is_large else limit - 1
    wanted = torch.cat([torch.arange(rows * WIDTH).view(rows, WIDTH) % 251 - rank for rank in range(axis.size)])
    wanted = wanted.to(dtype)
    own = slice(axis.rank * rows, (axis.rank + 1) * rows)
    x = wanted[own].clone()
    into = torch.zeros_like(wanted)
    into[own] = x
    with Names() as names:
        found = [all_gather(x, axis), start_all_gather(x, axis)()]
        found.append(all_gather(x.t().contiguous().t(), axis))  # rows that are not contiguous
        all_gather_into(into, into[own], axis)
    return [torch.equal(one, wanted) for one in [*found, into]], names.seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("pool", ["pool2", "pool4"])
def test_every_rank_gets_every_rank_s_rows(pool: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    size = int(pool[-1])
    for is_large in (True, False):
        for equal, names in request.getfixturevalue(pool).run(gathered, dtype, is_large):
            assert equal == [True] * 4
            assert len(names) == 4 * (size if is_large else 1)
            assert set(names) == ({"broadcast_"} if is_large else {"_allgather_base_"})
