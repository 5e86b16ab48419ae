"""Prints a traceback that several ranks of a host end with once; the other ranks refer to it in a line."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
import time
from pathlib import Path
from types import TracebackType

_PATIENCE = 1.0  # seconds that a rank waits until the first one has printed, before it prints its own


def print_equal_errors_once() -> None:
    """Let the ranks that torch's launchers started on this host share one traceback, if they print the same text.

    Every exception hook of the program runs on every rank, and only what it prints is compared.
    """
    folder = _folder()
    previous = sys.excepthook
    if folder is None or getattr(previous, "prints_equal_errors_once", False):
        return

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = io.StringIO()
        with contextlib.redirect_stderr(text):
            previous(kind, error, trace)
        _print_once(folder, text.getvalue(), ": ".join(filter(None, (kind.__name__, *str(error).splitlines()[:1]))))

    report.prints_equal_errors_once = True  # type: ignore[attr-defined]
    sys.excepthook = report


def _folder() -> Path | None:
    """Return the folder that the ranks of this host and of this attempt share; None without a launcher."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    folder = Path(path).parent.parent if path else None
    return folder if folder is not None and folder.is_dir() else None


def _print_once(folder: Path, text: str, summary: str) -> None:
    """Print a text, or a line in its place if another rank has printed the same text."""
    claim = folder / f"printed-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    is_ours = False
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        if rank := _printed_by(claim):
            text = f"{summary} (rank {rank} has printed the same traceback)\n"
    except OSError:  # such as a full disk
        pass
    else:
        is_ours = True
    sys.stderr.write(text)
    sys.stderr.flush()
    if is_ours:
        with contextlib.suppress(OSError):
            claim.write_text(os.environ.get("RANK", "0"))


def _printed_by(claim: Path) -> str:
    """Return the rank that has printed the text; empty if it has not done so in time."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            if rank := claim.read_text():
                return rank
        time.sleep(0.01)
    return ""
