"""The page's style sheet, with the parts' colours from the palette."""

from __future__ import annotations

from meshwright.planner.page.draw import AXES, PALETTE

_SHADES = 8

_BASE = """
:root { color-scheme: light dark; --page: #f4f5f7; --card: #ffffff; --ink: #16202c; --soft: #556172; --line: #dfe3e9;
  --lane: #f1f3f6; --accent: #b3261e; --dot: #7d8fa6; --front: #0b5a94; --hatch: rgba(255,255,255,.42); }
@media screen and (prefers-color-scheme: dark) { :root { --page: #0f141a; --card: #171d25; --ink: #e8ecf1;
  --soft: #a3afbd; --line: #2b3440; --lane: #1f2731; --accent: #ff8a80; --dot: #73859b; --front: #6cb8ee;
  --hatch: rgba(10,14,20,.34); } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 Inter, system-ui, -apple-system,
  "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 1280px; margin: 0 auto; padding: 32px 40px 48px; display: grid; gap: 24px;
  grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); }
header, .wide, footer { grid-column: 1 / -1; }
h1 { font-size: 28px; line-height: 1.2; letter-spacing: -.015em; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; line-height: 1.3; letter-spacing: -.005em; margin: 0; }
p { margin: 4px 0 0; color: var(--soft); }
section > p { margin-bottom: 16px; font-size: 13.5px; max-width: 112ch; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 22px 24px; }
.chosen { display: flex; flex-wrap: wrap; align-items: baseline; gap: 8px 14px; margin-top: 18px; }
.chosen code { font: 600 16px/1.4 ui-monospace, "SF Mono", "Cascadia Mono", Menlo, "DejaVu Sans Mono", monospace;
  background: var(--lane); border: 1px solid var(--line); border-radius: 8px; padding: 5px 11px;
  overflow-wrap: anywhere; }
.chosen span { color: var(--soft); font-size: 14px; flex: 1 1 20rem; }
.chosen .future { flex: none; color: var(--accent); border: 1px solid currentColor; border-radius: 99px;
  padding: 1px 10px; font-size: 12.5px; font-weight: 600; }
dl { display: grid; grid-template-columns: repeat(5, minmax(0, 1fr)); gap: 0; margin: 22px 0 0; padding-top: 18px;
  border-top: 1px solid var(--line); }
dl div + div { border-left: 1px solid var(--line); padding-left: 20px; }
dt { font-size: 12.5px; color: var(--soft); }
dd { margin: 0; } dd b { display: block; font-size: 25px; line-height: 1.3; letter-spacing: -.02em; font-weight: 650;
  font-variant-numeric: tabular-nums; }
dd small { display: block; color: var(--soft); font-size: 12.5px; line-height: 1.4; padding-right: 12px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; line-height: 1.4; margin-top: 10px; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 12.5px; }
th, td { padding: 6px 12px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td { overflow-wrap: anywhere; } td:first-child { font-weight: 550; } td.num, th.num { text-align: right; padding: 6px 0;
  white-space: nowrap; font-variant-numeric: tabular-nums; }
.why td:first-child { width: 11em; }
details { font-size: 13.5px; } summary { cursor: pointer; color: var(--front); padding: 8px 0 0; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; margin: 14px 0 0;
  font-size: 12.5px; color: var(--soft); }
.legend li { display: flex; align-items: center; gap: 7px; } .legend b { color: var(--ink); font-weight: 550; }
.legend svg { width: 13px; height: 13px; flex: none; border-radius: 3px; }
.picture { overflow-x: auto; } .picture svg { display: block; height: auto; }
.picture.narrow { display: none; } .wide .picture:not(.narrow) svg { min-width: 900px; }
.picture svg { width: 100%; }
footer { color: var(--soft); font-size: 12.5px; }
text { font-size: 12px; fill: var(--ink); font-family: inherit; }
.label, .muted, .axis { fill: var(--soft); } .strong { font-weight: 650; } .num { font-variant-numeric: tabular-nums; }
.axis { font-size: 11.5px; font-variant-numeric: tabular-nums; }
.inside { font-size: 11.5px; font-weight: 550; pointer-events: none; } .small { font-size: 11px; font-weight: 400; }
.halo, .mark-label { paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round; }
.part { stroke: var(--card); stroke-width: .75px; } .hatch { fill: url(#hatch); pointer-events: none; }
.hatch-line { stroke: var(--hatch); stroke-width: 2.5px; }
.mark { stroke: var(--accent); stroke-width: 1.5px; stroke-dasharray: 5 3; fill: none; pointer-events: none; }
.mark-label { fill: var(--accent); font-size: 11.5px; font-weight: 600; }
.grid { stroke: var(--line); fill: none; } .tick { stroke: var(--soft); fill: none; } .lane { fill: var(--lane); }
.torn { fill: var(--card); stroke: var(--line); }
.node { fill: var(--lane); stroke: var(--line); } .rank-cell { fill: var(--card); stroke: var(--line); }
.rank-number { font-weight: 600; } .rank-number, .chip-text { pointer-events: none; }
.chip-text { font-size: 10.5px; font-weight: 600; font-variant-numeric: tabular-nums; }
.dot { fill: var(--dot); opacity: .55; } .front { fill: none; stroke: var(--front); stroke-width: 2.25px; }
.front-dot { fill: var(--front); stroke: var(--card); stroke-width: 1.25px; }
.choice { fill: var(--accent); stroke: var(--card); stroke-width: 1.5px; }
@media (max-width: 1020px) { main { grid-template-columns: minmax(0, 1fr); padding: 24px; } }
@media (max-width: 640px) { main { padding: 12px; gap: 12px; } .card { padding: 16px 14px; } h1 { font-size: 22px; }
  dl { grid-template-columns: 1fr 1fr; gap: 14px 0; } dl div + div { border-left: 0; padding-left: 0; }
  dl div:nth-child(even) { border-left: 1px solid var(--line); padding-left: 14px; }
  .picture { display: none; } .picture.narrow { display: block; } .why td:first-child { width: 7em; } }
@media print { :root { color-scheme: light; --page: #fff; } main { padding: 0; gap: 14px; max-width: none; }
  body { font-size: 12px; } .card { break-inside: avoid; padding: 12px 14px; }
  .picture.narrow { display: none; } .picture:not(.narrow) { display: block; }
  .wide .picture:not(.narrow) svg { min-width: 0; }
  .part, .chip, .dot, .node, .choice, .front-dot { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def style() -> str:
    """Return the style sheet."""
    light = "".join(_part(name, colours[0]) for name, colours in PALETTE.items())
    dark = "".join(_part(name, colours[1]) for name, colours in PALETTE.items())
    # A chip's shade shows the coordinate: the axis colour mixed with the card's. Its text stays in the ink's colour.
    chips = "".join(
        f".chip.f-{part}.s{shade} {{ fill: color-mix(in srgb, var(--{part}) {62 - 7 * shade}%, var(--card)); }}\n"
        for part in AXES.values()
        for shade in range(_SHADES)
    )
    return f"{_BASE}{light}{chips}@media screen and (prefers-color-scheme: dark) {{\n{dark}}}\n"


def _part(name: str, colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in (red, green, blue)]
    bright = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    ink = "#10161d" if bright > 0.2 else "#ffffff"  # the one with more contrast
    return f":root {{ --{name}: {colour}; }} .f-{name} {{ fill: {colour}; }} .t-{name} {{ fill: {ink}; }}\n"
