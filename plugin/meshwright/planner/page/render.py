"""Fills a page's template, and writes pages to files."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from meshwright.errors import PlanError
from meshwright.planner.page.style import style


def render(template: Path, *, own_style: str = "", **values: object) -> str:
    """Return the page of a template, which may extend ``base.html.j2`` and import ``table.html.j2``.

    Args:
        template: the template's file.
        own_style: rules that follow the style sheet of all pages.
        values: the template's variables.
    """
    return str(fragment(template, style=Markup(style() + own_style), **values))


def fragment(template: Path, **values: object) -> Markup:
    """Return the markup of a template that is a part of a page."""
    loader = FileSystemLoader([template.parent, Path(__file__).parent])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return Markup(environment.get_template(template.name).render(**values))


def as_script(data: object) -> str:
    """Return JSON for a script element, in which no text can end the element or begin markup."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def write_whole(content: str, path: Path, *, option: str) -> None:
    """Write a file atomically, so that its readers never see a part of it.

    Args:
        content: the file's text.
        path: the file.
        option: the option that names the file, for the error.

    Raises:
        PlanError: if a file cannot be made in the folder.
        OSError: if the disk is full; an older file stays.
    """
    try:
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise PlanError(f"{option} {path}: cannot write to {path.parent} ({error.strerror})") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
