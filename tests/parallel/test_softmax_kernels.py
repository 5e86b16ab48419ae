"""The loss's kernels for GPUs, run by Triton's interpreter, against float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.parallel.losses import cross_entropy
from support.interpreted_kernels import CASES, DTYPES

TRITON = Path(sys.prefix, "triton")  # where the Makefile puts it, apart from torch


@pytest.mark.skipif(not TRITON.exists(), reason="Triton is not installed: make setup, or make test")
def test_the_kernels_give_the_losses_and_gradients_of_float64() -> None:
    """Sums in float32 are within 1e-5; a gradient is rounded once, or cut off, as the interpreter does: at most eps.

    The whole operation multiplies rounded matrices, whose errors are a few eps. A target off by one word fails all.
    """
    right, wrong = (found(shift) for shift in (0, 1))
    for case, has, fault in zip(CASES, right, wrong, strict=True):
        eps = torch.finfo(DTYPES[case.dtype]).eps
        assert has["loss"] <= 1e-5 and has["gradient"] <= eps + 1e-6 and has["padding"] == 0, case
        assert has["by_chunks"] <= 2 * eps + 1e-6, case
        if case.tokens:
            assert fault["loss"] > 1e-2 and fault["gradient"] > eps and fault["by_chunks"] > 3 * eps, case


def test_kernels_that_do_not_compile_are_told_once_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles at the first call, and needs a C compiler, which a machine for inference may lack."""

    def fail() -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(cross_entropy, "_has_triton", lambda: True)
    monkeypatch.setattr(cross_entropy, "_kernels", fail)
    cross_entropy._works.cache_clear()
    with pytest.warns(UserWarning, match="Failed to find C compiler.*install gcc") as caught:
        assert [cross_entropy._works(torch.device("cpu"), torch.float32) for _ in range(2)] == [False, False]
    assert len(caught) == 1
    cross_entropy._works.cache_clear()


def found(shift: int) -> list[dict[str, float]]:
    path = os.pathsep.join([*filter(None, sys.path), str(TRITON)])
    done = subprocess.run(
        [sys.executable, "-m", "support.interpreted_kernels", str(shift)],
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[dict[str, float]] = json.loads(done.stdout)
    return found
