"""Every code block of the docs runs as pasted, and prints what the page shows."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import preloaded
from support.docs_blocks import ROOT, Block, DocsError, PageRun, blocks_of

PAGES = {path.name: path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))}
BLOCKS = {page: blocks_of(page, path.read_text()) for page, path in PAGES.items()}

# What does not run as a reader would run it: the word of the command line, what happens instead, and why.
DRY = {
    "make": ("make -n", "installs, trains or tests for minutes; a target that does not exist still fails"),
    "pytest": ("pytest --collect-only", "this is pytest; a selection without tests still fails"),
}
PARSED_ONLY = {
    "benchmarks": "takes minutes, and a quiet machine",
    "benchmarks.families.static": "takes minutes; tests/test_spmd.py checks families the same way",
    "benchmarks.random_programs": "takes minutes; tests/test_random_programs.py runs some of them",
    "--num_machines": "needs two machines; tests/test_launch_hosts.py makes two and runs the same commands",
}
ADDED = {
    "calibrate": (["--seconds", "1"], "measures for 100 seconds unless told otherwise"),
    "run_clm.py": (["--use_cpu"], "on a CPU, as the page says below the command"),
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("bin")
    (folder / "activate").write_text(f"export PATH={folder}:$PATH\n")
    make = folder / "make"
    make.write_text(f'#!/bin/sh\nexec {shutil.which("make")} -n "$@"\n')
    make.chmod(0o755)
    with preloaded.commands(folder, PARSED_ONLY, {word: added for word, (added, _) in ADDED.items()}):
        yield folder


def run(page: str, blocks: list[Block], folder: Path, commands: Path, request: Any) -> PageRun:
    page_run = PageRun(blocks, folder, commands, lambda ranks: request.getfixturevalue(f"pool{ranks}"))
    page_run.run()
    return page_run


@pytest.mark.parametrize("page", [page for page, blocks in BLOCKS.items() if {b.language for b in blocks} - {"text"}])
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path, commands: Path, request: Any) -> None:
    page_run = run(page, BLOCKS[page], tmp_path, commands, request)
    left = [block for block in BLOCKS[page] if block.language != "text" and block not in page_run.done]
    assert not left
