"""Finds where a step on fake CUDA tensors makes the host wait for the device, and what its collectives are given."""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshwright
from meshwright.faults.interpose import COLLECTIVES
from meshwright.parallel.autograd_graph import tensors_in
from meshwright_tools.tracing.trace import group_in

_Args = Sequence[Any]
_Kwargs = Mapping[str, Any]

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
_MESSAGES = ("send", "recv", "recv_anysource")  # torch's methods, which never wait
_ENTERS = {"aten::lift_fresh", "aten::_to_copy", "aten::copy_"}
_AGREEMENTS = {"largest"}  # functions of Meshwright in which the hosts agree over gloo, in a step
_PACKAGE = Path(meshwright.__file__).parent
_LEFT_OUT = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/"  # torch, and the tools


@dataclass(frozen=True, kw_only=True)
class Issued:
    """A collective or a message, as it was issued.

    Args:
        kind: torch's name of the operation.
        group: the name of the process group, which is the same on its ranks.
        ranks: the ranks of the group.
        shape: the shape of its largest tensor.
        dtype: the dtype of its largest tensor.
        devices: the kinds of the devices of its tensors.
        root: the rank from which a broadcast sends, or to which a reduction goes; None for other collectives.
        peer: the other rank of a message; None for a collective.
        is_contiguous: whether each of its tensors on the GPU is one piece of memory in the order of its elements.
        is_agreement: whether it is one of the agreements of the hosts that the runtime makes in a step.
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    devices: tuple[str, ...]
    dtype: str = "float32"
    root: int | None = None
    peer: int | None = None
    is_contiguous: bool = True
    is_agreement: bool = False

    @property
    def must_match(self) -> tuple[object, ...]:
        """What must be equal on all ranks of the group."""
        return self.kind, self.shape, self.dtype, self.root

    @property
    def oddity(self) -> str | None:
        """What NCCL does not accept about it, in words; None if NCCL takes it as it is.

        The hosts' agreements are on the CPU; they go over gloo and wait for no GPU.
        """
        if self.kind == "barrier":
            return None
        if self.kind in _OF_LISTS:
            return f"{self.kind} of a list of tensors"
        if len(self.devices) > 1 or (self.devices == ("cpu",) and not self.is_agreement):
            return f"{self.kind} of tensors on {' and '.join(self.devices)}"
        return None if self.is_contiguous else f"{self.kind} of a tensor that is not contiguous"


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A collective or message that the program has not waited for, with the tensors that it writes and reads."""

    work: object
    written: list[Tensor]
    read: list[Tensor]


class HostWaitMode(TorchDispatchMode):
    """Records, while ``step`` is not negative, waits of the host, copies between devices, and collectives.

    Attributes:
        step: the number of the current step; -1 before and after the steps that count.
        waits: the places where the host waits for the device, and how often.
        copies: the places of copies between host and device that the host waits for.
        early: the places that use a tensor before its collective or its copy has ended, in words.
        issued: the collectives and messages, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.step = -1
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.early: Counter[str] = Counter()
        self.issued: list[Issued] = []
        self._pending: dict[int, _Pending] = {}  # by the id of the work
        self._arriving: dict[int, Tensor] = {}  # copies to the host that have not ended, by their memory

    def host_waits(self, what: str) -> None:
        """Record that the host waits for the device."""
        if self.step >= 0:
            self.waits[f"{what} in {_place()}"] += 1
            self._arriving.clear()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follow which collectives the program has waited for, and where it reads whole tensors."""
        with contextlib.ExitStack() as patches:
            for name in (*COLLECTIVES, *_MESSAGES):
                if (method := getattr(dist.ProcessGroup, name, None)) is not None:
                    patches.enter_context(mock.patch.object(dist.ProcessGroup, name, self._started(name, method)))
            for kind in (dist.Work, FakeWork):
                patches.enter_context(mock.patch.object(kind, "wait", self._awaited(kind.wait)))
            patches.enter_context(mock.patch.object(FakeTensor, "tolist", lambda x: self._to_list(x)))
            yield

    def _to_list(self, x: Tensor) -> object:
        """Stand in for ``Tensor.tolist``, which copies all values at once."""
        if x.is_cuda:
            self.host_waits("tolist")

        def nested(shape: tuple[int, ...]) -> object:
            return [nested(shape[1:]) for _ in range(shape[0])] if shape else _value_of(x.dtype)

        return nested(tuple(x.shape))

    def _started(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        def call(group: object, *args: object, **kwargs: object) -> object:
            work = method(group, *args, **kwargs)
            is_async = any(getattr(x, "asyncOp", False) for x in (*args, *kwargs.values()))
            if name == "barrier" and not is_async:
                self.host_waits("barrier")
            elif is_async or name in _MESSAGES:  # the device waits for others
                read = list(tensors_in((args, kwargs)))
                written = [] if name == "send" else list(tensors_in(args[:1]))
                self._pending[id(work)] = _Pending(work=work, written=written, read=read)
            return work

        return call

    def _awaited(self, method: Callable[..., object]) -> Callable[..., object]:
        def call(work: object, *args: object) -> object:
            self._pending.pop(id(work), None)
            return method(work, *args)

        return call

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: _Args = (), kwargs: _Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        name, tensors = func._schema.name, list(tensors_in((args, kwargs)))
        if func.namespace == "c10d":
            self._collective(func, args, kwargs, tensors)
            return func(*args, **kwargs)
        masked = func._opname in ("index", "index_put_") and any(x.dtype == torch.bool for x in tensors[1:])
        repeats = func._opname == "repeat_interleave" and len(args) < 4
        if any(x.is_cuda for x in tensors) and (name in _READ_BY_HOST or masked or repeats):
            self.host_waits(func._opname)
        if self.step >= 0 and (self._pending or self._arriving) and not _is_view(func):
            self._see_early(func, args, kwargs, tensors)
        if name in ("aten::_local_scalar_dense", "aten::equal") and isinstance(args[0], FakeTensor):
            return _value_of(args[0].dtype) if name != "aten::equal" else True  # with which a step can continue
        result = func(*args, **kwargs)
        self._see_copy(name, args, kwargs, result)
        return result

    def _see_early(self, func: OpOverload, args: _Args, kwargs: _Kwargs, tensors: list[Tensor]) -> None:
        used, changed = set(map(_memory_of, tensors)), set(map(_memory_of, _changed_by(func, args, kwargs)))
        # The device makes its copies in order, also those into parts of the same memory.
        is_by_host = func.namespace != "prim" and not (func._opname == "copy_" and args[1].is_cuda)
        found = ["read before its copy to the host has ended"] if is_by_host and used & self._arriving.keys() else []
        for pending in self._pending.values():
            if any(_memory_of(x) in used for x in pending.written):
                found.append("used before its collective has ended")
            elif any(_memory_of(x) in changed for x in pending.read):
                found.append("overwritten before its collective has ended")
        for what in found:
            self.early[f"{what}: {func._opname} in {_place()}"] += 1

    def _see_copy(self, name: str, args: _Args, kwargs: _Kwargs, result: Any) -> None:
        if name not in _ENTERS or self.step < 0 or not isinstance(result, Tensor):
            return
        source = args[1] if name == "aten::copy_" else args[0]
        if source.device.type == result.device.type or not source.numel():
            return
        is_async = kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2])
        if not is_async:
            self.copies[f"{source.device.type} to {result.device.type} in {_place()}"] += 1
        elif source.is_cuda:
            self._arriving[_memory_of(result)] = result

    def _collective(self, func: OpOverload, args: _Args, kwargs: _Kwargs, tensors: list[Tensor]) -> None:
        if self.step < 0:
            return
        kind = func._schema.name.removeprefix("c10d::")
        named = {**dict(zip((x.name for x in func._schema.arguments), args, strict=False)), **kwargs}
        group = group_in(tree_leaves((args, kwargs)))
        assert group is not None, f"{kind} is of no process group"
        ranks = tuple(dist.get_process_group_ranks(group))
        root, peer = named.get("root_rank"), named.get("dst", named.get("src"))
        largest = max(tensors, key=lambda x: x.numel(), default=None)
        devices = tuple(sorted({x.device.type for x in tensors}))
        self.issued.append(
            Issued(
                kind=kind,
                group=group.group_name,
                ranks=ranks,
                shape=() if largest is None else tuple(largest.shape),
                dtype="" if largest is None else str(largest.dtype).removeprefix("torch."),
                devices=devices,
                root=None if root is None else ranks[root],
                peer=None if peer is None else ranks[peer],
                is_contiguous=all(x.is_contiguous() for x in tensors if x.is_cuda),
                is_agreement=devices == ("cpu",) and _is_agreement(),
            )
        )


def _value_of(dtype: torch.dtype) -> bool | float | int:
    """Return the value with which a step continues that reads a fake tensor."""
    return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def _changed_by(func: OpOverload, args: _Args, kwargs: _Kwargs) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    named = {**dict(zip((x.name for x in func._schema.arguments), args, strict=False)), **kwargs}
    written = [x.name for x in func._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    return list(tensors_in([named.get(name) for name in written]))


def _is_view(func: OpOverload) -> bool:
    """Return whether an operation returns a view, and neither reads nor writes values."""
    returned = [x.alias_info for x in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _is_agreement() -> bool:
    frames = traceback.extract_stack()
    return any(f.name in _AGREEMENTS and Path(f.filename).is_relative_to(_PACKAGE) for f in frames)


def _memory_of(x: Tensor) -> int:
    """Return a key that identifies a tensor's memory, also for fake tensors."""
    key: int = x.untyped_storage()._cdata
    return key


def _place() -> str:
    """Return the line of the program that runs: the innermost one of Meshwright, or of a library above torch."""
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith(_LEFT_OUT)]
    named = [f for f in frames if Path(f.filename).is_relative_to(_PACKAGE) or "/site-packages/" in f.filename]
    frame = (named or frames)[-1]
    path = Path(frame.filename)
    shown = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else Path(*path.parts[-2:])
    return f"{shown.as_posix()}:{frame.lineno}"
