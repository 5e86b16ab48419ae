"""Reads from the command line what ``meshwright plan`` plans: the cluster, the job and the user's own plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from meshwright.errors import PlanError

if TYPE_CHECKING:
    from meshwright.planner.candidate import Candidate, Job, Logits, Precision
    from meshwright.planner.cost import Budget
    from meshwright.planner.hardware import Cluster, HardwareProfile
    from meshwright.planner.search import Search
    from meshwright.planner.shapes import ModelShape
    from meshwright.planner.space import Space

Number = TypeVar("Number", int, float)


def numbers(option: str, text: str | None, kind: type[Number]) -> tuple[Number, ...]:
    """Return the numbers of an option with one value or several, separated by commas.

    Raises:
        PlanError: a value is not a number above zero, or is given twice.

    Example:
        >>> numbers("--gpus", "64,128", int)
        (64, 128)
    """
    if text is None:
        return ()
    found = []
    for word in text.split(","):
        try:
            value = kind(word.strip().replace("_", ""))
        except ValueError:
            value = kind(0)
        if not 0 < value < float("inf"):
            what = "a positive integer" if kind is int else "a number above zero"
            raise PlanError(f"{option}={word.strip()!r} must be {what}, or several with commas: {option} 64,128,256")
        found.append(value)
    if len(set(found)) < len(found):
        raise PlanError(f"{option}={text} gives a value twice; write each once")
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one search, before the cluster is built.

    Args:
        gpus: number of devices; None for 8, or as many as the profile measured.
        gpus_per_node: number of devices per node; None for 8, or as many as the profile measured.
        gpu: name of the device; None for the profile's, or h100-sxm.
        seq_len: tokens per sequence.
        global_batch: sequences per step.
        precision: dtype of the matrix multiplications.
        logits: the logits that are in memory at once, as in ``Job``.
        interconnect: Gb/s from one device to other nodes; None for the device's usual network.
        profile_path: the file of the profile; None without one.
    """

    gpus: int | None
    gpus_per_node: int | None
    gpu: str | None
    seq_len: int
    global_batch: int
    precision: Precision
    logits: Logits
    interconnect: float | None
    profile_path: Path | None

    def cluster(self, measured: HardwareProfile | None) -> Cluster:
        """Return the cluster."""
        from meshwright.planner.hardware import Cluster, device

        slow_link = self.interconnect and self.interconnect / 8 * 1e9
        if measured is not None and measured.device is not None:
            if self.gpu is not None:
                raise PlanError(
                    f"--gpu {self.gpu} cannot be combined with {self.profile_path}, which measured "
                    f"{measured.device.name!r}; leave out one of them"
                )
            return measured.cluster(gpus=self.gpus, gpus_per_node=self.gpus_per_node, slow_link=slow_link)
        return Cluster(
            device=device("h100-sxm" if self.gpu is None else self.gpu), gpus=8 if self.gpus is None else self.gpus,
            gpus_per_node=8 if self.gpus_per_node is None else self.gpus_per_node, slow_link=slow_link,
        )  # fmt: skip

    def job(self, cluster: Cluster, measured: HardwareProfile | None) -> Job:
        """Return the job, in 32 bits if the profile measured float32 or the cluster has CPUs only."""
        from meshwright.planner.candidate import Job

        on_cpu = cluster.device.shares_host
        job = Job(
            seq_len=self.seq_len, global_batch=self.global_batch, precision=self.precision, own_runtime=True,
            on_cpu=on_cpu, logits=self.logits,
        )  # fmt: skip
        dtype = measured.dtype if measured and measured.dtype else "float32" if on_cpu else "bfloat16"
        return job.in_32_bits() if dtype == "float32" else job


@dataclass(frozen=True, kw_only=True)
class PlanQuestion:
    """The question to answer, apart from the settings that may have several values.

    Args:
        shape: the model.
        measured: the profile; None for the catalogue.
        settings: the settings, with the first value of each.
        memory: share of the device memory that a plan may fill.
        top: number of plans to show.
        allow_future: whether to include plans that this version cannot run.
        budget: the tokens and the price; None without a number of tokens.
    """

    shape: ModelShape
    measured: HardwareProfile | None
    settings: Settings
    memory: float
    top: int
    allow_future: bool
    budget: Budget | None

    def space(self, **changed: Any) -> Space:
        """Return the plans to search, with some of the settings changed."""
        from meshwright.planner.space import Space

        settings = dataclasses.replace(self.settings, **changed)
        cluster = settings.cluster(self.measured)
        job = settings.job(cluster, self.measured)
        return Space(shape=self.shape, cluster=cluster, job=job, allow_future=self.allow_future)

    def search(self, space: Space, *, top: int | None = None) -> Search:
        """Return the fastest plans that fit, as many as asked for after equal ones are merged."""
        from meshwright.planner.notes import without_repetitions
        from meshwright.planner.search import search

        wanted = top or self.top
        found = search(space, self.measured, top=2 * wanted, budget=self.filled(space))
        return without_repetitions(found, wanted)

    def filled(self, space: Space) -> float:
        """Return the bytes of a device that a plan may fill."""
        return self.memory * space.cluster.device.memory


def swept(values: dict[str, tuple[Any, ...]]) -> str | None:
    """Return the setting that has several values; None if none has.

    Raises:
        PlanError: two settings have several values.
    """
    several = [name for name, found in values.items() if len(found) > 1]
    if len(several) > 1:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in several)
        raise PlanError(f"{options} have several values, but a table compares one setting; give one value of the other")
    return several[0] if several else None


def question(
    model: Path, settings: Settings, *, memory: float, top: int, allow_future: bool, tokens: str | None,
    price: float | None,
) -> PlanQuestion:  # fmt: skip
    """Return the question about a model.

    Raises:
        PlanError: the model is not a dense decoder, or a price is given without tokens.
    """
    from meshwright.planner.cost import Budget, parse_tokens
    from meshwright.planner.hardware import HardwareProfile
    from meshwright.planner.shapes import describe

    if tokens is None and price is not None:
        raise PlanError(f"--price {price:g} needs the tokens of the run; write --tokens 1T")
    return PlanQuestion(
        shape=describe(model),
        measured=HardwareProfile.load(settings.profile_path) if settings.profile_path else None,
        settings=settings,
        memory=memory,
        top=top,
        allow_future=allow_future,
        budget=None if tokens is None else Budget(tokens=parse_tokens(tokens), price=price),
    )


def own_plans(
    words: Sequence[str], sizes: dict[str, Any], gpus: int | None
) -> tuple[int | None, Callable[[Job], list[Candidate]]]:
    """Return the number of devices of the plans that the user gives, and a function that makes them for a job.

    Args:
        words: plans in words, or files.
        sizes: fields of ``ParallelPlan``.
        gpus: number of devices, if it was given.

    Raises:
        PlanError: a plan is malformed, or both words and sizes are given.
    """
    # Imported here, since it imports torch, which takes seconds.
    from meshwright.choose.given_plan import resolve_plan
    from meshwright.plan.config import ParallelPlan
    from meshwright.planner.candidate import Candidate

    if words and sizes:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in sizes)
        raise PlanError(f"--plan {words[0]!r} and {options} both give a plan; leave one of them out")
    plans = [resolve_plan(text, "--plan") for text in words]
    if gpus is None and len({plan.world_size for plan in plans}) > 1:
        counts = " and ".join(f"{text!r} has {plan.world_size}" for text, plan in zip(words, plans, strict=True))
        raise PlanError(f"--plan {counts} devices; compare plans of as many devices, or estimate each in a command")
    if sizes:
        _check_sizes(sizes, gpus)
        plan = ParallelPlan(**sizes)
        if gpus is not None and "dp" not in sizes:
            if gpus % plan.world_size:
                raise PlanError(
                    f"--gpus {gpus} is not divisible by tp={plan.tp} x cp={plan.cp} x pp={plan.pp}; change a size, or "
                    "give --dp in place of --gpus"
                )
            plan = dataclasses.replace(plan, dp=gpus // plan.world_size)
        plans = [plan]
    world = gpus if gpus is not None else plans[0].world_size if plans else None
    return world, lambda job: [Candidate.of(dataclasses.asdict(plan), job) for plan in plans]


_SPLITS = ("dp", "tp", "cp", "pp")
_OF_SPLIT = {"context": "cp", "ulysses": "cp", "schedule": "pp", "sequence_parallel": "tp"}


def _check_sizes(sizes: dict[str, Any], gpus: int | None) -> None:
    """Raise a PlanError if an option would have no effect, or no option says how many devices the plan has."""
    for name, split in _OF_SPLIT.items():
        if sizes.get(name) and split not in sizes:
            raise PlanError(f"--{name.replace('_', '-')} has an effect with --{split} only; write --{split} 2 too")
    if gpus is None and not any(split in sizes for split in _SPLITS):
        raise PlanError(
            f"--{next(iter(sizes)).replace('_', '-')} describes a plan of your own, without its number of devices; "
            "write --gpus 8, or sizes such as --dp 8"
        )
