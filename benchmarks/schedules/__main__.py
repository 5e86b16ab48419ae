"""Compares the pipeline schedules with what the planner and the design compute, and with torch's own schedules.

torchrun --nproc-per-node 4 -m benchmarks.schedules bubble
torchrun --nproc-per-node 4 -m benchmarks.schedules counts
torchrun --nproc-per-node 4 -m benchmarks.schedules time --seconds 80

``bubble`` gives each stage one layer, whose forward, input gradient and weight gradient sleep for the same time, and
prints the share of a step in which a rank does not sleep. ``counts`` prints the messages of a step and the bytes that a
rank holds at its fullest moment. ``time`` prints our step time / that of torch.distributed.pipelining with the same
micro-batches and the same layers on each stage: the median of ratios within a round and its 95 % interval. Torch's
stages are of two kinds: "stock" is the model's own forward with the layers of the stage, as our stages run it, and
"hand" calls the layers without it. A step is forward and backward in float32. The ratio of the CPU time of all ranks
depends less on other load. Exits with status 1 if a figure misses its goal, except the step times.
"""

from __future__ import annotations

import warnings
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import meshwright as mw
from benchmarks.families.one_device import own_groups
from benchmarks.schedules.bubble import measured_bubble, simulated_bubble
from benchmarks.schedules.contest import compare
from benchmarks.schedules.held import holding
from benchmarks.schedules.messages import Messages, computed_messages
from benchmarks.schedules.model import Sizes
from benchmarks.schedules.torch_stages import STAGES
from meshwright.mesh.process_group import start_process_group
from meshwright.pipeline.links import AHEAD
from meshwright.plan.schedule import SCHEDULES, chunks_of

POINTS = 0.03  # goal: the largest difference between a measured and a simulated bubble
SENT = 2 * AHEAD  # goal: messages that a rank keeps in addition: those that it receives ahead from two neighbours
GRADIENTS = 1e-4  # float32 with sums in another order, relative to the largest value of a tensor

application = typer.Typer(add_completion=False)
Schedules = Annotated[list[str] | None, typer.Option(help="a schedule; may be given several times (default: all)")]


@application.command()
def bubble(
    schedule: Schedules = None,
    micro_batches: Annotated[int, typer.Option(help="micro-batches of a step")] = 8,
    milliseconds: Annotated[float, typer.Option(help="sleep of each operation")] = 40.0,
    steps: Annotated[int, typer.Option(help="steps of which the median counts")] = 3,
) -> None:
    """Measure the idle share of a step whose operations sleep, against the planner's simulation."""
    is_first, missed = _start(), False
    for name in schedule or SCHEDULES:
        with own_groups():
            measured = measured_bubble(name, micro_batches, milliseconds / 1000, steps)
        simulated = simulated_bubble(name, dist.get_world_size(), micro_batches)
        missed |= abs(measured.share - simulated) > POINTS
        if is_first:
            off = 100 * (measured.share - simulated)
            print(
                f"{name}: bubble {measured.share:.3f}, simulated {simulated:.3f}, {off:+.1f} points; not slept "
                f"{measured.not_slept:.3f}; sleeps took {measured.longest:.3f} of their time",
                flush=True,
            )
    raise typer.Exit(int(is_first and missed))


@application.command()
def counts(
    schedule: Schedules = None,
    micro_batches: Annotated[int, typer.Option(help="micro-batches of a step")] = 16,
) -> None:
    """Count the messages of a step, and the bytes that each rank holds at its fullest moment."""
    is_first, missed = _start(), False
    sizes = Sizes(micro_batches=micro_batches)
    p, batch = dist.get_world_size(), sizes.batch()
    for name in schedule or SCHEDULES:
        with own_groups():
            model = sizes.distributed(name, p)
            for _ in range(2):  # the first step also announces dtypes
                with Messages() as messages:
                    model(**batch).loss.backward()
                    mw.clip_grad_norm_(model, 1.0)
                model.zero_grad()
            with holding(model, [batch]) as steps:
                model(**batch).loss.backward()
        held = steps[-1]
        own: dict[str, Any] = {"sent": messages.sent, "bytes": messages.bytes, "others": dict(messages.collectives)}
        own |= {"held": max(held.after), "counted": max(held.counted())}
        found: list[dict[str, Any]] = [{}] * p
        dist.all_gather_object(found, own)
        expected = computed_messages(name, p, chunks_of(name), micro_batches)
        sent = {pair: count for one in found for pair, count in one["sent"].items()}
        size = {pair: count for one in found for pair, count in one["bytes"].items()}
        is_exact = sent == expected and size == {pair: n * sizes.message_bytes for pair, n in expected.items()}
        most = max(abs(one["held"] - one["counted"]) for one in found) / sizes.message_bytes
        missed |= not is_exact or most > SENT
        if is_first:
            words = "as computed" if is_exact else f"not as computed: {sent} instead of {dict(expected)}"
            print(f"{name}: {sum(sent.values())} messages, {sum(size.values())} bytes, {words}")
            print(f"  besides, on each rank: {found[0]['others']}")
            for rank, one in enumerate(found):
                print(f"  rank {rank} holds {one['held']} bytes, counted {one['counted']}")
            print(f"  largest difference: {most:.1f} messages of {sizes.message_bytes} bytes", flush=True)
    raise typer.Exit(int(is_first and missed))


@application.command("time")
def time_(
    schedule: Schedules = None,
    stages: Annotated[list[str] | None, typer.Option(help="stock or hand; may be given twice (default: both)")] = None,
    rounds: Annotated[int, typer.Option(help="turns of each side, at most")] = 40,
    seconds: Annotated[float, typer.Option(help="time of each schedule, after which no further turn begins")] = 80.0,
    hidden: Annotated[int, typer.Option(help="width of the model")] = 256,
    length: Annotated[int, typer.Option(help="tokens of a row")] = 128,
) -> None:
    """Compare step times with torch's own schedule classes, in turns."""
    is_first, missed = _start(), False
    sizes = Sizes(hidden=hidden, length=length, vocabulary=4096)
    for name in schedule or SCHEDULES:
        with own_groups():
            results = compare(name, sizes, stages=stages or list(STAGES), rounds=rounds, seconds=seconds)
        for kind, result in results.items():
            missed |= result.off > GRADIENTS
            if is_first:
                print(f"{name}, {kind} stages: {result}", flush=True)
    raise typer.Exit(int(is_first and missed))


def _start() -> bool:
    """Join the process group; return whether this is the first rank."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    start_process_group(torch.device("cpu"), 120.0)
    return dist.get_rank() == 0


if __name__ == "__main__":
    application()
