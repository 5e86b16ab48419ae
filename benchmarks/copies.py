"""Measures how much two processes that exchange nothing slow each other down on this machine.

python -m benchmarks.copies

Each process trains half of the workload's rows. In each round one of them takes a step alone, and then both take a
step at once. Half of the ratio that this prints is the least that a step on two processes can take of the time of one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.connection import Connection

import torch

from benchmarks.contenders import Contender
from benchmarks.summary import Ratio
from benchmarks.workload import Workload

PARTS = 2


def _serve(orders: Connection) -> None:
    torch.set_num_threads(1)
    workload, contender = Workload(), Contender()
    contender.model = workload.model()
    contender.optimizer = workload.optimizer(contender.model.parameters())
    contender.batch = workload.batch(part=0, parts=PARTS)
    for _ in range(2):
        contender.step()
    orders.send(None)
    while orders.recv():
        wall, cpu = time.monotonic(), time.process_time()
        contender.step()
        orders.send((time.monotonic() - wall, time.process_time() - cpu))


def _step(processes: list[Connection]) -> tuple[float, float]:
    """Let processes take a step at once; return the longest wall time and the mean CPU time."""
    for process in processes:
        process.send(True)
    times = [process.recv() for process in processes]
    return max(wall for wall, _ in times), sum(cpu for _, cpu in times) / len(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="number of rounds (default: %(default)s)")
    rounds = parser.parse_args().rounds
    context = multiprocessing.get_context("spawn")
    processes = []
    for _ in range(PARTS):
        ours, theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs,), daemon=True).start()
        processes.append(ours)
    for process in processes:
        process.recv()
    alone, together = [], []
    for number in range(rounds):
        alone.append(_step([processes[number % PARTS]]))
        together.append(_step(processes))
    for process in processes:
        process.send(False)  # the end
    for name, which in (("wall", 0), ("CPU", 1)):
        ratio = Ratio.paired([step[which] for step in together], [step[which] for step in alone])
        print(f"{PARTS} copies at once / one alone, {name} time: {ratio}, {rounds} rounds")


if __name__ == "__main__":
    main()
