"""Chooses the reader that fits a loader."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch.utils.data import IterableDataset

from meshwright.data.global_batches import Sharing
from meshwright.data.peers import Peers
from meshwright.data.readers.base import Reader
from meshwright.data.readers.map_style import MapReader
from meshwright.data.readers.split import SplitReader
from meshwright.data.readers.stream_shards import StreamReader, has_lanes, has_shards, stage_over_shards
from meshwright.data.readers.whole_stream import WholeReader, is_stock
from meshwright.data.sampler_order import split_by
from meshwright.mesh.axes import Axis
from meshwright.parallel.batch.items import BatchFormat
from meshwright.plan.loader_options import LoaderOptions

logger = logging.getLogger(__name__)


Batches = Iterable[Any]  # what a user's loader yields


def split_reader(
    loader: Batches, dp: Axis, share: Sharing, options: LoaderOptions, *, needs_equal_rows: bool, keeps_samples: bool
) -> Reader:
    """Return the reader for a loader of this rank's part of a dataset.

    Raises:
        ValueError: an empty dataset, or options that do not fit it.
    """
    own = make_reader(loader, Axis(dp.name), share, Peers(), options, keeps_samples=keeps_samples, is_part=True)
    drop_last = bool(getattr(loader, "drop_last", False))
    return SplitReader(own, dp, drop_last=drop_last, needs_equal_rows=needs_equal_rows)


def make_reader(
    loader: Batches,
    dp: Axis,
    share: Sharing,
    readers: Peers,
    options: LoaderOptions,
    *,
    keeps_samples: bool = False,
    format: BatchFormat | None = None,
    needs_rows: bool = False,
    is_part: bool = False,
) -> Reader:
    """Return the reader that fits a loader; its portions hold their samples if ``keeps_samples``.

    ``format`` and ``needs_rows`` are for ready batches; see ``WholeReader``. With ``is_part``, the user has split the
    dataset, and this rank reads its part in the part's own order.

    Raises:
        ValueError: an empty dataset, one that is split already, or options that do not fit it.
    """
    name = options.fingerprint
    if not is_part and name is None and (what := split_by(loader)):
        raise ValueError(
            f"the loader is split already, by {what}, and would be split a second time, so that some samples are never "
            "read; pass a plain DataLoader over the whole dataset, or call shard_dataloader(..., "
            "is_dataset_splitted=True). If each process reads all samples already, set "
            "LoaderOptions(fingerprint='a name')"
        )
    if not is_part and options.reads_lanes and has_lanes(loader):
        return StreamReader(loader, dp, share, {**options.of_stream, "name": name})
    if options.shuffle:
        raise ValueError(
            "shuffle=True applies to an iterable dataset with several shards that can be read in lanes; pass "
            "DataLoader(..., shuffle=True), or shuffle the dataset itself"
        )
    if is_stock(loader) and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None:
        return MapReader(
            loader,
            dp,
            share,
            seed=options.seed,
            name=name,
            keeps_samples=keeps_samples,
            draws=options.draws,
            format=format,
        )
    if is_stock(loader) and loader.batch_size and not is_part and dp.size > 1 and dp.rank == 0:
        _tell_of_lanes(loader.dataset, dp.size)
    return WholeReader(
        loader,
        dp,
        share,
        readers=readers,
        name=name,
        keeps_samples=keeps_samples,
        format=format,
        needs_rows=needs_rows,
        draws=options.draws,
    )


def _tell_of_lanes(dataset: Any, ranks: int) -> None:
    """Log what reading in the order of one device costs, if the dataset's shards could be spread over the ranks."""
    if not has_shards(dataset):
        return
    stage = stage_over_shards(dataset)
    logger.warning(
        "to keep the order of one device, each of the %d data-parallel ranks reads all %d shards of the dataset, and a "
        "resumed run reads them again up to its position. LoaderOptions(order='lanes') reads each shard once, in "
        "another order%s",
        ranks,
        dataset.num_shards,
        f", of a pipeline without {stage}: shuffle by LoaderOptions(shuffle=True)" if stage else "",
    )
