"""Paragraphs and tables of the pages that sweeps write."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence


def paragraph(text: str) -> str:
    """Return a paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *(f"| {' | '.join(row)} |" for row in rows)]
