"""``save_pretrained``, ``save_weights`` and ``save_optimizer`` over an older save, ended at each of their steps.

Rank 0 writes all files of a model, so only its disk can fail.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import meshwright as mw
from meshwright.checkpoint.one_device.weight_files import WeightFiles
from support.construction import distribute, make
from support.kills import STRIDE, counted, fingerprint, plain_names, try_faults
from support.tiers import crossing, crossings, nightly

SHARDED = {"max_shard_size": "20KB"}
SAVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one file over one": ({}, {}),
    "files over one": ({}, SHARDED),
    "one file over files": (SHARDED, {}),
    "files over files": (SHARDED, SHARDED),
    "save_weights over files": (SHARDED, {"weights": True}),
    "whole weights over files": (SHARDED, {"whole": True}),
}


def save(model: Any, folder: Path, *, weights: bool = False, whole: bool = False, **options: Any) -> None:
    if weights:
        mw.save_weights(model, folder)
    else:
        state = mw.full_state_dict(model) if whole else None
        model.save_pretrained(folder, state_dict=state or None, **options)


def loaded(folder: Path) -> dict[str, str]:
    """What transformers and ``load_weights`` find, which must be the same, and a file of another program's."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = {name: hashlib.sha256(x.numpy().tobytes()).hexdigest() for name, x in model.state_dict().items()}
    files = WeightFiles.open(folder)
    names = files.names_for(model)
    for tensor in model.parameters():
        path, entry = files.entries[names[id(tensor)]]
        with path.open("rb") as file:
            file.seek(entry.start)
            assert file.read(tensor.nbytes) == tensor.detach().numpy().tobytes(), path
    return {**found, "tokenizer": (folder / "tokenizer.json").read_text()}


def fail_at_each_step(folder: Path, kind: str, every: int, case: str) -> tuple[int, list[str]]:
    first, second = SAVES[case]
    model = distribute(make("llama"), tp=2)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text("{}")
    dist.barrier()
    find = functools.partial(loaded, folder)
    save(model, folder, **first)
    dist.barrier()
    old = find()
    dist.barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    save_new = functools.partial(save, model, folder, **second)
    if dist.get_rank() == 0:
        shutil.copytree(folder, folder.with_name("kept"))
    dist.barrier()
    save_new()
    dist.barrier()
    new, names = find(), plain_names(folder)
    assert new.keys() == old.keys() and all(new[name] != old[name] for name in new if "weight" in name)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        shutil.copytree(folder.with_name("kept"), folder)
    dist.barrier()
    return try_faults(
        folder=folder, kind=kind, rank=0, every=every, save=save_new, find=find, expected=[old, new], names=names
    )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("every", [nightly(STRIDE), 9], ids=["many steps", "some steps"])
@pytest.mark.parametrize(
    ("kind", "case"),
    crossings(
        itertools.product(["kill", "full"], SAVES),
        but=[
            ("kill", "files over one"),
            ("kill", "one file over files"),
            ("kill", "files over files"),
            ("full", "files over files"),
        ],
    ),
)
def test_a_model_is_the_old_or_the_new(kind: str, case: str, every: int, pool2: Any, tmp_path: Path) -> None:
    results = pool2.run(fail_at_each_step, tmp_path / "model", kind, every, case, timeout=900)
    counted(results, f"{case}, {kind}")


def optimizer_fails(folder: Path, kind: str, rank: int, every: int) -> tuple[int, list[str]]:
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2, zero_stage=1))
    model = make("llama")
    model, optimizer, _ = mw.to_distributed(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config=config)

    def find() -> dict[str, str]:
        """What is loaded; the optimizer then has again what is to be saved."""
        mw.load_optimizer(model, optimizer, folder)
        mw.save_optimizer(model, optimizer, folder.with_name("read"))
        found = fingerprint(folder.with_name("read"))
        dist.barrier()
        if folder.with_name("second").exists():
            mw.load_optimizer(model, optimizer, folder.with_name("second"))
        return found

    states = []
    for name in ("first", "second"):
        model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mw.save_optimizer(model, optimizer, folder.with_name(name))
        states.append(fingerprint(folder.with_name(name)))
        dist.barrier()
        if name == "first":
            mw.save_optimizer(model, optimizer, folder)
    return try_faults(
        folder=folder,
        kind=kind,
        rank=rank,
        every=every,
        save=lambda: mw.save_optimizer(model, optimizer, folder),
        find=find,
        expected=states,
        names={"optimizer.json", *(f"part-0000{n}-X.{end}" for n in (0, 1) for end in ("json", "safetensors"))},
    )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("every", [nightly(STRIDE), 4], ids=["many steps", "some steps"])
@pytest.mark.parametrize(("kind", "rank"), [("kill", 0), crossing("full", 1), nightly("kill", 1), nightly("full", 0)])
def test_an_optimizer_is_the_old_or_the_new(kind: str, rank: int, every: int, pool2: Any, tmp_path: Path) -> None:
    results = pool2.run(optimizer_fails, tmp_path / "optimizer", kind, rank, every, timeout=900)
    counted(results, f"optimizer, {kind} of rank {rank}")
