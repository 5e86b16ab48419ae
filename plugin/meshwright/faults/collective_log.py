"""A log of this process's collectives: for each group, the last collectives and a digest of all collectives.

The timeouts of process groups, after which their backends give up.

A collective of gloo raises an error, to which the guard adds what the other ranks do. NCCL has a watchdog instead,
which ends the process from another thread and knows nothing of other ranks. So it waits until the guard has explained
the error.
"""

from __future__ import annotations

import datetime
import functools
import time
import zlib
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

LENGTH = 64  # the number of collectives per group whose descriptions are kept


class Log:
    """The collectives of one group.

    Two ranks whose digests are equal issued the same operations on the same shapes in the same order.
    """

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0
        self._recent: deque[str] = deque(maxlen=LENGTH)

    def add(self, what: str) -> None:
        self.count += 1
        self.digest = zlib.crc32(what.encode(), self.digest)
        self._recent.append(what)

    def summary(self) -> str:
        return f"{self.count} collectives with digest {self.digest:08x}"

    def recent(self) -> dict[str, str]:
        """Return the last collectives by their number, oldest first."""
        first = self.count - len(self._recent) + 1
        return {str(first + i): what for i, what in enumerate(self._recent)}


class CallTrace:
    """The logs of all groups, and what the process did last."""

    def __init__(self) -> None:
        self.logs: dict[tuple[int, ...], Log] = {}
        self.doing = "set-up"
        self.call = ""  # the call of the program, such as save_checkpoint(), that every rank must make
        self.ranks: tuple[int, ...] = ()  # the ranks of the last collective
        self.leaving = ""  # how the program is ending itself; cleared if it begins another operation
        self._since = time.monotonic()

    def of(self, ranks: tuple[int, ...]) -> Log:
        log = self.logs.get(ranks)
        if log is None:
            log = self.logs[ranks] = Log()
        return log

    def add(self, ranks: tuple[int, ...], what: str) -> None:
        """Record that a collective of these ranks starts."""
        self.of(ranks).add(what)
        self.ranks = ranks
        self.begin(what)

    def begin(self, doing: str) -> None:
        self.doing, self._since = f"{doing}, in {self.call}" if self.call else doing, time.monotonic()
        self.leaving = ""

    @property
    def age(self) -> float:
        """The seconds since the process began its last operation."""
        return time.monotonic() - self._since

    def last(self) -> str:
        """Return the operation that the process began last, and when it began."""
        return self.doing if self.age < 1.0 else f"{self.doing} (begun {self.age:.0f} s ago)"


def first_difference(logs: dict[str, dict[str, str]]) -> str | None:
    """Return a text with the first collective at which the ranks' recent logs differ; None if the logs are equal.

    Args:
        logs: each rank's ``Log.recent()``, by the rank's name.
    """
    if not logs:
        return None
    numbers = sorted({int(number) for log in logs.values() for number in log})
    # Collectives that some log no longer holds cannot be compared.
    known_from = max(min((int(number) for number in log), default=1) for log in logs.values())
    for number in numbers:
        entries = {name: log.get(str(number), "nothing") for name, log in logs.items()}
        if number >= known_from and len(set(entries.values())) > 1:
            lines = "\n".join(f"  {name}: {what}" for name, what in entries.items())
            return f"first difference at collective {number}:\n{lines}"
    return None


def describe(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return a text that must be equal on all ranks of a collective: its operation, root or reduction, shapes, dtypes.

    Args:
        operation: the name of a method of ProcessGroup.
        args, kwargs: the arguments of the call.
    """
    # Only a gather's inputs and a scatter's outputs exist on every rank. The ranks' shares of an
    # all-to-all differ by design, and an all-gather's inputs are described by its outputs.
    chosen: object = args[1:2] if operation == "gather" else args[:1] if operation in ("scatter", "allgather") else args
    reduction = root = None
    if operation not in _WITHOUT_SETTINGS:
        options = kwargs.get("opts", args[-1] if args else None)
        reduction, root = getattr(options, "reduceOp", None), getattr(options, "rootRank", None)
    return _text(
        operation,
        # How many rows each rank sends is its own matter if the call has split sizes.
        tuple([(x.dtype, x.shape[1:] if _is_uneven(operation, args) else x.shape) for x in _tensors(chosen)]),
        None if reduction is None else reduction.op.name.lower(),
        root,
    )


def _is_uneven(operation: str, args: tuple[Any, ...]) -> bool:
    return operation in ("all_to_all_single", "alltoall_base") and len(args) > 3 and bool(args[2] or args[3])


# Their options have neither a reduction nor a root, and a search for an attribute that does not exist is slow.
_WITHOUT_SETTINGS = frozenset(
    {"_allgather_base", "all_gather_single", "allgather", "all_to_all_single", "alltoall", "alltoall_base", "barrier"}
)


# A step repeats the shapes of the step before, and the text of each collective costs more than the log around it.
@functools.lru_cache(maxsize=4096)
def _text(
    operation: str, tensors: tuple[tuple[torch.dtype, torch.Size], ...], reduction: str | None, root: int | None
) -> str:
    shapes: dict[str, int] = {}
    for dtype, size in tensors:
        shape = "" if operation.startswith(("all_to_all", "alltoall")) else tuple(size)
        text = f"{str(dtype).removeprefix('torch.')} {shape}".rstrip()
        shapes[text] = shapes.get(text, 0) + 1
    settings = ([] if reduction is None else [reduction]) + ([] if root is None else [f"root {root}"])
    listed = ", ".join(text if count == 1 else f"{count} x {text}" for text, count in shapes.items())
    name = operation.strip("_") + (f"({', '.join(settings)})" if settings else "")
    return f"{name} of {listed}" if listed else name


def describe_tensors(tensors: object) -> str:
    """Return the dtypes and shapes of tensors as text."""
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in _tensors(tensors))


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, (list, tuple)):
        return []
    found: list[torch.Tensor] = []
    for item in value:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found += _tensors(item)
    return found


WATCHDOG_WAITS = 30.0  # seconds that NCCL's watchdog waits longer than the guard


def set_timeouts(timeout: float) -> None:
    """Set the timeout of every process group of this process; see ``set_timeout``."""
    for group in list(dist.distributed_c10d._world.pg_map):
        set_timeout(group, timeout)


def set_timeout(group: dist.ProcessGroup, timeout: float) -> None:
    """Set the timeout of a process group whose collectives raise, and let NCCL's watchdog wait for longer than that.

    The watchdog's time is never shortened, since the program may have chosen it for a group of its own.

    Args:
        group: the process group.
        timeout: the seconds.
    """
    for backend in {group._get_backend(device) for device in group._device_types if device.type in ("cpu", "cuda")}:
        if backend.name() != "nccl":
            backend._set_default_timeout(datetime.timedelta(seconds=timeout))
            continue
        watchdog = datetime.timedelta(seconds=timeout + WATCHDOG_WAITS)
        if backend.options._timeout < watchdog:
            backend._set_default_timeout(watchdog)
