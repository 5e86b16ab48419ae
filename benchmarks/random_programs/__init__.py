"""Legal training programs drawn at random, under plans drawn at random, against one process."""

import sys
from pathlib import Path

# The tests' worker pools and small models, which this process and the pools' processes import.
_TESTS = str(Path(__file__).parents[2] / "tests")
if _TESTS not in sys.path:
    sys.path.append(_TESTS)
