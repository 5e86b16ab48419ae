"""How commands fail: with one line on standard error and, with ``--json``, an object on standard output."""

from __future__ import annotations

import contextlib
import json as json_format
import sys
from collections.abc import Iterator, Mapping
from typing import NoReturn

import typer

from meshwright.cli.say import say

_WRONG_ARGUMENT: Mapping[type[Exception], int] = {ValueError: 2}
# The errors of the command line itself, such as an unknown option; the class is not public in all versions of typer.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


def fail(command: str, message: object, *, code: int, kind: str, json: bool) -> NoReturn:
    """End the command with an error.

    Args:
        command: the words of the command, after ``meshwright``.
        message: what is wrong.
        code: the exit code.
        kind: the class of the error.
        json: whether ``--json`` was given.
    """
    say(f"{_words(command)}: {message}", err=True)
    if json:
        print_error(command, message, code=code, kind=kind)
    sys.exit(code)


def print_error(command: str, message: object, *, code: int, kind: str) -> None:
    """Print an error as an object; the arguments are those of ``fail``."""
    error = {"command": _words(command), "kind": kind, "message": str(message), "exit_code": code}
    say(json_format.dumps({"error": error}, indent=2))


def _words(command: str) -> str:
    return f"meshwright {command}".rstrip()


@contextlib.contextmanager
def failures_of(
    command: str,
    *,
    json: bool = False,
    codes: Mapping[type[Exception], int] = _WRONG_ARGUMENT,
    interrupted: str = "interrupted",
) -> Iterator[None]:
    """End the command if an error is raised in this context.

    Args:
        command: the words of the command, after ``meshwright``.
        json: whether ``--json`` was given.
        codes: class of errors -> exit code; the first class that an error has counts.
        interrupted: what Ctrl-C leaves behind.
    """
    try:
        yield
    except tuple(codes) as error:
        code = next(code for kind, code in codes.items() if isinstance(error, kind))
        fail(command, error, code=code, kind=type(error).__name__, json=json)
    except KeyboardInterrupt:
        fail(command, interrupted, code=130, kind="KeyboardInterrupt", json=json)


def run_with_json_errors(app: typer.Typer) -> NoReturn:
    """Run the command line so that wrong options are errors as an object too; for a command with ``--json``."""
    try:
        code = app(standalone_mode=False)
    except _USAGE_ERROR as error:
        message = error.format_message()  # type: ignore[attr-defined]
        fail(_command(getattr(error, "ctx", None)), message, code=2, kind=type(error).__name__, json=True)
    except typer.Abort:
        fail("", "interrupted", code=130, kind="KeyboardInterrupt", json=True)
    sys.exit(code)


def _command(context: typer.Context | None) -> str:
    """Return the words of the command in which an error was raised."""
    words: list[str] = []
    while context is not None and context.parent is not None:
        words.insert(0, context.info_name or "")
        context = context.parent  # type: ignore[assignment]
    return " ".join(words)
