"""Whether the batches that a causal LM is trained on have what its loss is made of."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

_INPUTS = frozenset({"input_ids", "attention_mask", "position_ids", "token_type_ids", "special_tokens_mask"})


def warn_without_labels(batch: Any) -> None:
    """Say that a batch has inputs and nothing that a loss could compare them with."""
    if isinstance(batch, Mapping) and "input_ids" in batch and _INPUTS.issuperset(batch):
        logger.warning(
            "the loader's batches have %s and no labels, so that model(**batch).loss is None, which has no backward(); "
            "let the collate function add them, e.g. batch['labels'] = batch['input_ids'].clone(), or use "
            "transformers' DataCollatorForLanguageModeling(tokenizer, mlm=False). A loss of your own needs none.",
            ", ".join(map(str, batch)),
        )
