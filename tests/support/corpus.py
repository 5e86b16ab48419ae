"""Tiny checkpoints that earlier versions wrote, and what each of them must give, whichever version loads it.

Every value follows from its name, so a load is compared with a formula and not with what another load gave. Before a
change of the format, write files of the present one: ``PYTHONPATH=tests python -m support.corpus
tests/checkpoint/corpus/format_N``. Files that are there stay as they are.
"""

from __future__ import annotations

import random
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

import meshwright as mw
from harness import WorkerPool
from meshwright.optim.owners import parts_of
from meshwright.optim.runtime import runtime_of
from support import optimizer_files
from support.models import build, labels_for, tokens

FOLDER = Path(__file__).parents[1] / "checkpoint" / "corpus"
PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2_zero1": {"dp": 2, "zero_stage": 1},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "gradient_accumulation_steps": 2},
    "dp2_tp2_zero3": {"dp": 2, "tp": 2, "zero_stage": 3},
}
SAVED = (*PLANS, "dp2_zero1_bf16")  # the last one has master weights
STEP, EXTRA, STREAMS = 3, {"epoch": 1, "notes": [None, "ü", 0.1]}, {"seed": 7, "training": 5, "evaluation": 2}
SCALE, RATES = 2.0**10, [0.25, 0.125]
MASTER = 1 + 2**-12  # by which a master weight differs from the weight, to which it is rounded
# An uneven vocabulary, one key head for two ranks, a tied weight and a dropout, which has streams of its own.
TRAITS = {
    "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 1,
    "tie_word_embeddings": True, "attention_dropout": 0.1,
}  # fmt: skip


def plan_of(name: str) -> dict[str, Any]:
    return PLANS[name.removesuffix("_bf16")]


def ranks_of(name: str) -> int:
    return int(np.prod([plan_of(name).get(axis, 1) for axis in ("pp", "dp", "tp")]))


def values(key: str, shape: Any) -> Tensor:
    """The elements of a tensor of a checkpoint: whole numbers that every dtype holds, except those of masters."""
    kind, _, name = key.partition("/")
    key = f"weights/{name}" if kind == "master" else key
    found = (torch.arange(torch.Size(shape).numel()) * 7 + zlib.crc32(key.encode())) % 251
    return found.view(shape).float() * (MASTER if kind == "master" else 1)


class Program:
    """A run with all that a checkpoint can have, under a plan; nothing of it is as the checkpoints have it."""

    def __init__(self, name: str):
        torch.manual_seed(1)
        self.plan = plan_of(name)
        model: Any = build("llama", **TRAITS)
        self.model = model.to(torch.bfloat16 if name.endswith("bf16") else torch.float32)
        parameters = dict(self.model.named_parameters())
        groups = [[p for p in parameters.values() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False)]
        self.optimizer: Any = torch.optim.AdamW([{"params": group} for group in groups], lr=1.0)
        self.loader: Any = None
        if self.plan:
            self.model, self.optimizer, self.loader = mw.to_distributed(
                self.model, self.optimizer, DataLoader(Rows(), batch_size=4, shuffle=True),
                config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**self.plan)),
            )  # fmt: skip
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)
        self.scaler = torch.amp.GradScaler("cpu")

    def train(self) -> None:
        """Make one step, after which the optimizer has state."""
        ids = tokens(4, 6, vocab_size=11)
        batch = next(iter(self.loader)) if self.loader is not None else {"input_ids": ids, "labels": labels_for(ids)}
        self.model(**batch).loss.backward()
        self.optimizer.step()

    def fill(self) -> None:
        """Give an undistributed model and its optimizer the values of the corpus."""
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(values(f"weights/{name}", parameter.shape))
            for key, value in self.optimizer.state[parameter].items():
                value.copy_(values(f"state/{name}/{key}", value.shape) if value.ndim else torch.tensor(STEP))
        self.scheduler.step()
        for group, rate in zip(self.optimizer.param_groups, RATES, strict=True):
            group["lr"] = rate
        self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": SCALE})

    def set_masters(self) -> None:
        for part in parts_of(self.model, self.optimizer).parts.values():
            if part.has_master and part.key is not None:
                part.key.data.mul_(MASTER)

    def others(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "scaler": self.scaler, "loader": self.loader}

    def contents(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the weights, the state and the masters by the keys of a checkpoint, and the optimizer's manifest."""
        weights = mw.full_state_dict(self.model)
        mw.save_optimizer(self.model, self.optimizer, folder)
        found = {f"weights/{name}": value for name, value in weights.items()}
        manifest, tensors = optimizer_files.contents(folder)
        return found | tensors, manifest

    def streams(self) -> Any:
        return runtime_of(self.model).streams


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    ids = tokens(20, 6, vocab_size=11)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def set_random_state(rank: int) -> list[Any]:
    """Set this process's random states to those that a rank saved; return the next draws."""
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    for _ in range(rank + 1):  # the first draw makes the words, which then are the same on all ranks: small files
        torch.rand(1), np.random.rand(), random.random()
    return next_draws()


def next_draws() -> list[Any]:
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    found = [torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()]
    torch.set_rng_state(states[0]), np.random.set_state(states[1]), random.setstate(states[2])
    return found


def save(name: str, first: str, folder: str) -> None:
    """Write the checkpoint of a plan, from the one that an undistributed model wrote."""
    program = Program(name)
    if program.plan:
        program.train()
        options = {**program.others(), "loader": None}
        mw.load_checkpoint(first, program.model, program.optimizer, **options)
        program.set_masters()
        program.streams().load_state_dict(STREAMS)
    else:
        program.train()
        program.fill()
    write = mw.save_checkpoint  # its import draws a number
    set_random_state(dist.get_rank() if dist.is_initialized() else 0)
    write(folder, program.model, program.optimizer, step=STEP, extra=EXTRA, **program.others())


def unpacked(archive: Path, folder: Path) -> Path:
    """Unpack a checkpoint and return its folder."""
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.partition(".")[0]


def main(to: Path) -> None:
    to.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        pools = {count: WorkerPool(count) for count in (2, 4)}
        for name in SAVED:
            first, target = Path(scratch, "one_bf16" if name.endswith("bf16") else "one"), Path(scratch, name)
            if not first.exists():
                save(first.name, "", str(first))
            if plan_of(name):
                pools[ranks_of(name)].run(save, name, str(first), str(target))
            with tarfile.open(to / f"{name}.tar.xz", "w:xz") as archive:
                archive.add(target, name)
        for pool in pools.values():
            pool.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
