"""The links of the pages that mkdocs does not build lead to files and headings; mkdocs checks those of docs/."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from meshwright import errors
from support.docs_blocks import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "evidence").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
BLOCK = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_class_of_errors_has_an_anchor() -> None:
    """An error of the package is documented by its class, or is of a class of Python that has a section of its own."""
    page = (ROOT / "docs/errors.md").read_text().partition("## Classes")[2]
    headings = re.findall(r"^### (.*)$", page, re.MULTILINE)
    found = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    own = {name for name in found if not name.startswith("_")}
    assert own == set(headings[:-1])
    sources = [path for folder in ("plugin", "integrations") for path in (ROOT / folder).rglob("*.py")]
    raised = {name for path in sources for name in re.findall(r"\braise ([A-Z]\w*Error)\b", path.read_text())}
    of_python = {name for name in raised - own if hasattr(builtins, name)}
    assert of_python == set(re.findall(r"`(\w+Error)`", page.partition(f"### {headings[-1]}")[2]))
    # PlanErrors that the report and the planner recognise, and what the reader of files from outside raises to them.
    assert raised - own - of_python == {"NoRecordsError", "WrongConfigError", "OddFileError"}


def dead_links(page: Path, text: str) -> list[str]:
    dead = []
    for path, anchor in LINK.findall(BLOCK.sub("", text)):
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(f"{path}#{anchor}" if anchor else path)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page, page.read_text()) == []


def test_a_dead_link_is_found() -> None:
    text = "[a](docs/nowhere.md), [b](docs/design.md#nothing), [c](docs/design.md#glossary), [d](https://a.org/b)"
    assert dead_links(ROOT / "README.md", text) == ["docs/nowhere.md", "docs/design.md#nothing"]


def missing_files(text: str, folders: Iterable[Path]) -> list[str]:
    """Return the Python files that a text names, and that are at none of these paths."""
    named = re.findall(r"(?<![\w./-])[\w./]+\.py\b", text)
    return [name for name in named if not any((folder / name).exists() for folder in folders)]


def test_the_files_that_packages_and_the_design_name_exist() -> None:
    """The docstring of a package is the index of its files, and design.md that of the packages."""
    packages = ("plugin/meshwright", "plugin/meshwright_plan", "plugin/meshwright_tools", "integrations/meshwright_hf")
    roots = [ROOT / "plugin", *(ROOT / package for package in packages)]
    folders = [path.parent for root in roots for path in root.rglob("__init__.py")]
    for folder in folders:
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        assert missing_files(docstring, [folder, *roots]) == [], folder
    page = (ROOT / "docs/design.md").read_text()
    assert missing_files(page, folders) == []
    assert {*re.findall(r"`(\w+)/`", page)} <= {folder.name for folder in folders} | {"benchmarks", "conformance"}
    assert missing_files("see nowhere.py and roles/decoder.py", roots) == ["nowhere.py"]
