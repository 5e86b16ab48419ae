"""Makes texts safe to show: those that come from outside, and those that hold secrets.

Texts from outside are the names of folders and models, fields of files, and what other programs say. On a terminal and
in files that programs read, such a text is data: it ends no line, moves no cursor and runs nothing.

Secrets are the values of options that open something: tokens, keys and passwords. They reach no log and no page.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence

HIDDEN = "***"
# Words of the names of options whose values are hidden; "tokens" counts what is trained on.
_SECRET = re.compile(
    "(?:^|[^a-zA-Z])(?:api)?(?:token|key|password|passwd|passphrase|secrets?|credentials?)(?:$|[^a-zA-Z])",
    re.IGNORECASE,
)
_OF_TEXT = re.compile("(?:eos|bos|pad|unk|sep|cls|mask|image|stop)[_-]token$", re.IGNORECASE)  # words of a tokenizer
_CAMEL_CASE = re.compile("(?<=[a-z])(?=[A-Z])")
_PASSWORD = re.compile(r"(://[^/@:\s]*:)[^/@\s]+@")  # in an address


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


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the words of a command with *** in the place of the values of options that are named after secrets.

    Example:
        >>> without_secrets(["train.py", "--hf_token", "hf_x", "--api-key=y", "--max_tokens=5", "wandb.key=z"])
        ['train.py', '--hf_token', '***', '--api-key=***', '--max_tokens=5', 'wandb.key=***']
    """
    found, hides = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        is_option = word.startswith("-")
        shown = f"{name}={HIDDEN}" if equals and _is_secret(name) else HIDDEN if hides and not is_option else word
        found.append(_PASSWORD.sub(rf"\1{HIDDEN}@", shown))
        hides = is_option and not equals and _is_secret(name)
    return found


def hidden_in(name: str, value: object) -> object:
    """Return a setting's value, hidden if the setting or a field of it is named after a secret and has a text.

    Example:
        >>> hidden_in("hub_token", "hf_x"), hidden_in("logger", {"api_key": "y", "every": 5}), hidden_in("pad_token", 0)
        ('***', {'api_key': '***', 'every': 5}, 0)
    """
    if isinstance(value, Mapping):
        return {key: hidden_in(str(key), each) for key, each in value.items()}
    return HIDDEN if _is_secret(name) and not isinstance(value, bool | int | float | None) else value


def _is_secret(name: str) -> bool:
    return _SECRET.search(_CAMEL_CASE.sub("_", name)) is not None and _OF_TEXT.search(name) is None
