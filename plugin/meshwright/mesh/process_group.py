"""The launched processes, their process group, and the one address on which rank 0 listens."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import itertools
import multiprocessing.context
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from meshwright.errors import PeerFailedError, PlanError
from meshwright.mesh.host import check_one_rank_per_gpu, local_rank
from meshwright.mesh.host_wire import open_host_wire, shares_gpus
from meshwright.mesh.siblings import end_ranks
from meshwright.printable import tell

LOOPBACK = "127.0.0.1"


def listening_address() -> str:
    """Return the address of the interface that connects this process with the other ranks.

    This is loopback if the launcher says that all ranks are on this host. Otherwise it is the address of MASTER_ADDR,
    or, if that is not an address of this host (a service of a cluster, for example), the one from which this host
    reaches it. "0.0.0.0" stands for all interfaces, if MASTER_ADDR only leads to loopback or cannot be resolved.
    """
    wanted = os.environ.get("MASTER_ADDR", LOOPBACK)
    ranks = str(dist.get_world_size()) if dist.is_initialized() else os.environ.get("WORLD_SIZE")
    if ranks is not None and os.environ.get("LOCAL_WORLD_SIZE") == ranks:
        return LOOPBACK
    if wanted in ("localhost", "::1") or wanted.startswith("127."):
        return LOOPBACK
    with contextlib.suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(wanted, 1, type=socket.SOCK_DGRAM):
            # Connecting a datagram socket sends nothing; it only chooses the interface.
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(place)
                own = str(probe.getsockname()[0])
                # Many hosts give their own name a loopback address, which other hosts cannot reach.
                if not own.startswith("127.") and own != "::1":
                    return own
    return "::" if ":" in wanted else "0.0.0.0"


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on one address.

    Raises:
        OSError: the address is not one of this host, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


_ANSWERS = 1.0  # seconds in which a store that runs says that ranks have not come
FOLLOWS = 0.5  # seconds that a rank waits before it ends because of another one, which launchers then find first

T = TypeVar("T")

_made = itertools.count()  # the process groups made here, so that each has keys of its own in the launcher's store


def world_size() -> int:
    """Return the number of processes, from the process group or else from the launcher's environment."""
    return dist.get_world_size() if dist.is_initialized() else _number("WORLD_SIZE", 1)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else _number("RANK", 0)


def node_count() -> int:
    """Return the number of nodes, from the launcher's LOCAL_WORLD_SIZE; 1 if the launcher does not set it."""
    return max(1, world_size() // max(1, _number("LOCAL_WORLD_SIZE", world_size())))


def _number(name: str, default: int) -> int:
    """Return a number that a launcher sets in the environment."""
    value = os.environ.get(name)
    if value is None:
        return default
    if not value.isdecimal():
        raise PlanError(
            f"{name}={value!r} in the environment is not a number. A launcher sets it for each process: unset it, or "
            "start the script with: meshwright launch --num_processes N -- SCRIPT"
        )
    return int(value)


def backend_for(device: torch.device) -> str:
    """Return the backends of a process group whose tensors live on ``device``; CPU tensors always use gloo."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and not shares_gpus() else "gloo"


def backend_of_new_groups() -> str | None:
    """Return the backends of a new process group; None for those of the default group.

    Through gloo, hosts tell each other numbers without waiting for their devices. accelerate's default group is NCCL's
    alone, so the groups made here add gloo.
    """
    return None if "cpu" in _backends(None) else backend_for(torch.device("cuda"))


def wire_device(device: torch.device | str = "cpu", group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device from which a tensor of ``device`` can be sent: gloo sends from the CPU, others from CUDA.

    Args:
        device: the tensor's device; the CPU for small tensors that belong to no device.
        group: the process group; None for the default group.
    """
    backends = _backends(group)
    sends_itself = torch.device(device).type == "cuda" and backends.get("cuda", "gloo") != "gloo"
    if sends_itself or "cpu" not in backends:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    return dict(entry.split(":") for entry in str(dist.get_backend_config(group)).split(","))


def device_for(model_device: torch.device) -> torch.device:
    """Return this process's device of the model's device type; a CUDA device becomes the current one."""
    if model_device.type != "cuda":
        return model_device
    # All ranks together check whether two of them use one GPU, when they join the process group.
    device = torch.device("cuda", local_rank(_rank(), world_size()) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def start_process_group(device: torch.device, timeout_s: float) -> None:
    """Join the launcher's process group, unless the script has done so.

    The process leaves the group at exit, also a gloo group that the script or accelerate has made; otherwise gloo's
    threads may abort the interpreter, after a run that has succeeded.

    Raises:
        PlanError: if two ranks use the same GPU, or the launcher's numbers contradict each other. The message names
            them.
        PeerFailedError: if other ranks do not come within the timeout. The message names them.
    """
    _leave_parents_threads()
    timeout = datetime.timedelta(seconds=timeout_s)
    is_shared = device.type == "cuda" and shares_gpus()
    if is_shared and not (dist.is_initialized() and "cuda:nccl" in str(dist.get_backend_config())):
        open_host_wire()
    if dist.is_initialized():
        if "gloo" in str(dist.get_backend_config()):
            _leave_at_exit()
        return
    if world_size() == 1:
        return
    if _rank() >= world_size():
        raise PlanError(
            f"RANK={_rank()} in the environment must be below WORLD_SIZE={world_size()}: ranks count from 0. A "
            "launcher sets both: meshwright launch --num_processes N -- SCRIPT"
        )
    device_id = device if device.type == "cuda" and not is_shared else None
    if (store := _launchers_store(timeout)) is not None:
        rank, world = int(os.environ["RANK"]), world_size()
    else:
        store, rank, world = next(iter(dist.rendezvous("env://", timeout=timeout)))
    store.set_timeout(timeout)
    store = dist.PrefixStore(f"meshwright{attempt_number()}/{next(_made)}", store)
    await_ranks(store, rank, world, timeout_s)
    if device.type == "cuda" and not is_shared:
        check_one_rank_per_gpu(store, rank, world, device)
    dist.init_process_group(
        backend_for(device), store=store, rank=rank, world_size=world, device_id=device_id, timeout=timeout
    )
    _leave_at_exit()


def _leave_parents_threads() -> None:
    """Compute with one thread in a process that was forked, as accelerate's ``notebook_launcher`` does.

    A fork has none of the threads of its parent. If the parent has computed anything large, OpenMP would wait for them
    forever in the first large operation. DataLoader's workers do the same, and torchrun's default is one thread, too.
    """
    forked = getattr(multiprocessing.context, "ForkProcess", None)  # Windows has none
    if forked is not None and isinstance(multiprocessing.current_process(), forked):
        torch.set_num_threads(1)


def await_ranks(store: dist.Store, rank: int, world: int, timeout_s: float) -> None:
    """Wait in a store until all ranks have made this call. Kill those of this machine that do not come.

    Raises:
        PeerFailedError: if ranks do not come within the timeout. The message names them.
    """

    def absent() -> list[int]:
        store.set(f"rank {rank}", "here")
        if store.add("number", 1) == world:
            store.set("all", "here")
        try:
            store.wait(["all"], datetime.timedelta(seconds=timeout_s))
        except RuntimeError:
            if found := _absent(store, world):
                return found
            raise
        return []

    if found := _answered(absent, rank, world, timeout_s):
        raise did_not_come(found, rank, world, timeout_s)


def _answered(ask: Callable[[], T], rank: int, world: int, timeout_s: float) -> T:
    """Return what a function of a store returns, which waits without a limit if the process that serves it is stopped.

    Raises:
        PeerFailedError: if it does not return in time.
    """
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((ask(), None))
        except BaseException as error:
            done.put((None, error))

    threading.Thread(target=run, name="meshwright-store", daemon=True).start()
    try:
        answer, error = done.get(timeout=timeout_s + _ANSWERS)
    except queue.Empty:
        if _has_launchers_store():
            raise PeerFailedError(f"rank {rank}: the launcher's store does not answer: stopped or cut off") from None
        raise did_not_come([0], rank, world, timeout_s) from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]


def did_not_come(absent: list[int], rank: int, world: int, timeout_s: float) -> PeerFailedError:
    """Kill the ranks of this machine that have not come to the set-up; return the error that names all absent ones."""
    ranks = " and ".join(filter(None, [", ".join(map(str, absent[:-1])), str(absent[-1])]))
    text = (
        f"rank {rank} waited {timeout_s:g} s for rank{'s' * (len(absent) > 1)} {ranks}, which did not come to the "
        "set-up: killed or stopped before it, or still busy. If they need longer, set a larger "
        "ToDistributedConfig(timeout_s=...)"
    )
    if rank == next(present for present in range(world) if present not in absent):
        # At once, since a launcher may end this process before its program can print the error.
        tell(text)
    end_ranks(absent)  # a stopped process would outlive the launcher's SIGTERM
    time.sleep(FOLLOWS)
    return PeerFailedError(text)


def attempt_number() -> str:
    """Return the number of a restart, if all ranks have the same.

    torchrun's store keeps the addresses of the processes from before a restart, and nobody may read these. With several
    nodes, their launchers may count restarts differently.
    """
    is_one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if is_one_node else ""


def _absent(store: dist.Store, world: int) -> list[int]:
    """Return the ranks that have not come; none if all have, or rank 0's store is gone."""
    try:
        return [rank for rank in range(world) if not store.check([f"rank {rank}"])]
    except RuntimeError:
        return []


def _has_launchers_store() -> bool:
    """Return whether the ranks meet in a store that torchrun serves, not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _launchers_store(timeout: datetime.timedelta) -> dist.Store | None:
    """Return the store of the ranks, which rank 0 serves on the ranks' interface only; None to leave it to torch.

    Torch's own store listens on all interfaces. Torchrun starts it in its own process, which cannot be changed.
    """
    is_launched = all(name in os.environ for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    if not is_launched or _has_launchers_store():
        return None
    # The store itself waits for nobody, since its error would not name the ranks that are missing; see await_ranks.
    host, port, ranks = listening_address(), int(os.environ["MASTER_PORT"]), world_size()
    reached = host if host == LOOPBACK else os.environ["MASTER_ADDR"]
    if os.environ["RANK"] != "0":
        _await_listener(reached, port, timeout.total_seconds())

        def join() -> dist.Store:
            return dist.TCPStore(reached, port, ranks, is_master=False, timeout=timeout, wait_for_workers=False)

        return _answered(join, int(os.environ["RANK"]), ranks, timeout.total_seconds())
    try:
        listener = bound_socket(host, port)
    except OSError:  # torch may serve a store at this port already, and then uses it again
        return dist.TCPStore(
            reached, port, ranks, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    return dist.TCPStore(
        reached,
        port,
        ranks,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _await_listener(host: str, port: int, timeout_s: float) -> None:
    """Wait until rank 0 serves its store.

    Raises:
        PeerFailedError: if it does not within the timeout.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(until - time.monotonic(), 0.1)).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise did_not_come([0], int(os.environ["RANK"]), world_size(), timeout_s) from error
            time.sleep(0.1)


@functools.cache  # a notebook may distribute many models
def _leave_at_exit() -> None:
    atexit.unregister(dist.destroy_process_group)  # the script's own, which would run later and find no group
    atexit.register(leave_process_group)


def leave_process_group() -> None:
    """Leave the group, if there is one; otherwise gloo's threads abort the interpreter at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()


def ensure_process_group(timeout_s: float = 120.0, device: torch.device | None = None) -> None:
    """Join the launcher's process group, unless the script has done so; a single process creates its own.

    DTensors need a process group even for one process.

    Args:
        timeout_s: see ``start_process_group``.
        device: the device of the group's tensors; None for this process's GPU, or the CPU if there is none.
    """
    if device is None:
        device = device_for(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    start_process_group(device, timeout_s)
    if not dist.is_initialized():
        dist.init_process_group(backend_for(device), store=dist.HashStore(), rank=0, world_size=1)
        _leave_at_exit()


def wait_for_message(work: dist.Work | None, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Wait until a message has been sent or received, but no longer than its group's timeout.

    Gloo's waits for a single message have the timeout that the group was made with, unless they are given another. The
    waits for collectives have the group's current timeout, which ``timeout_s`` sets.

    Args:
        work: what ``isend`` or ``irecv`` returned.
        group: the process group; None for that of all ranks.
        device: the device of the message.

    Raises:
        RuntimeError: the message did not come, or was not taken, in time.
    """
    group = dist.group.WORLD if group is None else group
    assert work is not None and group is not None, "a rank outside of the group sends and gets no messages"
    options = group._get_backend(device).options if device.type == "cpu" else None
    if options is None:  # NCCL's waits have the group's timeout; a fake rank's group has no options
        work.wait()
    else:
        work.wait(options._timeout)
