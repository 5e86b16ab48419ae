"""Saves of all ranks, written in a thread while training goes on; the first rank makes each checkpoint visible."""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import json
import logging
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from typing import cast

from torch import nn
from torch.optim import Optimizer

from meshwright.checkpoint.files.disk import naming_the_disk
from meshwright.checkpoint.files.place import Place
from meshwright.checkpoint.files.reading import Lineage
from meshwright.checkpoint.files.storage import Staging, storage_of
from meshwright.checkpoint.format.checkpoint_folders import Manifest, commit, keep_newest, stage
from meshwright.checkpoint.format.part_files import FileRecord, HostMemory, RankPart, Snapshot
from meshwright.checkpoint.format.rank_state import RankState
from meshwright.compiling import without_compilation
from meshwright.errors import PeerFailedError
from meshwright.faults import ending
from meshwright.faults.every_rank import HubExchange, OneRank
from meshwright.faults.guard import active_guard, start_guard
from meshwright.faults.together import Exchange, attempt, exchange_together, failure_text, on_first_rank, raise_if_any
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright.plan.config import ToDistributedConfig


class SaveJob:
    """One save.

    Args:
        target: the folder that the checkpoint gets.
        own: what this rank has of the run.
        keep: the number of this run's checkpoints to keep in the folder's parent; None for all.
        lineage: the run.
        memory: the memory to which the tensors are copied before they are written; None to write them as they are.
    """

    def __init__(self, target: Place, own: RankState, *, keep: int | None, lineage: Lineage, memory: HostMemory | None):
        self.target, self.keep, self._lineage = target, keep, lineage
        self._own: RankState | None = own
        self._memory = memory
        self._part: RankPart | Snapshot | None = None
        self._manifest: Callable[[], Manifest] | None = None
        self._error: Exception | None = None
        self.moves = 0  # how often this rank has written something, so that a save that hangs is known

    def move(self, _: int = 0) -> None:
        """Count a step of this rank's own work."""
        self.moves += 1

    @property
    def num_bytes(self) -> int:
        """The number of bytes of tensors that this rank writes."""
        assert self._part is not None
        return self._part.num_bytes

    def plan(self, meeting: Exchange | None) -> None:
        """Decide what each rank writes; every rank must make the call.

        On devices other than the CPU, the tensors are copied now. An error of one rank alone is raised by
        :meth:`check`.

        Args:
            meeting: how the ranks exchange what they have; None for collectives.
        """
        assert self._own is not None
        own, self._own = self._own, None  # so that the tensors of a snapshot are free once they are copied
        _, texts = exchange_together(lambda: (None, own.text()), meeting)

        def plan() -> None:
            part, manifest = own.planned(texts)
            self._part = part if self._memory is None else Snapshot(part, self._memory)
            self._manifest = manifest

        _, self._error = attempt(plan)

    def check(self) -> None:
        """Raise what went wrong on this rank in :meth:`plan`."""
        raise_if_any(self._error)

    def copy(self, meeting: Exchange | None) -> None:
        """Plan the save if that has not been done, and copy the tensors that a snapshot shares with the model.

        Every rank must make the call. An error of one rank alone is raised by :meth:`run`.
        """
        with reading_shards():
            if self._own is not None:
                self.plan(meeting)
            if isinstance(self._part, Snapshot):
                self._part.copy()

    def run(self, meeting: Exchange | None, on_write: Callable[[int], None]) -> None:
        """Write and commit the checkpoint; every rank must make the call.

        Args:
            meeting: how the ranks tell each other that their files are written; None for collectives.
            on_write: function that is called with the number of bytes after each write.
        """
        staging: Staging | None = None

        def start() -> str:
            nonlocal staging
            with naming_the_disk(self.target):
                staging = stage(self.target)
            return staging.name

        def write() -> str:
            self.check()
            assert self._part is not None
            part = self._part.copied() if isinstance(self._part, Snapshot) else self._part
            with naming_the_disk(self.target, part.num_bytes):
                path, tag = storage_of(self.target).staged(self.target, staged)
                return json.dumps({name: asdict(record) for name, record in part.write(path, on_write, tag).items()})

        def finish() -> None:
            assert staging is not None and self._manifest is not None
            with naming_the_disk(self.target):
                manifest = commit(staging, dataclasses.replace(self._manifest(), files=files), self._lineage)
            if self.keep is not None:
                keep_newest(self.target.parent, self.keep, manifest.run)

        try:
            staged = on_first_rank(start, meeting)
            _, texts = exchange_together(lambda: (None, write()), meeting)
            files = {name: FileRecord(**record) for text in texts for name, record in json.loads(text).items()}
            on_first_rank(finish, meeting)
        finally:
            if staging is not None:
                staging.close()


logger = logging.getLogger(__name__)

_LOOK = 1.0  # seconds at most between two looks whether a save has moved on


class Background:
    """The saves of one model that are written in a thread, one at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._has_ended = threading.Event()  # whether the save in progress is complete, has failed or hangs
        self._hangs = False
        self._error: Exception | None = None
        self._is_copied = threading.Event()  # whether the save in progress has its copy
        self._is_copied.set()
        self._held: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        _ALL.add(self)
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
        timeout = ToDistributedConfig().timeout_s
        guard = active_guard() or start_guard(timeout=timeout)
        meeting = OneRank() if guard is None else guard.exchange(f"save/{next(_NUMBERS)}")
        timeout = timeout if guard is None else guard.timeout
        self._is_copied, self._has_ended, self._hangs = threading.Event(), threading.Event(), False
        # Not a daemon: the interpreter waits for it at its end.
        self._thread = threading.Thread(target=self._run, args=(save, meeting), name="meshwright-save")
        self._thread.start()
        watch = threading.Thread(target=self._watch, args=(save, meeting, timeout), name="meshwright-save-watch")
        watch.daemon = True
        watch.start()

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
        if self._thread is None:
            return
        self._has_ended.wait()
        if self._hangs and self._error is not None and self._thread.is_alive():
            raise self._error  # also the next time: the thread still has the memory
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def _run(self, save: SaveJob, meeting: HubExchange | OneRank) -> None:
        try:
            save.copy(meeting)
            self._is_copied.set()
            save.run(meeting, save.move)
        except Exception as error:
            self._fail(error)
        finally:
            self._is_copied.set()
            try:
                meeting.close()
            except (PeerFailedError, TimeoutError) as error:
                logger.warning("after a save in the background, another rank did not confirm its end: %s", error)
            finally:
                self._has_ended.set()

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            logger.error("a save in the background failed: %s", error)
            self._error = error

    def _watch(self, save: SaveJob, meeting: HubExchange | OneRank, timeout: float) -> None:
        """Fail a save that neither moves on nor waits for another rank within the timeout, on all ranks.

        The looks are counted, since a clock goes on while the process is stopped.
        """
        thread, ended = self._thread, self._has_ended
        assert thread is not None
        seen, quiet, look = (-1, -1), 0.0, min(_LOOK, timeout / 8)
        while quiet < timeout:
            if ended.wait(look):
                return
            moved = (save.moves, meeting.count)
            quiet = quiet + look if moved == seen and not meeting.is_waiting else 0.0
            seen = moved
        error = TimeoutError(
            f"the save to {save.target} has not moved on for {timeout:g} s, at {ending.place(thread)}, so "
            "its file system hangs or is too slow. Older checkpoints are whole. Save to another file system, or wait "
            f"longer: ToDistributedConfig(timeout_s={5 * timeout:g})"
        )
        self._hangs = True
        self._fail(error)
        meeting.fail(error, failure_text(error))
        self._is_copied.set()
        ended.set()
        while thread.is_alive():
            thread.join(look)
            if not threading.main_thread().is_alive():  # the interpreter would wait for the thread for ever
                _end_with_error()

    @property
    def has_failed(self) -> bool:
        return self._error is not None


# Numbers all background saves of the program: every rank makes the same ones in the same order.
_NUMBERS = itertools.count()

_ALL: weakref.WeakSet[Background] = weakref.WeakSet()


def _wait_at_end() -> None:
    """Wait for saves while the interpreter still starts threads, which asynchronous stores of fsspec need."""
    for background in list(_ALL):
        if (thread := background._thread) is not None and thread.is_alive():  # a forked process has none
            background._has_ended.wait()


# Called in reverse order, before the executors of concurrent.futures are shut down and threads are joined.
threading._register_atexit(_wait_at_end)  # type: ignore[attr-defined]

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
        _end_with_error()


def _end_with_error() -> None:
    print("the last checkpoint was not saved: see the error above", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)  # an exception in an exit handler would not change the exit code
