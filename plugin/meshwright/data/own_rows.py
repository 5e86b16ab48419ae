"""Cuts this rank's rows out of a batch that was collated whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.data.global_batches import Share
from meshwright.data.nested import like, take_rows
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.schema import BatchSchema


def own_rows(batch: object, share: Share, rows: int, format: BatchFormat | None) -> Any:
    """Return a share of a batch of ``rows`` rows; None if the batch cannot be cut into these rows.

    Args:
        batch: what a collate function returned for all rows.
        share: this rank's rows.
        rows: the number of rows.
        format: what the inputs of the batch mean.
    """
    schema = BatchSchema(batch if isinstance(batch, Mapping) else {"batch": batch}, format)
    if schema.rows != rows:
        return None
    try:
        own = schema.part(slice(share.low, share.high), take_rows)
    except ValueError:
        return None
    return like(batch, own) if isinstance(batch, Mapping) else own["batch"]


def cut_rows(batch: object, share: Share, rows: int, format: BatchFormat | None) -> Any:
    """Return a share of a batch, as ``own_rows``, where earlier batches could be cut.

    Raises:
        ValueError: the batch cannot be cut into its rows.
    """
    own = own_rows(batch, share, rows, format)
    if own is None:
        raise ValueError(
            f"what the collate function returned for a batch of {rows} rows ({type(batch).__name__}) cannot be cut "
            "into rows, unlike the batches before. The ranks collate whole batches, since the function draws random "
            "numbers, or its rows depend on each other. Return tensors whose first dim is the batch's rows for every "
            "batch, or set LoaderOptions(draws='rank'), so that each rank collates its own rows, with values of its own"
        )
    return own
