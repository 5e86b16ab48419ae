"""``python -m benchmarks.construction``: measure the memory, bytes and seconds to build, read and save a model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.__main__ import ROOT, worker_environment

RANKS = 2
# 1.1 B parameters: the sizes of TinyLlama.
SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}


class What(StrEnum):
    """The operations that can be measured."""

    deferred = "deferred"
    meta = "meta"
    checkpoint = "checkpoint"
    save = "save"


@dataclass(frozen=True)
class Cost:
    """The cost on one rank. ``peak_increase`` is the peak resident memory less the resident memory before, in bytes."""

    rank: int
    shard: int
    peak_increase: int
    bytes_read: int
    seconds: float


def measured(step: Callable[[], torch.nn.Module], rank: int) -> tuple[torch.nn.Module, Cost]:
    """Run a step that returns a model, and measure it by the kernel's VmRSS before, VmHWM after, and rchar."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, read, start = _status("VmRSS"), _bytes_read(), time.perf_counter()
    model = step()
    seconds = time.perf_counter() - start
    shard = sum(p.nbytes for p in model.parameters())
    return model, Cost(rank, shard, _status("VmHWM") - before, _bytes_read() - read, seconds)


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def work(what: What, dtype: str, folder: str) -> None:
    """Run one rank, and print its cost as JSON."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import meshwright as mw

    torch.set_default_dtype(getattr(torch, dtype))
    config = LlamaConfig(**SIZES)
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    plan = mw.ParallelPlan(tp=RANKS)

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        context = mw.deferred_init() if what is What.deferred else torch.device("meta")
        with context:
            model = LlamaForCausalLM(config)
        weights = folder if what is What.checkpoint else None
        return mw.to_distributed(model, config=mw.ToDistributedConfig(plan=plan, weights=weights))[0]

    model, cost = measured(build, rank)
    if what is What.save:

        def save() -> torch.nn.Module:
            model.save_pretrained(folder)  # type: ignore[operator]
            return model

        _, cost = measured(save, rank)
    print(json.dumps(asdict(cost)), flush=True)


def _launch(what: What, dtype: str, folder: str) -> list[Cost]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += ["-m", "benchmarks.construction", what.value, dtype, folder]
    result = subprocess.run(command, env=worker_environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        raise typer.Exit(result.returncode)
    # Not split by lines: the ranks share the pipe, so two records may be on one line.
    costs = [Cost(**json.loads(found)) for found in re.findall(r"\{[^}]*\}", result.stdout)]
    return sorted(costs, key=lambda cost: cost.rank)


def main(
    what: Annotated[What, typer.Option(help="how to build the model; 'save' measures saving it")] = What.deferred,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
) -> None:
    """Build (or save) a Llama of 1.1 B parameters on 2 ranks, tp=2, on CPU.

    Peak memory is the increase of a rank's resident memory from just before the model is built to its
    highest point, as the kernel counts it (VmHWM - VmRSS). With --what checkpoint, other processes write
    the checkpoint first; the bytes read are those that a rank's read calls returned.

    Examples:

    $ python -m benchmarks.construction --what deferred

    $ python -m benchmarks.construction --what checkpoint --dtype bfloat16
    """
    with tempfile.TemporaryDirectory(prefix="construction-") as folder:
        if what is What.checkpoint:
            _launch(What.save, dtype, folder)
        for cost in _launch(what, dtype, folder):
            print(
                f"rank {cost.rank}: shard {cost.shard / 1e6:.0f} MB, peak +{cost.peak_increase / 1e6:.0f} MB "
                f"({cost.peak_increase / cost.shard:.3f} x shard), read {cost.bytes_read / 1e6:.0f} MB "
                f"({cost.bytes_read / cost.shard:.3f} x shard), {cost.seconds:.1f} s"
            )


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(What(sys.argv[1]), *sys.argv[2:])
    else:
        typer.run(main)
