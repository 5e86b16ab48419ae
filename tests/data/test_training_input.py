"""The loader that to_distributed returns: training goes on elsewhere, and a reader that dies ends all ranks."""

from __future__ import annotations

import itertools
import os
import re
import signal
from typing import Any

import pytest
import torch
from datasets import Dataset as HubDataset
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

import meshwright as mw
from harness.programs import mark_fault, run_program
from meshwright.data.packing import Packing
from meshwright_hf.datasets import TokenCollator, pack_dataset
from support.loading import Numbers
from support.models import build
from support.tiers import crossing

LENGTH, ROWS = 6, 37


def rows_of(kind: str) -> Any:
    """Rows whose first token is their number, from the third word on."""
    columns = {"input_ids": [[3 + number] * LENGTH for number in range(ROWS)]}
    columns["labels"] = columns["input_ids"]
    dataset = HubDataset.from_dict(columns)
    return dataset.to_iterable_dataset(num_shards=5) if kind == "stream" else dataset


def one_device_loader(kind: str, batch_size: int, workers: int = 0) -> DataLoader[Any]:
    shuffle = {} if kind == "stream" else {"shuffle": True, "generator": torch.Generator().manual_seed(1)}
    return DataLoader(rows_of(kind), batch_size=batch_size, collate_fn=TokenCollator(), num_workers=workers, **shuffle)


def train(kind: str, state: Any, limit: int | None, batch_size: int, workers: int, **plan: int) -> Any:
    """Optimizer steps of two batches each, stopped in the middle of one. Returns the rows trained on, and the state."""
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = mw.LoaderOptions(shuffle=kind == "stream", buffer_size=9, seed=4 if kind == "stream" else None)
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), loader=options)
    loader = one_device_loader(kind, batch_size, workers)
    model, optimizer, loader = mw.to_distributed(model, optimizer, loader, config=config)
    if state is not None:
        loader.load_state_dict(state)
    trained = []
    for number, batch in enumerate(itertools.islice(loader, limit)):
        model(**batch).loss.backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        trained += [int(row[0]) - 3 for row in batch["labels"] if row[0] >= 0]
    return trained, loader.state_dict()


@pytest.mark.parametrize("kind", [crossing("map"), "stream"])
def test_training_goes_on_with_another_plan_batch_size_and_workers(kind: str, pool4: Any) -> None:
    """Each sample is trained on once in the epoch, though it is left in the middle of an accumulation window."""
    first = pool4.run(train, kind, None, 3, 5, 1, dp=4)
    state = first[0][1]
    assert all(other == state for _, other in first) and state["samples"] == 15
    second = pool4.run(train, kind, state, None, 4, 0, dp=2, tp=2)
    assert second[0][0] == second[1][0] and second[2][0] == second[3][0]  # tensor-parallel peers
    rows = [row for trained, _ in first for row in trained] + second[0][0] + second[2][0]
    assert sorted(rows) == list(range(ROWS))
    assert all(state["epoch"] == 1 and state["samples"] == 0 for _, state in second)


def packed_rows(world: int) -> list[list[int]]:
    """The tokens of a packed stream, as each rank gets them through a plain DataLoader."""
    documents = HubDataset.from_dict({"input_ids": [[number] * (1 + number % 7) for number in range(1, 60)]})
    shards = pack_dataset(documents.to_iterable_dataset(num_shards=4), Packing(length=16))
    mesh = mw.ProcessMesh(range(world), ["dp"])
    loader = mw.shard_dataloader(DataLoader(shards, batch_size=world), mesh, shard_dims="dp", output="local")
    return [batch["input_ids"].flatten().tolist() for batch in loader if batch["labels"].max() >= 0]


def test_a_packed_stream_loses_no_token_on_a_mesh(pool4: Any) -> None:
    documents = HubDataset.from_dict({"input_ids": [[number] * (1 + number % 7) for number in range(1, 60)]})
    shards = pack_dataset(documents.to_iterable_dataset(num_shards=4), Packing(length=16))
    one = sorted(tuple(row) for batch in DataLoader(shards, batch_size=3) for row in batch["input_ids"].tolist())
    ranks = pool4.run(packed_rows, 4)
    rows = [tuple(batch) for rank in ranks for batch in rank]
    assert sorted(rows) == one and sum(1 for row in rows for x in row if x) == sum(1 + n % 7 for n in range(1, 60))


class Fragile(Numbers):
    """Its reader fails, or is killed, at row 20, where it is read by a worker of rank 1."""

    def __init__(self, how: str):
        super().__init__(64)
        self.how = how

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 20:
            assert get_worker_info() is not None
            mark_fault()
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("the file of row 20 is gone")
        ids = torch.full((LENGTH,), index)
        return {"input_ids": ids, "labels": ids}


def reading_program(how: str) -> None:
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2), timeout_s=20)
    loader = DataLoader(Fragile(how), batch_size=8, num_workers=1)
    model, _, loader = mw.to_distributed(build("llama"), None, loader, config=config)
    for batch in loader:
        model(**batch).loss.backward()
        model.zero_grad()
    print("went on in silence", flush=True)


DEATHS = [
    crossing("raises", "the file of row 20 is gone"),
    ("killed", r"DataLoader worker \(pid.*(killed|exited unexpectedly)"),
]


@pytest.mark.parametrize(("how", "named"), DEATHS)
def test_a_worker_that_dies_ends_all_ranks_with_its_error(how: str, named: str) -> None:
    for outcome in run_program(reading_program, 2, how, timeout=40):
        assert outcome.code == 1 and outcome.after < 30
        assert re.search(named, outcome.output, re.DOTALL), outcome.output
        assert "went on in silence" not in outcome.output
