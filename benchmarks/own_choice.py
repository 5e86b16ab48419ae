"""Check whether the plan that to_distributed picks is the fastest, by running all plans that fit on this machine.

    python -m benchmarks.own_choice [--processes 2 4] [--rounds 7] [--seconds 60]

The machine is first calibrated for each number of processes. Then one launch builds each model once for every plan that
fits according to the search, and runs one step of every plan in each round, so that other load affects all plans
equally.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright_plan.job.candidate import Job
from meshwright_plan.job.shapes import describe
from meshwright_plan.machine.hardware import HardwareProfile
from meshwright_plan.search.search import Search, search
from meshwright_plan.search.space import Space

SMALL = {"num_attention_heads": 8, "num_key_value_heads": 4, "use_cache": False}
# Name -> config, sequences per batch, tokens per sequence: wide and short, deep and long, a large vocabulary.
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "wide": ({"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 4096}, 4, 128),
    "long": ({"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 4096}, 4, 512),
    "wordy": ({"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "vocab_size": 16384}, 8, 128),
}


def plans(model: str, processes: int, profile: HardwareProfile) -> Search:
    sizes, rows, length = MODELS[model]
    job = Job(seq_len=length, global_batch=rows, on_cpu=True).in_32_bits()
    shape = describe(LlamaConfig(**sizes, **SMALL), name=model)
    return search(Space(shape=shape, cluster=profile.cluster(gpus=processes), job=job), profile, top=1000)


def worker(arguments: argparse.Namespace) -> None:
    """Run one rank: time a step of every plan in turn. Rank 0 writes its times, which include the slowest rank."""
    dist.init_process_group("gloo")
    profile = HardwareProfile.load(arguments.profile)
    result = {}
    for name, (sizes, rows, length) in MODELS.items():
        found = plans(name, dist.get_world_size(), profile)
        torch.manual_seed(0)
        origin = LlamaForCausalLM(LlamaConfig(**sizes, **SMALL)).train()
        batch = torch.randint(0, sizes["vocab_size"], (rows, length))
        runs = []
        for choice in found.choices:
            model = copy.deepcopy(origin)
            optimizer = torch.optim.AdamW(model.parameters())
            plan = choice.plan.plan
            model, optimizer, _ = mw.to_distributed(model, optimizer, config=mw.ToDistributedConfig(plan=plan))
            own = rows // plan.dp
            first = dist.get_rank() // plan.tp * own
            runs.append((choice, model, optimizer, batch[first : first + own]))
        seconds: list[list[float]] = [[] for _ in runs]
        for number in range(arguments.rounds + 1):
            for times, (_, model, optimizer, ids) in zip(seconds, runs, strict=True):
                dist.barrier()
                start = time.perf_counter()
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                dist.barrier()
                if number:
                    times.append(time.perf_counter() - start)
        result[name] = [
            {"plan": choice.plan.label, "estimated": choice.time.total, "seconds": times}
            for (choice, *_), times in zip(runs, seconds, strict=True)
        ]
    if dist.get_rank() == 0:
        Path(arguments.result).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def report(processes: int, result: dict[str, list[dict[str, Any]]]) -> None:
    for name, rows in result.items():
        medians = [statistics.median(row["seconds"]) for row in rows]
        best = min(range(len(rows)), key=medians.__getitem__)
        pairs = zip(rows[0]["seconds"], rows[best]["seconds"], strict=True)
        ratio = statistics.median(pick / other for pick, other in pairs)
        print(
            f"\n{name} on {processes} processes: {len(rows)} plans fit; the picked plan took {ratio:.2f}x as long as "
            "the best"
        )
        order = sorted(range(len(rows)), key=medians.__getitem__)
        for index in sorted({0, *order[:4], order[-1]}, key=medians.__getitem__):
            row, mark = rows[index], "pick" if index == 0 else "best" if index == best else ""
            print(f"  {mark:4} {row['plan']:28} {medians[index]:7.3f} s measured {row['estimated']:7.3f} s estimated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=60, help="duration of the calibration (default: 60)")
    parser.add_argument("--profile", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.profile:
        return worker(arguments)
    for processes in arguments.processes:
        with tempfile.TemporaryDirectory() as folder:
            profile, result = f"{folder}/profile.json", f"{folder}/result.json"
            calibrate = [sys.executable, "-m", "meshwright_tools.cli", "calibrate", "--output", profile]
            subprocess.run([*calibrate, "--processes", str(processes), "--seconds", str(arguments.seconds)], check=True)
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            here = ["-m", "benchmarks.own_choice", "--profile", profile, "--result", result]
            subprocess.run([*launch, *here, "--rounds", str(arguments.rounds)], check=True)
            report(processes, json.loads(Path(result).read_text()))


if __name__ == "__main__":
    main()
