"""``python -m conformance.outside_scripts``: run published scripts and write evidence/outside_scripts.md."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from conformance.outside_scripts.catalogue import SCRIPTS, Script, Source
from conformance.outside_scripts.page import Row, render, version

PLANS = ("tp2", "tp2+sp", "dp2 tp2+sp zero1", "dp2 zero3")
PAGE = Path(__file__).resolve().parents[2] / "evidence" / "outside_scripts.md"
TRL_PRELOAD = ["trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "trl.trainer.reward_trainer"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The runs of one call, and the folder in which they run."""

    scripts: Sequence[Script]
    plans: Sequence[str]
    checkouts: Mapping[Source, Path]
    root: Path


def main(
    transformers: Annotated[Path | None, typer.Option(help="checkout of huggingface/transformers")] = None,
    trl: Annotated[Path | None, typer.Option(help="checkout of huggingface/trl, or the folder of its package")] = None,
    accelerate: Annotated[Path | None, typer.Option(help="checkout of huggingface/accelerate")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="part of a script's name; may be repeated; then no page is written")
    ] = None,
    plan: Annotated[list[str] | None, typer.Option(help="plan; may be repeated; then no page is written")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="folder for the outputs; runs whose outputs it has are not repeated")
    ] = None,
    output: Annotated[Path, typer.Option(help="page to write")] = PAGE,
) -> None:
    """Run scripts that others publish in one process and under four plans, and compare weights and logged numbers.

    Each script is copied, its import of the Trainer or the Accelerator is changed, and the copy trains a model of
    about 20,000 parameters. Exits with status 1 if a script differs, or is refused after its first pass.

    Examples:

        python -m conformance.outside_scripts --transformers ../transformers --trl ../trl --accelerate ../accelerate
        python -m conformance.outside_scripts --trl ../trl --only dpo --plan tp2
    """
    given: dict[Source, Path | None] = {"transformers": transformers, "trl": trl, "accelerate": accelerate}
    checkouts = {source: path.resolve() for source, path in given.items() if path is not None}
    if not checkouts:
        raise typer.BadParameter("name at least one checkout: --transformers, --trl or --accelerate")
    chosen = [script for script in SCRIPTS if script.source in checkouts]
    if only:
        chosen = [script for script in chosen if any(part in script.name for part in only)]
    if not chosen:
        raise typer.BadParameter(f"no script's name has one of {only}")
    with tempfile.TemporaryDirectory() as scratch:
        root = (folder or Path(scratch)).resolve()
        # Read when the libraries are imported, in the server from which every process is forked.
        os.environ |= {"HF_HOME": str(root / "cache"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "warning"}
        os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "WANDB_MODE": "disabled"}
        rows = _compare_all(Job(scripts=chosen, plans=tuple(plan or PLANS), checkouts=checkouts, root=root))
    held = sum(verdict.holds for row in rows for verdict in row.verdicts.values())
    total = sum(len(row.verdicts) for row in rows)
    print(f"{held} of {total} runs under a plan are equal to one process or refused before the first pass")
    if not only and not plan and len(checkouts) == len(given):
        output.write_text(render(rows, PLANS, {source: version(path, source) for source, path in checkouts.items()}))
        print(f"wrote {output}")
    raise typer.Exit(0 if held == total else 1)


def _compare_all(job: Job) -> list[Row]:
    """Return a row for each script; rows that the folder has are not made again."""
    from conformance.outside_scripts.inputs import write_inputs
    from conformance.outside_scripts.running import compare, run
    from harness import server

    server.PRELOAD.extend(TRL_PRELOAD)
    inputs = job.root / "inputs"
    if not inputs.exists():
        write_inputs(inputs)
    rows = []
    for script in job.scripts:
        start = time.monotonic()
        place = job.root / re.sub(r"\W+", "-", f"{script.source} {script.name}")
        expected = run(script, None, job.checkouts, inputs, place / "one")
        if expected.error is not None:
            print(f"{script.name}: fails in one process: {expected.error} ({place / 'one'})", flush=True)
            raise typer.Exit(1)
        verdicts = {}
        for plan in job.plans:
            found = run(script, plan, job.checkouts, inputs, place / plan.replace(" ", "-"))
            verdicts[plan] = compare(found, expected, script.tolerance)
        rows.append(Row(script=script, verdicts=verdicts))
        cells = " | ".join(f"{verdict.kind} {verdict.detail[:60]}" for verdict in verdicts.values())
        print(f"{script.name:58} {time.monotonic() - start:4.0f} s  {cells}", flush=True)
    return rows


if __name__ == "__main__":
    typer.run(main)
