"""The collectives that a block of code calls, counted."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch

from meshwright.parallel import collectives


class Traffic:
    """Counts the calls that reach torch.distributed, and the bytes of the whole tensor of each."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def _count(self, name: str, whole: torch.Tensor) -> None:
        self.calls[name] += 1
        self.bytes[name] += whole.numel() * whole.element_size()

    def __enter__(self) -> Traffic:
        # The whole tensor is the output of a gather and the input of everything else. On CPU a
        # reduce-scatter is an all-to-all and a local sum (see collectives.start_reduce_scatter).
        names = {
            "all_gather": (collectives, "_all_gather", 0),
            "reduce_scatter": (collectives, "_all_to_all", 1),
            "all_reduce": (collectives, "_all_reduce", 0),
        }
        self._patches = []
        for name, (owner, attribute, position) in names.items():
            function = getattr(owner, attribute)

            def count(*args: Any, _f: Any = function, _n: str = name, _p: int = position, **kwargs: Any) -> Any:
                self._count(_n, args[_p])
                return _f(*args, **kwargs)

            self._patches.append(mock.patch.object(owner, attribute, count))
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()
