"""The worker pools that every distributed test of the session shares."""

from collections.abc import Iterator

import pytest

from harness import WorkerPool

PRELOAD = ("transformers.models.llama.modeling_llama", "meshwright")


@pytest.fixture(scope="session")
def pool2() -> Iterator[WorkerPool]:
    """Two ranks; they start at the first run."""
    pool = WorkerPool(2, PRELOAD)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool4() -> Iterator[WorkerPool]:
    """Four ranks; they start at the first run."""
    pool = WorkerPool(4, PRELOAD)
    yield pool
    pool.close()
