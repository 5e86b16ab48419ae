"""Fake CUDA tensors, on machines without a GPU too: they have a device, but neither memory nor kernels."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from meshwright.errors import PlanError
from meshwright.tracing.host_waits import HostWaitMode

DEVICE = "cuda:0"
_SOURCE = Path(__file__).with_name("cuda_guard.cpp")


class FakeEvent:
    """Stands in for ``torch.cuda.Event``; tells the observer of a wait for an event of the current step.

    The device counts as done with earlier steps, and as not having begun the current step.
    """

    def __init__(self, observer: HostWaitMode, *_: object, **__: object) -> None:
        self._observer, self._step = observer, -1

    def record(self, *_: object) -> None:
        self._step = self._observer.step

    def query(self) -> bool:
        return self._step != self._observer.step

    def elapsed_time(self, end: FakeEvent) -> float:
        if not (self.query() and end.query()):  # CUDA raises an error
            self._observer.host_waits("Event.elapsed_time")
        return 1.0

    def synchronize(self) -> None:
        if self._step == self._observer.step:
            self._observer.host_waits("Event.synchronize")


class FakeStream:
    """Stands in for ``torch.cuda.Stream``; what runs on it is ordered by events alone."""

    def __init__(self, *_: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """Order what follows after what the other stream has to do."""


def why_unavailable() -> str | None:
    """Return why this machine cannot make fake CUDA tensors; None if it can."""
    if torch.cuda.is_available() or shutil.which(os.environ.get("CXX", "c++")):
        return None
    return "torch finds no GPU here, so a C++ compiler (c++, or CXX) is needed to build a small library for fake ones"


@contextlib.contextmanager
def fake_cuda(observer: HostWaitMode) -> Iterator[None]:
    """Let ``FakeTensor`` be on CUDA inside the context.

    Without a GPU this loads a library that stays loaded, after which torch believes that CUDA is there. So call it in a
    process that does nothing else. The library is built once, in about 20 seconds, and kept in torch's folder of
    extensions.

    Args:
        observer: the object that is told when the host waits for an event.

    Raises:
        PlanError: if the library is needed and cannot be built.
    """
    if not torch.cuda.is_available():
        _load_guard()

    def no_state(*_: object) -> object:
        return torch.empty(0, dtype=torch.uint8)

    def nothing(*_: object) -> None:
        return None

    with contextlib.ExitStack() as patches:
        for name, stand_in in {
            "get_rng_state": no_state,
            "set_rng_state": nothing,
            "manual_seed": nothing,
            "current_device": lambda: 0,
            "get_device_capability": lambda *_: (9, 0),
            "is_current_stream_capturing": lambda: False,
            "Stream": FakeStream,
            "stream": contextlib.nullcontext,
            "current_stream": FakeStream,
            "Event": functools.partial(FakeEvent, observer),
            "synchronize": lambda *_: observer.host_waits("torch.cuda.synchronize"),
        }.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        # Autocast asks whether a GPU is there.
        patches.enter_context(mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False))
        patches.enter_context(mock.patch.object(torch.cuda, "is_bf16_supported", lambda *_: True))
        # A torch without CUDA has no thread of autograd for the device.
        patches.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield


@functools.cache
def _load_guard() -> None:
    if (problem := why_unavailable()) is not None:
        raise PlanError(problem)
    from torch.utils import cpp_extension

    try:
        cpp_extension.load(
            name="meshwright_cuda_guard", sources=[str(_SOURCE)], extra_cflags=["-O0"], is_python_module=False
        )
    except (RuntimeError, OSError) as error:
        first = next((line for line in str(error).splitlines() if "error" in line), "")
        raise PlanError(f"cannot build the library for fake CUDA tensors from {_SOURCE.name}: {first}") from error
