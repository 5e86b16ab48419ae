"""Text on standard error, beside the progress bars of other libraries."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print lines to standard error; an open bar of tqdm is cleared before, and drawn again below them."""
    bar = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bar is not None and getattr(bar, "_instances", None):
        bar.write(text, file=sys.stderr)
        sys.stderr.flush()
    else:
        print(text, file=sys.stderr, flush=True)
