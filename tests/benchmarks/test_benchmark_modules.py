"""Every benchmark and sweep can be imported where pytest has not put the tests on the path, as its command does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

IMPORT_ALL = """
import importlib, pkgutil, benchmarks, conformance
packages = (benchmarks, conformance)
names = [m.name for package in packages for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    if not name.endswith("__main__") and ".stand_ins" not in name:
        importlib.import_module(name)
print(len(names))
"""


@pytest.mark.crossing  # it imports everything in a new process, which takes as long as forty other tests
def test_a_benchmark_finds_what_it_imports() -> None:
    found = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        cwd=ROOT,
        env=found,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 50
