"""A whole program with pickle taken away: Meshwright neither writes nor reads a pickle, and torch does so by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright.data.stream import ShardedStream
from meshwright.mesh.axes import Axis
from meshwright_tools.checkpoints.export_checkpoint import export_checkpoint
from support.models import build
from support.no_pickle import NoPickle

# Who may pickle, and why; SECURITY.md lists the same.
ALLOWED = {
    "multiprocessing": "Python's queue between a DataLoader and its own worker processes",
    "torch.utils.data": "an error or a batch of a DataLoader's own worker",
}


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.arange(8) + index
        return {"input_ids": ids, "labels": ids, "names": f"row {index}"}


def whole_program(folder: Path, workers: int) -> list[str]:
    """Distribute, read for the peers, train, save, load and export; return who pickled."""
    with pytest.MonkeyPatch.context() as patch:
        found = NoPickle(patch, ALLOWED).found
        plan = mw.ParallelPlan(tp=2, sequence_parallel=True)
        config = mw.ToDistributedConfig(plan=plan, loader=mw.LoaderOptions(source="leader"))
        model = build("llama")
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=workers)
        model, optimizer, loader = mw.to_distributed(model, optimizer, loader, config=config)
        for step, batch in enumerate(loader):
            assert len(batch.pop("names")) == 4
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                break
        mw.save_checkpoint(folder / "step-3", model, optimizer, loader=loader, step=3)
        mw.load_checkpoint(folder, model, optimizer, loader=loader)
        mw.save_weights(model, folder / "weights")
        mw.load_weights(model, folder / "weights")
        mw.save_optimizer(model, optimizer, folder / "optimizer")
        mw.load_optimizer(model, optimizer, folder / "optimizer")
        if torch.distributed.get_rank() == 0:
            export_checkpoint(folder / "step-3", folder / "exported")
        assert json.loads((folder / "step-3" / "checkpoint.json").read_text())["manifest"]["step"] == 3
        return sorted(found)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_whole_program_runs_without_pickle(workers: int, pool2: Any, tmp_path: Path) -> None:
    leader, peer = pool2.run(whole_program, tmp_path, workers, timeout=120)
    assert peer == []
    assert leader == [] if not workers else set(leader) <= ALLOWED.keys()


class Custom:
    """A sample that only pickle could send."""


def streamed(samples: list[Any]) -> int:
    dp = Axis("dp", 2, torch.distributed.get_rank(), torch.distributed.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        NoPickle(patch, ALLOWED)
        stream = ShardedStream([samples] * 3, batch_size=4, dp=dp, lanes=3, num_workers=1)
        return sum(len(rows.samples) for rows in stream if not rows.is_blank)


def test_samples_move_between_ranks_without_pickle_or_are_refused_at_once(pool2: Any) -> None:
    assert sum(pool2.run(streamed, [{"text": "x", "ids": torch.ones(3)}] * 5)) == 15
    errors = pool2.run_expecting_error(streamed, [Custom()] * 5)
    assert all("a sample is a " in message and "Custom" in message for _, message in errors)


def gathered_pickle() -> None:
    with pytest.MonkeyPatch.context() as patch:
        NoPickle(patch, ALLOWED)
        torch.distributed.all_gather_object([None, None], "x")


def test_a_pickle_would_be_caught(pool2: Any) -> None:
    errors = pool2.run_expecting_error(gathered_pickle)
    assert [kind for kind, _ in errors] == ["AssertionError"] * 2
