"""The sizes that ``make lint`` holds: none may be larger than in sizes.json; ``--write`` writes what they are now.

A commit that makes one larger changes the file, and its message says why.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HELD = ROOT / ".ci" / "sizes.json"
PLUGIN = ROOT / "plugin"
CODE = [path for folder in ("plugin", "integrations") for path in sorted((ROOT / folder).rglob("*.py"))]
PROSE = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING"))]
GUARDS = re.compile(r"(^|_)(check|refuse|warn|why)(_|$)")  # what looks for a fault that a mechanism may make needless


def lines_of(text: str, tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that have code: neither empty ones, nor comments, nor docstrings."""
    code = {i for i, line in enumerate(text.splitlines(), 1) if line.strip() and not line.strip().startswith("#")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return code


def sizes() -> dict[str, float]:
    """Return the sizes of the packages and of the docs by name."""
    trains = tools = imports = guards = 0
    longest = 0
    for path in CODE:
        text = path.read_text()
        tree = ast.parse(text)
        lines = len(lines_of(text, tree))
        is_tool = path.is_relative_to(PLUGIN / "meshwright_plan") or path.is_relative_to(PLUGIN / "meshwright_tools")
        trains, tools = trains + lines * (not is_tool), tools + lines * is_tool
        longest = max(longest, text.count("\n"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports += (node.end_lineno or node.lineno) - node.lineno + 1
            elif isinstance(node, ast.FunctionDef) and GUARDS.search(node.name):
                guards += 1
    return {
        "files of the packages": len(CODE),
        "lines of code of what trains": trains,
        "lines of code of the planner and the tools": tools,
        "percent of both that import": round(100 * imports / (trains + tools), 1),
        "lines of the longest file": longest,
        "functions named check, refuse, warn or why": guards,
        "pages of docs": len(PROSE),
        "words of docs": sum(len(path.read_text().split()) for path in PROSE),
        "lines of README": (ROOT / "README.md").read_text().count("\n"),
    }


def main() -> None:
    """Compare with the file, or write it."""
    now = sizes()
    if "--write" in sys.argv:
        HELD.write_text(json.dumps(now, indent=2) + "\n")
    held = json.loads(HELD.read_text())
    larger = [f"{name}: {size}, held at {held[name]}" for name, size in now.items() if size > held[name]]
    if larger:
        sys.exit(
            "\n".join(larger) + "\nDelete what the change makes needless; or run `python .ci/sizes.py --write` and say "
            "in the commit's message why it is larger."
        )
    print(", ".join(f"{size:,} {name}" for name, size in now.items()))


if __name__ == "__main__":
    main()
