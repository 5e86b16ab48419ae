"""Compare many models, programs and scripts with one device: ``python -m conformance.families`` and others."""

import sys
from pathlib import Path

# The sweeps, and the processes that they start, import the tests' worker pools and small models.
_TESTS = str(Path(__file__).parents[1] / "tests")
if _TESTS not in sys.path:
    sys.path.append(_TESTS)
