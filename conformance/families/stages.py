"""Every dense decoder over pipeline stages, against itself on one device.

torchrun --nproc-per-node 2 -m conformance.families.stages
torchrun --nproc-per-node 4 -m conformance.families.stages --schedule zb-h1 --only llama --only gpt2
torchrun --nproc-per-node 4 -m conformance.families.stages --method ring

Losses, norms and every gradient of plain, packed and padded rows are compared in float64. The tolerance is 1e-10 of a
tensor's largest value: only the order of sums differs, by about 1e-16 per sum. Exits with status 1 if a family differs
or is refused. With ``--results FILE`` a sweep that was interrupted goes on where it ended.
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import Annotated

import typer
from rich.progress import track
from torch import nn

import meshwright as mw
from conformance.families.kept_results import KeptResults, ResultsFile, start_sweep
from conformance.families.models import DENSE, build, model_types
from conformance.families.one_device import ROWS, largest_difference
from conformance.families.parity import TOLERANCE
from meshwright.mesh.process_group import world_size
from meshwright.parallel.tensor_parallel.structure import describe
from meshwright.roles import plan_for

LAYERS = 4
_OTHER_NAMES = ("n_layers", "num_layers", "decoder_layers")  # fields of a family's tiny config for the number of layers


def build_deeper(family: str) -> nn.Module:
    """Return a tiny model of four layers, or of two if no config field sets the number of layers."""
    given = DENSE[family]
    fields = {name: LAYERS for name in _OTHER_NAMES if name in given} or {"num_hidden_layers": LAYERS}
    if "layer_types" in given:
        fields["layer_types"] = list(given["layer_types"]) * 2
    if family == "gpt_neo":
        fields["attention_types"] = [[["global", "local"], 2]]
    for deeper in (fields, {"num_hidden_layers": LAYERS}):  # some configs prefer this name to their own
        with contextlib.suppress(ValueError, TypeError):
            model = build(family, **deeper)
            if layers_of(model) == LAYERS:
                return model
    return build(family)


def layers_of(model: nn.Module) -> int:
    """Return the number of a decoder's layers."""
    return len(describe(model, plan_for(model), tp=1, sequence_parallel=False).layers)


def plan_for_stages(model: nn.Module, schedule: str, method: str | None = None) -> mw.ParallelPlan:
    """Return a plan with as many stages as the model has layers, at most; with a method, two ranks share each row."""
    cp = 1 if method is None else 2
    pp = min(world_size() // cp, layers_of(model))
    return mw.ParallelPlan(
        pp=pp, cp=cp, dp=world_size() // (pp * cp), schedule=schedule,  # type: ignore[arg-type]
        context=method or "gather", gradient_accumulation_steps=2,  # type: ignore[arg-type]
    )  # fmt: skip


def difference(family: str, kind: str, schedule: str, method: str | None) -> float:
    """Return the largest relative difference from one device; every rank must make the call."""
    return largest_difference(
        partial(build_deeper, family), partial(plan_for_stages, schedule=schedule, method=method), kind
    )


def main(
    schedule: Annotated[str, typer.Option(help="the pipeline's schedule")] = "1f1b",
    method: Annotated[
        str | None, typer.Option(help="also share each row over two ranks, by this method of context parallelism")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="a family; may be given several times")] = None,
    results: ResultsFile = None,
) -> None:
    """Compare every dense decoder over pipeline stages with itself on one device; torchrun starts this program."""
    is_first = start_sweep()
    families = only or sorted(DENSE.keys() & set(model_types()))
    kept, exact, others = KeptResults[float](results), 0, []
    for family in track(families, "families", disable=not (is_first and sys.stderr.isatty())):
        for kind in ROWS:
            name = " ".join(filter(None, (family, kind, schedule, method, f"ranks={world_size()}")))
            result = kept.of(name, partial(difference, family, kind, schedule, method))
            if isinstance(result, str):
                others.append(f"{family}, {kind}: refused: {result}")
            elif result > TOLERANCE:
                others.append(f"{family}, {kind}: differs by {result:.1e}")
            else:
                exact += 1
    if is_first:
        print(
            f"{exact} of {len(families) * len(ROWS)} programs of {len(families)} families are exact", *others, sep="\n"
        )
    raise typer.Exit(1 if is_first and others else 0)


if __name__ == "__main__":
    typer.run(main)
