"""The program that torchrun starts to measure a figure other than time: memory, collectives or the guard's share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import report
from benchmarks.contenders import CONTESTS, ONE_PROCESS, Entry
from benchmarks.environment import environment
from benchmarks.memory import saved_bytes
from benchmarks.traffic import Traffic, traffic_per_layer
from benchmarks.watching import guard_shares
from benchmarks.workload import Workload

FIGURES = ("memory", "collectives", "guard")
WARM_UP_STEPS = 3


def compare_memory(entries: Sequence[Entry], workload: Workload) -> dict[str, int]:
    """Measure saved activations; return contender -> bytes on this rank."""
    found = {}
    for entry in entries:
        contender = entry.build(workload)
        if not contender.idle:
            found[entry.name] = saved_bytes(contender)
    return found


def compare_collectives(entries: Sequence[Entry], workload: Workload) -> dict[str, dict[str, Traffic]]:
    """Return the collectives that one decoder layer adds to a step: contender -> phase -> traffic on this rank."""
    added = workload.num_hidden_layers // 2
    shallow = replace(workload, num_hidden_layers=workload.num_hidden_layers - added)
    return {
        entry.name: traffic_per_layer(entry.build(workload), entry.build(shallow), added)
        for entry in entries
        if entry.name != ONE_PROCESS
    }


def compare_guard(entries: Sequence[Entry], workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Return the share of each step that the guard takes on this rank: contender -> one value per round."""
    watched = [entry for entry in entries if entry.name.startswith("ours")]
    return {entry.name: guard_shares(entry.build(workload), WARM_UP_STEPS, rounds) for entry in watched}


def measure_and_print(figure: str, contest: str, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Measure one figure of one contest, print its table on rank 0, and return the record to save."""
    workload = Workload()
    wanted = [entry for entry in CONTESTS[contest] if not names or entry.name in names]
    entries = [entry for entry in wanted if entry.installed]
    absent = [entry.name for entry in wanted if not entry.installed]
    speaks = dist.get_rank() == 0
    about = {"contest": contest, "figure": figure, "workload": asdict(workload), **environment()}
    record = {**about, "absent": absent}
    if figure == "memory":
        saved = compare_memory(entries, workload)
        if speaks:
            report.print_memory(contest, saved, absent)
        return {**record, "saved_activation_bytes": saved}
    if figure == "guard":
        shares = compare_guard(entries, workload, rounds)
        if speaks:
            report.print_guard(contest, shares)
        return {**record, "guard_shares": shares}
    per_layer = compare_collectives(entries, workload)
    if speaks:
        report.print_collectives(contest, per_layer, absent)
    traffic = {name: {key: asdict(phase) for key, phase in of.items()} for name, of in per_layer.items()}
    return {**record, "collectives_per_layer": traffic}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contest", choices=CONTESTS, required=True)
    parser.add_argument("--figure", choices=FIGURES, required=True)
    parser.add_argument("--only", action="append", default=[], help="a contender's name; may be given several times")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    record = measure_and_print(options.figure, options.contest, options.only, options.rounds)
    if dist.get_rank() == 0:
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
