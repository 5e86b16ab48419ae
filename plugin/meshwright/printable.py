"""Shows texts that come from outside: names of folders and models, fields of files, what other programs say.

On a terminal and in files that programs read, such a text is data: it ends no line, moves no cursor and runs nothing.
"""

from __future__ import annotations

import shlex
import sys


def printable(text: object) -> str:
    r"""Return a text as one printable line: other characters, such as line ends, are escaped as Python writes them.

    Example:
        >>> printable("runs\n\x1b[2J\u2028x")
        'runs\\n\\x1b[2J\\u2028x'
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def printable_lines(text: object) -> str:
    """Return a text whose lines are printable; line ends and tabs stay."""
    found = str(text)
    if found.isascii() and found.replace("\n", "").isprintable():
        return found
    return "".join(c if c in "\n\t" else printable(c) for c in found)


def shell_word(text: object) -> str:
    r"""Return a text as one word of a shell, in one printable line.

    Example:
        >>> shell_word("my plan.yaml"), shell_word("a\nb'c")
        ("'my plan.yaml'", "$'a\\nb\\'c'")
    """
    found = str(text)
    return shlex.quote(found) if found.isprintable() else f"$'{''.join(map(_in_quotes, found))}'"


def _in_quotes(character: str) -> str:
    """Return a character as bash reads it in $'...'."""
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file's name that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\{character}" if character in "'\\" else printable(character)


def tell(text: object) -> None:
    """Print lines to standard error at once, as what Meshwright says."""
    print(f"meshwright: {printable_lines(text)}", file=sys.stderr, flush=True)
