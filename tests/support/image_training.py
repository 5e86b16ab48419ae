"""A training on ready batches whose rows differ in images, of which every gradient of every step is a result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from support.exact import Float64
from support.short_programs import distribute, gradients_of, weights_of
from support.vision_models import build, collate, samples

Plan = dict[str, Any] | None
Counts = tuple[tuple[int, ...], ...]  # the images in the rows of each batch
# The second row has no image in three batches one after the other, which has no weight decay for its rank's tower.
PAIRS: Counts = ((1, 1), (2, 0), (0, 0), (3, 1), (2, 0), (1, 0), (3, 0))
FOURS: Counts = ((1, 0, 0, 2), (0, 0, 3, 1), (0, 0, 0, 0), (2, 2, 0, 0), (0, 1, 0, 0))


def train(plan: Plan, family: str, counts: Counts = PAIRS, **options: Any) -> dict[str, Tensor]:
    """Train a family on batches with these numbers of images; see :func:`train_on`."""
    batches = [collate(family, samples(family, numbers)) for numbers in counts]
    return train_on(plan, build(family), batches, **options)


def train_on(
    plan: Plan, model: Any, batches: Sequence[Any], *, prepare: Callable[[Any], object] = lambda model: None
) -> dict[str, Tensor]:
    """Train on ready batches, with an optimizer that decays only weights that have a gradient.

    Args:
        plan: None for one process.
        model: the model.
        batches: the batches.
        prepare: changes the model before it is distributed.
    """
    with Float64():
        prepare(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
        return _steps(plan, model, optimizer, batches)


def _steps(plan: Plan, model: Any, optimizer: Any, batches: Sequence[Any]) -> dict[str, Tensor]:
    model.config.use_cache = False
    model, optimizer, loader = distribute(plan, model, optimizer, batches)
    found: dict[str, Tensor] = {}
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        found |= {f"gradient {step} of {name}": gradient for name, gradient in gradients_of(model, plan).items()}
        found[f"norm {step}"] = mw.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"weight {name}": value for name, value in weights_of(model, plan).items()}


one_process = functools.cache(functools.partial(train, None))


def train_each(plan: Plan, families: Sequence[str], counts: Counts) -> dict[str, dict[str, Tensor]]:
    """Train several families one after the other, since each call of a pool takes time."""
    return {family: train(plan, family, counts) for family in families}
