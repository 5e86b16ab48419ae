"""``meshwright verify``: checks that a model trains under a plan as it does on one device."""

from __future__ import annotations

import contextlib
import importlib.util
import json as json_format
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright_tools.cli.command import ModelConfig, PlanWords, failures_of, say

if TYPE_CHECKING:
    from meshwright.plan.config import ParallelPlan

_LEAST_PROCESSES = 4


def verify(
    model: ModelConfig,
    plan: PlanWords,
    steps: Annotated[int, typer.Option(help="Number of optimizer steps to compare.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the random weights and tokens.")] = 0,
    full_width: Annotated[
        bool, typer.Option("--full-width", help="Keep all sizes of the config, and only reduce the number of layers.")
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            help="Largest number of processes to start, unless the smallest plan of this kind needs more (default: one "
            "for each core, and at least 4)."
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(help="Time limit for each of the two programs (under the plan, and on one device), in seconds."),
    ] = 600.0,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run the model's own Python code, which lies beside the config.json."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check that a model trains under a plan as on one device.

    Keeps the fewest layers that include each kind of the model's layers, reduces the widths, and trains this short
    model for a few steps in float64 on this machine: under the plan on several CPU processes, and in one process with
    stock torch. Compares the outputs of modules, the logits, the loss, each parameter's gradient and the weights, and
    prints a table with the largest difference of each kind. A plan with more ranks than --processes is replaced by a
    plan with the same axes, stage and options, but with smaller sizes.

    The exit code is 0 if everything is equal, 1 if anything differs or a process fails, and 2 if the model cannot run
    the plan or an argument is wrong.

    For example:

    \b
      meshwright verify --model llama --plan "dp2 tp2+sp zero1"
      meshwright verify --model Qwen/Qwen3-8B --plan plan.yaml
      meshwright verify --model config.json --plan "tp4+sp" --json | jq .suspect

    For a model of your own, call mw.verify(model_factory, plan) in a script.
    """
    with failures_of("verify", json=json, codes={ValueError: 2, RuntimeError: 1}):
        with _progress() as tell, tempfile.TemporaryDirectory(prefix="meshwright-verify-") as folder:
            if importlib.util.find_spec("transformers") is None:
                raise ValueError(
                    "transformers builds the model of a config, but it is not installed; pip install 'meshwright[hf]' "
                    "(for a model of your own, call mw.verify in a script)"
                )
            wanted, chosen = _plans(plan, processes)
            # Imported here so that --help is fast.
            from meshwright_tools.verification.local_processes import start_server

            start_server(_modules(model))
            from meshwright_tools.verification.short_model import ConfigFile, short_model
            from meshwright_tools.verification.verify import verify as verify_model

            source = ConfigFile(path=model, trust_remote_code=trust_remote_code)
            factory, notes = short_model(
                source, Path(folder), real_plan=wanted, plan=chosen, full_width=full_width, tell=tell
            )
            if chosen != wanted:
                is_smaller = chosen.world_size < wanted.world_size
                why = f"needs {wanted.world_size} processes" if is_smaller else "is for more layers"
                notes.append(
                    f"{wanted.label} {why}, so {chosen.label} was verified in its place, a smaller plan of the same "
                    "kind."
                )
            report = verify_model(
                factory, chosen, steps=steps, seed=seed, timeout=timeout, on_progress=tell, notes=tuple(notes)
            )
        say(json_format.dumps(report.as_dict(), indent=2) if json else str(report))
        sys.exit(0 if report.ok else 1)


def _plans(words: str, processes: int | None) -> tuple[ParallelPlan, ParallelPlan]:
    """Return the plan, and the one of the same kind that this machine runs in its place."""
    from meshwright.choose.given_plan import resolve_plan
    from meshwright.errors import PlanError
    from meshwright.mesh.host import core_count
    from meshwright_tools.verification.verify import smaller_plan

    if processes is not None and processes < 1:
        raise PlanError(f"--processes {processes} must be at least 1")
    wanted = resolve_plan(words, "--plan")
    return wanted, smaller_plan(wanted, processes or max(_LEAST_PROCESSES, core_count()))


def _modules(model: Path) -> list[str]:
    """Return the modules that the processes can start to import before the config is read in full."""
    from meshwright.outside_files import read_json
    from meshwright_plan.job.config_file import config_path

    try:
        name = str(read_json(config_path(model))["model_type"]).replace("-", "_")
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [f"transformers.models.{name}.modeling_{name}", "meshwright_tools.verification.short_model"]


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("verifying: {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda text: progress.update(task, description=text)
