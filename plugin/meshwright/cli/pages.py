"""The extra ``pages``, which ``meshwright plan --html`` and ``meshwright report`` need."""

from __future__ import annotations

from importlib.util import find_spec

from meshwright.errors import PlanError


def check_pages() -> None:
    """Raise if jinja2, which fills the pages' templates, is not installed.

    Raises:
        PlanError: if it is missing; the message has the command that installs it.
    """
    if find_spec("jinja2") is None:
        raise PlanError("an HTML page needs jinja2, which is not installed: pip install 'meshwright[pages]'")
