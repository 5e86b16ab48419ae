"""Computes the Trainer's label smoothing in the model's own loss, so that whole logits are never in memory."""

from __future__ import annotations

import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from meshwright.optim.runtime import Runtime
from meshwright.parallel.causal_lm_loss import CausalLMLoss
from meshwright.roles.adapters import without_wrappers

# Earlier smoothers average over the labels of one micro-batch, where the model's loss averages over a step's.
_COUNTS_ITEMS = "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters


def takes_smoothing(trainer: Any, runtime: Runtime) -> bool:
    """Return whether the model's own loss can smooth labels as the Trainer's label smoother does.

    Args:
        trainer: the Trainer, whose ``compute_loss`` must be that of transformers.
        runtime: the runtime of its model.
    """
    name = without_wrappers(trainer.model)[1]._get_name()
    return (
        _COUNTS_ITEMS
        and trainer.compute_loss_func is None
        and type(trainer.label_smoother) is LabelSmoother
        and isinstance(runtime.loss, CausalLMLoss)
        and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    )


def smoothing(runtime: Runtime, factor: float, inputs: Any) -> AbstractContextManager[None]:
    """Let the model's own loss smooth labels inside the context.

    Args:
        runtime: the model's runtime.
        factor: ``TrainingArguments.label_smoothing_factor``; 0 for none.
        inputs: the batch. Its ``shift_labels`` are removed, since the Trainer's smoother shifts ``labels`` itself.
    """
    if not factor:
        return contextlib.nullcontext()
    inputs.pop("shift_labels", None)
    assert isinstance(runtime.loss, CausalLMLoss)
    return runtime.loss.smoothed(factor)
