"""The worker pools that every distributed test of the session shares."""

from collections.abc import Iterator

import pytest

from harness import WorkerPool


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
