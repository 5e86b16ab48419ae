"""One rank of a worker pool, with the environment that torchrun would give it.

Each job gets a default process group of its own over the pool's store. The group of a job that succeeded
lives until the pool says that every rank is through: to close it earlier would cut off slower ranks. The group
of a job that failed is closed at once, so that the ranks that wait for this one fail instead of hanging.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import logging
import os
import pickle
import queue
import random
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from harness.messages import Failure, Job, Result, send
from harness.server import become_program
from meshwright.mesh import process_mesh

# The pool finds a hang long before; a worker must not report it as an error of its own.
GROUP_TIMEOUT = datetime.timedelta(minutes=30)

_threads = 0  # that are left after a job


def main(connection: Connection, log: str, environment: dict[str, str]) -> None:
    """Serve jobs until the pool closes the connection.

    Args:
        connection: to the pool.
        log: the file for what this process prints.
        environment: the variables of this process.
    """
    os.setsid()
    become_program(log)
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, jobs), daemon=True).start()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    torch.set_num_threads(1)
    # What was imported stays: left out of every later collection, a collection takes a few milliseconds. A collection
    # before this would copy each page that the process shares with the server.
    gc.freeze()
    send(connection, Result("ready"))
    while True:
        if message := jobs.get():
            _serve(connection, store, message)
        else:
            _close_groups()


def _read(connection: Connection, jobs: queue.SimpleQueue[bytes]) -> None:
    """Hand jobs to the main thread, and end the process with its parent, whatever it is doing."""
    while True:
        try:
            jobs.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)


def _serve(connection: Connection, store: dist.Store, message: bytes) -> None:
    failed = False
    try:
        job: Job = pickle.loads(message)
        _open_group(store, job.number)
        send(connection, Result(job.function(*job.args, **job.kwargs)))
    except BaseException as error:
        failed = True
        send(connection, Failure(time.monotonic(), type(error).__name__, str(error), traceback.format_exc()))
    if failed:
        # Outside the except block: the traceback's frames hold process groups open.
        _close_groups()


def _open_group(store: dist.Store, number: int) -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    logging.disable(logging.NOTSET)  # an earlier function may have left it off
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    job_store = dist.PrefixStore(f"job{number}", store)
    dist.init_process_group("gloo", store=job_store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
    # A function that raises at once would close its group while another rank is still connecting to it.
    job_store.set(f"connected{rank}", "")
    job_store.wait([f"connected{other}" for other in range(world_size)], GROUP_TIMEOUT)


def _close_groups() -> None:
    """Close all groups, and end their threads: those of a gloo group wake 100 times a second while anything holds it.

    Device meshes hold their groups. The plugin keeps the meshes of a world until the next world has some, and DTensor
    keeps those that its operations have seen for the life of the process.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    process_mesh._device_meshes.clear()
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute._planner_cache.clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    gc.collect()
    global _threads
    if _number_of_threads() > _threads:  # something held a trainer, with its groups, when an earlier job was frozen
        gc.unfreeze()
        gc.collect()
    gc.freeze()  # the modules that this job was the first to import, too
    _threads = _number_of_threads()


def _number_of_threads() -> int:
    """Return how many threads this process has, those of gloo included; 0 where the system does not say."""
    tasks = Path("/proc/self/task")
    return sum(1 for _ in tasks.iterdir()) if tasks.exists() else 0
