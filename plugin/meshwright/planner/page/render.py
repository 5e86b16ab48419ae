"""Fills a page's template."""

from __future__ import annotations

import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from meshwright.planner.page.draw import PALETTE, PART_OF_AXIS


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


_SHADES = 8


def style() -> str:
    """Return the style sheet."""
    base = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    light = "".join(_part(name, colours[0]) for name, colours in PALETTE.items())
    dark = "".join(_part(name, colours[1]) for name, colours in PALETTE.items())
    dark_mode = f"@media screen and (prefers-color-scheme: dark) {{\n{dark}{_chips(40, 4)}}}\n"
    return f"{base}{light}{_chips(62, 7)}{dark_mode}"


def _chips(most: int, step: int) -> str:
    """Return the fills of chips: the axis colour, in percent by coordinate, mixed with the card's.

    A chip's text has the page's text colour, from which the mixture must differ enough to be read.
    """
    return "".join(
        f".chip.f-{part}.s{shade} {{ fill: color-mix(in srgb, var(--{part}) {most - step * shade}%, var(--card)); }}\n"
        for part in PART_OF_AXIS.values()
        for shade in range(_SHADES)
    )


def _part(name: str, colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in (red, green, blue)]
    bright = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    ink = "#10161d" if bright > 0.2 else "#ffffff"  # the ink with more contrast to the colour
    return f":root {{ --{name}: {colour}; }} .f-{name} {{ fill: {colour}; }} .t-{name} {{ fill: {ink}; }}\n"
