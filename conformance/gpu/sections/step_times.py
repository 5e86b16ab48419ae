"""What the planner expects of this device beside what it does, and Meshwright beside the stock loop."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from conformance.gpu.races import LORA_RANK, OURS, WAYS, Contest, Turn, race
from conformance.gpu.ranks import RankPools, rank_pools
from conformance.gpu.section import Check, Place, Section, attempt, not_run
from meshwright.choose.picked_plan import cluster_at_hand, device_at_hand
from meshwright_plan.job.adapters import Lora
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.shapes import describe
from meshwright_plan.machine.hardware import Cluster, Coefficients, HardwareProfile
from meshwright_plan.time.step import StepModel
from meshwright_tools.calibration.measure import calibrate

_CONTESTS = (  # the most telling first, as the time may end after any of them
    Contest(name="1.2 B, 2 x 4096", rows=2, length=4096, hidden=2048, layers=16, ffn=8192, heads=32, kv_heads=8,
            vocab=128256),
    Contest(name="0.4 B, 1 x 32768, recompute", rows=1, length=32768, hidden=1024, layers=24, ffn=2816, heads=16,
            kv_heads=8, vocab=32000, recompute=True),
    Contest(name="1.2 B, 1 x 8192, LoRA", rows=1, length=8192, hidden=2048, layers=16, ffn=8192, heads=32, kv_heads=8,
            vocab=128256, adapters=True),
    Contest(name="0.1 B, 8 x 2048", rows=8, length=2048, hidden=768, layers=12, ffn=2048, heads=12, kv_heads=12,
            vocab=32000),
    Contest(name="3.2 B, 1 x 4096, recompute", rows=1, length=4096, hidden=3072, layers=28, ffn=8192, heads=24,
            kv_heads=8, vocab=128256, recompute=True),
    Contest(name="0.4 B, 4 x 4096", rows=4, length=4096, hidden=1024, layers=24, ffn=2816, heads=16, kv_heads=8,
            vocab=32000),
)  # fmt: skip
_TINY = (
    Contest(name="tiny, 4 x 128", rows=4, length=128, hidden=128, layers=2, ffn=384, heads=4, kv_heads=2, vocab=1000),
)
_CALIBRATION = 0.15  # share of the time
_SHORTEST = 4.0  # seconds of a calibration
_OFF, _FASTEST = 0.10, 1.00
_CPU_SPEED = 0.5  # on a CPU, where a tiny model's hooks are much of its step
_LATE = 1.0  # seconds of a planted fault
# Losses of the first batch: bfloat16 has 8 bits, and float32 24; about 11 is the loss, the mean over thousands of rows.
_LOSS = {"cpu": 1e-5, "cuda": 5e-3}


class StepTimes(Section):
    """Calibrates the device, and times models of several sizes."""

    name = "time"
    question = (
        "Does the planner, calibrated here, foresee the time of a step, and is a step as fast as the fastest loop "
        "without Meshwright, with the same loss?"
    )
    share = 8.0

    def run(self, place: Place) -> Iterator[Check]:
        end = time.monotonic() + place.seconds
        seconds = max(_SHORTEST, _CALIBRATION * place.seconds) if place.is_cuda else _SHORTEST
        profiles: list[HardwareProfile] = []
        yield from attempt("calibration", _calibrated, seconds, profiles)
        contests, longest = list(_CONTESTS if place.is_cuda else _TINY), 0.0
        with rank_pools() as pools:
            while contests and (not longest or longest <= end - time.monotonic()):  # the first in any case
                began, contest = time.monotonic(), contests.pop(0)
                if contest.adapters and find_spec("peft") is None:
                    yield not_run(contest.name, "peft")
                    continue
                yield from attempt(contest.name, _raced, contest, _ways(contest, place), profiles, place, pools)
                longest = max(longest, time.monotonic() - began)
        if contests:
            what = f"{len(contests)} models were not timed: {'; '.join(contest.name for contest in contests)}"
            left = f"{max(0.0, end - time.monotonic()):.0f} s are left, and one takes up to {longest:.0f} s"
            yield Check(what=what, figure=float("nan"), note=left, leaves_out=True)


def _ways(contest: Contest, place: Place) -> tuple[str, ...]:
    """Return the ways to train that are compared."""
    if not place.is_cuda:
        return ("stock", "meshwright")
    return tuple(way for way in WAYS if not (contest.adapters and way.endswith("liger")))


def _raced(
    contest: Contest, ways: tuple[str, ...], profiles: list[HardwareProfile], place: Place, pools: RankPools
) -> Iterator[Check]:
    (found,) = pools.run(1, race, contest, ways, place.device, _LATE if place.plants else 0.0)
    turns = found.turns
    yield from _compared(contest, turns, place)
    for way, why in found.missing.items():
        yield Check(what=f"{contest.name}: {way} was not timed", figure=float("nan"), note=why)
    seconds = turns["meshwright"].seconds
    for profile in profiles:
        goal = place.goal(_OFF)  # a CPU is shared with others
        yield _foreseen(contest, seconds, profile.cluster(gpus=1), profile.coefficients, place, "the estimate", goal)
    if place.is_cuda:
        cluster, promised = (
            cluster_at_hand(torch.device("cuda", 0), 1, None),
            "what the catalogue promises for this card",
        )
        yield _foreseen(contest, seconds, cluster, Coefficients(), place, promised, None)


def _calibrated(seconds: float, profiles: list[HardwareProfile]) -> Check:
    """Measure the device, append its profile, and print it, so that its points can be fitted again elsewhere."""
    profile = calibrate(processes=1, seconds=seconds)
    assert profile is not None and profile.device is not None
    profiles.append(profile)
    print(json.dumps(dataclasses.asdict(profile)))
    return Check(
        what="peak of matrix multiplications, calibrated",
        figure=profile.device.flops / 1e12,
        unit="TFLOP/s",
        details={"GB/s": profile.device.bandwidth / 1e9},
    )


def _foreseen(
    contest: Contest,
    seconds: float,
    cluster: Cluster,
    coefficients: Coefficients,
    place: Place,
    beside: str,
    goal: float | None,
) -> Check:
    job = Job(
        seq_len=contest.length,
        global_batch=contest.rows,
        on_cpu=not place.is_cuda,
        optimizer_bytes=4,  # AdamW's two moments in bfloat16, as the weights
        lora=Lora(rank=LORA_RANK) if contest.adapters else None,
    )
    job = job if place.is_cuda else job.in_32_bits()
    plan = Candidate(micro_batch_size=contest.rows, recompute="full" if contest.recompute else "none")
    shape = describe(contest.config)
    expected = StepModel(shape, cluster, coefficients).step(plan, job).total
    return Check(
        what=f"{contest.name}: time of a step, off {beside}",
        figure=abs(expected / seconds - 1),
        goal=goal,
        details={"ms expected": 1e3 * expected, "ms measured": 1e3 * seconds},
    )


def _compared(contest: Contest, turns: dict[str, Turn], place: Place) -> Iterator[Check]:
    own = min((turns[way] for way in OURS if way in turns), key=lambda turn: turn.seconds)
    others = {way: turn for way, turn in turns.items() if way not in OURS}
    fastest = min(others, key=lambda way: others[way].seconds)
    yield Check(
        what=f"{contest.name}: speed relative to the fastest other, {fastest}",
        figure=others[fastest].seconds / own.seconds,
        goal=place.goal(_FASTEST, _CPU_SPEED),
        at_least=True,
        details={f"ms {way}": 1e3 * turn.seconds for way, turn in turns.items()},
    )
    yield Check(
        what=f"{contest.name}: loss of the first batch, off the stock model's",
        figure=max(abs(turn.loss / turns["stock"].loss - 1) for turn in turns.values()),
        goal=_LOSS[place.device],
    )
    if place.is_cuda and not contest.adapters:
        peak = device_at_hand(torch.device("cuda", 0)).flops
        flops = describe(contest.config).flops(contest.length) * contest.rows * contest.length
        for way, turn in turns.items():
            yield Check(what=f"{contest.name}: MFU, {way}", figure=flops / turn.seconds / peak)
