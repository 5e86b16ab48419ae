"""Work beside training: checkpoints that are written meanwhile, a second stream, and a checker of memory."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

import meshwright as mw
from conformance.gpu.ranks import RankPools, rank_pools
from conformance.gpu.section import Check, Place, Section, attempt
from conformance.gpu.training import Numbers, batches, largest_difference, new_model, trained
from meshwright.choose.given_plan import resolve_plan

_PLANS = ("dp2 zero1", "tp2+sp", "dp2 zero3")
_ON_STREAM = 2e-5  # float32, as between plan and device
_CHECKER = "compute-sanitizer"
_SLOW = 150.0  # seconds for the checker, which runs kernels tens of times slower
_BAD = 9  # the exit code with which the checker reports an error


class Streams(Section):
    """Compares what is done beside training with the same done alone."""

    name = "streams"
    question = "Is a checkpoint that is written while training goes on, and a step on a second stream, what it must be?"
    share = 2.0

    def run(self, place: Place) -> Iterator[Check]:
        with rank_pools() as pools:
            if find_spec("xxhash") is None:
                note = "xxhash is not installed, whose digests are in the files of a checkpoint"
                yield Check(what="saves in the background that were compared", figure=0.0, note=note)
            for plan in _PLANS if find_spec("xxhash") else ():
                yield from attempt(plan, _saved, plan, place, pools)
            yield from attempt("a second stream", _streamed, place, pools)
        yield from attempt("small steps", _checked_memory, place)


def _saved(plan: str, place: Place, pools: RankPools) -> Check:
    folder = str(place.folder / plan.replace(" ", "-"))
    differing = pools.run(2, differing_files, folder, plan, place.device, place.plants)[0]
    what = f"{plan}: files of a save in the background that differ from those of a save at once"
    return Check(what=what, figure=differing, goal=0.0)


def _streamed(place: Place, pools: RankPools) -> Check:
    factor = 1.001 if place.plants else 1.0
    expected = pools.run(2, trained, "tp2+sp", torch.float32, place.device)[0]
    found = pools.run(2, trained_on_stream, place.device, factor)[0]
    difference = largest_difference(found, expected, weights=False)
    return Check(what="tp2+sp on a second stream, off the first stream's numbers", figure=difference, goal=_ON_STREAM)


def differing_files(folder: str, plan: str, device: str, plants: bool) -> int:
    """Save at once and in the background at the same step, and train while the second save is written.

    Returns:
        The number of files of tensors that differ, or are there once only.
    """
    model = new_model("llama", torch.float32, device)
    config = mw.ToDistributedConfig(plan=resolve_plan(plan))
    model, optimizer, loader = mw.to_distributed(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches(8), config=config
    )
    at_once, meanwhile = Path(folder, "at-once"), Path(folder, "meanwhile")
    for step, batch in enumerate(loader, start=1):
        model(**{name: x.to(device) for name, x in batch.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            mw.save_checkpoint(at_once, model, optimizer, step=step)
        if step == (3 if plants else 2):
            mw.save_checkpoint(meanwhile, model, optimizer, step=step, asynchronous=True)
    mw.wait_for_checkpoints(model)
    dist.barrier()
    first, second = _digests(at_once), _digests(meanwhile)
    return sum(first.get(name) != second.get(name) for name in first.keys() | second.keys()) if first else 1


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}


def trained_on_stream(device: str, factor: float) -> Numbers:
    """Train under tp2+sp on a stream of the program's own."""
    stream = contextlib.nullcontext() if device == "cpu" else torch.cuda.stream(torch.cuda.Stream())
    with stream:
        return trained("tp2+sp", torch.float32, device, scale=factor)


def _checked_memory(place: Place) -> Check:
    """Run a few steps under the checker if there is one; without, the steps alone."""
    checker = shutil.which(_CHECKER) if place.is_cuda else None
    command = [sys.executable, "-m", "conformance.gpu.small_step", place.device]
    if checker:
        command = [checker, "--tool", "memcheck", "--error-exitcode", str(_BAD), *command]
    what = f"small steps {f'under {_CHECKER}' if checker else 'alone'}: exit code"
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_SLOW, check=False
        )
    except subprocess.TimeoutExpired:
        return Check(what=what, figure=float("nan"), note=f"not done within {_SLOW:g} s, which says nothing")
    print(done.stdout)
    last = done.stdout.strip().rpartition("\n")[2][:200]
    note = last if checker or not place.is_cuda else f"{_CHECKER} is not installed"
    return Check(what=what, figure=done.returncode, goal=0.0, note=note)
