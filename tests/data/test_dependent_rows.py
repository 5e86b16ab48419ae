"""Rows that depend on the other rows of their batch have the values of one device; what does not is read by rank."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

import meshwright as mw
from data.test_one_length import Iterated, collators, rows_for
from meshwright.data.collation_trial import TRIED
from meshwright.data.global_batches import even_share
from meshwright.data.nested import leaves
from meshwright.data.peers import Peers
from meshwright.data.readers.choose import make_reader
from meshwright.mesh.axes import Axis
from meshwright.plan.loader_options import LoaderOptions
from support.logs import logged
from support.models import build, tokens

SIZE, DP = 4, 2
ROWS = list(torch.rand(27, 5, generator=torch.Generator().manual_seed(0)).double())


def normalised(rows: list[Tensor]) -> dict[str, Tensor]:
    x = torch.stack(rows)
    return {"x": (x - x.mean()) / x.std(), "weights": torch.tensor([0.1, 0.2, 0.3, 0.4])}


def mixed(rows: list[Tensor]) -> Tensor:
    x = torch.stack(rows)
    return 0.7 * x + 0.3 * x.roll(-1, 0)


def masked_by_first(rows: list[Tensor]) -> list[Tensor]:
    x = torch.stack(rows)
    return [x, x * (rows[0] > 0.5)]


def advantages(rows: list[Tensor]) -> dict[str, Any]:
    rewards = [float(row.sum()) for row in rows]
    return {"x": torch.stack(rows), "advantages": [x - sum(rewards) / len(rows) for x in rewards]}


def with_means(rows: list[Tensor]) -> dict[str, Tensor]:
    x = torch.stack(rows)
    return {"x": x, "mean": x.mean(), "of_channels": x.mean(0)}


def of_three_or_more(rows: list[Tensor]) -> Tensor:
    assert len(rows) > 2
    return torch.stack(rows)


class DrawsLate:
    """Draws from its second batch on."""

    calls = 0

    def __call__(self, rows: list[Tensor]) -> Tensor:
        self.calls += 1
        x = torch.stack(rows)
        return x if self.calls == 1 else x + torch.rand(x.shape)


class MakesGenerator:
    """Makes its generator in its first call, as transformers' masks with a seed do."""

    generator: torch.Generator | None = None

    def __call__(self, rows: list[Tensor]) -> Tensor:
        self.generator = self.generator or torch.Generator().manual_seed(3)
        return torch.stack(rows) + torch.rand(len(rows), 5, generator=self.generator)


class ReadsTogether(Dataset[Any]):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        x = torch.stack([ROWS[index] for index in indices])
        return list(x - x.mean())


# Collate functions, and what is said of each.
DEPENDENT = [
    (normalised, "batch['x'] depends"),
    (mixed, "batch depends"),
    (masked_by_first, "batch[1] depends"),
    (advantages, "batch['advantages'] depends"),
    (with_means, "batch['mean'], batch['of_channels'] depend"),
    (of_three_or_more, "what the collate function returns depends"),
    (DrawsLate, "draws random numbers"),
    (MakesGenerator, "draws random numbers"),
]


def batches(dataset: Any, collate: Any, workers: int, rank: int | None) -> list[dict[str, Any]]:
    """The batches of two epochs: of one device, or the rows of a rank."""
    torch.manual_seed(0)
    loader: Any = DataLoader(dataset, SIZE, collate_fn=collate, num_workers=workers)
    if rank is None:
        return [dict(leaves(batch)) for _ in range(2) for batch in loader]
    reader = make_reader(loader, Axis("dp", size=DP, rank=rank), even_share, Peers(), LoaderOptions())
    found = []
    for _ in range(2):
        reader.position.begin()
        found += [dict(leaves(portion.batch)) for portion in reader.read(reader.draw())]
    return found


def check_one_device(dataset: Any, make: Callable[[], Any], workers: int, said: str) -> None:
    """Compare bitwise. What has no rows is equal on both ranks."""
    expected = batches(dataset, make(), workers, None)
    with logged(level=logging.WARNING) as lines:
        ranks = [batches(dataset, make(), workers, rank) for rank in range(DP)]
    for whole, *parts in zip(expected, *ranks, strict=True):
        for name, x in whole.items():
            if "advantages" in name:  # a list, of which each rank has the values of its rows under names of its own
                continue
            pieces = [part[name] for part in parts]
            rows = torch.cat(pieces) if x.ndim and pieces[0].shape != x.shape else pieces[0]
            assert torch.equal(rows, x) and torch.equal(pieces[-1], rows[-len(pieces[-1]) :] if x.ndim else x), name
        values = [[x for name, x in part.items() if "advantages" in name] for part in (whole, *parts)]
        assert values[0] == values[1] + values[2]
    assert len(lines) == 1 and said in lines[0] and "2 times the work" in lines[0]


@pytest.mark.parametrize("kind", [list, Iterated])
@pytest.mark.parametrize(("collate", "said"), DEPENDENT, ids=lambda value: getattr(value, "__name__", value))
def test_rows_that_depend_on_each_other_are_those_of_one_device(collate: Any, said: str, kind: Any) -> None:
    make = collate if isinstance(collate, type) else lambda: collate
    check_one_device(kind(ROWS), make, 0, said)


def test_so_are_those_that_workers_and_whole_datasets_read() -> None:
    """Workers have read ahead by the rank's rows when a later batch shows that it must be whole."""
    check_one_device(list(ROWS), lambda: normalised, 1, "batch['x'] depends")
    check_one_device(list(ROWS), DrawsLate, 1, "draws random numbers")
    check_one_device(ReadsTogether(), lambda: default_collate, 0, "__getitems__ returns depends")


class Counted(Dataset[Any]):
    def __init__(self, rows: list[Any]):
        self.rows, self.reads = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.rows[index]


@pytest.mark.parametrize("name", [*collators("left"), "stacked"])
def test_what_only_pads_packs_or_stacks_is_read_by_rank(name: str) -> None:
    """After the batches that are tried, which are one where rows are only stacked."""
    draws = random.Random(name)
    rows = list(ROWS[:24]) if name == "stacked" else rows_for(name, draws, 24)
    collate: Any = default_collate if name == "stacked" else collators("left")[name]
    dataset, tried = Counted(rows), 1 if name == "stacked" else TRIED
    loader = DataLoader(dataset, SIZE, collate_fn=collate)
    reader = make_reader(loader, Axis("dp", size=DP, rank=1), even_share, Peers(), LoaderOptions())
    with logged(level=logging.WARNING) as lines:
        assert len(list(reader.read(reader.draw()))) == 6
    assert dataset.reads == tried * SIZE + (6 - tried) * SIZE // DP and not lines


class Ready(IterableDataset[Any]):
    """Ready batches."""

    def __init__(self, *batches: Any):
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


@pytest.mark.parametrize(
    ("inputs", "is_told"),
    [
        (lambda step, fixed: {"weights": fixed}, True),
        (lambda step, fixed: {"weights": fixed.clone()}, True),
        (lambda step, fixed: {"scores": fixed + step}, False),
        (lambda step, fixed: {"mask": torch.ones(4, 3)}, False),
        (lambda step, fixed: {"labels": fixed}, False),
    ],
)
def test_an_input_with_as_many_entries_as_rows_by_chance_is_told(inputs: Any, is_told: bool) -> None:
    """The same object is told in the second batch; equal numbers when chance is out of question."""
    fixed = torch.tensor([0.1, 0.2, 0.3, 0.4])
    ready = [{"x": torch.full((4, 2), float(step)), **inputs(step, fixed)} for step in range(6)]
    reader = make_reader(Ready(*ready), Axis("dp", size=2, rank=1), even_share, Peers(), LoaderOptions())
    with logged(level=logging.WARNING) as lines:
        list(reader.read(reader.draw()))
    assert len(lines) == is_told and (not is_told or "batch_dims={'weights': None}" in lines[0])


def cut_by_the_loop() -> list[list[str]]:
    """What is said of a loss of cached features, and of halves of a batch that count unequal numbers of labels."""
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2))
    found = []
    for kind in ("cached", "gathered", "halves", "even halves"):
        rows: list[Any] = [{"input_ids": x} for x in tokens(48, 8)]
        for n, row in enumerate(rows if "halves" in kind else ()):
            row["labels"] = row["input_ids"].clone()
            row["labels"][: n % 5 if kind == "halves" else 0] = -100
        model: Any = build("llama")
        model, _, loader = mw.to_distributed(model, None, DataLoader(rows, batch_size=8), config=config)
        with logged(level=logging.WARNING) as lines:
            for batch in loader:
                if "halves" in kind:
                    for half in (slice(0, 2), slice(2, 4)):
                        model(**{name: x[half] for name, x in batch.items()}).loss.backward()
                    continue
                with torch.no_grad():
                    leaf = features(model, batch).requires_grad_()
                all_rows = mw.gather_rows(leaf, model) if kind == "gathered" else leaf
                F.cross_entropy(all_rows @ all_rows.T, torch.arange(len(all_rows))).backward()
                (features(model, batch) * leaf.grad).sum().backward()
        found.append([line for line in lines if "gather_rows(" in line or "takes a mean" in line])
    return found


def features(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.normalize(model.model(**batch)[0].mean(1), dim=-1)


def test_losses_that_the_loop_cuts_are_told(pool2: Any) -> None:
    (cached, gathered, halves, even), others = pool2.run(cut_by_the_loop, timeout=200)
    assert len(cached) == 1 and "meshwright.gather_rows(features)" in cached[0]
    assert len(halves) == 1 and "takes a mean over each of them" in halves[0]
    assert not gathered and not even and not any(others)
