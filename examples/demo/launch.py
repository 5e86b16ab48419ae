"""Start the training processes as torchrun does, on this machine's loopback, and wait until all have ended."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from examples.demo.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def launch(settings: Settings) -> None:
    """Run ``examples.demo.train`` in ``settings.world_size`` processes and wait for them.

    This does the same as ``torchrun --nproc-per-node N -m examples.demo.train SETTINGS_FILE``. All processes have ended
    when the call returns or raises.

    Raises:
        ChildFailedError: if a process failed; the other processes are then stopped.
        KeyboardInterrupt, SignalException: if a signal stopped this process.
    """
    # This logger reports every process that ends; the exception says what matters.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    os.environ.update(_environment(settings.world_size))
    with tempfile.TemporaryDirectory() as logs:
        config = LaunchConfig(
            run_id="demo",
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=settings.world_size,
            max_restarts=0,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            # SIGINT is left to Python here, so that the launcher ends the processes by SIGTERM. If SIGINT were
            # passed on, every process would print a traceback.
            signals_to_handle="SIGTERM,SIGHUP",
        )
        python = os.environ.get("PYTHON_EXEC", sys.executable)  # as for torchrun
        elastic_launch(config, python)("-m", "examples.demo.train", str(settings.path))


def _environment(world_size: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // world_size)
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
