"""What the installed package does without sources and without the Hugging Face stack; run by `make wheel`."""

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import meshwright

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "vocab_size": 32000,
}
COMMAND = str(Path(sys.executable).with_name("meshwright"))


def run(*arguments: str) -> tuple[int, str]:
    """Run the command line; return its exit code and what it printed."""
    done = subprocess.run([COMMAND, *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print(f"$ meshwright {' '.join(arguments)}\n{done.stdout}")
    return done.returncode, done.stdout


def main() -> None:
    """Fail at the first thing that a user of the package would miss."""
    assert Path(sys.prefix) in Path(meshwright.__file__).parents, f"{meshwright.__file__} is not the installed package"
    for name in meshwright.__all__:
        getattr(meshwright, name)
    assert run("--version") == (0, f"meshwright {importlib.metadata.version('meshwright')}\n")
    assert run("doctor")[0] == 0

    os.chdir(tempfile.mkdtemp())
    Path("config.json").write_text(json.dumps(CONFIG))
    assert run("plan", "--model", "config.json", "--gpus", "8", "--gpu", "h100-sxm", "--html", "plan.html")[0] == 0
    assert "<svg" in Path("plan.html").read_text(), "the page lacks its diagrams: are the data files in the wheel?"
    tools = Path(importlib.import_module("meshwright_tools.verification.verify").__file__ or "").parents[1]
    for file in ("report/page/report.html.j2", "report/page/report.css", "tracing/cuda_guard.cpp"):
        assert (tools / file).exists(), f"{file} is not in the wheel"
    code, text = run("verify", "--model", "config.json", "--plan", "tp2")
    assert code == 2 and text.count("\n") == 1 and "pip install 'meshwright[hf]'" in text

    description = importlib.metadata.metadata("meshwright")["Description"]
    dead = [link for link in re.findall(r"\]\(([^)]*)\)", description) if not link.startswith("https://")]
    assert description and not dead, f"a package index cannot follow these links of the description: {dead}"
    print(f"{len(meshwright.__all__)} public names, the command line and the description are right")


main()
