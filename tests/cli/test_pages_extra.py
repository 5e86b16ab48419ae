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
COMMANDS = {
    "plan": ["plan", "--model", "config.json", "--gpus", "4", "--save", "plan.yaml"],
    "plan with a page": ["plan", "--model", "config.json", "--gpus", "4", "--html", "plan.html"],
    "report": ["report", "."],
}
PROGRAM = """
import contextlib, io, json, sys
sys.modules["jinja2"] = sys.modules["markupsafe"] = None
import meshwright as mw
for name in mw.__all__:
    getattr(mw, name)
from meshwright_tools.cli import main
ended = {}
for name, arguments in json.loads(sys.argv[1]).items():
    sys.argv = ["meshwright", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            code = main() or 0
        except SystemExit as end:
            code = end.code or 0
    ended[name] = code, out.getvalue(), errors.getvalue()
print(json.dumps(ended))
"""
Ended = tuple[int, str, str]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Ended]]:
    """The folder, and the code, the output and the errors of each command, all in one process without the extra."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    paths = os.pathsep.join(path for path in sys.path if path)
    program = [sys.executable, "-c", PROGRAM, json.dumps(COMMANDS)]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_a_plan_needs_no_pages(ended: tuple[Path, dict[str, Ended]]) -> None:
    code, _, errors = ended[1]["plan"]
    assert code == 0, errors
    assert (ended[0] / "plan.yaml").exists()


@pytest.mark.parametrize("command", ["plan with a page", "report"])
def test_a_page_without_the_extra_is_an_error_of_one_line(command: str, ended: tuple[Path, dict[str, Ended]]) -> None:
    code, output, errors = ended[1][command]
    assert code == 2 and not output
    [line] = errors.splitlines()
    assert line.endswith("jinja2, which is not installed: pip install 'meshwright[tools]'")
    assert not list(ended[0].glob("*.html"))
