"""Finds where a step on fake CUDA tensors makes the host wait for the device, and what its collectives are given."""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.faults.interpose import COLLECTIVES

# Operations whose result, or the size of whose result, the host needs before it can go on.
_READ_BY_HOST = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
}
_OF_LISTS = ("allgather_", "reduce_scatter_", "alltoall_", "gather_", "scatter_")  # c10d copies these together first
_ENTERS = {"aten::lift_fresh", "aten::_to_copy", "aten::copy_"}
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Issued:
    """A collective or a message, as it was issued.

    Args:
        kind: torch's name of the operation.
        group: the name of the process group, which is the same on its ranks.
        ranks: the ranks of the group.
        shape: the shape of its largest tensor.
        devices: the kinds of the devices of its tensors.
        peer: the other rank of a message; None for a collective.
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    devices: tuple[str, ...]
    peer: int | None = None

    @property
    def is_native(self) -> bool:
        """Whether its tensors are on one kind of device, and each is one piece of memory, as NCCL requires.

        A collective on the CPU is an agreement of the hosts; it goes over gloo and waits for no GPU.
        """
        return len(self.devices) < 2 and self.kind not in _OF_LISTS


class HostWaitMode(TorchDispatchMode):
    """Records, while ``step`` is not negative, waits of the host, copies between devices, and collectives.

    Attributes:
        step: the number of the current step; -1 before and after the steps that count.
        waits: the places where the host waits for the device, and how often.
        copies: the places of copies between host and device that the host waits for.
        unawaited: the places that use a tensor of a collective before the program has waited for the collective.
        issued: the collectives and messages, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.step = -1
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.unawaited: Counter[str] = Counter()
        self.issued: list[Issued] = []
        self._pending: dict[int, tuple[Any, list[Tensor]]] = {}  # id of a work -> the work, and what it writes

    def host_waits(self, what: str) -> None:
        """Record that the host waits for the device."""
        if self.step >= 0:
            self.waits[f"{what} in {_place()}"] += 1

    @contextlib.contextmanager
    def watching_works(self) -> Iterator[None]:
        """Follow which collectives the program has waited for."""
        with contextlib.ExitStack() as patches:
            for name in COLLECTIVES:
                if (method := getattr(dist.ProcessGroup, name, None)) is not None:
                    patches.enter_context(mock.patch.object(dist.ProcessGroup, name, self._started(method)))
            for kind in (dist.Work, FakeWork):
                patches.enter_context(mock.patch.object(kind, "wait", self._awaited(kind.wait)))
            yield

    def _started(self, method: Any) -> Any:
        def call(group: Any, written: Any, *args: Any, **kwargs: Any) -> Any:
            work = method(group, written, *args, **kwargs)
            if any(getattr(x, "asyncOp", False) for x in (*args, *kwargs.values())):  # the device waits for others
                self._pending[id(work)] = work, [x for x in tree_leaves(written) if isinstance(x, Tensor)]
            return work

        return call

    def _awaited(self, method: Any) -> Any:
        def call(work: Any, *args: Any) -> Any:
            self._pending.pop(id(work), None)
            return method(work, *args)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, given = func._schema.name, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_on_device = any(x.is_cuda for x in given)
        if func.namespace == "c10d":
            self._collective(name.removeprefix("c10d::"), args, kwargs, given)
            return func(*args, **kwargs)
        if is_on_device:
            self._check_waits(func, name, args, given)
        if name == "aten::_local_scalar_dense" and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype  # a value with which a step can continue
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        result = func(*args, **kwargs)
        self._check_copy(name, args, kwargs, result)
        return result

    def _check_waits(self, func: Any, name: str, args: Any, given: list[Tensor]) -> None:
        masked = func._opname in ("index", "index_put_") and any(x.dtype == torch.bool for x in given[1:])
        repeats = func._opname == "repeat_interleave" and len(args) < 4
        if name in _READ_BY_HOST or masked or repeats:
            self.host_waits(func._opname)
        if self.step >= 0 and self._pending:
            used = {_memory_of(x) for x in given}
            if any(_memory_of(x) in used for _, written in self._pending.values() for x in written):
                self.unawaited[f"{func._opname} in {_place()}"] += 1

    def _check_copy(self, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if name not in _ENTERS or self.step < 0 or not isinstance(result, Tensor):
            return
        source = args[1] if name == "aten::copy_" else args[0]
        if source.device.type == result.device.type:
            return
        is_async = kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2])
        if not is_async:
            self.copies[f"{source.device.type} to {result.device.type} in {_place()}"] += 1

    def _collective(self, kind: str, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> None:
        if self.step < 0:
            return
        scripted = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.ScriptObject)]
        boxed = next(x for x in scripted if x._type().name() == "ProcessGroup")  # type: ignore[attr-defined]
        group = dist.ProcessGroup.unbox(boxed)
        ranks = tuple(dist.get_process_group_ranks(group))
        peers = [x for x in args if type(x) is int] if kind in ("send", "recv_") else []
        largest = max(given, key=lambda x: x.numel(), default=None)
        self.issued.append(
            Issued(
                kind=kind,
                group=group.group_name,
                ranks=ranks,
                shape=() if largest is None else tuple(largest.shape),
                devices=tuple(sorted({x.device.type for x in given})),
                peer=ranks[peers[0]] if peers else None,
            )
        )


def _memory_of(x: Tensor) -> int:
    """Return a key that identifies a tensor's memory, also for fake tensors."""
    key: int = x.untyped_storage()._cdata
    return key


def _place() -> str:
    """Return the line of the program that runs: the innermost one of Meshwright, else of a library above torch."""
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
    own = [f for f in frames if Path(f.filename).is_relative_to(_PACKAGE) and "/tracing/" not in f.filename]
    other = [f for f in frames if "/site-packages/" in f.filename]
    frame = (own or other or frames)[-1]
    parts = Path(frame.filename).parts[-2:]
    return f"{'/'.join(parts)}:{frame.lineno}"
