"""Says of a full disk which folder, how much it needs and how much is free; the kernel's error has a number alone."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from meshwright.checkpoint.files.place import Place

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def naming_the_disk(target: Place, needed: int = 0) -> Iterator[None]:
    """Name the folder in the error of a full disk that is raised in this context.

    Args:
        target: the folder or file that is saved.
        needed: bytes that this rank writes; 0 if it is not known.

    Raises:
        OSError: with the number of the error that the disk has given.

    Example::

        with naming_the_disk(Path("runs/step-100"), needed=part.num_bytes):
            part.write(path)
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or error.errno is None:
            raise
        needs, free = f"this rank needs {needed:,} bytes, and " if needed else "", _free(Path(target))
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno)}: {needs}{free} are free in {target.parent}. What was saved there "
            f"before is whole. Free space, or save to another disk",
            str(target),
        ) from error


def _free(target: Path) -> str:
    for folder in (target, *target.absolute().parents):
        with contextlib.suppress(OSError):
            return f"{shutil.disk_usage(folder).free:,} bytes"
    return "an unknown number of bytes"
