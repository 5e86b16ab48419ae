"""What a remote file's last request has brought beyond what was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class HeldBytes:
    """The bytes of one file that a store has sent last, which several readers of the file may share.

    Args:
        start: where they begin in the file.
        content: the bytes.
    """

    start: int = 0
    content: memoryview = field(default_factory=lambda: memoryview(b""))
