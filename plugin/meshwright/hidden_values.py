"""Hides the values of options that open something: tokens, keys and passwords reach no log and no page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HIDDEN = "***"
# Words of the names of such options; "tokens" counts what is trained on.
_SECRET = re.compile(
    "(?:^|[^a-zA-Z])(?:api)?(?:token|key|password|passwd|passphrase|secrets?|credentials?)(?:$|[^a-zA-Z])",
    re.IGNORECASE,
)
_OF_TEXT = re.compile("(?:eos|bos|pad|unk|sep|cls|mask|image|stop)[_-]token$", re.IGNORECASE)  # words of a tokenizer
_CAMEL_CASE = re.compile("(?<=[a-z])(?=[A-Z])")
_PASSWORD = re.compile(r"(://[^/@:\s]*:)[^/@\s]+@")  # in an address


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
