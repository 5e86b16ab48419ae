"""Every dense decoder over pipeline stages, against itself on one device.

torchrun --nproc-per-node 2 -m benchmarks.families.stages
torchrun --nproc-per-node 4 -m benchmarks.families.stages --schedule zb-h1 --only llama --only gpt2

Losses, norms and every gradient of plain, packed and padded rows are compared in float64. The tolerance is 1e-10 of a
tensor's largest value: only the order of sums differs, by about 1e-16 per sum. Exits with status 1 if a family differs.
"""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.progress import track
from torch import Tensor, nn

import meshwright as mw
from benchmarks.families.models import DENSE, build, model_types
from benchmarks.families.parity import TOLERANCE, batch
from meshwright.mesh.process_group import start_process_group, world_size
from meshwright.parallel.head_losses import find_loss
from meshwright.parallel.structure import describe
from meshwright.roles import plan_for
from meshwright.verification.float64_modules import in_float64, relative_difference

LAYERS = 4
_OTHER_NAMES = ("n_layers", "num_layers", "decoder_layers")  # of the number of layers, in a family's tiny config
ROWS = ("plain", "packed", "padded")


def build_deeper(family: str) -> nn.Module:
    """Return a tiny model of four layers; of two, if the family's config does not say how to have four."""
    given = DENSE[family]
    fields = {name: LAYERS for name in _OTHER_NAMES if name in given} or {"num_hidden_layers": LAYERS}
    if "layer_types" in given:
        fields["layer_types"] = list(given["layer_types"]) * 2
    if family == "gpt_neo":
        fields["attention_types"] = [[["global", "local"], 2]]
    try:
        model = build(family, **fields)
        return model if layers_of(model) == LAYERS else build(family)
    except (ValueError, TypeError):
        return build(family)


def layers_of(model: nn.Module) -> int:
    """Return the number of a decoder's layers."""
    return len(describe(model, plan_for(model), tp=1, sequence_parallel=False).layers)


def rows_of(kind: str) -> dict[str, Tensor]:
    """Return four rows of tokens: plain, of two documents each, or padded on either side."""
    inputs = {name: torch.cat([x, x.flip(0)]) for name, x in batch(packed=kind == "packed").items()}
    if kind == "padded":
        mask = torch.ones_like(inputs["input_ids"])
        mask[1, -3:] = mask[2, :2] = 0
        inputs |= {"attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, -100)}
    return inputs


def largest_difference(family: str, kind: str, schedule: str) -> float:
    """Return the largest relative difference of loss, norm and gradients on rank 0; every rank must make the call."""
    with in_float64():
        inputs = rows_of(kind)
        whole = build_deeper(family).train()
        expected = whole(**inputs).loss
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9)
        model = build_deeper(family).train()
        pp = min(world_size(), layers_of(model))
        plan = mw.ParallelPlan(
            pp=pp, dp=world_size() // pp, schedule=schedule, gradient_accumulation_steps=2  # type: ignore[arg-type]
        )  # fmt: skip
        averages_over = None if find_loss(model) else "labels"
        config = mw.ToDistributedConfig(plan=plan, loss_averages_over=averages_over)
        model = mw.to_distributed(model, config=config)[0]
        loss = model(**inputs).loss
        loss.backward()
        gradients = mw.full_gradients(model)
        found = [abs(loss.item() / expected.item() - 1), abs(mw.clip_grad_norm_(model, 1e9).item() / norm.item() - 1)]
    if dist.get_rank() == 0:
        wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
        assert gradients.keys() == wanted.keys(), gradients.keys() ^ wanted.keys()
        largest = max(gradient.abs().max().item() for gradient in wanted.values())
        for name, gradient in wanted.items():
            # A gradient that is zero except for rounding (a key's bias) is compared with the largest gradient.
            is_zero = gradient.abs().max() <= 1e-12 * largest
            off = (gradients[name] - gradient).abs().max().item() / largest
            found.append(off if is_zero else relative_difference(gradients[name], gradient))
    return max(value if value == value else float("inf") for value in found)


def main(
    schedule: Annotated[str, typer.Option(help="the pipeline's schedule")] = "1f1b",
    only: Annotated[list[str] | None, typer.Option(help="a family; may be given several times")] = None,
) -> None:
    """Compare every dense decoder over pipeline stages with itself on one device; torchrun starts this program."""
    warnings.filterwarnings("ignore")
    start_process_group(torch.device("cpu"), 120.0)
    is_first = dist.get_rank() == 0
    families = only or sorted(DENSE.keys() & set(model_types()))
    exact, others = 0, []
    for family in track(families, "families", disable=not (is_first and sys.stderr.isatty())):
        for kind in ROWS:
            try:
                off = largest_difference(family, kind, schedule)
            except mw.PlanError as error:
                others.append(f"{family}, {kind}: refused: {error}")
                continue
            exact += off <= TOLERANCE
            if off > TOLERANCE:
                others.append(f"{family}, {kind}: differs by {off:.1e}")
    if is_first:
        print(
            f"{exact} of {len(families) * len(ROWS)} programs of {len(families)} families are exact", *others, sep="\n"
        )
    raise typer.Exit(1 if is_first and others else 0)


if __name__ == "__main__":
    typer.run(main)
