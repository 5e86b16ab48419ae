"""Writes files that people name, whole or not at all."""

from __future__ import annotations

import os
import stat
import uuid
from pathlib import Path

from meshwright.errors import PlanError


def write_whole(path: str | os.PathLike[str], content: str, *, option: str) -> None:
    """Write a file in one step, so that a full disk or a kill leaves what was there; its rights follow the umask.

    A link stays, and the file behind it is replaced. What is no file, such as /dev/stdout, is written directly.

    Args:
        path: the file.
        content: its text.
        option: what has named the file, for the error.

    Raises:
        PlanError: if the file cannot be written; an older one is then whole.

    Example::

        write_whole("plan.yaml", "dp: 2\\n", option="--save")
    """
    place = Path(os.path.realpath(path))
    try:
        if place.exists() and not stat.S_ISREG(place.stat().st_mode):
            place.write_text(content, encoding="utf-8")
            return
        draft = place.with_name(f".{place.name[:100]}.{uuid.uuid4().hex[:8]}")
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w", encoding="utf-8") as file:
                file.write(content)
            os.replace(draft, place)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        kept = "; the file that was there is whole" if place.is_file() else ""
        raise PlanError(
            f"{option} {path} cannot be written ({error.strerror or error}){kept}. Name another file, or free space"
        ) from None
