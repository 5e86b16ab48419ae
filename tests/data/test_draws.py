"""Random draws of datasets and collate functions are those of one device: late ones, and in an epoch that resumes."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

import meshwright as mw
from meshwright.data.common_states import CommonStates
from meshwright.data.global_batches import even_share
from meshwright.data.peers import Peers
from meshwright.data.readers.choose import make_reader
from meshwright.mesh.axes import Axis
from meshwright.plan.config import LoaderOptions
from support.logs import logged

ROWS = 24


class Rows(IterableDataset[Tensor]):
    """Rows in order; the batches of others are drawn by torch, or by numpy and Python."""

    def __init__(self, kind: str = "in order"):
        self.kind = kind

    def __iter__(self) -> Iterator[Tensor]:
        order: Any = range(ROWS)
        if self.kind == "shuffled":
            order = torch.randperm(ROWS).tolist()
        elif self.kind == "by numpy":
            order = np.random.permutation(ROWS).tolist()
        for index in order:
            yield torch.tensor([index + random.random() / 10 if self.kind == "by numpy" else float(index)])


def noisy(rows: list[Tensor]) -> Tensor:
    x = default_collate(rows)
    return x + torch.rand_like(x) / 10


def some_noisy(rows: list[Tensor]) -> Tensor:
    """Draws for a few rows alone, as a crop of long ones does: at first for none, then for one of a batch."""
    return torch.stack([x + torch.rand(1) / 10 if int(x) % 10 == 7 or int(x) > 17 else x for x in rows])


class LateNoise:
    """Draws from its third batch on."""

    calls = 0

    def __call__(self, rows: list[Tensor]) -> Tensor:
        self.calls += 1
        return noisy(rows) if self.calls > 2 else default_collate(rows)


class OwnGenerator:
    """Makes its generator in its first call, as transformers' collators of masks with a seed do."""

    generator: torch.Generator | None = None

    def __call__(self, rows: list[Tensor]) -> Tensor:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(5)
        x = default_collate(rows)
        return x + torch.rand(x.shape, generator=self.generator) / 10


class SumsWithNoise(LateNoise):
    def __call__(self, rows: list[Tensor]) -> Tensor:
        return super().__call__(rows).sum().reshape(1)


def seeded() -> None:
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(0)


def cases() -> dict[str, tuple[Any, Any]]:
    in_order = list(torch.arange(float(ROWS)).unsqueeze(1))
    return {
        "shuffled": (Rows("shuffled"), None),
        "by numpy": (Rows("by numpy"), None),
        "collated": (Rows("shuffled"), noisy),
        "some": (Rows(), some_noisy),
        "late": (Rows(), LateNoise()),
        "own": (Rows(), OwnGenerator()),
        "mapped": (in_order, noisy),
        "mapped, own": (in_order, OwnGenerator()),
        "mapped, some": (in_order, some_noisy),
        "mapped, late": (in_order, LateNoise()),
    }


def loader_of(case: str, workers: int, *, persistent: bool = False) -> Any:
    dataset, collate = cases()[case]
    return DataLoader(dataset, 4, collate_fn=collate, num_workers=workers, persistent_workers=persistent)


def reader_of(case: str, workers: int, dp: int, rank: int) -> Any:
    return make_reader(loader_of(case, workers), Axis("dp", size=dp, rank=rank), even_share, Peers(), LoaderOptions())


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("case", ["shuffled", "by numpy", "collated"])
def test_a_resumed_epoch_goes_on_with_its_rows_and_draws(case: str, workers: int) -> None:
    """Bitwise; one that reads the dataset again in the states of the save has other rows, and repeats some."""
    seeded()
    expected = [*loader_of(case, workers), *loader_of(case, workers)]
    parts: list[list[Tensor]] = []
    for rank in (0, 1):
        seeded()
        reader, found = reader_of(case, workers, 2, rank), list[Tensor]()
        for portion in reader.read(reader.draw()):
            found.append(portion.batch)
            if len(found) == 2:
                break
        state, states = json.loads(json.dumps(reader.state_dict())), CommonStates.now()
        reader = reader_of(case, workers, 2, rank)
        seeded()
        states.restore()
        reader.check_state(state)
        reader.load_state_dict(state)
        for _ in range(2):
            found += [portion.batch for portion in reader.read(reader.draw())]
        parts.append(found)
    assert all(torch.equal(torch.cat(own), x) for *own, x in zip(*parts, expected, strict=True))


@pytest.mark.parametrize(("name", "value"), [("torch", "x"), ("numpy", ["MT19937", [1], 0, 0, 0.0]), ("python", None)])
def test_damaged_states_of_an_epochs_start_are_refused(name: str, value: object) -> None:
    reader = reader_of("shuffled", 0, 1, 0)
    next(iter(reader.read(reader.draw())))
    state = json.loads(json.dumps(reader.state_dict()))
    reader.check_state({key: x for key, x in state.items() if key != "start"})  # of an earlier version
    state["start"][name] = value
    with pytest.raises(mw.CheckpointError, match=rf"'start'\['{name}'\]"):
        reader.check_state(state)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_what_is_drawn_late_and_cannot_be_cut_is_told_of(is_mapped: bool, workers: int) -> None:
    """A sum of the rows: each rank goes on with its own, in the states that the batch had."""
    collate: Any = SumsWithNoise()
    rows: Any = list(torch.arange(float(ROWS))) if is_mapped else Rows()
    with logged(level=logging.WARNING) as said:
        seeded()
        loader = DataLoader(rows, 4, collate_fn=collate, num_workers=workers)
        reader = make_reader(loader, Axis("dp", size=2), even_share, Peers(), LoaderOptions())
        found = [portion.batch for portion in reader.read(reader.draw())]
    assert [text for text in said if "cannot be cut into rows" in text] and len(found) == ROWS // 4
    assert [int(x) for x in found] == [1, 9, 17, 25, 33, 41] and found[1] == 9 and found[-1] != 41


def two_epochs(case: str, workers: int, persistent: bool) -> list[Tensor]:
    seeded()
    loader = loader_of(case, workers, persistent=persistent)
    if dist.is_initialized():
        loader = mw.shard_dataloader(loader, mw.ProcessMesh([0, 1], ["dp"]), shard_dims="dp", output="local")
    return [*loader, *loader]


@pytest.mark.parametrize(
    ("case", "workers", "persistent"),
    [
        *(
            (case, 0, False)
            for case in ("some", "late", "own", "mapped", "mapped, some", "mapped, late", "mapped, own")
        ),
        *((case, 2, False) for case in ("some", "late", "mapped, some", "mapped, late")),
        ("mapped, late", 1, True),
    ],
)
def test_draws_that_begin_late_are_those_of_one_device(case: str, workers: int, persistent: bool, pool2: Any) -> None:
    """Bitwise. Where the first batch has none, or one rank alone draws, ranks that read their own rows draw others."""
    expected = two_epochs(case, workers, persistent)
    ranks = pool2.run(two_epochs, case, workers, persistent)
    assert len(ranks[0]) == len(expected)  # two workers each read all of an iterable dataset
    assert all(torch.equal(torch.cat(own), x) for *own, x in zip(*ranks, expected, strict=True))


class Shards(Rows):
    num_shards = 2

    def open(self, shard: int, start: int) -> Iterator[Tensor]:
        return iter(torch.arange(float(ROWS)).unsqueeze(1)[shard::2][start:])


def warnings_of_shards() -> list[str]:
    with logged(level=logging.WARNING) as said:
        loader: Any = DataLoader(Shards(), 4, collate_fn=LateNoise())
        mesh = mw.ProcessMesh([0, 1], ["dp"])
        list(mw.shard_dataloader(loader, mesh, shard_dims="dp", output="local"))
    return [text for text in said if "collates its own rows of a dataset with shards" in text]


def test_draws_of_a_dataset_with_shards_are_told_of_once(pool2: Any) -> None:
    first, second = pool2.run(warnings_of_shards)
    assert len(first) == 1 and not second
