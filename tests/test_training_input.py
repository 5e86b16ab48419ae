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
from meshwright_hf.datasets import TokenCollator
from support.loading import Numbers
from support.models import build

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


@pytest.mark.parametrize("kind", ["map", "stream"])
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


@pytest.mark.parametrize(("how", "named"), [("raises", "the file of row 20 is gone"), ("killed", r"DataLoader worker \(pid.*(killed|exited unexpectedly)")])
def test_a_worker_that_dies_ends_all_ranks_with_its_error(how: str, named: str) -> None:
    for outcome in run_program(reading_program, 2, how, timeout=40):
        assert outcome.code == 1 and outcome.after < 30
        assert re.search(named, outcome.output, re.DOTALL), outcome.output
        assert "went on in silence" not in outcome.output
