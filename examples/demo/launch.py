"""Start the training processes as torchrun does, on this machine's loopback, and end them all."""

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

    The same as ``torchrun --nproc-per-node N -m examples.demo.train SETTINGS_FILE``. They have all
    ended when this returns or raises.

    Raises:
        ChildFailedError: some process failed; the others are ended.
        KeyboardInterrupt, SignalException: this process was told to stop.
    """
    # It logs every process that ends or that it ends; what matters is in the exception.
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
            # Not SIGINT: passed on, it would be a traceback of every process. Left to Python here, it
            # makes the launcher end them by SIGTERM.
            signals_to_handle="SIGTERM,SIGHUP",
        )
        elastic_launch(config, sys.executable)("-m", "examples.demo.train", str(settings.path))


def _environment(world_size: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // world_size)
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
