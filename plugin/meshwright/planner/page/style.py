"""The page's style sheet, with the parts' colours from the palette."""

from __future__ import annotations

from pathlib import Path

from meshwright.planner.page.draw import PALETTE, PART_OF_AXIS

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
