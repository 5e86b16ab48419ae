"""Runs a script in one process and under plans, and compares the results."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from conformance.outside_scripts.catalogue import ROWS, Edit, Script, Source
from conformance.outside_scripts.page import Verdict
from conformance.outside_scripts.recording import run_script
from harness.programs import run_program
from meshwright.choose.given_plan import PLAN_VARIABLE, plan_line, resolve_plan
from meshwright.plan.config import ParallelPlan

# A difference is divided by the number, or by this limit if the number is smaller. A reward's margin is a difference of
# log-probabilities of about 60; the bias of a BERT's keys has no gradient but rounding.
SMALLEST_FIGURE, SMALLEST_WEIGHT = 0.1, 1e-3
TIME_LIMIT = 300.0  # seconds
REFUSALS = ("PlanError", "ValueError", "NotImplementedError")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run left.

    Args:
        error: the class and message of what was raised, or how the processes ended; None if the script ended well.
        passes: the most forward passes in training of any rank.
        weights: the final weights, whole.
        figures: the numbers that the script logged or printed, in their order.
    """

    error: str | None
    passes: int
    weights: dict[str, Any]
    figures: list[float]


def run(script: Script, plan_text: str | None, checkouts: Mapping[Source, Path], inputs: Path, folder: Path) -> Run:
    """Run a script under a plan, or unchanged in one process if the plan is None, unless ``folder`` has this run."""
    plan = ParallelPlan() if plan_text is None else resolve_plan(plan_text)
    if any(not (folder / f"record-{rank}.json").exists() for rank in range(plan.world_size)):
        shutil.rmtree(folder, ignore_errors=True)  # left by a call that was stopped
        folder.mkdir(parents=True)
        _start(script, plan, checkouts[script.source] / script.path, inputs / script.inputs, folder, plan_text)
    records = [json.loads((folder / f"record-{rank}.json").read_text()) for rank in range(plan.world_size)]
    said = [f"{record['error']}: {record['message']}" for record in records if "error" in record]
    error = said[0] if said else None
    return Run(
        error=error,
        passes=max(record["passes"] for record in records),
        weights={} if error else _weights(folder),
        figures=[] if error else read_figures(folder),
    )


def _start(script: Script, plan: ParallelPlan, path: Path, inputs: Path, folder: Path, plan_text: str | None) -> None:
    names = {"rows": ROWS // plan.dp, "warmup": 2 * plan.dp, "inputs": inputs, "output": folder / "output"}
    edits = (*script.settings, *(script.changes if plan_text else ()))
    copy = folder / path.name
    copy.write_text(edited(path.read_text(), edits, names, script.path))
    arguments = [argument.format(**names) for argument in script.arguments]
    environment = {}
    if plan_text:
        environment = {"ACCELERATE_USE_CPU": "true", PLAN_VARIABLE: plan_line(vars(plan))}
    given = (str(copy), arguments, str(inputs), environment, str(folder), script.source)
    for rank, outcome in enumerate(run_program(run_script, plan.world_size, *given, timeout=TIME_LIMIT)):
        (folder / f"output-{rank}.log").write_text(outcome.output)
        if outcome.code is None or outcome.code < 0:
            ended = f"ended by signal {-outcome.code}" if outcome.code else f"did not end within {TIME_LIMIT:.0f} s"
            record = {"passes": 0, "error": "Killed", "message": f"rank {rank} {ended}"}
            (folder / f"record-{rank}.json").write_text(json.dumps(record))


def edited(text: str, edits: tuple[Edit, ...], names: Mapping[str, Any], path: str) -> str:
    """Return a script's text with its edits made.

    Raises:
        ValueError: if the script does not have the text that an edit replaces.
    """
    for edit in edits:
        if edit.old not in text and not edit.optional:
            raise ValueError(
                f"{path} has no {edit.old!r}: take a checkout of the version in the page, or change the edit"
            )
        new = edit.new
        for name in ("rows", "warmup"):
            new = new.replace(f"{{{name}}}", str(names[name]))
        text = text.replace(edit.old, new)
    return text


def compare(found: Run, expected: Run, tolerance: float) -> Verdict:
    """Return the verdict on a run under a plan, compared with the run in one process."""
    if found.error is not None:
        is_refusal = found.error.split(":")[0] in REFUSALS and found.passes == 0
        return Verdict(kind="refused" if is_refusal else "late", detail=found.error)
    if found.weights.keys() != expected.weights.keys():
        names = sorted(found.weights.keys() ^ expected.weights.keys())
        return Verdict(kind="differs", detail=f"other weights: {', '.join(names[:3])}")
    if len(found.figures) != len(expected.figures):
        return Verdict(kind="differs", detail=f"{len(found.figures)} figures, not {len(expected.figures)}")
    differences = [_difference(found.weights[name], value) for name, value in expected.weights.items()]
    pairs = zip(found.figures, expected.figures, strict=True)
    differences += [abs(a - b) / max(abs(b), SMALLEST_FIGURE) for a, b in pairs]
    largest = max(differences, key=lambda difference: math.inf if math.isnan(difference) else difference)
    return Verdict(kind="equal" if largest <= tolerance else "differs", detail=f"{largest:.0e}")


def _difference(found: Any, expected: Any) -> float:
    largest = expected.abs().max().clamp(min=SMALLEST_WEIGHT)
    return float(((found.double() - expected.double()).abs().max() / largest).item())


def _weights(folder: Path) -> dict[str, Any]:
    """Return what the script saved at its end, else what was taken from its Accelerator."""
    names = ("output/model.safetensors", "weights.safetensors")
    paths = [folder / name for name in names if (folder / name).exists()]
    if not paths:
        raise ValueError(f"{folder} has no weights: what the script trains is not compared")
    return load_file(paths[0])


# Times and memory differ between runs, and MeshwrightTrainer logs more of them. The Trainer counts floating-point
# operations per rank.
_NOT_COMPARED = ("runtime", "per_second", "flos", "step_time", "per_step", "mfu", "peak_memory", "slowest_rank")


def read_figures(folder: Path) -> list[float]:
    """Return the logged numbers of a Trainer, or those of the lines in which a script prints an epoch's result."""
    states = sorted((folder / "output").glob("**/trainer_state.json"), key=lambda path: len(path.parts))
    if states:
        history = json.loads(states[0].read_text())["log_history"]
        kept = [(name, value) for entry in history for name, value in sorted(entry.items())]
        return [float(value) for name, value in kept if not any(word in name for word in _NOT_COMPARED)]
    lines = re.findall(r"(?:epoch \d+: |Average test).*", (folder / "output-0.log").read_text())
    return [float(number) for line in lines for number in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", line)]
