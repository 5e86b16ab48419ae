"""Computes the Trainer's label smoothing in the model's own loss, so that whole logits are never in memory."""

from __future__ import annotations

import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from meshwright.optim.runtime import Runtime
from meshwright.parallel.losses.causal_lm import CausalLMLoss
from meshwright.roles.adapters import without_wrappers
from meshwright_hf.trainer.checks import StockTrainer

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
