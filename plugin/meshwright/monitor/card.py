"""The card that a run shows at its start, with the planner's estimate, and the comparison with what was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.choose.model_sizes import describe_model, kind_of, logits_in_training
from meshwright.choose.picked_plan import PROFILE_FILE, calibrate_command, cluster_at_hand, load_run_profile
from meshwright.errors import PlanError
from meshwright.mesh.host import crowding
from meshwright.mesh.process_group import node_count, world_size
from meshwright.optim.runtime import device_of, find_runtime
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright_plan.answers.notes import measured_notes
from meshwright_plan.formatting import memory as size
from meshwright_plan.formatting import seconds
from meshwright_plan.job.candidate import Candidate, Job, Logits
from meshwright_plan.job.optimizers import OptimizerKind
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.machine.hardware import Cluster, HardwareProfile
from meshwright_plan.memory.peak import Memory, stage_memory
from meshwright_plan.search.space import check_expert_ranks
from meshwright_plan.time.layer import StepTime
from meshwright_plan.time.step import StepModel


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The model's sizes and the devices that run it.

    Args:
        shape: the model's sizes.
        cluster: the launched devices.
        profile: the efficiencies.
        is_known: whether the devices' peak comes from a data sheet or a measurement; False for a guess for some CPU.
        command: the command that measures this machine.
        unused_profile: why the profile that the run names is not used; empty if it is, or if there is none.
        logits: the logits that are in memory at once, as in ``Job``.
        optimizer: what the optimizer keeps, as in ``Job``.
    """

    shape: ModelShape
    cluster: Cluster
    profile: HardwareProfile
    is_known: bool
    command: str = ""
    unused_profile: str = ""
    logits: Logits = "chunked"
    optimizer: str | OptimizerKind = "adamw"

    @classmethod
    def find(cls, model: nn.Module, config: ToDistributedConfig, optimizer: Optimizer | None = None) -> Machine:
        """Describe the model, the optimizer and the devices at hand, without communication.

        Raises:
            PlanError: if the planner cannot describe the model.
        """
        is_cut = find_runtime(model) is not None and not hasattr(getattr(model, "config", None), "to_dict")
        try:
            shape = None if is_cut else describe_model(model, config)
        except PlanError:
            shape = None
        if shape is None:
            raise PlanError(f"the planner does not know the sizes of {type(model).__name__}")
        device, nodes, path = device_of(model), node_count(), config.hardware_profile
        per_node = max(1, world_size() // nodes)
        given, unused = None, ""
        if path is not None:
            try:
                given = load_run_profile(path, processes=per_node, nodes=nodes)
            except PlanError as error:  # the memory does not depend on it, and the catalogue gives the time
                unused = str(error)
        return cls(
            shape=shape,
            cluster=cluster_at_hand(device, nodes, given),
            profile=given or HardwareProfile(name="catalogue"),
            is_known=device.type != "cpu" or (given is not None and given.device is not None),
            command=calibrate_command(processes=per_node, nodes=nodes, path=path or PROFILE_FILE),
            unused_profile=unused,
            logits=logits_in_training(model, config),
            optimizer=kind_of(optimizer, model),
        )

    def notes(self, batch: tuple[int, int]) -> tuple[str, ...]:
        """Return what the estimate of a model with mixers or towers rests on, for rows and tokens per row."""
        rows, length = batch
        return tuple(measured_notes(self.shape, Job(seq_len=max(1, length), global_batch=max(1, rows))))

    @property
    def unknown_peak(self) -> str:
        """Why the devices' peak is not known; empty if it is."""
        if self.is_known:
            return ""
        if self.unused_profile:
            return "it needs the peak of this CPU, from a profile that is valid for this run"
        pass_it = f"pass ToDistributedConfig(hardware_profile={PROFILE_FILE!r})"
        return f"it needs the peak of this CPU; measure it with {self.command}, and {pass_it}"

    @property
    def basis(self) -> str:
        """The source of the time estimate, as words."""
        if self.profile.rows:
            return f"profile {self.profile.name}"
        return "from data sheets, nothing measured here" if self.is_known else "a guess for some CPU, nothing measured"

    @property
    def peak_flops(self) -> float | None:
        """The peak of one device in floating-point operations per second; None if it is not known."""
        return self.cluster.device.flops if self.is_known else None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimated time and memory of a step.

    Args:
        time: the time by part.
        memory: the memory of a rank of each pipeline stage, by stage.
        band: relative error of the time; nine of ten runs are inside.
        ranks_per_stage: number of ranks of each stage.
        launches: launching operations, as a share of the time of a layer without communication.
    """

    time: StepTime
    memory: tuple[Memory, ...]
    band: float
    ranks_per_stage: int
    launches: float

    @property
    def fullest(self) -> Memory:
        """The memory of the stage that needs the most."""
        return max(self.memory, key=lambda memory: memory.total)

    def of_ranks(self) -> list[Memory]:
        """Return the estimate for each rank."""
        return [memory for memory in self.memory for _ in range(self.ranks_per_stage)]


def estimate(machine: Machine, plan: ParallelPlan, dtype: torch.dtype, batch: tuple[int, int], passes: int) -> Estimate:
    """Return the estimate for a step of a plan.

    Args:
        machine: the model and the devices.
        plan: the plan.
        dtype: the dtype of the weights.
        batch: rows on one data-parallel rank, and tokens per row, of one forward pass.
        passes: number of forward passes per step, in a program that accumulates gradients itself.

    Raises:
        PlanError: if the planner cannot estimate the plan.
    """
    rows, length = batch
    candidate = candidate_of(plan, rows, passes)
    check_expert_ranks(machine.shape, candidate)
    job = Job(
        seq_len=max(1, length),
        global_batch=max(1, rows * plan.dp * passes),
        on_cpu=machine.cluster.device.is_cpu,
        logits=machine.logits,
        optimizer=machine.optimizer,
    )
    job = job.in_32_bits(may_autocast=True) if dtype.itemsize >= 4 else job
    try:
        model = StepModel(machine.shape, machine.cluster, machine.profile.coefficients)
        time, layer = model.step(candidate, job), model.layer(candidate, job)
        memory = tuple(stage_memory(machine.shape, candidate, job, stage) for stage in range(plan.pp))
    except (ArithmeticError, ValueError) as error:
        raise PlanError(f"no estimate of {plan.label}: {error}") from error
    computing = layer.forward + layer.backward - layer.tensor - layer.context - layer.experts
    return Estimate(
        time=time,
        memory=memory,
        band=machine.profile.band,
        ranks_per_stage=plan.world_size // plan.pp,
        launches=3 * machine.profile.coefficients.launch / computing,  # backward launches twice as many as forward
    )


def candidate_of(plan: ParallelPlan, rows: int, passes: int = 1) -> Candidate:
    """Return a runtime's plan as the planner writes it.

    Args:
        plan: the plan.
        rows: rows of a forward pass on one data-parallel rank.
        passes: number of forward passes per step.

    Example:
        >>> candidate_of(ParallelPlan(dp=2, tp=2, zero_stage=1, micro_batch_size=1), rows=4).label
        'dp2 tp2 zero1 mb1x4'
    """
    count = max(1, plan.count_micro_batches(rows))
    micro = max(1, -(-rows // count))  # the largest, if their sizes differ
    job = Job(seq_len=1, global_batch=plan.dp * micro * count * passes)
    return Candidate.of(replace(plan, micro_batch_size=micro, gradient_accumulation_steps=1), job)


_SMALL = 2**20  # bytes below which a part is not listed
_MOSTLY = 0.5  # share of a layer's time from which launching operations counts as the most of it
_WIDEST = 16  # ranks up to which the card shows the whole mesh


@dataclass(frozen=True, kw_only=True)
class Card:
    """The facts about a run that are known before its first step.

    Args:
        model: the model's class.
        parameters: number of its parameters.
        active: number of the parameters that a token uses, of a model with experts; None for a dense model.
        plan: the plan.
        source: where the plan comes from.
        device: name of the devices.
        batch: rows on one data-parallel rank and tokens per row of a forward pass; None if the model takes no tokens.
        estimate: the planner's estimate; None without one.
        reason: why there is no estimate.
        basis: the source of the time estimate, such as data sheets.
        unknown_peak: why the devices' peak, which MFU needs, is not known; empty if it is.
        unused_profile: why the profile that the run names is not used; empty if it is, or if there is none.
        is_cpu: whether the devices are CPUs.
        notes: what the estimate rests on and leaves out, for a model with mixers or towers, or a pipeline.
        measured: when the memory is measured, in words.
    """

    model: str
    parameters: int
    plan: ParallelPlan
    source: str
    device: str
    batch: tuple[int, int] | None
    estimate: Estimate | None = None
    reason: str = ""
    basis: str = ""
    unknown_peak: str = ""
    unused_profile: str = ""
    is_cpu: bool = False
    active: int | None = None
    notes: tuple[str, ...] = ()
    measured: str = "after step 1"

    @property
    def tokens_per_pass(self) -> int | None:
        """The tokens of one forward pass over all ranks."""
        return None if self.batch is None else self.batch[0] * self.batch[1] * self.plan.dp

    def __str__(self) -> str:
        plan, world = self.plan, self.plan.world_size
        active = plan.dims.active
        mesh = plan.product(*active) if active else "one device"
        if world <= _WIDEST and world > 1:
            mesh += "".join(f"\n    {line}" for line in plan.dims.rank_grid().splitlines())
        used = "" if self.active is None else f" ({_count(self.active)} active)"
        lines = [
            f"meshwright: {self.model}, {_count(self.parameters)} parameters{used}, on {world} x {self.device}",
            f"  plan    {plan.label}",
            f"  why     {self.source}",
            f"  mesh    {mesh}",
        ]
        if self.batch is not None:
            rows, length = self.batch
            lines.append(
                f"  tokens  {self.tokens_per_pass:,} per step ({rows * plan.dp} rows of {length}, one forward pass)"
            )
        if self.estimate is None:
            lines.append(f"  memory  no estimate: {self.reason}; measured {self.measured}")
        else:
            lines += [
                f"  memory  {_memory(self.estimate, is_cpu=self.is_cpu)}; measured {self.measured}",
                f"  time    {self._time(self.estimate)}",
                *(f"    {note}" for note in self.notes),
            ]
        if self.unused_profile:
            lines.append(f"  profile not used: {self.unused_profile}")
        if self.unknown_peak:
            lines.append(f"  MFU     unknown: {self.unknown_peak}")
        return "\n".join(lines)

    def _time(self, estimate: Estimate) -> str:
        is_guess = self.is_cpu and self.unknown_peak  # which has no band
        band = "" if is_guess else f", ±{estimate.band:.0%}"
        return f"{seconds(estimate.time.total)} per step estimated{band} ({self.basis})"


def _memory(estimate: Estimate, *, is_cpu: bool) -> str:
    least, most = (pick(estimate.memory, key=lambda memory: memory.total) for pick in (min, max))
    low, high = size(least.total), size(most.total)
    return f"{high if low == high else f'{low} to {high}'} per rank estimated ({_largest(most, is_cpu=is_cpu)})"


def _largest(memory: Memory, *, is_cpu: bool) -> str:
    named = {**memory.parts, "process and libraries" if is_cpu else "CUDA context and allocator": memory.slack}
    del named["slack"]
    parts = sorted(named.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {size(value)}" for name, value in parts if value >= _SMALL)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The estimate of a step beside what was measured.

    Args:
        estimate: the estimate.
        seconds: measured seconds per step, without the first step.
        peak: measured bytes on the fullest rank.
        rank: that rank.
        has_profile: whether the estimate rests on a calibrated profile.
        is_cpu: whether the devices are CPUs.
        command: the command that measures this machine.
        processes: number of processes per host.
        cores: number of cores of this host.
    """

    estimate: Estimate
    seconds: float
    peak: float
    rank: int
    has_profile: bool
    is_cpu: bool
    command: str
    processes: int
    cores: int

    @property
    def time_ratio(self) -> float:
        return self.seconds / self.estimate.time.total

    @property
    def memory_ratio(self) -> float:
        return self.peak / self.estimate.fullest.total

    def is_inside(self, ratio: float) -> bool:
        """Return whether a measured value is inside the estimate's band."""
        return 1 / (1 + self.estimate.band) <= ratio <= 1 + self.estimate.band

    def __str__(self) -> str:
        estimate = self.estimate
        if self.is_cpu and not self.has_profile:
            return (
                f"meshwright: measured {seconds(self.seconds)} per step, and {size(self.peak)} of memory on rank "
                f"{self.rank}. To compare them with estimates, measure this CPU: {self.command}"
            )
        lines = [
            f"meshwright: estimated {seconds(estimate.time.total)} per step (±{estimate.band:.0%}), measured "
            f"{seconds(self.seconds)} ({self.time_ratio:.2f}x); estimated {size(estimate.fullest.total)} of memory, "
            f"measured {size(self.peak)} on rank {self.rank} ({self.memory_ratio:.2f}x)"
        ]
        return "\n".join([*lines, *(f"  {hint}" for hint in self.hints)])

    @property
    def hints(self) -> list[str]:
        """What to do about values outside the band, as sentences; empty if all values are inside.

        A guess for some CPU has no band, so without a profile there is none on CPU.
        """
        if self.is_cpu and not self.has_profile:
            return []
        hints = []
        if not self.is_inside(self.time_ratio):
            hints.append(f"The step takes {self.time_ratio:.2f}x the estimate, outside its band{self._cure}")
        if not self.is_inside(self.memory_ratio):
            where = "a process's largest resident memory, which includes its libraries" if self.is_cpu else "of a GPU"
            hints.append(
                f"The memory is {self.memory_ratio:.2f}x the estimate ({where}); see the parts with "
                "print(meshwright.memory_of(model, optimizer))"
            )
        return hints

    @property
    def _cure(self) -> str:
        """The rest of the sentence about the time."""
        likely = f". Likely causes: {'; '.join(causes)}" if (causes := self._causes) else ""
        if not self.has_profile:
            use = f"ToDistributedConfig(hardware_profile={PROFILE_FILE!r})"
            return f"{likely}. It rests on data sheets; measure this machine with {self.command}, and pass {use}"
        if likely:
            return (
                f"{likely}. If the machine is busier than when the profile was measured, measure again: {self.command}"
            )
        return f": the machine is not as it was when the profile was measured; measure it again: {self.command}"

    @property
    def _causes(self) -> list[str]:
        """What usually makes a step slower than its estimate, as far as it holds here."""
        if self.time_ratio < 1:
            return []
        causes = []
        if self.is_cpu and (crowded := crowding(self.processes, cores=self.cores)):
            causes.append(crowded)
        if self.estimate.launches > _MOSTLY:
            causes.append("layers so small that launching operations takes most of the time")
        return causes


def _count(parameters: int) -> str:
    return f"{parameters:,}" if parameters < 1e6 else f"{parameters / 1e6:,.1f} M"
