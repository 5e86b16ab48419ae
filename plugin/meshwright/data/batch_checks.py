"""Checks of batches: what becomes DTensors is equal on all ranks, and a causal LM has labels."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping

from torch import Tensor

from meshwright.data.global_batches import Portion
from meshwright.data.nested import digest, leaves
from meshwright.data.peers import Peers
from meshwright.data.stream import gather_objects
from meshwright.mesh.axes import Axis
from meshwright.parallel.batch.schema import PER_TOKEN

logger = logging.getLogger(__name__)


def check_dtensors(portion: Portion, own: str, dp: Axis, where: str) -> None:
    """Raise on all ranks of the axis unless the inputs that become DTensors fit together.

    Args:
        portion: this rank's portion of the batch, of which these inputs are left.
        own: their dtypes and sizes, as text.
        dp: the axis over whose ranks the rows are sharded.
        where: the step, as a text for the message.

    Raises:
        ValueError: the inputs have different dtypes or sizes, or a tensor that is not sharded by rows differs.
    """
    if len(set(map(tuple, Peers((dp,)).gather(zlib.crc32(own.encode()))))) > 1:
        signatures = gather_objects(own, dp)
        said = "; ".join(f"{{{text}}} on rank {rank} of {dp.name}" for rank, text in enumerate(signatures))
        raise ValueError(
            f"{where}: the inputs differ in dtype or size between ranks: {said}. The rows of a DTensor must have the "
            "same length on all ranks: pad all batches to one length, or use output='local'"
        )
    if portion.is_whole:
        return
    kept = {name: x for name, x in leaves(portion.batch) if isinstance(x, Tensor)}
    kept = {name: x for name, x in kept.items() if not x.ndim or x.shape[0] != portion.held}
    if len(set(map(tuple, Peers((dp,)).gather(digest(kept))))) > 1:
        raise ValueError(
            f"{where}: the ranks have different values of {', '.join(kept)}. These cannot be sharded by rows, since "
            f"their first dim is not the number of rows ({portion.held} on this rank), so as DTensors they must be the "
            "same on all ranks; leave them out of the batch, or use output='local'"
        )


def warn_without_labels(batch: object) -> None:
    """Log a warning if a batch has a causal LM's inputs but no labels."""
    if isinstance(batch, Mapping) and "input_ids" in batch and set(PER_TOKEN).issuperset(batch):
        logger.warning(
            "the loader's batches have %s but no labels, so model(**batch).loss is None and has no backward(). Add "
            "them in the collate function, for example batch['labels'] = batch['input_ids'].clone(), or use "
            "transformers' DataCollatorForLanguageModeling(tokenizer, mlm=False). A loss of your own needs no labels.",
            ", ".join(map(str, batch)),
        )
