"""The batches for the comparison of a plan: cases that distributed programs get wrong."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.parallel.batch.mean_over_ranks import IGNORE_INDEX
from meshwright.parallel.losses.head_losses import find_loss
from meshwright.plan.config import ParallelPlan
from meshwright.roles.adapters import without_wrappers
from meshwright.roles.decoder import ask

LENGTH = 12


@dataclass(frozen=True)
class Case:
    """The batches that one step trains on.

    Args:
        name: the case in words.
        batches: the global batches of the step, whose gradients are accumulated.
        options: other arguments of the model's call.
    """

    name: str
    batches: tuple[Any, ...]
    options: Mapping[str, object] = field(default_factory=dict)


def given_cases(batch: object) -> tuple[Case, ...]:
    """Return a case for each batch that the user gave.

    Args:
        batch: a global batch, or a list of them.

    Raises:
        PlanError: if ``batch`` is neither a mapping nor a list of mappings.
    """
    batches = [batch] if isinstance(batch, Mapping) else list(batch) if isinstance(batch, Sequence) else []
    if not batches or not all(isinstance(one, Mapping) for one in batches):
        raise PlanError(
            f"batch is {type(batch).__name__}, which is neither a global batch nor a list of them; pass what "
            "model(**batch) takes, e.g. batch={'input_ids': ids, 'labels': labels}"
        )
    return tuple(Case(f"batch {i}" if len(batches) > 1 else "batch", (dict(one),)) for i, one in enumerate(batches))


def token_cases(model: nn.Module, plan: ParallelPlan, seed: int) -> tuple[Case, ...]:
    """Return the cases for the comparison of a causal LM.

    Args:
        model: the one-device model.
        plan: the plan, which sets the number of rows per step.
        seed: the seed of the tokens.

    Raises:
        PlanError: if the model's vocabulary is not found, or the model takes no ``input_ids`` and ``labels``.
    """
    decoder: nn.Module = without_wrappers(model)[1]
    takes = inspect.signature(decoder.forward).parameters
    words = _vocabulary(decoder)
    takes_tokens = {"input_ids", "labels"} <= takes.keys()
    if words is None or not takes_tokens:
        why = "has no embedding or head of a known size" if takes_tokens else "is not called with input_ids and labels"
        raise PlanError(
            f"{type(decoder).__name__} {why}, so verify cannot make batches for it; "
            "pass a global batch: verify(model_factory, plan, batch={...})"
        )
    generator = torch.Generator().manual_seed(seed)
    pieces = plan.gradient_accumulation_steps * (plan.micro_batch_size or 1)
    rows = 2 * plan.dp * max(pieces, 1)
    is_counted = plan.schedule == "interleaved" and plan.micro_batch_size is not None
    rows *= plan.pp if is_counted else 1  # this schedule needs a multiple of pp
    fewer = rows if is_counted else rows - 1
    # This length is a multiple of tp. Some cases have a shorter length, so that sequence parallelism has to pad.
    even = math.lcm(LENGTH, plan.tp)

    def tokens(count: int, length: int) -> dict[str, Tensor]:
        ids = torch.randint(0, words, (count, length), generator=generator)
        labels = ids.clone()
        for row in range(count):  # rows have different numbers of valid labels, so a mean of means is wrong
            labels[row, : 1 + row % (length // 2)] = IGNORE_INDEX
        return {"input_ids": ids, "labels": labels}

    cases = [Case("even rows", (tokens(rows, even),)), Case("uneven rows, odd length", (tokens(fewer, even - 1),))]
    if "attention_mask" in takes:
        cases.append(Case("padding", (_padded(tokens(rows, even), left=False),)))
        cases.append(Case("padding on the left", (_padded(tokens(rows, even - 1), left=True),)))
    if "position_ids" in takes:
        # With a cache, transformers ignores the borders of documents.
        options = {"use_cache": False} if "use_cache" in takes else {}
        cases.append(Case("packed documents", (_packed(tokens(rows, even)),), options))
    known = find_loss(decoder)
    if known is not None and known.is_causal_lm:
        window = tokens(rows, even), tokens(rows, even - 3)
        items = sum(int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()) for batch in window)
        cases.append(Case("accumulation", window, {"num_items_in_batch": items}))
    return tuple(cases)


def _vocabulary(model: nn.Module) -> int | None:
    embedding: nn.Module | None = ask(model, "get_input_embeddings")
    if embedding is None:
        embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    # Some models have an additional embedding for padding, which the head does not predict.
    words = (
        getattr(embedding, "num_embeddings", None),
        getattr(ask(model, "get_output_embeddings"), "out_features", None),
    )
    return min((x for x in words if x is not None), default=None)


def _padded(batch: dict[str, Tensor], *, left: bool) -> dict[str, Tensor]:
    """Mask a different number of tokens in each row as padding; the first row has no padding."""
    ids, labels = batch["input_ids"], batch["labels"].clone()
    mask = torch.ones_like(ids)
    for row in range(len(ids)):
        count = row % (ids.shape[1] // 2)
        if left:
            mask[row, :count] = 0
        else:
            mask[row, ids.shape[1] - count :] = 0
    return {"input_ids": ids, "labels": labels.masked_fill(mask == 0, IGNORE_INDEX), "attention_mask": mask}


def _packed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Pack two documents into each row; the positions restart at the second document."""
    count, length = batch["input_ids"].shape
    borders = [2 + row % (length - 4) for row in range(count)]
    positions = [torch.cat([torch.arange(first), torch.arange(length - first)]) for first in borders]
    return {**batch, "position_ids": torch.stack(positions)}
