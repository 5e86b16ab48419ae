"""Short training programs that run with a plan, or without one as on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from support.exact import relative_difference
from support.models import labels_for, tokens

ZERO = [{"dp": 2, "zero_stage": stage} for stage in (1, 2, 3)]

Plan = dict[str, Any] | None


def batches(steps: int) -> list[dict[str, Tensor]]:
    ids = tokens(4 * steps, 10)
    labels = labels_for(ids)
    return [{"input_ids": ids[i : i + 4], "labels": labels[i : i + 4]} for i in range(0, len(ids), 4)]


def distribute(
    plan: Plan, model: nn.Module, optimizer: Any = None, loader: Any = None, **config: Any
) -> tuple[Any, Any, Any]:
    if plan is None:
        return model, optimizer, loader
    options = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), **config)
    return mw.to_distributed(model, optimizer, loader, config=options)


def train(
    model: nn.Module,
    plan: Plan,
    batches: Any,
    optimizer: Any = None,
    *,
    loss_of: Callable[[Any, Any], Tensor] = lambda model, batch: model(**batch).loss,
    **config: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train on each batch, under a plan or as on one device.

    Args:
        model: the model, which is not distributed yet.
        plan: the fields of the plan; None for one device.
        batches: the global batches.
        optimizer: the optimizer that steps after each batch; without one the gradients of the batches add up.
        loss_of: the loss of a batch, by default the model's own.
        config: further fields of the configuration.

    Returns:
        The losses of the batches, and whole tensors: the weights, or the gradients if there is no optimizer.
    """
    model, optimizer, loader = distribute(plan, model, optimizer, batches, **config)
    losses = losses_of(model, optimizer, loader, loss_of)
    return losses, gradients_of(model, plan) if optimizer is None else weights_of(model, plan)


def losses_of(
    model: Any,
    optimizer: Any,
    loader: Iterable[Any],
    loss_of: Callable[[Any, Any], Tensor] = lambda model, batch: model(**batch).loss,
) -> list[float]:
    """Train on each batch, and return the losses; without an optimizer, gradients add up."""
    losses = []
    for batch in loader:
        loss = loss_of(model, batch)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights_of(model: nn.Module, plan: object) -> dict[str, Tensor]:
    return {n: w.clone() for n, w in model.state_dict().items()} if plan is None else mw.full_state_dict(model)


def gradients_of(model: nn.Module, plan: object) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in model.named_parameters()} if plan is None else mw.full_gradients(model)
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def worst(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(relative_difference(actual[name], value) for name, value in expected.items())


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """A mean over the labels that count, unlike transformers' own."""
    targets = labels[:, 1:].reshape(-1)
    return F.cross_entropy(logits[:, :-1].reshape(len(targets), -1), targets, label_smoothing=0.3)


def next_words(batch: dict[str, Any]) -> Tensor:
    """The number of labels that count."""
    return (batch["labels"][:, 1:] != -100).sum()
