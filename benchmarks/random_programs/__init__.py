"""Compares random legal training programs under random plans with the same programs on one process."""

import sys
from pathlib import Path

# This process and the pools' processes import the tests' worker pools and small models.
_TESTS = str(Path(__file__).parents[2] / "tests")
if _TESTS not in sys.path:
    sys.path.append(_TESTS)
