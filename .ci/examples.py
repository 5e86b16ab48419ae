"""An extension of griffe: the examples of docstrings are code on the pages of the API."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Gives sections the names that griffe knows: it takes ``Example:`` for a remark, and ``Example::`` for text."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object that was read."""
        if obj.docstring is not None:
            value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"^Example::$", "**Example**", value, flags=re.MULTILINE)
