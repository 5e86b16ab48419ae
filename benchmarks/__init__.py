"""Measure step time, memory and traffic of Meshwright and other libraries. Run ``python -m benchmarks``."""

import sys
from pathlib import Path

# Some benchmarks, and the processes that they start, import the tests' worker pools and small models.
_TESTS = str(Path(__file__).parents[1] / "tests")
if _TESTS not in sys.path:
    sys.path.append(_TESTS)
