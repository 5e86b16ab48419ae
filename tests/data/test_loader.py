"""The simple distributed loader: the same batches as one device, each row on one data-parallel rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset, load_dataset
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

import meshwright as mw
from meshwright.data.loader import DistributedLoader
from meshwright.data.peers import LoaderMesh, Peers
from meshwright.errors import LoaderError
from meshwright.faults.guard import start_guard
from meshwright.mesh.axes import Axis
from support.tiers import crossing


def axes(tp: int) -> tuple[Axis, Axis]:
    """A dp x tp mesh over the world."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dp = world // tp
    tp_groups = [dist.new_group(list(range(i * tp, (i + 1) * tp))) for i in range(dp)]
    dp_groups = [dist.new_group(list(range(i, world, tp))) for i in range(tp)]
    return (
        Axis("tp", size=tp, rank=rank % tp, group=tp_groups[rank // tp]),
        Axis("dp", size=dp, rank=rank // tp, group=dp_groups[rank % tp]),
    )


class Rows(torch.utils.data.Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([index]), "labels": torch.tensor([index])}


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(Rows(self.size)[i] for i in range(self.size))


def make(kind: str, size: int, batch_size: int, workers: int = 0) -> Any:
    if kind == "shards":
        rows = Dataset.from_dict({"input_ids": [[i] for i in range(size)], "labels": [[i] for i in range(size)]})
        shards = rows.to_iterable_dataset(num_shards=min(3, size)).with_format("torch")
        return DataLoader(shards, batch_size=batch_size)
    if kind == "stream":
        return DataLoader(Stream(size), batch_size=batch_size)
    if kind == "list":
        return [dict(batch.items()) for batch in DataLoader(Rows(size), batch_size=batch_size)]
    if kind == "datasets":
        rows = Dataset.from_dict({"input_ids": [[i] for i in range(size)], "labels": [[i] for i in range(size)]})
        return DataLoader(rows.with_format("torch"), batch_size=batch_size, shuffle=True)
    if kind == "weighted":
        sampler: Any = WeightedRandomSampler([1.0] * size, size, replacement=False)
        return DataLoader(Rows(size), batch_size=batch_size, sampler=sampler)
    if kind == "generator":
        sampler = RandomSampler(Rows(size), generator=torch.Generator().manual_seed(3))
        return DataLoader(Rows(size), batch_size=batch_size, sampler=sampler)
    return DataLoader(Rows(size), batch_size=batch_size, shuffle=kind == "shuffled", num_workers=workers)


def counted(loader: Any, epochs: int = 2) -> list[list[list[int]]]:
    """For each epoch and batch, the rows that count."""
    return [[[i for i in b["labels"].flatten().tolist() if i != -100] for b in loader] for _ in range(epochs)]


def read(kind: str, size: int, batch_size: int, tp: int, workers: int = 0, seed: int | None = None) -> Any:
    tp_axis, dp_axis = axes(tp)
    torch.manual_seed(dist.get_rank() if seed is None else seed)
    loader = DistributedLoader(make(kind, size, batch_size, workers), LoaderMesh(dp=dp_axis, peers=Peers((tp_axis,))))
    return counted(loader)


KINDS = ["sequential", "shuffled", "generator", "weighted", "datasets", "stream", "shards", "list"]


@pytest.mark.parametrize(("size", "batch_size"), [crossing(12, 4), (13, 4), crossing(7, 3), (1, 4), (9, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_one_device(kind: str, size: int, batch_size: int, pool4: Any) -> None:
    torch.manual_seed(0)  # the first rank's state; the other ranks have others
    expected = counted(make(kind, size, batch_size))
    ranks = pool4.run(read, kind, size, batch_size, 2)
    assert ranks[0] == ranks[1] and ranks[2] == ranks[3]  # the two ranks of a TP group read the same rows
    for epoch, batches in enumerate(expected):
        assert len(ranks[0][epoch]) == len(ranks[2][epoch]) == len(batches)  # equal steps: nobody waits
        for step, batch in enumerate(batches):
            assert ranks[0][epoch][step] + ranks[2][epoch][step] == batch


def test_shuffling_changes_from_epoch_to_epoch(pool2: Any) -> None:
    first, second = pool2.run(read, "shuffled", 20, 4, 1)[0]
    assert first != second


def test_workers(pool2: Any) -> None:
    ranks = pool2.run(read, "shuffled", 13, 4, 1, 1)
    assert sorted(i for rank in ranks for batch in rank[0] for i in batch) == list(range(13))


def lengths() -> tuple[int, int, str]:
    tp_axis, dp_axis = axes(1)
    user = make("sequential", 10, 4)
    loader = DistributedLoader(user, LoaderMesh(dp=dp_axis, peers=Peers((tp_axis,))))
    return len(loader), loader.batch_size, type(loader.dataset).__name__


def begin_alone() -> None:
    guard = start_guard(timeout=60)
    assert guard is not None
    _, dp = axes(1)
    loader = DistributedLoader(make("shuffled", 8, 4), LoaderMesh(dp=dp))
    if dist.get_rank() == 1:
        next(iter(loader))
    guard.meet("forward pass", dp.group)


def test_a_rank_that_begins_an_epoch_before_the_others_is_named(pool2: Any) -> None:
    """Its loop has skipped the last batch, in which the others wait: both end at once, and not by the timeout."""
    for kind, message in pool2.run_expecting_error(begin_alone, timeout=30):
        assert kind == "DivergenceError" and "rank 1 alone began to iterate: skip a batch" in message


def test_a_loader_still_looks_like_the_users(pool2: Any) -> None:
    assert pool2.run(lengths) == [(3, 4, "Rows")] * 2


def test_a_last_row_without_labels_is_an_error_that_names_drop_last() -> None:
    with pytest.raises(ValueError, match=r"drop_last=True"):
        list(DistributedLoader([torch.ones(1, 2)], LoaderMesh(dp=Axis("dp", size=2, rank=0), everyone=Peers())))


def seeded_afterwards() -> tuple[DataLoader[Any], DistributedLoader]:
    """A script that seeds its generator once the loader is made, as accelerate's own tests do."""
    generator = torch.Generator().manual_seed(3)
    torch.empty((), dtype=torch.int64).random_(generator=generator)  # used before, so that its seed does not say it all
    plain = DataLoader(Rows(8), batch_size=3, shuffle=True, generator=generator)
    loader = DistributedLoader(plain, LoaderMesh(dp=Axis("dp")))
    generator.manual_seed(7)
    return plain, loader


def read_ids(loader: Any, epochs: int = 2) -> list[list[int]]:
    return [batch["input_ids"].flatten().tolist() for _ in range(epochs) for batch in loader]


def test_a_generator_seeded_before_the_first_epoch_is_followed() -> None:
    expected = read_ids(seeded_afterwards()[0])
    assert read_ids(seeded_afterwards()[1]) == expected
    plain = DataLoader(Rows(8), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3))
    assert read_ids(plain) != expected, "another seed gives another order"

    _, loader = seeded_afterwards()
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    _, resumed = seeded_afterwards()
    resumed.load_state_dict(state)
    assert read_ids(resumed) == expected[1:]


class Lines(torch.utils.data.Dataset):
    """JSON lines, read by index; the last of six is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return json.loads(self.path.read_text().splitlines()[index])


class ReadInOrder(Lines, IterableDataset):
    __getitem__: Any = None

    def __iter__(self) -> Any:
        return map(json.loads, self.path.read_text().splitlines())


def refuse(rows: list[Any]) -> Any:
    raise KeyError("labels")


def unreadable(folder: Path, kind: str, *, workers: int = 0) -> DataLoader[Any]:
    for number in range(2):
        rows = [json.dumps({"x": number}) for _ in range(6)]
        (folder / f"{number}.jsonl").write_text("\n".join([*rows[:5], rows[5][:4] if number else rows[5]]))
    if kind == "shards":
        files = [str(folder / f"{number}.jsonl") for number in range(2)]
        dataset: Any = load_dataset("json", data_files=files, streaming=True, split="train", cache_dir=str(folder))
    else:
        dataset = (ReadInOrder if kind == "in order" else Lines)(folder / "1.jsonl")
    return DataLoader(dataset, batch_size=2, num_workers=workers, collate_fn=refuse if kind == "collate" else None)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("map", json.JSONDecodeError, r"row 5 of the Lines \(samples 4 to 5 of epoch 0\) could not be read"),
        ("collate", KeyError, r"rows 0, 1 of the Lines \(samples 0 to 1 of epoch 0\) could not be read"),
        ("in order", json.JSONDecodeError, r"batch 2 of epoch 0 \(samples 4 to 5\) of the ReadInOrder could not be"),
        ("shards", ValueError, r"(?s)epoch 0 of the IterableDataset.*row 0 of shard 1 of 2 \(.*1\.jsonl\)"),
    ],
)
def test_an_error_says_which_rows_were_read(
    kind: str, error: type[Exception], said: str, workers: int, tmp_path: Path
) -> None:
    """It is of the class that was raised, which is its cause. A worker's error has its traceback in its message."""
    options = mw.LoaderOptions(order="lanes" if kind == "shards" else "loader")
    user = unreadable(tmp_path, kind, workers=workers)
    loader = DistributedLoader(user, LoaderMesh(dp=Axis("dp")), options=options)
    expected = RuntimeError if workers and error is json.JSONDecodeError else error  # torch cannot rebuild its class
    with pytest.raises(expected, match=said) as raised:
        list(loader)
    assert (
        isinstance(raised.value, LoaderError) and type(raised.value.__cause__).__name__ == type(raised.value).__name__
    )


def read_unreadable(folder: Path) -> None:
    mesh = mw.ProcessMesh([0, 1], ["dp"])
    list(mw.shard_dataloader(unreadable(folder / str(dist.get_rank()), "shards"), mesh, None, "dp", output="local"))


def test_every_rank_is_told_the_file(pool2: Any, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for kind, message in pool2.run_expecting_error(read_unreadable, tmp_path):
        assert kind in ("ArrowInvalid", "PeerFailedError", "JSONDecodeError", "ValueError") and "1.jsonl" in message
