"""Take pickle away from a program, but for the uses that are listed."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch


class NoPickle:
    """Makes pickle raise in this process and the workers it forks.

    Args:
        patch: what undoes it.
        allowed: the uses that stay possible, as "MODULE calls FUNCTION" or the beginning of that.
    """

    def __init__(self, patch: pytest.MonkeyPatch, allowed: Collection[str]):
        self.allowed, self.found = allowed, set[str]()
        for name in ("loads", "load", "dumps", "dump"):
            patch.setattr(pickle, name, self._guarded(f"pickle.{name}", getattr(pickle, name)))
        for name in ("Unpickler", "Pickler", "_Unpickler", "_Pickler"):
            patch.setattr(pickle, name, self._guarded_class(f"pickle.{name}", getattr(pickle, name)))
        patch.setattr(torch, "load", self._guarded("torch.load", torch.load))
        patch.setattr(torch, "save", self._guarded("torch.save", torch.save))
        for name in ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"):
            patch.setattr(torch.distributed, name, self._guarded(name, getattr(torch.distributed, name)))
        # torch's own collectives of objects have imported these names.
        for name in ("_pickler", "_unpickler"):
            patch.setattr(torch.distributed.distributed_c10d, name, self._guarded(name, pickle.Pickler))

    def _check(self, name: str, depth: int) -> None:
        use = f"{sys._getframe(depth).f_globals.get('__name__', '')} calls {name}"
        matching = [allowed for allowed in self.allowed if use.startswith(allowed)]
        if not matching:
            raise AssertionError(use)
        self.found.update(matching)

    def _guarded(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._check(f"{name}(weights_only=True)" if kwargs.get("weights_only") is True else name, depth=2)
            return real(*args, **kwargs)

        return call

    def _guarded_class(self, name: str, real: Any) -> type:
        check = self._check

        class Guarded(real):  # a class, since torch.save derives one from it
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                check(name, depth=2)
                super().__init__(*args, **kwargs)

        return Guarded
