"""The worker pools that every distributed test of the session shares."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from harness import WorkerPool

# torch is imported in functions: the process of ``pytest -n`` that starts the others needs none, and they wait for it.


@pytest.fixture(scope="session")
def pool2() -> Iterator[WorkerPool]:
    """Two ranks; they start at the first run."""
    from harness import WorkerPool

    pool = WorkerPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool4() -> Iterator[WorkerPool]:
    """Four ranks; they start at the first run."""
    from harness import WorkerPool

    pool = WorkerPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def preloaded_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A command that runs what python would, without the seconds of its imports; launchers start it as PYTHON_EXEC."""
    from harness import preloaded

    folder = tmp_path_factory.mktemp("python")
    with preloaded.commands(folder, (), {}):
        yield folder / "python"


settings.register_profile("suite", deadline=None)  # a busy machine must not fail a test
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """Give each process of ``pytest -n`` its own cores, for the tests and for all processes that they start.

    A small collective between processes on one core takes a third of its time across cores: nobody is woken elsewhere.
    Each process has one thread, as the ranks have that it is compared with: LAPACK, which draws orthogonal weights,
    rounds by the number of threads.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None and config.getoption("numprocesses", None):
        return  # it runs no test
    import torch

    torch.set_num_threads(1)
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    number = int(worker["workerid"].removeprefix("gw"))
    if own := sorted(os.sched_getaffinity(0))[number :: worker["workercount"]]:
        os.sched_setaffinity(0, own)


def pytest_collection_finish() -> None:
    """Leave what the collection made out of later garbage collections.

    The stock Trainer and accelerate collect at each start and end, which takes about a second beside two million
    objects of imported packages and collected tests.
    """
    gc.collect()
    gc.freeze()
