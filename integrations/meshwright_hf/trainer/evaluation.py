"""The Trainer's evaluation loss and label smoothing, computed in the model's loss over the global batch."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from meshwright.optim.runtime import Runtime
from meshwright.parallel.batch.mean_over_ranks import valid_labels
from meshwright.parallel.collectives import all_gather
from meshwright.parallel.forward.uneven_batches import rows_and_labels, said_of_ranks
from meshwright.parallel.losses.causal_lm import CausalLMLoss
from meshwright.roles.adapters import without_wrappers
from meshwright_hf.trainer.accelerator import ItemsUse
from meshwright_hf.trainer.checks import StockTrainer
from meshwright_hf.trainer.data import evaluated_rows
from meshwright_hf.trainer.trl_trainers import evaluated_over

# Earlier smoothers average over the labels of one micro-batch, where the model's loss averages over a step's.
_COUNTS_ITEMS = "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters


def takes_smoothing(trainer: StockTrainer, runtime: Runtime) -> bool:
    """Return whether the model's own loss can smooth labels as the Trainer's label smoother does.

    Args:
        trainer: the Trainer, whose ``compute_loss`` must be that of transformers.
        runtime: the runtime of its model.
    """
    model = without_wrappers(trainer.model)[1]
    name = model._get_name()
    return (
        _COUNTS_ITEMS
        and trainer.compute_loss_func is None
        and type(trainer.label_smoother) is LabelSmoother
        and runtime.features.find(CausalLMLoss) is not None
        and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        and not _adds_to_loss(getattr(model, "config", None))
    )


def _adds_to_loss(config: object) -> bool:
    """Return whether a model's forward adds a term to its loss when it gets labels: the Trainer's smoother hides them.

    The term is a router's auxiliary loss or the z-loss of Bamba.
    """
    return bool(getattr(config, "output_router_logits", None) or getattr(config, "z_loss_coefficient", None))


def smoothing(
    trainer: StockTrainer, runtime: Runtime, factor: float, inputs: dict[str, Any]
) -> AbstractContextManager[None]:
    """Let the model's own loss smooth labels inside the context.

    Args:
        trainer: the Trainer.
        runtime: the model's runtime.
        factor: ``TrainingArguments.label_smoothing_factor``; 0 for none.
        inputs: the batch. Its ``shift_labels`` are removed, since the Trainer's smoother shifts ``labels`` itself.

    Raises:
        ValueError: if the forward would add a term to the loss, though its config did not say so before.
    """
    if not factor:
        return contextlib.nullcontext()
    config = getattr(without_wrappers(trainer.model)[1], "config", None)
    if "labels" in inputs and (inputs.get("output_router_logits") or _adds_to_loss(config)):
        raise ValueError(
            "the model adds a router's auxiliary loss or a z-loss to its own loss, because the batch has "
            "output_router_logits or model.config was changed after the Trainer was made. With label_smoothing_factor "
            "the loss of transformers' Trainer is without that term, so this loss would differ from it. Before the "
            "Trainer is made, write model.config.output_router_logits = True, or remove output_router_logits from the "
            "batch"
        )
    inputs.pop("shift_labels", None)
    loss = runtime.features.find(CausalLMLoss)
    assert loss is not None
    return loss.smoothed(factor)


logger = logging.getLogger(__name__)


class EvaluationLoss:
    """Converts the mean over a rank's rows to the mean over the global batch, as one process would compute it.

    The losses of transformers' heads are already the global mean on all ranks. For the label smoother and TRL's
    trainers it is known which items they average over. For a user's own loss it is unknown: if the ranks have different
    numbers of rows or labels, the result is the mean of the ranks' means, and a warning says so once.

    Args:
        trainer: the trainer that evaluates.
        runtime: the runtime of the trainer's model.
    """

    def __init__(self, trainer: StockTrainer, runtime: Runtime):
        self.trainer, self.dp = trainer, runtime.mesh.dp
        self._speaks = all(axis.rank == 0 for axis in (runtime.mesh.dp, *runtime.mesh.of_same_rows))
        self._has_warned = False

    def count(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the weight (-1: unknown), rows and labels of this rank's batch, before the trainer removes labels."""
        counted = rows_and_labels(inputs if isinstance(inputs, Mapping) else {}, with_mask=True)
        if (rows := evaluated_rows()) is not None:
            counted[0] = rows
        weight = _smoothed_over(self.trainer, inputs)
        weight = evaluated_over(self.trainer, inputs) if weight is None else weight
        return torch.cat([counted.new_full((1,), -1) if weight is None else weight.to(counted).reshape(1), counted])

    def of_global_batch(self, loss: Tensor, counted: Tensor, items: ItemsUse) -> Tensor:
        """Return the loss as the mean over the global batch; every rank makes the call.

        Args:
            loss: the loss over this rank's rows, a scalar.
            counted: the result of ``count`` for these rows.
            items: whether and how the loss used ``num_items_in_batch``.
        """
        own = torch.cat([loss.detach().double().reshape(1), counted.to(loss.device)])
        losses, weights, rows, labels = all_gather(own[None], self.dp).unbind(1)
        if items.is_divided:
            weights = torch.ones_like(losses)
        elif bool((weights < 0).any()):
            # A rank whose only row is a copy that does not count has weight 0.
            weights = (rows > 0).to(losses) if evaluated_rows() is not None else torch.ones_like(losses)
            ranks = torch.stack([rows, labels], dim=1)
            is_known = self._has_warned or bool((ranks == ranks[0]).all()) or bool((losses == losses[0]).all())
            if not is_known and self._speaks:
                logger.warning(
                    "%s computes its own loss, and in an evaluation the data-parallel ranks had %s. The evaluation "
                    "averages the ranks' means, so a row or label on a rank with fewer of them has a larger weight "
                    "than on one device. For the mean over the global batch, return meshwright.global_mean(model, "
                    "loss, count) from compute_loss, where this rank's loss is a mean over count items, for example "
                    "(labels != -100).sum()",
                    type(self.trainer).__name__, said_of_ranks(ranks.tolist()),
                )  # fmt: skip
            self._has_warned |= not is_known
        total = (losses.where(weights > 0, 0) * weights).sum()
        return (total / weights.sum().clamp(min=1)).to(loss.dtype)


def _smoothed_over(trainer: StockTrainer, inputs: Mapping[str, Any]) -> Tensor | None:
    """Return how many labels the Trainer's label smoother averages over; None without a label smoother."""
    if trainer.label_smoother is None or trainer.compute_loss_func is not None or "labels" not in inputs:
        return None
    labels, name = inputs["labels"], without_wrappers(trainer.model)[1]._get_name()
    return valid_labels(labels[..., 1:] if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() else labels)
