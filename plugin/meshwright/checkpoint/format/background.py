"""Saves that are written in a thread while training goes on."""

from __future__ import annotations

import atexit
import base64
import itertools
import logging
import os
import sys
import threading
import time
import weakref
import zlib
from collections import OrderedDict
from typing import cast

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from meshwright.checkpoint.format.save_job import SaveJob
from meshwright.checkpoint.format.snapshot import HostMemory
from meshwright.compiling import without_compilation
from meshwright.errors import PeerFailedError
from meshwright.faults.guard import active_guard
from meshwright.faults.together import Exchange

logger = logging.getLogger(__name__)

_FIRST_POLL, _LAST_POLL = 0.001, 0.02  # seconds between two looks at the store: twice as long after each
_PATIENCE = 120.0  # seconds that this rank, which has ended, waits for another one


class Background:
    """The saves of one model that are written in a thread, one at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._is_copied = threading.Event()  # whether the save in progress has its copy
        self._is_copied.set()
        self._held: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.memory = HostMemory()  # holds the copy of the save in progress

    @staticmethod
    def of(model: nn.Module) -> Background:
        """Return the background saves of a model, compiled or not."""
        if not _OF_MODELS:
            atexit.register(_fail_at_exit)
        return _OF_MODELS.setdefault(without_compilation(model), Background())

    def start(self, save: SaveJob) -> None:
        """Write a save in a thread, once the one before is complete; every rank makes the call."""
        self.wait()
        meeting = StoreMeeting(f"meshwright/save/{next(_NUMBERS)}") if dist.is_initialized() else None
        is_copied = threading.Event()
        # Not a daemon: the interpreter waits for it at its end.
        thread = threading.Thread(target=self._run, args=(save, meeting, is_copied), name="meshwright-save")
        thread.start()
        self._thread, self._is_copied = thread, is_copied

    def hold_steps_of(self, optimizer: Optimizer) -> None:
        """From now on, let an optimizer step only when the save in progress has its copy.

        A step that does not wait would also be correct, but each tensor that it changes would need a second copy in
        memory.
        """
        if optimizer in self._held:
            return
        # The optimizer may live longer than the model, and must not keep the memory.
        wait = weakref.WeakMethod(self.wait_for_copy)

        def hold(*_: object) -> None:
            if (found := wait()) is not None:
                found()

        handle = optimizer.register_step_pre_hook(hold)
        hooks = cast("OrderedDict[int, object]", optimizer._optimizer_step_pre_hooks)
        hooks.move_to_end(handle.id, last=False)  # before that of offload, which begins to step
        self._held.add(optimizer)

    def wait_for_copy(self) -> None:
        """Wait until the save in progress, if any, has copied the tensors."""
        self._is_copied.wait()

    def wait(self) -> None:
        """Wait for the save in progress, if any.

        Raises:
            Exception: on every rank, if the save failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, save: SaveJob, meeting: Exchange | None, is_copied: threading.Event) -> None:
        try:
            save.copy(meeting)
            is_copied.set()
            save.run(meeting, lambda _: None)
        except Exception as error:
            logger.error("a save in the background failed: %s", error)
            self._error = error
        finally:
            is_copied.set()
            if isinstance(meeting, StoreMeeting):
                meeting.close()

    @property
    def has_failed(self) -> bool:
        return self._error is not None


# Numbers all background saves of the program: every rank makes the same ones in the same order.
_NUMBERS = itertools.count()

# The thread cannot be an attribute of the model: the model could not be copied or pickled.
_OF_MODELS: weakref.WeakKeyDictionary[nn.Module, Background] = weakref.WeakKeyDictionary()


def wait_for_checkpoints(model: nn.Module) -> None:
    """Wait until a checkpoint of a model that is saved asynchronously is complete; every rank makes the call.

    Args:
        model: the model that was passed to ``save_checkpoint``, compiled or not.

    Raises:
        Exception: on every rank, the error of the save if it failed.

    Example::

        mw.save_checkpoint("runs/last", model, optimizer, asynchronous=True)
        ...
        mw.wait_for_checkpoints(model)
    """
    Background.of(model).wait()


def _fail_at_exit() -> None:
    """End with an error if the last save has failed and nothing has raised it."""
    if any(background.has_failed for background in _OF_MODELS.values()):
        print("the last checkpoint was not saved: see the error above", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)  # an exception in an exit handler would not change the exit code


class StoreMeeting:
    """Exchanges texts through the store of the default process group, for a thread beside the training.

    Collectives of a thread would mix with those of the training, and would no longer work after
    ``destroy_process_group``.

    Args:
        prefix: the beginning of the keys in the store, the same on all ranks and used once.
    """

    def __init__(self, prefix: str):
        self.rank, self._size = dist.get_rank(), dist.get_world_size()
        self._guard = active_guard()
        self._store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        self._count = 0
        self._own: list[str] = []  # the keys that this rank has set and not deleted

    def texts_of_all(self, text: str) -> list[str]:
        """Return the text of every rank, in their order; every rank must make the call.

        Raises:
            PeerFailedError: if another rank has failed.
            TimeoutError: if the program has ended on this rank, and another rank does not answer.
        """
        self._set(text)
        keys = [f"{self._count}/{rank}" for rank in range(self._size)]
        self._wait(keys)
        # All ranks have come here, so they have read everything before. The store lives as long as the job.
        while len(self._own) > 1:
            self._store.delete_key(self._own.pop(0))
        return [self._get(key) for key in keys]

    def text_of_first(self, text: str) -> str:
        """Return rank 0's text on every rank; every rank must make the call.

        Raises:
            PeerFailedError: if another rank has failed.
            TimeoutError: if the program has ended on this rank, and rank 0 does not answer.
        """
        if self.rank == 0:
            self._set(text)
        else:
            self._count += 1
        key = f"{self._count}/0"
        self._wait([key])
        return self._get(key)

    # The store refuses values of more than 8 MiB, which the texts of very many tensors reach only uncompressed.
    def _set(self, text: str) -> None:
        self._count += 1
        key = f"{self._count}/{self.rank}"
        self._store.set(key, base64.b64encode(zlib.compress(text.encode(), level=1)).decode())
        self._own.append(key)

    def _get(self, key: str) -> str:
        return zlib.decompress(base64.b64decode(self._store.get(key))).decode()

    def close(self) -> None:
        """Let rank 0, whose process may hold the store, end after the others have read the last texts."""
        try:
            if self.rank:
                self._store.set(f"read/{self.rank}", "")
            else:
                self._wait([f"read/{rank}" for rank in range(1, self._size)])
        except (RuntimeError, TimeoutError) as error:
            logger.warning("after a save in the background, another rank did not confirm its end: %s", error)

    def _wait(self, keys: list[str]) -> None:
        alone_since, poll = None, _FIRST_POLL
        # Short looks: a wait would hold the store's connection, which the training uses too.
        while keys and not self._store.check(keys):
            time.sleep(poll)
            poll = min(2 * poll, _LAST_POLL)
            if self._guard is not None and (cause := self._guard.cause) is not None:
                raise PeerFailedError(f"rank {self.rank} cannot go on with a save in the background: {cause}")
            if not threading.main_thread().is_alive():
                alone_since = alone_since or time.monotonic()
                if time.monotonic() - alone_since > _PATIENCE:
                    raise TimeoutError(f"another rank did not answer within {_PATIENCE:g} s of the end of the program")
