"""What the commands print: lines of printable text, whatever a file or an argument holds."""

from __future__ import annotations

import typer

from meshwright.printable import printable_lines


def say(text: object, *, err: bool = False) -> None:
    """Print lines to standard output, or to standard error."""
    typer.echo(printable_lines(text), err=err)
