"""Prints what several ranks of a host say alike once: a traceback with which they end, and warnings of libraries."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import re
import sys
import time
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

from meshwright.errors import PACKAGES

_GATHERS = 0.5  # seconds in which the rank that prints a traceback waits for others with the same one
_PATIENCE = 1.5  # seconds that a rank waits until the first one has printed, before it prints its own

# What differs between ranks in texts that say the same: torch's prefix and addresses.
_OF_RANK = re.compile(r"^\[rank\d+\]: ?|\b0x[0-9a-f]+\b", re.MULTILINE)
_CPP_FRAMES = re.compile(
    r"^.*(?:Exception raised from|C\+\+ CapturedTraceback).*\n(?:^(?:\[rank\d+\]: )?(?:frame )?#\d+.*\n)*", re.MULTILINE
)

_installed: Path | None = None  # the folder for which the hooks are installed


def say_equal_texts_once() -> None:
    """Let the ranks that torch's launchers started on this host share one traceback and one copy of each warning.

    Every exception hook of the program runs on every rank, and only what it prints is compared. Warnings are those of
    Meshwright and of installed packages; what the program itself says is printed on every rank.
    """
    global _installed
    folder = _folder()
    if folder is None or folder == _installed:
        return
    _installed = folder
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = io.StringIO()
        with contextlib.redirect_stderr(text):
            previous(kind, error, trace)
        summary = ": ".join(filter(None, (kind.__name__, *str(error).splitlines()[:1])))
        sys.stderr.write(_share(folder, _without_cpp_frames(text.getvalue()), summary))
        sys.stderr.flush()

    sys.excepthook = report
    for handler in _handlers():
        handler.addFilter(_is_to_be_printed)
    show = warnings.showwarning

    def show_once(message: Warning | str, category: type[Warning], filename: str, *about: Any, **more: Any) -> None:
        if not _is_installed(filename) or is_first_to_say(f"{category.__name__}: {message}"):
            show(message, category, filename, *about, **more)

    warnings.showwarning = show_once


def is_first_to_say(text: str) -> bool:
    """Return whether no other rank of this host has said this text; True without a launcher."""
    folder = _folder()
    if folder is None:
        return True
    claim, rank = folder / f"warned-{_digest(text)}", os.environ.get("RANK", "0")
    try:
        claim.symlink_to(rank)  # made with its content at once, unlike a file
    except FileExistsError:
        with contextlib.suppress(OSError):
            return os.readlink(claim) == rank
    except OSError:  # such as a full disk
        pass
    return True


def _handlers() -> list[logging.Handler]:
    """Return the handlers that print: those of the root logger, and of libraries that have their own.

    A file that the program gives each rank gets the warnings of that rank.
    """
    printed = (sys.stderr, sys.stdout)
    own = (getattr(logger, "handlers", ()) for logger in logging.Logger.manager.loggerDict.values())
    of_root = [x for x in logging.root.handlers if getattr(x, "stream", sys.stderr) in printed]
    of_libraries = [x for handlers in own for x in handlers if getattr(x, "stream", None) in printed]
    return [*of_root, *filter(None, [logging.lastResort]), *of_libraries]


def _is_to_be_printed(record: logging.LogRecord) -> bool:
    is_ours = record.name.partition(".")[0] in PACKAGES
    if record.levelno < logging.WARNING or not (is_ours or _is_installed(record.pathname)):
        return True
    try:
        text = record.getMessage()
    except Exception:  # arguments that do not fit the text, of which the handler tells without raising
        return True
    return is_first_to_say(text)


def _is_installed(path: str) -> bool:
    """Return whether a file belongs to an installed package, and not to the program."""
    return bool({"site-packages", "dist-packages"} & set(Path(path).parts))


def _folder() -> Path | None:
    """Return the folder of the ranks of this host and attempt that print into the same stream; None without a launcher.

    torch's launchers can send the ranks' streams to different files, or nowhere (``--local-ranks-filter``). A rank does
    not speak for those whose stream does not have its words.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    of_attempt = Path(path).parent.parent if path else None
    if of_attempt is None or not of_attempt.is_dir():
        return None
    with contextlib.suppress(OSError):  # such as a full disk
        stream = os.fstat(2)
        folder = of_attempt / f"said-{stream.st_dev}-{stream.st_ino}"
        folder.mkdir(exist_ok=True)
        return folder
    return None


def _share(folder: Path, text: str, summary: str) -> str:
    """Return what this rank prints in place of a traceback: it, a line, or nothing if another rank speaks for it."""
    meeting, rank = folder / f"ended-{_digest(_OF_RANK.sub('', text))}", os.environ.get("RANK", "0")
    speaks_for = meeting / "speaks-for"
    try:
        meeting.mkdir()
    except FileExistsError:
        with contextlib.suppress(OSError):
            (meeting / rank).touch()
            until = time.monotonic() + _PATIENCE
            while time.monotonic() < until:
                if speaks_for.exists() and (ranks := speaks_for.read_text().split()):
                    same = f"{summary} (rank {ranks[0]} has printed the same traceback)\n"
                    return "" if rank in ranks else same
                time.sleep(0.01)
        return text
    except OSError:  # such as a full disk
        return text
    with contextlib.suppress(OSError):
        others = _gathered(meeting)
        speaks_for.with_suffix(".new").write_text(" ".join([rank, *others]))
        speaks_for.with_suffix(".new").rename(speaks_for)
        if others:
            everyone = ", ".join(sorted([rank, *others], key=int))
            return f"{text.rstrip()}\n(the same on ranks {everyone})\n"
    return text


def _gathered(meeting: Path) -> list[str]:
    """Return the other ranks of this host that end with the same traceback, once all do or the time has passed."""
    others, until = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1, time.monotonic() + _GATHERS
    while True:
        found = [path.name for path in meeting.iterdir()]
        if len(found) >= others or time.monotonic() > until:
            return found
        time.sleep(0.01)


def _without_cpp_frames(text: str) -> str:
    """Return a traceback without the frames of C++, unless the user has asked torch for them."""
    return text if "TORCH_SHOW_CPP_STACKTRACES" in os.environ else _CPP_FRAMES.sub("", text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
