"""The planner's estimate for the plan that runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.choose.logits_in_training import logits_in_training
from meshwright.choose.model_sizes import describe_model
from meshwright.choose.optimizer_kind import kind_of
from meshwright.choose.picked_plan import cluster_at_hand
from meshwright.choose.run_profile import PROFILE_FILE, calibrate_command, load_run_profile
from meshwright.errors import PlanError
from meshwright.mesh.process_group import node_count, world_size
from meshwright.optim.runtime import device_of, find_runtime
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright.planner.answers.notes import measured_notes
from meshwright.planner.answers.own_plan import check_expert_ranks
from meshwright.planner.job.candidate import Candidate, Job, Logits
from meshwright.planner.job.optimizers import OptimizerKind
from meshwright.planner.job.shapes import ModelShape
from meshwright.planner.machine.hardware import Cluster, HardwareProfile
from meshwright.planner.memory.peak import Memory, stage_memory
from meshwright.planner.time.breakdown import StepTime
from meshwright.planner.time.step import StepModel


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
        own_runtime=True,
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
    return Candidate.of({**asdict(plan), "micro_batch_size": micro}, job)
