"""Measures what a meeting of many ranks costs the hub, which runs in a thread beside the training of rank 0.

python -m benchmarks.referee
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time

from meshwright.faults.link import Link, line
from meshwright.faults.referee import Referee
from meshwright.faults.referee_server import Hub, _allow_open_files

SIZES = (8, 64, 128, 256, 512, 1024)
ROUNDS = 7
WHAT = "gradients, step 3, 512 collectives with digest 12345678"
TOKEN = "benchmark"


def referee_seconds(groups: list[list[int]]) -> float:
    """Return the CPU seconds of one meeting of each group, including reading questions and writing answers."""
    referee = Referee(120.0)
    for rank in (rank for ranks in groups for rank in ranks):
        referee.join(rank, f"rank {rank}", 0.0)
    known = [referee.group(ranks) for ranks in groups]
    # Members of all groups come in turn, so that all meetings are open at once.
    order = [(rank, known[n]) for place in zip(*groups, strict=True) for n, rank in enumerate(place)]
    question = json.dumps({"key": "gradients", "what": WHAT, "note": ""})
    start = time.thread_time()
    for rank, group in order:
        for post in referee.ask(rank, group=group, now=1.0, **json.loads(question)):
            line(post.body)
    referee.tick(2.0)
    return time.thread_time() - start


def hub_seconds(size: int) -> tuple[float, float]:
    """Return the CPU seconds of the hub's thread for one meeting over sockets, and for a second of heartbeats."""
    hub = Hub("127.0.0.1", name="rank 0", world_size=size, token=TOKEN, timeout=120.0)
    ranks = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.referee", "--ranks-of", str(hub.port), str(size)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert ranks.stdin is not None and ranks.stdout is not None
    thread = next(t.ident for t in threading.enumerate() if t.name == "meshwright-hub")
    assert thread is not None
    clock = time.pthread_getcpuclockid(thread)
    ranks.stdout.readline()
    start = time.clock_gettime(clock)
    time.sleep(5.0)
    beats = (time.clock_gettime(clock) - start) / 5.0
    meetings = []
    for _ in range(ROUNDS):
        start, since = time.clock_gettime(clock), time.monotonic()
        ranks.stdin.write("meet\n")
        ranks.stdin.flush()
        ranks.stdout.readline()
        meetings.append(time.clock_gettime(clock) - start - beats * (time.monotonic() - since))
    ranks.stdin.close()
    ranks.wait()
    hub.close("done")
    return statistics.median(meetings), beats


def be_ranks(port: int, size: int) -> None:
    """Play all ranks of a hub: meet once for each line of the standard input."""
    _allow_open_files(2 * size)
    links = [
        Link(
            ("127.0.0.1", port),
            {"token": TOKEN, "rank": rank, "name": f"rank {rank}", "process": None},
            timeout=120.0, status=lambda: "step 3, all-reduce of float32 (1000,)", on_notice=lambda *_, **__: None,
        )
        for rank in range(size)
    ]  # fmt: skip
    group = {"kind": "group", "number": 0, "ranks": list(range(size))}
    for link in links:
        link.announce(group)
    print("ready", flush=True)
    for _ in sys.stdin:
        for link in links:
            link.announce({"kind": "ask", "key": "gradients", "group": 0, "what": WHAT, "note": ""})
        assert all(json.loads(link._answers.readline()) == {"agreed": True} for link in links)
        print("met", flush=True)
    for link in links:
        link.tell({"kind": "leave", "how": "done"})
        link.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks-of", nargs=2, type=int, metavar=("PORT", "SIZE"), help=argparse.SUPPRESS)
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES, help="numbers of ranks (default: 8 to 1024)")
    arguments = parser.parse_args()
    if arguments.ranks_of:
        be_ranks(*arguments.ranks_of)
        return
    print(
        "| ranks | referee, one group (ms) | referee, tp 8 x dp (ms) | hub with its sockets (ms) | heartbeats (ms/s) |"
    )
    print("|---|---|---|---|---|")
    for size in arguments.sizes:
        one = statistics.median(referee_seconds([list(range(size))]) for _ in range(ROUNDS))
        groups = [list(range(first, size, min(8, size))) for first in range(min(8, size))]
        many = statistics.median(referee_seconds(groups) for _ in range(ROUNDS))
        meeting, beats = hub_seconds(size)
        print(f"| {size} | {one * 1e3:.2f} | {many * 1e3:.2f} | {meeting * 1e3:.1f} | {beats * 1e3:.1f} |", flush=True)


if __name__ == "__main__":
    main()
