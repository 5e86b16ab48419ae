"""Every code block of the docs runs as pasted, and prints what the page shows."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import preloaded
from support.docs_blocks import ROOT, Block, DocsError, PageRun, blocks_of
from support.tiers import crossings

FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = {path.name: blocks_of(path.name, path.read_text()) for path in FILES}
Run = Callable[[list[Block]], PageRun]

# What does not run as a reader would run it, by a word of its command line: what happens instead, and why.
DRY = {
    "make": ("make -n", "installs, trains, tests or measures for minutes; an unknown target still fails"),
    "pip": ("a look at the extras that the package declares", "installs for minutes"),
    "pytest": ("pytest --collect-only", "this is pytest; a selection of no tests still fails"),
}
PIP = """#!{python}
import re, sys
from importlib.metadata import metadata
command, requirement = sys.argv[1:]
extras = re.fullmatch(r"[.](?:\\[(.+)\\])?", requirement)[1] or ""
unknown = set(filter(None, extras.split(","))) - set(metadata("meshwright").get_all("Provides-Extra"))
sys.exit(f"no such extra: {{unknown}}" if command != "install" or unknown else 0)
"""
PARSED_ONLY = {
    "conformance.gpu": "takes minutes and a GPU; tests/gpu_command/test_gpu_command.py runs it on a CPU",
    "conformance.random_programs": "takes minutes; tests/distribute/test_random_programs.py runs some of them",
    "examples.vision_language": "trains three times; tests/examples/test_examples.py compares the losses",
    "sweep": "searches for minutes; tests/cli/test_questions.py and tests/planner search",
    "--num_machines": "needs two machines; tests/cli/test_launch_hosts.py makes two and launches over them",
}
# Pages that run whole programs, which other tests run too.
WHOLE_PROGRAMS = [
    "CONTRIBUTING.md", "accelerate.md", "checkpoints.md", "compile.md", "context.md", "cuda.md", "data.md",
    "deepspeed.md", "launching.md", "lora.md", "moe.md", "pipeline.md", "planner.md", "primitives.md", "sft.md",
    "trainer.md", "transformers.md", "verify.md", "vision.md",
]  # fmt: skip
ADDED = {
    "calibrate": (["--seconds", "1"], "measures for 100 seconds unless told otherwise"),
    "run_clm.py": (["--use_cpu"], "is what the page adds on a CPU, below the command"),
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with the commands that blocks find, as in the bin of a venv."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "activate").write_text(f"export PATH={folder}:$PATH\n")
    make = folder / "make"
    make.write_text(f'#!/bin/sh\nexec {shutil.which("make")} -n "$@"\n')
    pip = folder / "pip"
    pip.write_text(PIP.format(python=sys.executable))
    for command in (make, pip):
        command.chmod(0o755)
    with preloaded.commands(folder, PARSED_ONLY, {word: arguments for word, (arguments, _) in ADDED.items()}):
        yield folder


@pytest.fixture
def run(tmp_path: Path, commands: Path, request: Any) -> Run:
    def run(blocks: list[Block]) -> PageRun:
        page = PageRun(blocks, tmp_path, commands, lambda ranks: request.getfixturevalue(f"pool{ranks}"))
        page.run()
        return page

    return run


def runnable(blocks: list[Block]) -> list[Block]:
    return [block for block in blocks if block.language != "text" or block.is_output]


@pytest.mark.parametrize(
    "page", crossings([page for page, blocks in BLOCKS.items() if runnable(blocks)], only=WHOLE_PROGRAMS)
)
def test_the_blocks_of_a_page_run(page: str, run: Run) -> None:
    assert run(BLOCKS[page]).done == runnable(BLOCKS[page])


def test_what_does_not_run_is_in_the_docs() -> None:
    """No entry of the tables is left over."""
    shell = " ".join(block.text for blocks in BLOCKS.values() for block in blocks if block.language == "bash").split()
    assert {*DRY, *PARSED_ONLY, *ADDED} <= set(shell)


def test_no_block_hides() -> None:
    """Every fence is one that the extractor knows, and shell and Python go by one name each."""
    for path in FILES:
        fences = [line for line in path.read_text().splitlines() if line.lstrip().startswith(("```", "~~~"))]
        assert len(fences) == 2 * len(BLOCKS[path.name])
    assert {block.language for blocks in BLOCKS.values() for block in blocks} == {
        "bash", "diff", "json", "python", "text",
    }  # fmt: skip


PRELUDE = "<!-- given: mw, model, optimizer, loader; ranks: 2 -->\n"
RIGHT = f"""
{PRELUDE}```python
model, optimizer, loader = mw.to_distributed(model, optimizer, loader, plan="tp2")
print(mw.plan_of(model).tp)
```

```text
2
```

In the same program:

```python
del model
```

<!-- files: one_device.py as train.py; file: changed.py -->
```diff
+import os
 for batch in loader:
```

- In a list:

  <!-- files: DIR -->
  ```bash
  make demo
  ls DIR/config.json && python changed.py
  ```
"""


def test_a_page_that_is_right(run: Run) -> None:
    blocks = blocks_of("page.md", RIGHT)
    assert [(block.line, block.language) for block in blocks] == [
        (4, "python"), (9, "text"), (15, "python"), (20, "diff"), (28, "bash"),
    ]  # fmt: skip
    assert run(blocks).done == blocks


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("given: mw, ", "given: ", r'"page_md.py", line 4, in <module>[\s\S]*NameError: name \'mw\''),
        ("given: mw, ", "given: mw, engin, ", "ImportError: cannot import name 'engin'"),
        ("optimizer, loader, plan=", "optimizer, loader, plans=", "PlanError: .*no argument 'plans'; write plan"),
        ("```text\n2", "```text\n3", r"page.md:9 \(text\): this is not printed:\n3"),
        ("del model", "del modle", r'"page_md.py", line 15, in <module>[\s\S]*NameError'),
        (" for batch in loader", " for rows in loader", "its old lines are 0 times in"),
        ("+import os", "+import ost", r"page.md:28 \(bash\): exit code 1[\s\S]*No module named 'ost'"),
        ("python changed.py", "python one.py", "No such file"),
        ("make demo", "make demos", r"exit code 2 of[\s\S]*No rule to make target 'demos'"),
        ("make demo", "make demo\nmeshwright plan --gpu=h100", r"exit code 2 of[\s\S]*--model"),
        ("make demo", "make demo\nmeshwright launch --num_machine 2 train.py", "No such option"),
        ("make demo", "make demo\npip install '.[hff]'", "no such extra: {'hff'}"),
        ("make demo", "make demo\npytest tests/test_zeros.py", "exit code 4 of"),
        ("```diff", "```patch", "nothing runs this language"),
        ("; file: changed.py", "; fil: changed.py", "unknown notes {'fil'}"),
    ],
)
def test_a_page_that_is_wrong(old: str, new: str, error: str, run: Run) -> None:
    assert RIGHT.count(old) == 1
    with pytest.raises(DocsError, match=error):
        run(blocks_of("page.md", RIGHT.replace(old, new)))


def test_a_block_without_an_end() -> None:
    with pytest.raises(DocsError, match=r"page.md:2: a block without an end"):
        blocks_of("page.md", "```python\nprint(1)\n")
