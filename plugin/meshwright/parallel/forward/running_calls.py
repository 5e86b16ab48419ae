"""The calls of a model that run now, by their frames: one without its frame on the stack was interrupted."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from torch import nn

from meshwright.parallel.dropout_streams import Restore


@dataclass(eq=False)
class RunningCall:
    """A call of a model, or of a module in it.

    Args:
        module: what was called.
        frame: the frame that runs it.
        is_pass: whether the call is a pass; otherwise it is a part of one.
        end: what ends the call.
        restore: what ends the pass's random draws.
        keeps_sharded: whether the pass computes a training loss from sharded logits.
        defers: whether the pass computes a training loss from the head's input.
    """

    module: nn.Module
    frame: FrameType
    is_pass: bool
    end: Callable[[], object] | None = None
    restore: Restore | None = None
    keeps_sharded: bool = False
    defers: bool = False


class RunningCalls:
    """The calls of one model that run now, on each thread."""

    def __init__(self) -> None:
        self._of_thread: dict[int, list[RunningCall]] = defaultdict(list)

    def __deepcopy__(self, memo: dict[int, object]) -> RunningCalls:
        return RunningCalls()  # none of a copied model runs

    def begin(self, module: nn.Module, frame: FrameType) -> RunningCall:
        """Begin a call. It is a pass, unless it is a part of a pass of another module.

        Args:
            module: what is called.
            frame: the frame that runs it.
        """
        running = self.innermost(frame)
        call = RunningCall(module, frame, is_pass=running is None or running.module is module)
        self._of_thread[threading.get_ident()].append(call)
        return call

    def leave(self, module: nn.Module) -> RunningCall | None:
        """End the innermost call; None if it is not one of this module, whose own call has not begun."""
        calls = self._of_thread[threading.get_ident()]
        if not calls or calls[-1].module is not module:
            return None
        call = calls.pop()
        if not calls:
            del self._of_thread[threading.get_ident()]
        return call

    def innermost(self, frame: FrameType | None) -> RunningCall | None:
        """Return the innermost pass that runs on this thread, and forget those that were interrupted.

        Args:
            frame: a frame inside of the pass.
        """
        calls = self._of_thread.get(threading.get_ident(), [])
        while calls and not is_on_stack(calls[-1].frame, frame):
            calls.pop()
        return next((call for call in reversed(calls) if call.is_pass), None)


def is_on_stack(frame: FrameType, inner: FrameType | None) -> bool:
    """Return whether a frame is one of those that lead to another one."""
    while inner is not None and inner is not frame:
        inner = inner.f_back
    return inner is frame
