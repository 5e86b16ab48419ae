"""A program of one step, distributed and on one device: its loss, its norm and every gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from conformance.families.parity import batch
from meshwright.errors import UnreadableTensorError
from meshwright.parallel.losses.head_losses import find_loss
from meshwright_tools.verification.float64_modules import in_float64
from support.exact import gradient_differences

ROWS = ("plain", "packed", "padded")


def rows_of(kind: str) -> dict[str, Tensor]:
    """Return four rows of tokens: plain, of two documents each, or padded on either side."""
    inputs = {name: torch.cat([x, x.flip(0)]) for name, x in batch(packed=kind == "packed").items()}
    if kind == "padded":
        mask = torch.ones_like(inputs["input_ids"])
        mask[1, -3:] = mask[2, :2] = 0
        inputs |= {"attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, -100)}
    return inputs


@contextlib.contextmanager
def own_groups() -> Iterator[None]:
    """Destroy the process groups that a program makes inside the context; every rank must leave it.

    Each group of gloo has threads that wake a hundred times per second, so that the groups of many programs would keep
    a machine busy. The groups of device meshes stay, since later programs use the same meshes.
    """
    groups = dist.distributed_c10d._world.pg_map
    before = set(groups)
    yield
    dist.barrier()  # a rank that is done must not close a group that another one still uses
    for group in set(groups) - before:
        if not group.group_desc.startswith("mesh_"):
            dist.destroy_process_group(group)


def largest_difference(build: Callable[[], Any], plan_for: Callable[[nn.Module], mw.ParallelPlan], kind: str) -> float:
    """Return the difference of :func:`largest_differences` for one kind of rows."""
    return largest_differences(build, plan_for, (kind,))[kind]


def largest_differences(
    build: Callable[[], Any], plan_for: Callable[[nn.Module], mw.ParallelPlan], kinds: Sequence[str] = ROWS
) -> dict[str, float]:
    """Return for each kind of rows the largest relative difference from one device, on rank 0.

    One distributed model takes the rows of all kinds in turn, of which each rank of dp gets some. Every rank must make
    the call.

    Args:
        build: a function that builds the model, in training mode if it is to be compared in this mode.
        plan_for: a function that returns the plan for the model.
        kinds: the kinds of rows.
    """
    try:
        return _differences(build, plan_for, kinds, {})
    except UnreadableTensorError as error:  # the model's own forward reads its logits
        if "gather_logits=True" not in str(error):
            raise
        return _differences(build, plan_for, kinds, {"gather_logits": True})


def _differences(
    build: Callable[[], Any],
    plan_for: Callable[[nn.Module], mw.ParallelPlan],
    kinds: Sequence[str],
    options: dict[str, Any],
) -> dict[str, float]:
    with in_float64():
        model = build()
        options = options | {"loss_averages_over": None if find_loss(model) else "labels"}
        config = mw.ToDistributedConfig(plan=plan_for(model), **options)
        batches: Any = [rows_of(kind) for kind in kinds]
        model, _, batches = mw.to_distributed(model, None, batches, config=config)
        found = {}
        for kind, rows in zip(kinds, batches, strict=True):
            model.zero_grad()
            loss = model(**rows).loss
            loss.backward()
            gradients = mw.full_gradients(model)
            actual = Step(loss.item(), mw.clip_grad_norm_(model, 1e9).item(), gradients)
            found[kind] = _difference(actual, _step_alone(build, kind)) if dist.get_rank() == 0 else 0.0
    return found


@dataclass(frozen=True)
class Step:
    """The loss, the norm of the gradients and the gradients of a step; gradients are those of rank 0."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]


def _step_alone(build: Callable[[], Any], kind: str) -> Step:
    model = build()
    loss = model(**rows_of(kind)).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Step(loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 1e9).item(), gradients)


def _difference(actual: Step, expected: Step) -> float:
    found = [abs(actual.loss / expected.loss - 1), abs(actual.norm / expected.norm - 1)]
    found += gradient_differences(actual.gradients, expected.gradients).values()
    return max(value if value == value else float("inf") for value in found)
