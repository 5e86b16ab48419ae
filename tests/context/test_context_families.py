"""evidence/families_context.md has a row for every dense decoder, and refuses those that the planner leaves out."""

from __future__ import annotations

from conformance.families.context_page import PAGE, REFUSED, rows
from conformance.families.models import DENSE
from meshwright.plan.parts import METHODS
from meshwright_plan.job.layer_shape import traits_of

ROWS = rows(PAGE.read_text())


def test_the_page_has_every_family_and_no_difference() -> None:
    assert ROWS.keys() == DENSE.keys()
    assert not [family for family, cells in ROWS.items() if any("no" in cell.split("*") for cell in cells)]


def test_the_planner_knows_what_is_refused() -> None:
    for family, cells in ROWS.items():
        refused = {method for method, cell in zip(METHODS, cells, strict=True) if cell == REFUSED}
        known = set(METHODS) - set(traits_of(family, {}).context)
        assert refused == known, (family, refused, known)
