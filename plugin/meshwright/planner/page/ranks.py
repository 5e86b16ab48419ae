"""The rank grid: the node of each rank, and its coordinate on each mesh axis."""

from __future__ import annotations

import math

from meshwright.planner.candidate import Candidate
from meshwright.planner.page.draw import AXES, Box, Svg, span
from meshwright.planner.search import Search

_CELLS = 64  # ranks drawn in a wide diagram; half as many in a narrow one
_COLUMNS = 4  # ranks side by side in a node
_SHADES = 8  # steps of lightness along an axis
_WIDE_COLUMNS = 16  # ranks side by side in a node of many ranks
_CELL = 66  # pixels per rank
_GAP = 16


def coordinates(plan: Candidate, rank: int) -> dict[str, int]:
    """Return a rank's coordinate on each axis; tp is the innermost axis, then cp, dp and pp.

    Example:
        >>> coordinates(Candidate(replicate=2, tp=2), 3)
        {'pp': 0, 'dp': 1, 'cp': 0, 'tp': 1}
    """
    places: dict[str, int] = {}
    for axis, size in (("tp", plan.tp), ("cp", plan.cp), ("dp", plan.dp), ("pp", plan.pp)):
        rank, places[axis] = divmod(rank, size)
    return dict(reversed(places.items()))


def sizes(plan: Candidate) -> dict[str, int]:
    """Return the size of each axis, outermost first."""
    return {"pp": plan.pp, "dp": plan.dp, "cp": plan.cp, "tp": plan.tp}


def rank_picture(found: Search, width: float, ident: str) -> Svg:
    """Draw the first nodes as boxes and their ranks as cells with a chip for each axis."""
    plan, cluster = found.choices[0].plan, found.cluster
    gpus, in_node = cluster.gpus, min(cluster.gpus_per_node, cluster.gpus)
    axes = [axis for axis, size in sizes(plan).items() if size > 1] or ["dp"]
    cells = _CELLS if width > 480 else _CELLS // 2
    in_box = min(in_node, cells)
    nodes = min(cluster.nodes, max(1, cells // in_box))

    is_wide = width > 480
    across = min(in_box, _COLUMNS if in_box <= 2 * _COLUMNS or not is_wide else _WIDE_COLUMNS)
    room = int((width + _GAP) // (across * _CELL + 8 + _GAP)) if is_wide else 1
    if cluster.nodes > nodes > room > 0:
        nodes -= nodes % room  # if some nodes are left out anyway, draw whole rows only
    boxes = math.ceil(nodes / math.ceil(nodes / max(1, room)))
    box = min(max(340.0, across * _CELL + 12), (width - _GAP * (boxes - 1)) / boxes)
    cell, tall = (box - 12) / across, 44
    deep = math.ceil(in_box / across)
    box_height = 26 + deep * tall + 8
    rows = math.ceil(nodes / boxes)
    more = cluster.nodes - nodes
    cut = in_node - in_box
    foot = 24 if more or cut else 0
    svg = Svg(
        ident=ident, width=width, height=rows * (box_height + _GAP) - _GAP + foot + 2,
        title="Where each rank sits",
        description=f"{gpus} ranks in {cluster.nodes} nodes of {in_node}; "
        + ", ".join(f"{axis}={size}" for axis, size in sizes(plan).items())
        + "; from the innermost to the outermost, the axes are tp, cp, dp and pp.",
    )  # fmt: skip
    for node in range(nodes):
        left = node % boxes * (box + _GAP)
        top = node // boxes * (box_height + _GAP) + 1
        first = node * in_node
        svg.rect(Box(left + 0.5, top, box - 1, box_height), "node", radius=6)
        svg.text(left + 10, top + 18, f"node {node}", "strong")
        svg.text(left + box - 10, top + 18, _ranks(first, first + in_node - 1), "muted num", anchor="end")
        for index in range(in_box):
            x, y = left + 6 + index % across * cell, top + 26 + index // across * tall
            _cell(svg, plan, first + index, axes, Box(x, y, cell, tall))
    if more or cut:
        rest = f"{more:,} more node{'s' if more != 1 else ''}" if more else ""
        where = " and ".join(words for words in ("the rest of this node" if cut else "", rest) if words)
        svg.text(0, svg.height - 6, f"… {where}: ranks {span((nodes - 1) * in_node + in_box, gpus - 1)}", "muted")
    return svg


def _ranks(first: int, last: int) -> str:
    return f"rank{'s' if last > first else ''} {span(first, last)}"


def _cell(svg: Svg, plan: Candidate, rank: int, axes: list[str], box: Box) -> None:
    x, y, width, height = box
    places = coordinates(plan, rank)
    title = f"rank {rank}: " + ", ".join(f"{axis}={places[axis]}" for axis in places)
    svg.open("rank", rank=rank)
    svg.rect(Box(x + 2, y + 2, width - 4, height - 4), "rank-cell", title=title, radius=4)
    svg.text(x + width / 2, y + 17, str(rank), "num rank-number", anchor="middle")
    chip = (width - 10) / len(axes)
    for index, axis in enumerate(axes):
        shade = places[axis] * _SHADES // max(_SHADES, sizes(plan)[axis]) % _SHADES
        left = x + 5 + index * chip
        svg.rect(Box(left, y + 23, chip - 1, 15), f"chip f-{AXES[axis]} s{shade}", radius=2)
        svg.text(left + (chip - 1) / 2, y + 34.5, str(places[axis]), f"chip-text c-{AXES[axis]}", anchor="middle")
    svg.close()
