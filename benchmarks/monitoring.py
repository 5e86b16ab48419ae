"""Measures what status lines and the log cost: time of the training thread, and bytes and collectives per line.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.monitoring [--plan dp2] [--rounds 40]

Two equal models take turns, one with lines and one without. Their ratio is far below the noise of a step, so the time
inside of the monitor's functions is measured too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright.faults.guard import active_guard
from meshwright.faults.link import Link
from meshwright.monitor.monitor import Monitor
from meshwright.monitor.reporter import Reporter
from meshwright.monitor.step_observer import StepObserver

EVERY = 10
HOOKS = ((StepObserver, "_enter"), (StepObserver, "_leave"), (StepObserver, "_leads"), (StepObserver, "end_step"),
         (StepObserver, "saw_norm"))  # fmt: skip


class Spent:
    """Adds up the seconds of calls; a call inside another one counts once."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - start

        return call


def program(arguments: argparse.Namespace, **options: Any) -> Callable[[int], None]:
    """Return a function that takes a training step of a model of its own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=arguments.hidden, intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers, num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, _ = mw.to_distributed(
        model, optimizer, config=mw.ToDistributedConfig(plan=arguments.plan, **options)
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    plan = mw.plan_of(model)
    mine = rank // (plan.tp * plan.cp) % plan.dp

    def step(number: int) -> None:
        ids = torch.randint(8192, (arguments.rows, arguments.length), generator=torch.Generator().manual_seed(number))
        ids = ids.chunk(plan.dp)[mine]
        model(input_ids=ids, labels=ids).loss.backward()
        mw.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextlib.contextmanager
def timed_monitor(spent: Spent, sent: list[int]) -> Iterator[None]:
    """Measure the monitor's functions and the bytes of its messages inside the context."""
    announce = Link.announce

    def counted(link: Any, message: dict[str, Any]) -> None:
        if message["kind"] == "post":
            sent.append(len(json.dumps(message)) + 1)
        announce(link, message)

    with contextlib.ExitStack() as stack:
        for owner, name in HOOKS:
            stack.enter_context(mock.patch.object(owner, name, spent.timed(getattr(owner, name))))
        stack.enter_context(mock.patch.object(Link, "announce", counted))
        stack.enter_context(mock.patch.object(Monitor, "_begin", lambda self: None))  # the card, once per run
        yield


def collectives() -> int:
    guard = active_guard()
    return 0 if guard is None else sum(log.count for log in guard.trace.logs.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="dp2")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    arguments = parser.parse_args()
    spent, sent, of_thread = Spent(), [], Spent()
    shares, spans, ratios, counts = [], [], [], {True: 0, False: 0}
    with tempfile.TemporaryDirectory() as folder, timed_monitor(spent, sent):
        show = Reporter._figures
        with mock.patch.object(Reporter, "_figures", of_thread.timed(show)):
            plain = program(arguments)
            shown = program(arguments, logging_steps=EVERY, logging_dir=folder, max_steps=10**6)
            for number in range(3):
                plain(number)
                shown(number)
            for number in range(arguments.rounds):
                times = {}
                for with_lines in (True, False) if number % 2 else (False, True):
                    spent.seconds, before = 0.0, collectives()
                    start = time.perf_counter()
                    (shown if with_lines else plain)(number)
                    times[with_lines] = time.perf_counter() - start
                    counts[with_lines] += collectives() - before
                    if with_lines:
                        shares.append(spent.seconds / times[True])
                        spans.append(spent.seconds)
                ratios.append(times[True] / times[False])
    if not dist.is_initialized() or dist.get_rank() == 0:
        low, middle, high = statistics.quantiles(ratios, n=4)
        seconds = times[False]
        print(f"{arguments.plan}: a step takes {1e3 * seconds:.1f} ms; a line every {EVERY} steps, with the log")
        print(f"time in the monitor on the training thread: mean {statistics.fmean(shares):.4%} of a step, "
              f"median {statistics.median(shares):.4%}, most {max(shares):.4%}")  # fmt: skip
        print(f"the same in microseconds: mean {1e6 * statistics.fmean(spans):.0f}, "
              f"median {1e6 * statistics.median(spans):.0f}")  # fmt: skip
        print(f"step with lines / step without: median {middle:.4f}, quartiles {low:.4f} to {high:.4f}")
        print(f"collectives of {arguments.rounds} steps: {counts[True]} with lines, {counts[False]} without")
        if sent:
            print(f"bytes per line and rank: {statistics.fmean(sent):.0f}, over the guard's connection")


if __name__ == "__main__":
    main()
