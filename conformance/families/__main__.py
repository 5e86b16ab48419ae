"""``python -m conformance.families``: check every family and write evidence/families.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from conformance.families import kept_results
from conformance.families.expert_models import EXPERTS
from conformance.families.experts_page import section
from conformance.families.models import DENSE, model_types
from conformance.families.page import PAGE, render, verdict
from conformance.families.refusals import MIXTURE, kind_of_type, refusal
from conformance.families.sweep import read
from harness.torchrun import torchrun


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="a family; may be given several times; then no page is written")
    ] = None,
    output: Annotated[Path, typer.Option(help="the page to write")] = PAGE,
    experts: Annotated[
        Path | None,
        typer.Option(help="a file for the results of types with experts; those that it already has are not run again"),
    ] = None,
) -> None:
    """Compare every decoder of the installed transformers, on two ranks, with itself on one device.

    Exits with status 1 if a dense decoder differs or is refused, or a type with experts differs.

    Examples:

        python -m conformance.families
        python -m conformance.families --only gpt2 --only bloom
    """
    if unknown := sorted(set(only or ()) - DENSE.keys()):
        raise typer.BadParameter(f"{', '.join(unknown)}: not among {', '.join(sorted(DENSE))}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        if torchrun(2, "conformance.families.sweep", str(path), *(only or ())):
            raise typer.Exit(1)
        records = read(path)
    for record in records:
        cells = (record.parity, record.kv, record.tied, record.packed)
        print(f"{record.family:22}", *(f"{verdict(cell):6}" for cell in cells), record.traits)
    has_passed = all(record.passes for record in records)
    if not only:
        with tempfile.TemporaryDirectory() as folder:
            results = experts or Path(folder) / "experts.jsonl"
            has_passed &= not torchrun(2, "conformance.families.experts", "--results", str(results))
            with_experts = section(kept_results.read([results]))
        others = [name for name in model_types() if name not in DENSE]
        found = [refusal(name) for name in track(others, "other types", disable=not sys.stderr.isatty())]
        refusals = [r for r in found if r is not None and not (r.family in EXPERTS and r.kind == MIXTURE)]
        accepted = {n: kind_of_type(n) for n, r in zip(others, found, strict=True) if r is None and n not in EXPERTS}
        output.write_text(render(records, refusals, with_experts, accepted))
        print(f"{sum(record.passes for record in records)} families pass, {len(refusals)} are refused: {output}")
    raise typer.Exit(0 if has_passed else 1)


if __name__ == "__main__":
    typer.run(main)
