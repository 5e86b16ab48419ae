"""``python -m examples.demo``: prepare the corpus, train, prove, report."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from examples.demo.settings import Settings

# Settings for tests: a model, a corpus and a run that take seconds instead of minutes.
QUICK: dict[str, Any] = {
    "steps": 8,
    "seq_length": 64,
    "corpus_files": 12,
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "layers": 2,
}


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def main(
    steps: Annotated[int | None, typer.Option(min=5, help="Optimizer steps (default: 120, or 8 with --quick).")] = None,
    dp: Annotated[
        int | None, typer.Option(min=1, help="Data-parallel size; the batch of 8 rows is split over it.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option(min=1, help="Tensor-parallel size; heads, MLPs and vocabulary are split over it.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes, if neither --dp nor --tp is given.")] = 4,
    seq_length: Annotated[
        int | None, typer.Option(min=8, help="Tokens per row (default: 256, or 64 with --quick).")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Folder of summary.json, loss.png, the checkpoint and the corpus.")
    ] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Train a tiny model for a few steps, in seconds.")] = False,
) -> None:
    """Train a Llama with several processes and prove that one process gets the same result.

    The model has about 10 M parameters (float32) and learns the source text of this Python's standard
    library. The planner picks the parallel plan and says why; --dp and --tp set the plan instead. One
    process then repeats the first 5 steps with stock transformers and torch, and every loss and
    every gradient is compared. Exits with 1 if they differ by more than float32 rounding.

    The demo uses GPUs if the machine has one for each process, and CPU cores otherwise.
    """
    asked = {"steps": steps, "seq_length": seq_length}
    given = {name: value for name, value in asked.items() if value is not None}
    settings = Settings(**(QUICK if quick else {}) | given, dp=dp, tp=tp, processes=processes, output=output.resolve())
    run(dataclasses.replace(settings, device=device(settings.world_size)))


def device(processes: int) -> str:
    """Return "cuda" if every process can have its own GPU, otherwise "cpu"."""
    import torch

    return "cuda" if torch.cuda.device_count() >= processes else "cpu"


def run(settings: Settings) -> None:
    """Run the whole demo; raise typer.Exit if the runs differ, a process fails or a signal stops the demo."""
    # Imported here, so that --help is fast.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    console = Console()
    settings.save()
    settings.gradients.mkdir(exist_ok=True)
    # A run that fails must not leave the results of an earlier run.
    for name in ("summary.json", "loss.png"):
        (settings.output / name).unlink(missing_ok=True)
    shutil.rmtree(settings.checkpoint, ignore_errors=True)
    try:
        is_proven = _run_stages(settings, console)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message = failure.message["message"] if isinstance(failure.message, dict) else failure.message
        console.print(f"error on rank {rank} (exit code {failure.exitcode}): {message}", highlight=False)
        raise typer.Exit(1) from None
    except (KeyboardInterrupt, SignalException):
        # Rank 0's progress bar had hidden the cursor.
        console.show_cursor()
        console.print("stopped; every process has ended")
        raise typer.Exit(130) from None
    finally:
        shutil.rmtree(settings.gradients, ignore_errors=True)
    if not is_proven:
        raise typer.Exit(1)


def _run_stages(settings: Settings, console: Console) -> bool:
    with console.status("preparing the corpus: the source text of the standard library"):
        from examples.demo.corpus import prepare_corpus

        prepare_corpus(settings)

    from examples.demo.launch import launch

    console.print(f"training with {settings.world_size} processes, {settings.steps} steps on {settings.device}")
    launch(settings)

    with console.status(f"repeating the first {settings.proof_steps} steps in one process"):
        from examples.demo.prove import prove
        from examples.demo.results import TrainResult

        result = TrainResult.load(settings)
        proof = prove(settings, result.losses)

    from examples.demo.report import write_report

    console.print(write_report(settings, result, proof))
    paths = (settings.output / "summary.json", settings.output / "loss.png", settings.checkpoint)
    console.print("\n".join(map(str, paths)), highlight=False, soft_wrap=True)
    return proof.holds


if __name__ == "__main__":
    app()
