"""Ranks that read what they should not, or from where they should not: the same rows, or an error on all of them."""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset as HubDataset
from datasets import interleave_datasets
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import meshwright as mw
from meshwright.data.loader import DistributedLoader
from meshwright.data.peers import LoaderMesh
from meshwright.mesh.axes import Axis
from support.loading import Numbers, as_list, plain
from support.logs import logged
from support.tiers import crossings

GRID = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
DP2 = mw.ProcessMesh([0, 1], ["dp"])
SHAPES = [(2, 2, 1), (1, 2, 2), (2, 1, 2), (4, 1, 1), (1, 4, 1)]


def led(shape: tuple[int, ...], dims: str | None) -> list[list[int]]:
    mesh = mw.ProcessMesh(torch.arange(4).reshape(shape), ["dp", "tp", "cp"])
    loader = mw.shard_dataloader(plain(8, 4), mesh, shard_dims=dims, source="leader", output="local")
    return list(loader)


@pytest.mark.parametrize(
    ("shape", "dims"),
    crossings(
        itertools.product(SHAPES, ["dp", None]),
        but=[*((shape, "dp") for shape in SHAPES[::2]), *((shape, None) for shape in SHAPES[1::2])],
    ),
)
def test_a_leader_sends_to_its_own_peers(shape: tuple[int, ...], dims: str | None, pool4: Any) -> None:
    ranks = pool4.run(led, shape, dims)
    dp = shape[0] if dims else 1
    for rank, batches in enumerate(ranks):
        place, own = rank // (4 // dp), 4 // dp
        assert batches == [list(range(4 * step + place * own, 4 * step + place * own + own)) for step in range(2)]


def seeded(used_on_first: bool, differs: bool) -> Any:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank if differs else 0)
    if used_on_first and rank == 0:
        torch.rand(1, generator=generator)
    loader = DataLoader(Numbers(12), 4, shuffle=True, generator=generator, collate_fn=as_list)
    loader = mw.shard_dataloader(loader, DP2, shard_dims="dp", output="local")
    before = loader.state_dict()
    return before, list(loader), list(loader), loader.state_dict()


@pytest.mark.parametrize(("used_on_first", "differs"), [(False, True), (True, False), (True, True)])
def test_the_first_ranks_generator_holds_for_all(used_on_first: bool, differs: bool, pool2: Any) -> None:
    first, second = pool2.run(seeded, used_on_first, differs)
    assert first[0] == second[0] and first[3] == second[3]
    for epoch in (1, 2):
        assert sorted(x for batch in first[epoch] + second[epoch] for x in batch) == list(range(12))


def at_other_places(how: str) -> None:
    loader = mw.shard_dataloader(plain(16, 4), GRID, shard_dims="dp", output="local")
    state = {**loader.state_dict(), "samples": 8}
    if dist.get_rank() == 0:
        loader.load_state_dict(state) if how == "load" else loader.set_epoch(3)
    list(loader)


@pytest.mark.parametrize("how", ["load", "set_epoch"])
def test_ranks_at_different_places_are_named(how: str, pool4: Any) -> None:
    for kind, message in pool4.run_expecting_error(at_other_places, how):
        assert kind == "ValueError" and "on rank 0" in message and "epoch 0, sample 0 on rank 1" in message


def with_number(samples: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(samples), torch.tensor(samples) + dist.get_rank() // 2


def on_stages() -> None:
    loader = DataLoader(Numbers(8), 4, collate_fn=with_number)
    meshes = [mw.ProcessMesh([0, 1], ["dp"]), mw.ProcessMesh([2, 3], ["dp"])]
    list(mw.shard_dataloader(loader, meshes, shard_dims="dp", output="local"))


def test_stages_that_need_the_same_rows_are_compared(pool4: Any) -> None:
    for kind, message in pool4.run_expecting_error(on_stages):
        assert kind == "DivergenceError" and ("0, others on rank(s) 2" in message or "1, others on" in message)


class Lines(IterableDataset[Any]):
    def __init__(self, lines: list[int]):
        self.lines = lines

    def __iter__(self) -> Any:
        return iter(self.lines)


def unlike(kind: str) -> None:
    rank = dist.get_rank()
    if kind == "lines":
        loader: Any = DataLoader(Lines([1, 2, 3, 4, 5 + rank, 6]), batch_size=2)
    elif kind == "lengths":
        loader = [torch.arange(4)] * (2 + rank)
    else:
        torch.manual_seed(rank)
        loader = DataLoader(TensorDataset(torch.arange(12).view(6, 2)), batch_size=None, shuffle=True)
    for _ in mw.shard_dataloader(loader, DP2, shard_dims="dp", output="local"):
        pass


@pytest.mark.parametrize("kind", ["lines", "lengths", "order"])
def test_data_that_all_ranks_read_whole_is_compared(kind: str, pool2: Any) -> None:
    errors = pool2.run_expecting_error(unlike, kind)
    if kind == "lengths":  # seen before a batch is read: the lists say how long they are
        assert all("dataset: list of 2 on rank 0; list of 3 on rank 1" in message for _, message in errors)
    else:
        assert all(name == "DivergenceError" and "may give each process a part" in message for name, message in errors)


def not_by_rows(kind: str) -> None:
    def collate(samples: list[int]) -> Any:
        x = torch.tensor(samples)
        return {"x": x, "other": x.sum() if kind == "number" else x[None]}

    list(mw.shard_dataloader(DataLoader(Numbers(8), 4, collate_fn=collate), DP2, shard_dims="dp"))


@pytest.mark.parametrize("kind", ["number", "flat"])
def test_a_dtensor_that_is_not_the_same_on_all_ranks_is_refused(kind: str, pool2: Any) -> None:
    for name, message in pool2.run_expecting_error(not_by_rows, kind):
        assert name == "ValueError" and "different values of other" in message


def tail(axes: list[Any]) -> Any:
    rows = torch.arange(5.0)
    loader = DataLoader(TensorDataset(rows, rows), batch_size=4)
    loader = mw.shard_dataloader(loader, [DP2, DP2], shard_dims=axes, output="local", spread=True)
    return [(x.tolist(), y.tolist(), loader.weight) for x, y in loader]


def test_weights_of_a_tail_and_where_there_is_none(pool2: Any) -> None:
    first, second = pool2.run(tail, ["dp", "dp"])
    assert first[1] == ([4.0], [4.0], 0.0) and second[1] == ([4.0], [4.0], 2.0)
    for kind, message in pool2.run_expecting_error(tail, ["dp", None]):
        assert kind == "ValueError" and "loader.weight cannot correct the loss" in message


def labelled_tail() -> list[float]:
    """A mean loss that is weighted: rows without a label would make it nan."""
    dataset = TensorDataset(torch.arange(5), torch.arange(5))

    def collate(rows: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.stack([x for x, _ in rows]), "labels": torch.stack([y for _, y in rows])}

    loader = DataLoader(dataset, batch_size=4, collate_fn=collate)
    loader = mw.shard_dataloader(loader, DP2, shard_dims="dp", output="local", spread=True)
    logits = torch.eye(5)
    losses = []
    for batch in loader:
        loss = torch.nn.functional.cross_entropy(logits[batch["input_ids"]], batch["labels"]) * loader.weight
        dist.all_reduce(loss)
        losses.append(loss.item() / 2)
    return losses


def test_a_weighted_loss_of_a_row_that_does_not_count_is_zero(pool2: Any) -> None:
    expected = torch.nn.functional.cross_entropy(torch.eye(5), torch.arange(5)).item()
    for losses in pool2.run(labelled_tail):
        assert losses == pytest.approx([expected, expected], rel=1e-6)  # float32 sums of two numbers


def unsendable(samples: list[int]) -> Any:
    return [torch.tensor(samples), lambda: None]


def send() -> None:
    loader = DataLoader(Numbers(8), 4, collate_fn=unsendable)
    list(mw.shard_dataloader(loader, GRID, shard_dims="dp", output="local", source="leader"))


def test_a_batch_that_cannot_be_sent_is_an_error_on_all(pool4: Any) -> None:
    for _, message in pool4.run_expecting_error(send, timeout=30):
        assert "pickle" in message.lower()


def all_dropped(source: str) -> Any:
    loader = mw.shard_dataloader(plain(3, 4, drop_last=True), GRID, shard_dims="dp", output="local", source=source)
    other = mw.shard_dataloader(plain(7, 4, drop_last=True), GRID, shard_dims="dp", output="local", source=source)
    return list(loader), loader.dropped, len(list(other)), other.dropped


@pytest.mark.parametrize("source", ["each", "leader"])
def test_all_ranks_know_what_was_dropped(source: str, pool4: Any) -> None:
    assert pool4.run(all_dropped, source) == [([], 3, 1, 3)] * 4


def own_part(batch_size: int, seed: int | None, state: Any, limit: int | None) -> Any:
    rank = dist.get_rank()
    dataset = TensorDataset(torch.arange(100 * rank, 100 * rank + 12))
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader = DataLoader(dataset, batch_size, shuffle=True, generator=generator)
    loader = mw.shard_dataloader(loader, DP2, None, "dp", True, output="local")
    if state is not None:
        loader.load_state_dict(state)
    rows = [row for (batch,) in itertools.islice(loader, limit) for row in batch.tolist()]
    ended = loader.state_dict()
    loader.set_epoch(7)
    return rows, ended, loader.state_dict()["samples"]


def test_a_split_dataset_goes_on_or_says_why_not(pool2: Any) -> None:
    for epoch in (0, 6):  # in the middle, and after the last batch
        limit = 6 if epoch else 2
        first = pool2.run(own_part, 2, 3, None, limit)
        rest = pool2.run(own_part, 2, 3, first[0][1], None)
        for rank in range(2):
            expected = list(range(100 * rank, 100 * rank + 12))
            assert sorted(first[rank][0] + rest[rank][0]) == expected
            assert first[rank][2] == 0  # another epoch begins at its start
    state = pool2.run(own_part, 2, 3, None, 2)[0][1]
    for _, message in pool2.run_expecting_error(own_part, 4, 3, state, None):
        assert "batch_size=2" in message
    for _, message in pool2.run_expecting_error(own_part, 2, None, state, None):
        assert "shuffled without a seed" in message


def same_parts() -> list[str]:
    with logged(level=logging.WARNING) as said:
        loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
        list(mw.shard_dataloader(loader, DP2, shard_dims="dp", is_dataset_splitted=True, output="local"))
    return said


def test_parts_that_are_the_same_are_told(pool2: Any) -> None:
    first, second = pool2.run(same_parts)
    assert "the first batch is the same on all 2 ranks" in first[0] and not second


class FirstRowIsSlow(Numbers):
    def __getitem__(self, index: int) -> int:
        time.sleep(0.3 if index == 0 else 0)
        return index


class OwnIteration(DataLoader[Any]):
    """A loader of another library, such as torchdata's StatefulDataLoader."""

    def __iter__(self) -> Any:
        return super().__iter__()


def test_workers_batches_come_in_order() -> None:
    user = OwnIteration(FirstRowIsSlow(8), batch_size=2, num_workers=2, in_order=False)
    read = [batch.tolist() for batch in DistributedLoader(user, LoaderMesh(dp=Axis("dp")))]
    assert read == [[0, 1], [2, 3], [4, 5], [6, 7]] and not user.in_order


def stream(rows: int = 12, shards: int = 4) -> Any:
    return HubDataset.from_dict({"x": list(range(rows))}).to_iterable_dataset(num_shards=shards)


PIPELINES = {
    "take": lambda: stream().take(5),
    "skip": lambda: stream().skip(5),
    "indices": lambda: stream().map(lambda row, i: {"x": 100 * i + row["x"]}, with_indices=True),
    "filter by index": lambda: stream().filter(lambda row, i: i < 6, with_indices=True),
    "interleaved": lambda: interleave_datasets([stream(), stream(8, 2)], probabilities=[0.5, 0.5], seed=1),
    "map": lambda: stream().map(lambda row: {"x": row["x"] + 1}),
    "batched map": lambda: stream().map(lambda rows: {"x": [x + 1 for x in rows["x"]]}, batched=True),
    "filter": lambda: stream().filter(lambda row: row["x"] % 3 > 0),
    "select": lambda: stream().select_columns(["x"]),
    "shuffled": lambda: stream().shuffle(seed=3, buffer_size=5),
}
LANES = mw.LoaderOptions(order="lanes")


def batches(loader: Any, limit: int | None = None) -> list[list[int]]:
    return [batch["x"].tolist() for batch in itertools.islice(loader, limit)]


def reading(rows: Any, options: mw.LoaderOptions | None = None, workers: int = 0) -> DistributedLoader:
    loader = DataLoader(rows, batch_size=4, num_workers=workers)
    return DistributedLoader(loader, LoaderMesh(dp=Axis("dp")), options=options)


MORE_WORKERS = [("batched map", (0, 1)), ("shuffled", (2, 2))]


@pytest.mark.parametrize(("name", "workers"), [*((name, (0, 0)) for name in PIPELINES), *MORE_WORKERS])
def test_a_pipeline_has_the_batches_of_one_device(name: str, workers: tuple[int, int]) -> None:
    """Read at once, and by a loader that takes over; what counts rows over all shards is not read in lanes."""
    rows = PIPELINES[name]
    expected = batches(DataLoader(rows(), batch_size=4, num_workers=workers[0]))
    loader = reading(rows(), workers=workers[0])
    first, state = batches(loader, 1), loader.state_dict()
    other = reading(rows(), workers=workers[1])
    other.load_state_dict(state)
    assert first + batches(other) == expected

    in_lanes = reading(rows(), LANES)
    flat = itertools.chain.from_iterable
    assert sorted(flat(batches(in_lanes))) == sorted(flat(expected))
    is_in_lanes = type(in_lanes._reader).__name__ == "StreamReader"
    assert is_in_lanes == (name in ("map", "batched map", "filter", "select"))


def test_a_run_that_has_read_in_lanes_stays_in_them() -> None:
    loader = reading(stream(), LANES)
    whole = [*batches(loader), *batches(loader)]
    assert whole[0] == [0, 3, 6, 9]
    loader = reading(stream(), LANES)
    first, state = batches(loader, 1), loader.state_dict()
    other = reading(stream())
    other.load_state_dict(state)
    assert first + batches(other) + batches(other) == whole

    loader.set_epoch(0)  # back to the start of the epoch that was left
    other.load_state_dict(loader.state_dict())
    assert batches(other) == whole[:3]


def test_states_of_other_streams_are_refused() -> None:
    def make(rows: Any, name: str | None = None) -> DistributedLoader:
        return reading(rows, mw.LoaderOptions(fingerprint=name, order="lanes"))

    state = make(stream()).state_dict()
    with pytest.raises(ValueError, match="num_shards"):
        make(stream(12, 3)).load_state_dict(state)
    with pytest.raises(ValueError, match="fingerprint"):
        make(stream(), "mine").load_state_dict(state)
    with pytest.raises(ValueError, match="'stream' is None, and must be a table"):
        make(stream()).load_state_dict({**state, "stream": None})
    with pytest.raises(ValueError, match="dataset"):
        make(Lines([1]), "mine").load_state_dict(make(Lines([1])).state_dict())
