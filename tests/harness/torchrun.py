"""Programs of several ranks under torchrun, on this machine and with one thread each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def worker_environment() -> dict[str, str]:
    """Return the environment of the ranks: one thread each, loopback only, few log messages."""
    paths = [str(ROOT), str(ROOT / "plugin"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "PYTHONWARNINGS": "ignore",
        "TQDM_DISABLE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def torchrun(processes: int, module: str, *arguments: str) -> int:
    """Run ``python -m module`` on several ranks on a free loopback port, and return the exit status.

    Example:
        >>> torchrun(2, "benchmarks.loading", "--rows=1000")
        0
    """
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    return subprocess.run([*command, "-m", module, *arguments], env=worker_environment(), check=False).returncode
