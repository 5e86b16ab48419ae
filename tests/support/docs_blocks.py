"""The code blocks of a page of the docs, run as pasted, in a folder and in the order of the page.

What a block continues stands in a comment before it, which readers of the page do not see:

    <!-- given: model, optimizer; ranks: 4 -->     names of ``support.given``; a program of its own on 4
                                                   ranks, as of torchrun; of meshwright launch with "4, launched"
    <!-- files: config.json, text.txt as a.txt --> files of ``support.given``
    <!-- file: train.py -->                        saved under this name, for a shell block further down
    <!-- run: torchrun --nproc-per-node 4 a.py --> saved as a.py, and run by this command, which the prose names
    <!-- part of: out/config.json -->              JSON that stands in this file
    <!-- output: measured -->                      of this output, numbers like 1.5e-16 and what follows them may differ

Python blocks without ``ranks``, ``file`` or ``run`` belong to the program above them. A text block right below one
of another language is what that prints.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from harness import WorkerPool
from support.given import FILES
from support.trainers import fresh_accelerate

ROOT = Path(__file__).parents[2]
# A clone, as the shell blocks see it.
CLONE = (
    "LICENSE",
    "Makefile",
    "benchmarks",
    "conformance",
    "constraints.txt",
    "examples",
    "integrations",
    "plugin",
    "pyproject.toml",
    "tests",
)
NOTES = {"given", "ranks", "files", "file", "run", "part of", "output"}
TIMEOUT = 120  # seconds for a block
FENCE = re.compile(r"( *)```(\w*)$")
NOTE = re.compile(rf" *<!-- ((?:{'|'.join(NOTES)}): .*) -->$")
MEASURED = re.compile(r"\d\.\d+e-\d+|\.\.\.|\(\d+ s\)")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        page: the page's file name.
        line: of its first line, from 1.
        language: what stands behind the fence.
        lines: its lines, without the indentation of a list that it stands in.
        notes: what the comment before it says.
        note_line: of the comment, 0 without one.
        is_output: whether it is right below a block that may print it, with no prose between them.
    """

    page: str
    line: int
    language: str
    lines: tuple[str, ...]
    notes: dict[str, str] = field(hash=False)
    note_line: int
    is_output: bool

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language})"


class DocsError(AssertionError):
    """A block that does not run as pasted, or does not print what the page shows."""


def blocks_of(page: str, text: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    found: list[Block] = []
    notes: dict[str, str] = {}
    note_line, is_output, opened = 0, False, None
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        fence = FENCE.fullmatch(line)
        if opened is None and (note := NOTE.fullmatch(line)):
            notes, note_line = dict(part.split(": ", 1) for part in note[1].split("; ")), number
        elif opened is None and fence:
            opened = (number + 1, fence)
        elif opened is not None and fence and fence[1] == opened[1][1]:
            start, (indent, language) = opened[0], opened[1].groups()
            inside = tuple(inner.removeprefix(indent) for inner in lines[start - 1 : number - 1])
            found.append(Block(page, start, language, inside, notes, note_line, is_output))
            if unknown := notes.keys() - NOTES:
                raise DocsError(f"{found[-1]}: unknown notes {unknown}")
            notes, note_line, is_output, opened = {}, 0, language != "text", None
        elif opened is None and line.strip():
            notes, note_line, is_output = {}, 0, False
    if opened is not None:
        raise DocsError(f"{page}:{opened[0]}: a block without an end")
    return found


class PageRun:
    """Runs the blocks of one page; ``done`` are those that were run or compared.

    Args:
        blocks: of the page.
        folder: an empty one to work in.
        commands: the folder with ``python``, ``torchrun`` and others, and ``activate``, as in the bin of a venv.
        pool: gives the workers for a number of ranks.
    """

    def __init__(self, blocks: list[Block], folder: Path, commands: Path, pool: Callable[[int], WorkerPool]) -> None:
        self.blocks, self.folder, self.pool = blocks, folder, pool
        self.done: list[Block] = []
        self.printed = ""
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("MESHWRIGHT_")},
            "PATH": os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHON_EXEC": str(commands / "python"),  # what torchrun and accelerate start
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        for name in CLONE:
            (folder / name).symlink_to(ROOT / name)
        (folder / ".venv").mkdir()
        (folder / ".venv" / "bin").symlink_to(commands)

    def run(self) -> None:
        """Run every block, or raise at the first that fails."""
        programs = _programs(self.blocks)
        for position, block in enumerate(self.blocks):
            for needed in programs.get(block, [block]):
                self._make_files(needed)
            shown = [after.text for after in self.blocks[position + 1 : position + 2] if after.is_output]
            fails = bool(shown and re.match(r"\w+Error: ", shown[0]))
            if block in programs:
                self._run_python(block, programs[block], fails)
            elif block.language == "bash":
                self._run_shell(block, block.text, fails)
            elif block.language == "diff":
                self._apply(block)
            elif block.language == "json":
                self._find_json(block)
            elif block.language == "text":
                if block.is_output:
                    self._compare(block)
            elif block.language != "python":
                raise DocsError(f"{block}: nothing runs this language; tag it as text if nothing can")
            if block.language != "text" or block.is_output:
                self.done.append(block)
        for block in self.blocks:
            if (name := block.notes.get("file")) and not any(
                name in later.text for later in self.blocks if later.language == "bash" and later.line > block.line
            ):
                raise DocsError(f"{block}: no shell block below runs {name}")

    def _make_files(self, block: Block) -> None:
        for wanted in filter(None, block.notes.get("files", "").split(", ")):
            source, _, name = wanted.partition(" as ")
            path = self.folder / (name or source)
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_dir():
                FILES[source](path)

    def _run_python(self, first: Block, blocks: list[Block], fails: bool) -> None:
        """The program's lines have the numbers of the page's, so that tracebacks point into the page."""
        program = [""] * (blocks[-1].line + len(blocks[-1].lines))
        for block in blocks:
            if given := block.notes.get("given"):
                program[block.note_line - 1] = (
                    f"import support.given; support.given.fresh(); from support.given import {given}; del support"
                )
            program[block.line - 1 : block.line - 1 + len(block.lines)] = block.lines
        command = first.notes.get("run", "")
        name = first.notes.get("file") or command.rpartition(" ")[2] or f"{first.page.removesuffix('.md')}_md.py"
        (self.folder / name).write_text("\n".join(program))
        ranks, _, launched = first.notes.get("ranks", "1").partition(", ")
        if "file" in first.notes:
            return
        if ranks == "1":
            self._run_shell(first, command or f"python {name}", fails)
            return
        try:
            workers = self.pool(int(ranks))
            self.printed = workers.run(run_on_rank, name, str(self.folder), bool(launched), timeout=TIMEOUT)[0]
        except Exception as error:
            raise DocsError(f"{first}: {error}") from error

    def _run_shell(self, block: Block, text: str, fails: bool) -> None:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text], cwd=self.folder, env=self.environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            self.printed, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise DocsError(f"{block}: had not ended after {TIMEOUT} s:\n{error.output}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if (process.returncode != 0) != fails:
            raise DocsError(f"{block}: exit code {process.returncode} of\n{text}\n{self.printed}")

    def _apply(self, block: Block) -> None:
        """Change the file that the block is about, which must hold the old lines in one place, and save it."""
        script = (self.folder / block.notes["files"].rpartition(" as ")[2]).read_text()
        old, new = ("".join(f"{line[1:]}\n" for line in block.lines if line[:1] != omitted) for omitted in ("+", "-"))
        if script.count(old) != 1:
            raise DocsError(f"{block}: its old lines are {script.count(old)} times in\n{script}")
        (self.folder / block.notes["file"]).write_text(script.replace(old, new))

    def _find_json(self, block: Block) -> None:
        whole = json.loads((self.folder / block.notes["part of"]).read_text())
        part = json.loads(block.text if block.text.startswith("{") else f"{{{block.text}}}")
        if not part.items() <= whole.items():
            raise DocsError(f"{block}: {part} is not in {whole}")

    def _compare(self, block: Block) -> None:
        printed = " ".join(self.printed.split())
        for line in block.lines:
            if block.notes.get("output") == "measured":
                line = MEASURED.split(line)[0]
            if " ".join(line.split()) not in printed:
                raise DocsError(f"{block}: this is not printed:\n{line}\nbut:\n{self.printed}")


def _programs(blocks: list[Block]) -> dict[Block, list[Block]]:
    """The Python blocks that run together, by the first of them."""
    programs: dict[Block, list[Block]] = {}
    for block in blocks:
        if block.language == "python":
            if not programs or block.notes.keys() & {"ranks", "file", "run"}:
                programs[block] = []
            programs[next(reversed(programs))].append(block)
    return programs


def run_on_rank(name: str, folder: str, launched: bool) -> str:
    """Run a program on a rank of a pool, which keeps nothing of it; return what it printed."""
    output = io.StringIO()
    with _as_found(folder, launched), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        runpy.run_path(name, run_name="__main__")
    return output.getvalue()


@contextlib.contextmanager
def _as_found(folder: str, launched: bool) -> Iterator[None]:
    """Undo what a program changes in its process."""
    import meshwright_hf
    import meshwright_hf.accelerate

    environment = {"ACCELERATE_USE_CPU": "true"} if launched else {}
    start_method = multiprocessing.get_start_method(allow_none=True)
    with contextlib.chdir(folder), mock.patch.dict(os.environ, environment), fresh_accelerate():
        multiprocessing.set_start_method(None, force=True)  # the platform's, not that of the pool
        try:
            yield
        finally:
            multiprocessing.set_start_method(start_method, force=True)
            meshwright_hf.accelerate.deactivate()
            meshwright_hf.unregister()
            if groups := sys.modules.get("deepspeed.utils.groups"):
                groups._release_process_group_references()
