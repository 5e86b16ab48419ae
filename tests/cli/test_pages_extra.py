"""Without the extra ``pages`` the package imports, plans and refuses pages in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000,
}  # fmt: skip
PROGRAM = """
import sys
sys.modules["jinja2"] = sys.modules["markupsafe"] = None
import meshwright as mw
for name in mw.__all__:
    getattr(mw, name)
from meshwright.cli import main
sys.argv[0] = "meshwright"
main()
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_plan_needs_no_pages(tmp_path: Path) -> None:
    planned = run(tmp_path, "plan", "--model", "config.json", "--gpus", "4", "--save", "plan.yaml")
    assert planned.returncode == 0, planned.stderr
    assert (tmp_path / "plan.yaml").exists()


@pytest.mark.parametrize(
    "arguments", [("plan", "--model", "config.json", "--gpus", "4", "--html", "plan.html"), ("report", ".")]
)
def test_a_page_without_the_extra_is_an_error_of_one_line(arguments: tuple[str, ...], tmp_path: Path) -> None:
    refused = run(tmp_path, *arguments)
    assert refused.returncode == 2 and not refused.stdout
    [line] = refused.stderr.splitlines()
    assert line.endswith("jinja2, which is not installed: pip install 'meshwright[pages]'")
    assert not list(tmp_path.glob("*.html"))
