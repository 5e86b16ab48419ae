"""Batches per rank, made global ones."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from meshwright_hf.batches import global_batches


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Uneven:
    """A batch sampler with batches of its own making, and an epoch."""

    epoch = 0

    def __iter__(self):
        return iter([[0], [1, 2], [3], [4, 5, 6], [7]])

    def __len__(self):
        return 5

    def set_epoch(self, epoch):
        self.epoch = epoch


def read(loader):
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("dataset", [range(10), Stream()], ids=["map", "stream"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_are_dp_times_larger(dataset, drop_last):
    loader = global_batches(DataLoader(dataset, batch_size=2, drop_last=drop_last), 3)
    tail = [] if drop_last else [[6, 7, 8, 9]]
    assert read(loader) == [[0, 1, 2, 3, 4, 5], *tail]


def test_one_rank_keeps_the_loader():
    loader = DataLoader(range(3))
    assert global_batches(loader, 1) is loader


def test_order_and_options_stay():
    def collate(rows):
        return torch.tensor(rows) + 100

    def loader(batch_size):
        generator = torch.Generator().manual_seed(3)
        return DataLoader(range(12), batch_size=batch_size, shuffle=True, generator=generator, collate_fn=collate)

    joined = global_batches(loader(2), 2)
    assert read(joined) == read(loader(4)), "the shuffle is that of one device with the global batch"

    workers = DataLoader(range(4), num_workers=1, prefetch_factor=3, persistent_workers=True, timeout=7)
    joined = global_batches(workers, 2)
    assert (joined.num_workers, joined.prefetch_factor, joined.persistent_workers, joined.timeout) == (1, 3, True, 7)


@pytest.mark.parametrize("drop_last", [False, True])
def test_batch_samplers_are_joined(drop_last):
    sampler = BatchSampler(SequentialSampler(range(7)), 2, drop_last)
    loader = global_batches(DataLoader(range(7), batch_sampler=sampler), 2)
    expected = [[0, 1, 2, 3]] if drop_last else [[0, 1, 2, 3], [4, 5, 6]]
    assert read(loader) == expected
    assert len(loader) == len(expected)
    assert read(loader) == expected, "each epoch anew"


def test_a_batch_sampler_of_the_users_own():
    joined = global_batches(DataLoader(range(8), batch_sampler=Uneven()), 2)
    assert read(joined) == [[0, 1, 2], [3, 4, 5, 6], [7]]
    joined.batch_sampler.set_epoch(4)
    assert joined.batch_sampler.inner.epoch == 4, "what else it has stays within reach"
    assert joined.batch_sampler.batch_size is None
    assert list(pickle.loads(pickle.dumps(joined.batch_sampler))) == [[0, 1, 2], [3, 4, 5, 6], [7]]


def test_what_has_no_batches_is_refused():
    with pytest.raises(ValueError, match="batch_size=None"):
        global_batches(DataLoader(range(4), batch_size=None), 2)
    with pytest.raises(ValueError, match="a list makes its batches in a way of its own"):
        global_batches([torch.zeros(2)], 2)
