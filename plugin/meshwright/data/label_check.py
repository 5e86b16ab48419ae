"""Warns when the batches that a causal LM is trained on have no labels."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from meshwright.parallel.batch_schema import PER_TOKEN

logger = logging.getLogger(__name__)


def warn_without_labels(batch: object) -> None:
    """Log a warning if a batch has a causal LM's inputs but no labels."""
    if isinstance(batch, Mapping) and "input_ids" in batch and set(PER_TOKEN).issuperset(batch):
        logger.warning(
            "the loader's batches have %s but no labels, so model(**batch).loss is None and has no backward(). Add "
            "them in the collate function, for example batch['labels'] = batch['input_ids'].clone(), or use "
            "transformers' DataCollatorForLanguageModeling(tokenizer, mlm=False). A loss of your own needs no labels.",
            ", ".join(map(str, batch)),
        )
