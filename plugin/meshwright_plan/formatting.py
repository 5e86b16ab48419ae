"""Sizes, durations and tables as text."""

from __future__ import annotations

from collections.abc import Sequence

_GIB = 2**30


def gib(value: float) -> str:
    """Return a number of bytes as text.

    Example:
        >>> gib(1.5 * 2**30)
        '1.5 GiB'
    """
    return f"{value / _GIB:.1f} GiB"


def memory(value: float) -> str:
    """Return a number of bytes as text, in MiB below one GiB.

    Example:
        >>> memory(2.0**31), memory(2.0**29)
        ('2.0 GiB', '512 MiB')
    """
    return f"{value / 2**30:,.1f} GiB" if value >= 2**30 else f"{value / 2**20:,.0f} MiB"


def seconds(value: float) -> str:
    """Return a duration as text, with two to four digits.

    Example:
        >>> seconds(91.74), seconds(7.297), seconds(0.0213)
        ('91.7 s', '7.30 s', '21 ms')
    """
    if value >= 1:
        return f"{value:.0f} s" if value >= 100 else f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"
    return f"{1e3 * value:.0f} ms" if value >= 0.01 else f"{1e3 * value:.1f} ms"


def grid(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return rows of cells as text, with the first ``left`` columns aligned left and the others right.

    Example:
        >>> print(grid([("a", "n"), ("bb", "10")]))
        a    n
        bb  10
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
