"""Runs a script as ``python script.py`` does, in a process of its own, and records what the comparison needs."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright_tools.verification.float64_modules import in_float64

STAND_INS = Path(__file__).parent / "stand_ins"


def run_script(
    script: str, arguments: list[str], folder: str, environment: dict[str, str], record: str, source: str
) -> None:
    """Run a script in ``folder``, and write ``record-RANK.json`` and its last model's whole weights.

    Args:
        script: the path of the script.
        arguments: its arguments.
        folder: its working directory.
        environment: what the launcher of a plan sets; empty for one process without a launcher.
        record: the folder for the records.
        source: the checkout. TRL's kernels need their casts to float32; accelerate's scripts save no weights.
    """
    rank = os.environ["RANK"]
    if not environment:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
            os.environ.pop(name, None)
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = [script, *arguments]
    sys.path[0:0] = [str(Path(script).parent), str(STAND_INS)]
    counts = _count_passes()
    if source == "accelerate":
        _save_weights_at_the_end(Path(record))
    error: BaseException | None = None
    try:
        with in_float64() if source != "trl" else contextlib.nullcontext():
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            error = end
        raise
    except BaseException as raised:
        error = raised
        raise
    finally:
        found: dict[str, Any] = dict(counts)
        if error is not None:
            found |= {"error": type(error).__name__, "message": str(error)}
        (Path(record) / f"record-{rank}.json").write_text(json.dumps(found))


def _count_passes() -> dict[str, int]:
    """Count a model's forward passes in training, to tell when an error was raised."""
    from transformers import PreTrainedModel

    counts = {"passes": 0}

    def passed(module: nn.Module, _: Any) -> None:
        counts["passes"] += isinstance(module, PreTrainedModel) and module.training

    nn.modules.module.register_module_forward_pre_hook(passed)
    return counts


def _save_weights_at_the_end(record: Path) -> None:
    """Save the weights when a script ends its training."""
    from accelerate import Accelerator
    from safetensors.torch import save_file

    end = Accelerator.end_training

    def end_training(self: Any) -> None:
        if self._models:
            state = self.get_state_dict(self._models[-1])  # every rank makes the call; rank 0 gets all weights
            if self.is_main_process:
                save_file({name: value.clone() for name, value in state.items()}, record / "weights.safetensors")
        end(self)

    Accelerator.end_training = end_training  # type: ignore[method-assign]
