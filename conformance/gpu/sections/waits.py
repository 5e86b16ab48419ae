"""Where a step makes the host wait for the GPU: what the trace claims, and what a real step does."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
import warnings
from collections import Counter
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
_OTHERS = (os.path.dirname(torch.__file__), warnings.__file__)  # whose lines are not where a wait can be mended
_WAIT = "called a synchronizing CUDA operation"  # torch's words for a wait
_WARM = 3  # steps that may wait: the optimizer's state, the first batch of its kind, what the ranks compare


class Waits(Section):
    """Traces programs on fake CUDA tensors, and runs them while torch tells of each wait of the host."""

    name = "waits"
    question = (
        "Does a real step make the host wait for the GPU where the stock model does not, and does the trace say the "
        "same?"
    )
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
    """Run a program of the trace on this rank; return where its last step waits for the device, if anywhere.

    Left out are waits in lines in which the stock model waits without a plan, which are the model's own. Collectives
    may wait where ranks share a GPU, since they go through the host then.
    """
    fields, options, of_program = PROGRAMS[name]
    plan = mw.ParallelPlan(**fields)
    options = {"num_hidden_layers": 2 if plan.pp > 1 else 1, **options}
    dtype, family = options.pop("dtype", torch.float32), options.pop("family", "llama")
    autocast = of_program.get("autocast")

    def waits(is_stock: bool) -> Counter[str]:
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**SIZES, **options})
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).train()
        optimizer: Any = torch.optim.AdamW(model.parameters())
        if not is_stock:
            model, optimizer, _ = mw.to_distributed(model, optimizer, config=mw.ToDistributedConfig(plan=plan))
            if plants:
                FAULTS[_FAULT][0](model)
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64, device=device)

        def step() -> None:
            with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            if not is_stock:
                mw.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(_WARM):
            step()
        if plants and not is_stock and device == "cpu":
            model.register_forward_pre_hook(_as_a_wait)
        with watched_waits(device) as places:
            step()
        return places

    of_model = waits(is_stock=True)
    return "; ".join(f"{at} ({count} times)" for at, count in waits(is_stock=False).items() if at not in of_model)


@contextlib.contextmanager
def watched_waits(device: str) -> Iterator[Counter[str]]:
    """Yield where the host waits for the device, as it is found.

    torch warns of each wait: an error on one rank would leave the others in a collective. Backward runs on this thread,
    whose stack then shows the line.
    """
    places: Counter[str] = Counter()

    def note(message: Warning | str, *args: object, **kwargs: object) -> None:
        if _WAIT in str(message):
            places[_place()] += 1

    with warnings.catch_warnings(), torch.autograd.set_multithreading_enabled(False):
        warnings.simplefilter("always")
        warnings.showwarning = note
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def _as_a_wait(*_: object) -> None:
    """Warn as torch does on a GPU where the host waits for it."""
    warnings.warn(_WAIT, stacklevel=1)


def _place() -> str:
    found = [frame for frame in traceback.extract_stack()[:-2] if not frame.filename.startswith(_OTHERS)]
    return f"{os.path.basename(found[-1].filename)}:{found[-1].lineno}"
