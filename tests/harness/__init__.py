"""Worker processes that live for the whole test session, so that a distributed test costs milliseconds."""

from harness.pool import WorkerError, WorkerHang, WorkerPool

__all__ = ["WorkerError", "WorkerHang", "WorkerPool"]
