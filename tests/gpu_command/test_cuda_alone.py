"""evidence/cuda.md lists every file that names CUDA, so that nothing else is for CUDA devices alone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = {
    "plugin/meshwright": "",
    "plugin/meshwright_plan": "meshwright_plan/",
    "plugin/meshwright_tools": "meshwright_tools/",
    "integrations/meshwright_hf": "meshwright_hf/",
}  # and what the docs put before a file


def names_cuda(source: str) -> bool:
    """Return whether code, unlike its docstrings, uses ``torch.cuda`` or the name of the device."""
    return any(
        (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda")
        or (isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"cuda(:\d+)?", node.value))
        for node in ast.walk(ast.parse(source))
    )


def test_the_files_that_name_cuda_are_those_of_the_docs() -> None:
    table = (ROOT / "evidence/cuda.md").read_text().partition("## Other accelerators")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`([\w/]+\.py)`", table)) - {"tests/gpu_command/test_cuda_alone.py"}
    found = {
        prefix + path.relative_to(ROOT / folder).as_posix()
        for folder, prefix in SOURCES.items()
        for path in (ROOT / folder).rglob("*.py")
        if names_cuda(path.read_text())
    }
    assert found == listed, (sorted(found - listed), sorted(listed - found))


def test_a_name_of_cuda_is_found_in_code_alone() -> None:
    assert names_cuda("torch.cuda.synchronize()") and names_cuda("device == 'cuda'") and names_cuda("d = 'cuda:0'")
    assert not names_cuda('"""On "cuda" alone, by torch.cuda."""\nx.is_cuda')
