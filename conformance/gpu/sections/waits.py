"""Where a step makes the host wait for the GPU: what the trace claims, and what a real step does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import meshwright as mw
from conformance.gpu.ranks import RankPools, rank_pools
from conformance.gpu.section import Check, Place, Section, attempt
from support.cuda_steps import FAULTS, LENGTH, PROGRAMS, ROWS, SIZES

# Names of the programs that the tests trace; the one with dropout has randomness on the device.
_PROGRAMS = (
    "dp2", "dp2 zero1 bf16", "dp2 zero3 bf16", "tp2+sp", "tp2+sp dropout", "cp2 ring", "pp2", "dp2 accumulate",
    "dp2 zero2", "tp2+sp autocast", "cp2 ulysses tp2+sp zero3", "pp2 zb-h1", "dp2 tp2+sp zero1",
)  # fmt: skip
_TRACED_ON_CPU = _PROGRAMS[1:4]
_FAULT = "reads a number"
_WARM = 3  # steps that may wait: the optimizer's state, the first batch of its kind, what the ranks compare


class Waits(Section):
    """Traces programs on fake CUDA tensors, and runs them while waits of the host are errors."""

    name = "waits"
    question = "Does a real step make the host wait for the GPU anywhere, and does the trace say the same?"
    share = 2.0

    def run(self, place: Place) -> Iterator[Check]:
        names = _PROGRAMS if place.is_cuda else _TRACED_ON_CPU
        claims: dict[str, int] = {}
        yield from attempt("the trace", _traced, [_FAULT] if place.plants else names, claims)
        with rank_pools() as pools:
            for name in _PROGRAMS:
                yield from attempt(name, _real, name, place, pools, claims.get(name))


def _real(name: str, place: Place, pools: RankPools, claim: int | None) -> Check:
    ranks = mw.ParallelPlan(**PROGRAMS[name][0]).world_size
    found = pools.run(ranks, real_step, name, place.device, place.plants)
    return Check(
        what=f"{name}: ranks that wait in a real step",
        figure=sum(map(bool, found)),
        goal=0.0,  # a CPU's step runs by the same code, and has nothing to wait for
        note=next((text for text in found if text), ""),
        details=None if claim is None else {"waits, as traced": claim},
    )


def _traced(names: Sequence[str], claims: dict[str, int]) -> Iterator[Check]:
    """Yield what the trace finds in each program, in a process of its own, and note the number of waits by program."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    lines = "".join(f"{name}\n" for name in names)
    command = [sys.executable, "-m", "support.cuda_steps"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise RuntimeError("the trace failed; its output is above")
    for name, line in zip(names, done.stdout.splitlines(), strict=True):
        claim = json.loads(line)
        claims[name] = len(claim)
        yield Check(what=f"{name}: waits, as traced", figure=len(claim), goal=0.0, note="; ".join(claim))


def real_step(name: str, device: str, plants: bool) -> str:
    """Run a program of the trace on this rank; return where its last step waits for the device, or nothing.

    Its collectives may wait where ranks share a GPU, since they go through the host then.
    """
    fields, options, of_program = PROGRAMS[name]
    plan = mw.ParallelPlan(**fields)
    options = {"num_hidden_layers": 2 if plan.pp > 1 else 1, **options}
    dtype, family = options.pop("dtype", torch.float32), options.pop("family", "llama")
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **options})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).train()
    model, optimizer, _ = mw.to_distributed(
        model, torch.optim.AdamW(model.parameters()), config=mw.ToDistributedConfig(plan=plan)
    )
    if plants:
        FAULTS[_FAULT][0](model)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64, device=device)
    autocast = of_program.get("autocast")
    for step in range(_WARM + 1):
        is_watched = step == _WARM
        if is_watched and plants and device == "cpu":
            model.register_forward_pre_hook(_as_a_wait)
        try:
            if is_watched and device == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            mw.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        except RuntimeError as error:
            if not is_watched or "synchroniz" not in str(error):
                raise
            return _place_of(error)
        finally:
            if is_watched and device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return ""


def _as_a_wait(*_: object) -> None:
    """Raise what torch raises on a GPU where the host waits for it."""
    raise RuntimeError("called a synchronizing CUDA operation")


def _place_of(error: RuntimeError) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "the backward pass"
    return f"{str(error).splitlines()[0][:120]} at {place}"
