"""The links of the pages that mkdocs does not build lead to files and headings; mkdocs checks those of docs/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.docs_blocks import ROOT

PAGES = sorted(ROOT.glob("*.md"))
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
BLOCK = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path, text: str) -> list[str]:
    dead = []
    for path, anchor in LINK.findall(BLOCK.sub("", text)):
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(f"{path}#{anchor}" if anchor else path)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page, page.read_text()) == []


def test_a_dead_link_is_found() -> None:
    text = "[a](docs/nowhere.md), [b](docs/design.md#nothing), [c](docs/design.md#glossary), [d](https://a.org/b)"
    assert dead_links(ROOT / "README.md", text) == ["docs/nowhere.md", "docs/design.md#nothing"]
