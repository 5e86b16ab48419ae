"""The page's style sheet, with the parts' colours from the palette."""

from __future__ import annotations

from pathlib import Path

from meshwright.planner.page.draw import AXES, PALETTE

_SHADES = 8


def style() -> str:
    """Return the style sheet."""
    base = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    light = "".join(_part(name, colours[0]) for name, colours in PALETTE.items())
    dark = "".join(_part(name, colours[1]) for name, colours in PALETTE.items())
    # A chip's fill, the axis colour mixed with the card's, shows the coordinate. Its text has the page's text colour.
    chips = "".join(
        f".chip.f-{part}.s{shade} {{ fill: color-mix(in srgb, var(--{part}) {62 - 7 * shade}%, var(--card)); }}\n"
        for part in AXES.values()
        for shade in range(_SHADES)
    )
    return f"{base}{light}{chips}@media screen and (prefers-color-scheme: dark) {{\n{dark}}}\n"


def _part(name: str, colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in (red, green, blue)]
    bright = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    ink = "#10161d" if bright > 0.2 else "#ffffff"  # the ink with more contrast to the colour
    return f":root {{ --{name}: {colour}; }} .f-{name} {{ fill: {colour}; }} .t-{name} {{ fill: {ink}; }}\n"
