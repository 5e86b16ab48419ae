"""Follows the operation that computes head and loss in chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor

from meshwright.parallel.losses.chunked_head import ChunkedHeadLoss
from meshwright.plan import parts


@contextlib.contextmanager
def counting_fused_losses(*, tokens_per_chunk: int) -> Iterator[list[int]]:
    """Make the fused loss work on small chunks inside this context; the list gets the tokens of each of its calls."""
    runs: list[int] = []
    apply = ChunkedHeadLoss.apply

    def counted(*args: Any) -> Tensor:
        runs.append(len(args[0]))
        result: Tensor = apply(*args)
        return result

    with (
        mock.patch.object(parts, "_FEWEST", tokens_per_chunk),
        mock.patch.object(ChunkedHeadLoss, "apply", counted),
    ):
        yield runs
