"""Every sample once in every epoch, on any mesh, and in any chain of meshes. No processes: ranks take turns."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, WeightedRandomSampler
from transformers import BatchEncoding

from meshwright.data import shuffling as order
from meshwright.data.global_batches import EqualBatches, chunk_share, even_share
from meshwright.data.nested import digest, to_device
from meshwright.data.shuffling import Permutation
from meshwright.mesh.axes import Axis
from support.loading import Numbers, as_list, plain, ranks_of, seen, steps

CASES = 500


def test_500_random_cases() -> None:
    draw = random.Random(0)
    for _ in range(CASES):
        size, batch_size, dp = draw.randint(1, 400), draw.randint(1, 8), draw.randint(1, 8)
        shuffle, drop_last = draw.random() < 0.5, draw.random() < 0.3
        if draw.random() < 0.5:
            batch_size *= dp  # the batch of a rank rather than of all
        case = (size, batch_size, dp, shuffle, drop_last)
        loaders = ranks_of(dp, lambda c=case: plain(c[0], c[1], shuffle=c[3], drop_last=c[4]))
        kept = size // batch_size * batch_size if drop_last else size
        if kept == 0:
            assert steps(loaders) == [] and loaders[0].dropped == size, case
            continue
        taken = steps(loaders)
        batches = seen(taken)
        one_device = list(plain(size, batch_size, shuffle=shuffle, drop_last=drop_last))
        assert batches == one_device, case
        samples = list(itertools.chain.from_iterable(batches))
        assert len(samples) == len(set(samples)) == kept, case
        assert len(taken) == len(loaders[0]) == len(one_device), case
        assert loaders[0].dropped == size - kept, case
        for batch in taken:
            sizes = [len(rows) for rows in batch]
            assert max(sizes) - min(sizes) <= 1, case


def chain(size: int, stages: list[tuple[int, int, int]], *, shuffle: bool, steps_each: int) -> list[int]:
    """The samples of one epoch, read by meshes of (dp, batch size) that take over from each other."""
    state: dict[str, Any] | None = None
    samples: list[int] = []
    for number, (dp, batch_size, workers) in enumerate(stages):
        loaders = ranks_of(dp, lambda b=batch_size, w=workers: plain(size, b, shuffle=shuffle, num_workers=w))
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(json.loads(json.dumps(state)))
        is_last = number == len(stages) - 1
        samples += itertools.chain.from_iterable(seen(steps(loaders, None if is_last else steps_each)))
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
        assert len(json.dumps(state)) <= 4096
    assert state is not None and (state["epoch"], state["samples"]) == (1, 0)
    return samples


def test_440_changes_of_dp_in_mid_epoch() -> None:
    draw = random.Random(1)
    cases = 0
    for before, after in itertools.product(range(1, 9), repeat=2):
        for _ in range(7):
            size, batch_size = draw.randint(30, 200), draw.choice([4, 6, 8, 12])
            shuffle, taken = draw.random() < 0.5, draw.randint(1, 3)
            stages = [(before, batch_size, 0), (after, batch_size, 0)]
            samples = chain(size, stages, shuffle=shuffle, steps_each=taken)
            in_order = next(iter(plain(size, size, shuffle=shuffle)))
            assert samples == in_order, (before, after, size, batch_size)  # none lost, none twice, and one order
            cases += 1
    assert cases >= 440


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "stages",
    [
        [(4, 8, 0), (2, 8, 0), (3, 8, 0), (1, 8, 0)],
        [(4, 8, 0), (2, 6, 0), (3, 5, 0), (1, 7, 0)],  # the batch size changes too
        [(2, 8, 2), (2, 8, 0), (1, 4, 1), (3, 6, 2)],  # and so do the workers, which prefetch
    ],
)
def test_chains_of_meshes(stages: list[tuple[int, int, int]], shuffle: bool) -> None:
    samples = chain(101, stages, shuffle=shuffle, steps_each=2)
    assert samples == next(iter(plain(101, 101, shuffle=shuffle)))


def test_epochs_after_a_resumed_one_are_those_of_an_uninterrupted_run() -> None:
    expected = [list(itertools.chain.from_iterable(epoch)) for epoch in epochs_of_one_device(23, 4, 4)]
    first = ranks_of(2, lambda: plain(23, 4, shuffle=True))
    steps(first), steps(first)
    read = list(itertools.chain.from_iterable(seen(steps(first, 3))))
    resumed = ranks_of(3, lambda: plain(23, 4, shuffle=True))
    for loader in resumed:
        loader.load_state_dict(first[0].state_dict())
    read += itertools.chain.from_iterable(seen(steps(resumed)))
    assert read == expected[2]
    assert list(itertools.chain.from_iterable(seen(steps(resumed)))) == expected[3]


def epochs_of_one_device(size: int, batch_size: int, count: int) -> list[list[list[int]]]:
    loader = plain(size, batch_size, shuffle=True)
    return [list(loader) for _ in range(count)]


def test_set_epoch_chooses_the_order_and_keeps_a_loaded_place() -> None:
    expected = epochs_of_one_device(23, 4, 3)
    (loader,) = ranks_of(1, lambda: plain(23, 4, shuffle=True))
    loader.set_epoch(2)
    assert list(loader) == expected[2]
    loader.set_epoch(1)
    head = list(itertools.islice(loader, 2))
    state = loader.state_dict()
    (resumed,) = ranks_of(1, lambda: plain(23, 4, shuffle=True))
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert head + list(resumed) == expected[1]


def test_a_new_iteration_is_a_new_epoch_and_ends_the_old_one() -> None:
    (loader,) = ranks_of(1, lambda: plain(10, 2, shuffle=True))
    old = iter(loader)
    assert next(old) != next(iter(loader()))
    with pytest.raises(RuntimeError, match="only one position"):
        next(old)


def test_a_state_at_the_end_of_an_epoch_gives_nothing_more_of_it() -> None:
    (loader,) = ranks_of(1, lambda: plain(10, 4))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    (resumed,) = ranks_of(1, lambda: plain(10, 4))
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == [] and list(resumed) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_state_that_a_prefetching_loader_gives_counts_what_was_given_out() -> None:
    (loader,) = ranks_of(1, lambda: plain(100, 2, num_workers=2, prefetch_factor=8))
    iterator = iter(loader)
    next(iterator), next(iterator)
    assert loader.state_dict()["samples"] == 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"length": 11}, "length"),
        ({"dataset": "something else"}, "dataset"),
        ({"seed": 9}, "seed"),
        ({"order": "sequential"}, "order"),
        ({"version": 0}, "version"),
        ({"reader": "stream"}, "reader"),
    ],
)
def test_a_state_of_something_else_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    (loader,) = ranks_of(1, lambda: plain(10, 2, shuffle=True))
    with pytest.raises(ValueError, match=f"the state has {named}="):
        loader.load_state_dict({**loader.state_dict(), **change})


def test_without_a_generator_a_loaded_epoch_keeps_its_order() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(40), batch_size=4, shuffle=True, collate_fn=as_list)

    torch.manual_seed(5)
    (loader,) = ranks_of(1, make)
    head = list(itertools.islice(loader, 3))
    torch.manual_seed(6)  # another program
    (resumed,) = ranks_of(1, make)
    resumed.load_state_dict(loader.state_dict())
    samples = list(itertools.chain.from_iterable(head + list(resumed)))
    assert sorted(samples) == list(range(40))
    assert list(itertools.chain.from_iterable(resumed)) != samples  # the next epoch has an order of its own


class Buckets(BatchSampler):
    """Batches of 1, 2, 3, 1, 2, 3, ... samples."""

    def __init__(self, size: int):
        super().__init__(SequentialSampler(Numbers(size)), 2, False)

    def __iter__(self) -> Any:
        indices = iter(self.sampler)
        for count in itertools.cycle([1, 2, 3]):
            batch = list(itertools.islice(indices, count))
            if not batch:
                return
            yield batch


@pytest.mark.parametrize("kind", ["buckets", "weighted"])
def test_samplers_of_the_users(kind: str) -> None:
    def make() -> DataLoader[Any]:
        if kind == "buckets":
            return DataLoader(Numbers(20), batch_sampler=Buckets(20), collate_fn=as_list)
        sampler = WeightedRandomSampler([1.0] * 20, 20, replacement=False, generator=torch.Generator().manual_seed(3))
        return DataLoader(Numbers(20), batch_size=3, sampler=sampler, collate_fn=as_list)

    expected = list(make())
    loaders = ranks_of(2, make)
    head = seen(steps(loaders, 2))
    resumed = ranks_of(3, make)
    for loader in resumed:
        loader.load_state_dict(loaders[0].state_dict())
    assert head + seen(steps(resumed)) == expected


class OfItsOwn(SequentialSampler):
    """Draws from something that torch knows nothing of."""

    seed = 0

    def __iter__(self) -> Any:
        return iter(random.Random(self.seed).sample(range(20), 20))


def test_a_sampler_that_draws_another_order_cannot_go_on() -> None:
    def make(seed: int) -> DataLoader[Any]:
        sampler = OfItsOwn(range(20))
        sampler.seed = seed
        return DataLoader(Numbers(20), batch_size=3, sampler=sampler, collate_fn=as_list)

    (loader,) = ranks_of(1, lambda: make(1))
    next(iter(loader))
    (resumed,) = ranks_of(1, lambda: make(2))
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="a different order"):
        next(iter(resumed))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 10_000), st.integers(0, 2**40))
def test_a_permutation_has_every_index_once(size: int, seed: int) -> None:
    assert sorted(Permutation(size, str(seed)).take(0, size)) == list(range(size))


def test_a_permutation_is_shuffled() -> None:
    """Where each index goes, over 4000 seeds: chi-squared per degree of freedom is 1 +- 0.022 for a fair shuffle.

    A network of one round has 450, as it moves only halves of the indices.
    """
    size, seeds = 64, 4000
    counts = torch.zeros(size, size)
    for seed in range(seeds):
        counts[torch.arange(size), torch.tensor(Permutation(size, str(seed)).take(0, size))] += 1
    expected = seeds / size
    assert abs(((counts - expected) ** 2 / expected).sum().item() / (size - 1) ** 2 - 1) < 0.1


def test_large_datasets_are_shuffled_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "IN_MEMORY", 10)
    batches = [seen(steps(ranks_of(dp, lambda: plain(101, 8, shuffle=True)))) for dp in (1, 3)]
    assert batches[0] == batches[1]
    samples = list(itertools.chain.from_iterable(batches[0]))
    assert sorted(samples) == list(range(101)) and samples != list(range(101))


@given(st.integers(1, 300), st.integers(1, 16))
def test_shares_make_up_the_batch(rows: int, size: int) -> None:
    ranks = [Axis("dp", size=size, rank=rank) for rank in range(size)]
    even = [even_share(rows, rank) for rank in ranks]
    assert sum(share.counted for share in even) == rows
    assert [row for share in even if share.counted for row in range(share.low, share.high)] == list(range(rows))
    assert all(share.low < share.high for share in even)
    chunks = [chunk_share(rows, rank) for rank in ranks]
    if chunks[0].is_replicated:
        assert set(chunks) == {chunks[0]} and (chunks[0].low, chunks[0].high) == (0, rows)
    else:
        expected = [len(part) for part in torch.empty(rows).chunk(size)]
        assert [share.high - share.low for share in chunks] == expected and len(expected) == size


@given(st.integers(0, 200), st.integers(1, 20), st.booleans(), st.data())
def test_batches_after_some_samples(samples: int, batch_size: int, drop_last: bool, data: st.DataObject) -> None:
    batches = EqualBatches(samples, batch_size, drop_last)
    start = data.draw(st.integers(0, samples))
    rest = list(batches.after(start))
    assert sum(batch.rows for batch in rest) == samples - start - batches.dropped(start)
    assert len(list(batches.after(0))) == len(batches)


def test_a_sampler_over_a_part_of_the_dataset_reads_that_part() -> None:
    (loader,) = ranks_of(1, lambda: DataLoader(Numbers(10), 4, sampler=SequentialSampler(range(5)), collate_fn=as_list))
    assert list(loader) == [[0, 1, 2, 3], [4]]


def test_a_listed_order_goes_on_with_another_batch_size_and_says_what_it_drops() -> None:
    def make(batch_size: int) -> DataLoader[Any]:
        return DataLoader(Numbers(9), batch_size, sampler=range(8, -1, -1), collate_fn=as_list, drop_last=True)

    (first,) = ranks_of(1, lambda: make(2))
    assert next(iter(first)) == [8, 7]
    (resumed,) = ranks_of(1, lambda: make(3))
    resumed.load_state_dict(first.state_dict())
    assert list(resumed) == [[6, 5, 4], [3, 2, 1]] and resumed.dropped == 1


class Epochal(SequentialSampler):
    """Begins at the sample that its epoch says."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(range(self.epoch, 6))


def test_a_sampler_is_told_the_epoch() -> None:
    (loader,) = ranks_of(1, lambda: DataLoader(Numbers(6), 6, sampler=Epochal(range(6)), collate_fn=as_list))
    loader.set_epoch(4)
    assert list(loader) == [[4, 5]]
    for epoch in (-1, True):
        with pytest.raises(ValueError, match="epoch must be an integer"):
            loader.set_epoch(epoch)


@pytest.mark.parametrize("move", ["set_epoch", "load_state_dict"])
def test_an_iteration_ends_where_the_loader_is_sent_elsewhere(move: str) -> None:
    (loader,) = ranks_of(1, lambda: plain(8, 2))
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    loader.set_epoch(5) if move == "set_epoch" else loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="only one position"):
        next(iterator)


@pytest.mark.parametrize("samples", [99, -4, "x", None, True])
def test_a_state_with_an_impossible_place_is_refused(samples: Any) -> None:
    (loader,) = ranks_of(1, lambda: plain(8, 2))
    with pytest.raises(ValueError, match=r"'samples' is .*must be a whole number from 0"):
        loader.load_state_dict({**loader.state_dict(), "samples": samples})


class Scaled(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (batch * 10 for batch in super().__iter__())


def test_a_dataloader_with_an_iteration_of_its_own_keeps_it() -> None:
    loaders = ranks_of(2, lambda: Scaled(Numbers(4), batch_size=2))
    assert [[int(x) for batch in loader for x in batch] for loader in loaders] == [[0, 20], [10, 30]]


def test_persistent_workers_keep_the_order_of_one_device() -> None:
    def make() -> DataLoader[Any]:
        return plain(20, 4, shuffle=True, num_workers=1, persistent_workers=True)

    one = make()
    (loader,) = ranks_of(1, make)
    assert [list(loader) for _ in range(3)] == [list(one) for _ in range(3)]


def test_batches_that_come_ready_are_cut() -> None:
    batches = [{"x": torch.arange(4), "text": list("abcd"), "scale": torch.tensor(2.0)}]
    first, second = (next(iter(loader)) for loader in ranks_of(2, lambda: batches))
    assert (first["x"].tolist(), first["text"], first["scale"]) == ([0, 1], ["a", "b"], 2.0)
    assert (second["x"].tolist(), second["text"], second["scale"]) == ([2, 3], ["c", "d"], 2.0)


def test_batches_whose_rows_are_not_known_are_refused() -> None:
    for loader in ranks_of(2, lambda: [{"cu": torch.arange(6), "x": torch.arange(4)}]):
        with pytest.raises(ValueError, match="different numbers of rows"):
            next(iter(loader))


def test_images_and_positions_of_batches_that_come_ready_are_cut() -> None:
    """Images of 1 and 2 patches, and positions in time, height and width."""
    batch = {
        "input_ids": torch.arange(6).view(2, 3),
        "position_ids": torch.arange(18).view(3, 2, 3),
        "image_grid_thw": torch.tensor([[1, 1, 1], [1, 1, 2]]),
        "pixel_values": torch.randn(3, 4),
    }
    first, second = (next(iter(loader)) for loader in ranks_of(2, lambda: [batch]))
    for name, dim in (("input_ids", 0), ("position_ids", 1), ("image_grid_thw", 0), ("pixel_values", 0)):
        assert torch.equal(torch.cat([first[name], second[name]], dim), batch[name])
    assert [len(found["pixel_values"]) for found in (first, second)] == [1, 2]


def test_batches_of_one_data_parallel_rank_need_no_known_rows() -> None:
    """Patches of images, with the ranks of pp or cp alone."""
    batch = {
        "ids": torch.zeros(4, 2),
        "labels": torch.zeros(4, 2),
        "patches": torch.arange(48),
        "sizes": torch.ones(3, 3),
    }
    (loader,) = ranks_of(1, lambda: [batch])
    found = next(iter(loader))
    assert found.keys() == batch.keys() and all(torch.equal(found[name], batch[name]) for name in batch)


def test_digests_tell_structures_apart() -> None:
    values = [
        [1, 2],
        12,
        {"a": 1, "b": 2},
        {"b": 1, "a": 2},
        np.arange(3),
        np.arange(3.0),
        torch.arange(3),
        torch.arange(4),
        torch.arange(3).to_sparse(),
        None,
        "None",
        torch.zeros(2, 3),
        torch.zeros(3, 2),
        torch.zeros(3, 2).bfloat16(),
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest({"x": torch.ones(3).conj()}) == digest({"x": torch.ones(3)})


def test_a_batch_keeps_its_type() -> None:
    encoding = BatchEncoding({"input_ids": torch.arange(2)})
    mapped = to_device(encoding, torch.device("cpu"))
    assert type(mapped) is BatchEncoding and mapped.input_ids.tolist() == [0, 1] and mapped is not encoding
