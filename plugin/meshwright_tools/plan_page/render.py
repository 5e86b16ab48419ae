"""Fills the templates of a page, and draws its SVG shapes.

Each part of the time or memory (matmul, weights, ...) has one colour in all diagrams. Text widths are estimated.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from meshwright.mesh.rank_grid import AXES

_CHARACTER = 0.56  # mean width of a character, relative to the font size

# (light, dark) colour of each part: hues of Okabe and Ito and of Tol, which also differ in lightness. Compute is blue,
# communication warm, idle time grey. A mesh axis has the colour of the communication over it.
PALETTE: dict[str, tuple[str, str]] = {
    "matmul": ("#0072b2", "#2b8fd0"),
    "attention": ("#56b4e9", "#7cc8f2"),
    "elementwise": ("#b5dcf3", "#c9e6f7"),
    "recompute": ("#3f5f8a", "#5f82b3"),
    "tensor": ("#d55e00", "#e8742a"),
    "context": ("#e69f00", "#efb02e"),
    "experts": ("#a6473a", "#c9695b"),
    "data": ("#f2d16b", "#f5dc8a"),
    "bubble": ("#d9dde3", "#3c4450"),
    "optimizer": ("#009e73", "#1fb58b"),
    "other": ("#8d97a5", "#8d97a5"),
    "weights": ("#4b3b8f", "#7a69c9"),
    "gradients": ("#a99ce0", "#bdb2ec"),
    "activations": ("#e3a9c6", "#ebb9d2"),
    "logits": ("#882255", "#b8467f"),
    "unsharded": ("#ddcc77", "#e5d78f"),
    "working": ("#8a8a2e", "#a6a64a"),
    "communication": ("#f09a66", "#f4ab7f"),
    "slack": ("#aab3bf", "#6f7a88"),
    "forward": ("#1f4e79", "#3f78ad"),
    "backward": ("#8fb4d6", "#a9c8e4"),
}
PART_OF_AXIS = {**AXES, "pp": "weights"}  # mesh axis -> the part that has its colour
HATCHED = frozenset({"recompute", "bubble", "other", "slack"})


def number(value: float) -> str:
    """Return a coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def text_width(words: str, size: float) -> float:
    """Return the approximate width of a text."""
    return _CHARACTER * size * len(words)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about ``count`` round numbers from ``low`` to ``high``, which may be of any size.

    Example:
        >>> ticks(0, 80, 4)
        [0.0, 20.0, 40.0, 60.0, 80.0]
        >>> ticks(0, 0.0042, 5)
        [0.0, 0.001, 0.002, 0.003, 0.004]
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.99)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


class Box(NamedTuple):
    """The place and the size of a rectangle."""

    x: float
    y: float
    width: float
    height: float


@dataclass(kw_only=True)
class Svg:
    """One diagram.

    Args:
        ident: id of the diagram, unique on the page, to which its title and description refer.
        width, height: size of the diagram; the page may shrink it. The height may be set while it is drawn.
        title, description: text for screen readers.
    """

    ident: str
    width: float
    height: float = 0
    title: str
    description: str
    parts: list[str] = field(default_factory=list)

    def rect(self, box: Box, kind: str, *, title: str = "") -> None:
        """Add a rectangle of the CSS class ``kind``."""
        x, y, width, height = box
        size = f'x="{number(x)}" y="{number(y)}" width="{number(max(0, width))}" height="{number(height)}"'
        self._add(f'<rect {size} class="{kind}"', "rect", title)

    def part(self, box: Box, name: str, *, title: str = "") -> None:
        """Add a rectangle in a part's colour, hatched if the part is not useful work."""
        self.rect(box, f"part f-{name}", title=title)
        if name in HATCHED:
            self.rect(box, "hatch")

    def text(self, x: float, y: float, words: str, kind: str = "", *, anchor: str = "start") -> None:
        """Add a text with its baseline at y."""
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        style = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{number(x)}" y="{number(y)}"{where}{style}>{escape(words)}</text>')

    def path(self, path: str, kind: str, *, title: str = "") -> None:
        """Add a path."""
        self._add(f'<path d="{path}" class="{kind}"', "path", title)

    def circle(self, x: float, y: float, radius: float, kind: str, *, title: str = "") -> None:
        """Add a disc."""
        self._add(f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" class="{kind}"', "circle", title)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """Add a line."""
        self.path(f"M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}", kind)

    def _add(self, start: str, tag: str, title: str) -> None:
        self.parts.append(f"{start}><title>{escape(title)}</title></{tag}>" if title else f"{start}/>")

    def __str__(self) -> str:
        size = f'viewBox="0 0 {number(self.width)} {number(self.height)}" width="{number(self.width)}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" id="{self.ident}" role="img" {size} '
            f'aria-labelledby="{self.ident}-title {self.ident}-desc">'
            f'<title id="{self.ident}-title">{escape(self.title)}</title>'
            f'<desc id="{self.ident}-desc">{escape(self.description)}</desc>{"".join(self.parts)}</svg>'
        )


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
