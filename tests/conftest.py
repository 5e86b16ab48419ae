"""The worker pools that every distributed test of the session shares, and the tiers of the tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from harness import WorkerPool, preloaded
from quick_tier import QUICK
from tiers import CROSSINGS, belongs, matches


@pytest.fixture(scope="session")
def pool2() -> Iterator[WorkerPool]:
    """Two ranks; they start at the first run."""
    pool = WorkerPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool4() -> Iterator[WorkerPool]:
    """Four ranks; they start at the first run."""
    pool = WorkerPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def preloaded_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A command that runs what python would, without the seconds of its imports; launchers start it as PYTHON_EXEC."""
    folder = tmp_path_factory.mktemp("python")
    with preloaded.commands(folder, (), {}):
        yield folder / "python"


settings.register_profile("suite", deadline=None)  # a busy machine must not fail a test
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """Give each process of ``pytest -n`` its own cores, for the tests and for all processes that they start.

    A small collective between processes on one core takes a third of its time across cores: nobody is woken elsewhere.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    number = int(worker["workerid"].removeprefix("gw"))
    if own := sorted(os.sched_getaffinity(0))[number :: worker["workercount"]]:
        os.sched_setaffinity(0, own)
        torch.set_num_threads(len(own))  # more threads than cores would wait for each other


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test the mark of its tier, and refuse a pattern that fits no test of its file."""
    for mark, tier in (("crossing", CROSSINGS), ("quick", QUICK)):
        unused = {file: set(patterns) for file, patterns in tier.items()}
        for item in items:
            found = matches(item.nodeid.partition("::")[2], tier.get(item.path.name, ()))
            if belongs(found):
                item.add_marker(mark)
            unused.get(item.path.name, set()).difference_update(found)
        # Some files or tests that were asked for are no evidence about the others.
        is_all = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        if is_all and (stale := {file: rest for file, rest in unused.items() if rest}):
            raise pytest.UsageError(f"tests/tiers.py has patterns for `{mark}` that fit no test: {stale}")
