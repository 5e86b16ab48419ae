"""A few small steps on one device, for a checker of memory: ``python -m conformance.gpu.small_step cuda``."""

from __future__ import annotations

import sys

from conformance.gpu.races import Contest, race

SMALL = Contest(name="small", rows=2, length=64, hidden=128, layers=2, ffn=256, heads=4, kv_heads=2, vocab=512)

if __name__ == "__main__":
    print(race(SMALL, ("meshwright",), sys.argv[1]).turns)
