"""Context parallelism against DeepSpeed's Ulysses, and 4 x the tokens on 4 ranks, on the CPU.

torchrun --nproc-per-node 2 -m benchmarks.context --figure equal
torchrun --nproc-per-node 2 -m benchmarks.context --figure time --rounds 15
torchrun --nproc-per-node 4 -m benchmarks.context --figure scaling
torchrun --nproc-per-node 2 -m benchmarks.context --figure balance
torchrun --nproc-per-node 2 -m benchmarks.context --figure kernels
torchrun --nproc-per-node 2 -m benchmarks.context --figure mixers

equal: loss and gradient norm in float32, over those of one process. time: step times, in turn. scaling: CPU seconds of
forward and backward per token, since the ranks may share cores, compared with a prediction from processes that train
alone. balance: step times of a packed row whose work is spread evenly, against zigzag. kernels: step times with flash
kernels, against blocks with a mask. mixers: CPU seconds and kept bytes of recurrences and convolutions that hand states
over, against those of gathered tokens.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
import typer

from benchmarks.contenders import Contender
from benchmarks.context_contenders import DeepSpeedUlysses, EachAlone, LongRows, OneProcess, Ours
from benchmarks.context_mixers import mixers
from benchmarks.summary import Ratio
from benchmarks.timing import Clocked, say, time_after_warm_up
from meshwright.context import attention
from meshwright.errors import PlanError
from meshwright.faults.guard import active_guard
from meshwright.faults.interpose import observe
from meshwright.parallel.sequence_parts import SequenceParts

SMALL = LongRows(hidden_size=128, intermediate_size=256, num_hidden_layers=2, vocab_size=512, batch_size=2,
                 sequence_length=256)  # fmt: skip
LARGE = LongRows(num_hidden_layers=4, vocab_size=4096, batch_size=1, sequence_length=2048)
CASES = {
    "plain": SMALL,
    "five documents": replace(SMALL, documents=5),
    "one key head": replace(SMALL, num_key_value_heads=1),
    "window of 64": replace(SMALL, window=64),
    "three heads": replace(SMALL, num_attention_heads=3, num_key_value_heads=3, hidden_size=96),
    "257 tokens": replace(SMALL, sequence_length=257),
}
DEEPSPEED = "deepspeed ulysses zero1"
Build = Callable[[LongRows], Any]


def ours(context: str, **plan: Any) -> Build:
    """Return a function that builds a model of ours whose rows all ranks share."""
    return partial(Ours, cp=dist.get_world_size(), context=context, zero_stage=1, **plan)


def equal(rounds: int) -> None:
    """Print each contender's loss and gradient norm over those of one process."""
    builds: dict[str, Build] = {f"ours {name}": ours(name) for name in ("gather", "ulysses", "ring")}
    builds |= {f"deepspeed ulysses zero{stage}": partial(DeepSpeedUlysses, stage=stage) for stage in (1, 3)}
    say("| row | contender | loss / one process - 1 | norm / one process |\n|---|---|---|---|")
    for case, workload in CASES.items():
        expected = _loss_and_norm(OneProcess, workload)
        for name, build in builds.items():
            try:
                found = _loss_and_norm(build, workload)
            except (PlanError, ValueError, RuntimeError, AssertionError) as error:
                say(f"| {case} | {name} | {type(error).__name__}: {' '.join(str(error).split())[:140]} | |")
                continue
            say(f"| {case} | {name} | {found[0] / expected[0] - 1:.1e} | {found[1] / expected[1]:.6f} |")


def _loss_and_norm(build: Build, workload: LongRows) -> tuple[float, float]:
    """Return what the first rank finds; every rank makes the call."""
    contender = build(workload)
    observe(active_guard() if contender.watched else None)
    found: list[Any] = [None]
    if not contender.idle:
        loss = contender.forward()
        contender.backward(loss)
        found = [(loss.item(), contender.norm())]
    dist.broadcast_object_list(found, src=0)
    loss_and_norm: tuple[float, float] = found[0]
    return loss_and_norm


def step_time(rounds: int, methods: Sequence[str] = ("ulysses", "gather", "ring")) -> None:
    """Print the step time of each method of ours over that of DeepSpeed's Ulysses, in wall and in CPU seconds."""
    builds = {name: ours(name) for name in methods} | {DEEPSPEED: DeepSpeedUlysses}
    clocked = {name: Clocked(build(LARGE)) for name, build in builds.items()}
    seconds = time_after_warm_up(clocked, rounds)
    cpu = {name: contender.seconds[-rounds:] for name, contender in clocked.items()}
    say(f"{LARGE.sequence_length} tokens on {dist.get_world_size()} ranks, {rounds} rounds\n")
    say(f"| method | median s | it / {DEEPSPEED} | CPU s | it / {DEEPSPEED} |\n|---|---|---|---|---|")
    for name in clocked:
        columns = [f"{median(x[name]):.3f} | {Ratio.paired(x[name], x[DEEPSPEED])}" for x in (seconds, cpu)]
        say(f"| {name} | {' | '.join(columns)} |")


def balance(rounds: int) -> None:
    """Print the step time of a packed row that is divided by its work, over the step time in zigzag order."""
    workload = replace(LARGE, sequence_length=4096, num_hidden_layers=1, hidden_size=128, intermediate_size=256)
    half = workload.sequence_length // 2
    say("| method | zigzag: median s | balanced / zigzag |\n|---|---|---|")
    for method in ("gather", "ring"):
        even, in_zigzag = ours(method)(workload), partial(mock.patch.object, SequenceParts, "balanced", lambda x, _: x)
        zigzag = _Patched(ours(method)(workload), in_zigzag)
        for contender in (even, zigzag):  # one document fills the second half, and 32 the first
            short = torch.arange(half // 32).repeat(32)
            contender.batch["position_ids"] = torch.cat([short, torch.arange(half)])[None]
        seconds = time_after_warm_up({"even": even, "zigzag": zigzag}, rounds)
        say(f"| {method} | {median(seconds['zigzag']):.3f} | {Ratio.paired(seconds['even'], seconds['zigzag'])} |")


def kernels(rounds: int) -> None:
    """Print the step time of each method with flash kernels over that of blocks with a mask, of two kinds of rows."""
    masked = partial(mock.patch.object, attention, "has_flash", lambda *_: False)
    say("| method | documents | with a mask: median s | flash / with a mask |\n|---|---|---|---|")
    for method in ("gather", "ring"):
        for documents in (1, 8):
            workload = replace(LARGE, sequence_length=4096, num_hidden_layers=1, documents=documents)
            contenders = {"flash": ours(method)(workload), "masked": _Patched(ours(method)(workload), masked)}
            seconds = time_after_warm_up(contenders, rounds)
            ratio = Ratio.paired(seconds["flash"], seconds["masked"])
            say(f"| {method} | {documents} | {median(seconds['masked']):.3f} | {ratio} |")


class _Patched(Contender):
    """A contender whose steps run with something replaced."""

    watched = True

    def __init__(self, contender: Contender, patch: Callable[[], Any]):
        self.contender, self.batch, self.patch = contender, contender.batch, patch

    def step(self) -> torch.Tensor | None:
        with self.patch():
            return self.contender.step()


def scaling(rounds: int) -> None:
    """Print CPU seconds per token of n ranks with n x the tokens, measured and predicted from processes alone.

    A process takes a l + c l^2 for l tokens, since attention grows with the whole row. Two lengths give a and c. Each
    of n ranks has l tokens that attend to a row of n l, so it takes a l + c l (n l).
    """
    n = dist.get_world_size()
    quarter = replace(LARGE, hidden_size=256, intermediate_size=704, vocab_size=1024, sequence_length=1024)
    long = replace(quarter, sequence_length=n * quarter.sequence_length)
    methods = ("ulysses", "gather", "ring")
    contenders: dict[str, Contender] = {name: ours(name)(long) for name in methods}
    contenders |= {"l": EachAlone(quarter), "2l": EachAlone(replace(quarter, sequence_length=2048))}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds + 2):
        for name, contender in contenders.items():
            used = _cpu_seconds(contender)
            if round_ >= 2:  # the first rounds warm up
                seconds[name].append(used)
    say(f"{n} ranks with {long.sequence_length} tokens, each alone with {quarter.sequence_length}; {rounds} rounds\n")
    say("| method | CPU us per token and rank | predicted | measured / predicted |\n|---|---|---|---|")
    tokens = quarter.sequence_length
    quadratic = [(two - 2 * one) / 2 for one, two in zip(seconds["l"], seconds["2l"], strict=True)]
    linear = [one - c for one, c in zip(seconds["l"], quadratic, strict=True)]
    say(f"| alone | {median(seconds['l']) / tokens * 1e6:.0f} | | |")
    for name in methods:
        predicted = [a + n * c for a, c in zip(linear, quadratic, strict=True)]
        shown = (f"{median(x) / tokens * 1e6:.0f}" for x in (seconds[name], predicted))
        say(f"| {name} | {' | '.join(shown)} | {Ratio.paired(seconds[name], predicted)} |")


def _cpu_seconds(contender: Contender) -> float:
    """Return the CPU seconds of a forward and a backward pass, the mean over the ranks."""
    observe(active_guard() if contender.watched else None)
    dist.barrier()
    start = time.process_time()
    contender.backward(contender.forward())
    used = torch.tensor(time.process_time() - start)
    contender.optimizer.zero_grad()
    dist.all_reduce(used)
    return used.item() / dist.get_world_size()


FIGURES = {
    "equal": equal,
    "time": step_time,
    "scaling": scaling,
    "balance": balance,
    "kernels": kernels,
    "mixers": mixers,
}


def main(
    figure: Annotated[str, typer.Option(help=f"One of {', '.join(FIGURES)}.")] = "equal",
    rounds: Annotated[int, typer.Option(help="Number of measurements.")] = 10,
    method: Annotated[list[str] | None, typer.Option(help="A method whose step is timed (default: all).")] = None,
) -> None:
    """Measure one figure; torchrun starts this program on each rank."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if method:
        step_time(rounds, method)
    else:
        FIGURES[figure](rounds)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
