"""Plans in words, and the commands that the page gives to copy."""

from __future__ import annotations

from meshwright.mesh.axis_sizes import AXES
from meshwright.planner.job.candidate import Candidate
from meshwright.planner.machine.devices import CATALOGUE, spec_of
from meshwright.planner.search.search import Search
from meshwright.planner.search.simplicity import SIMPLER
from meshwright.printable import shell_word


def describe_plan(plan: Candidate) -> str:
    """Return a plan in words.

    Example:
        >>> describe_plan(Candidate(shard=8, tp=2, zero_stage=1, accumulation=4))
        '8 data-parallel x 2 tensor-parallel ranks, ZeRO-1, 4 micro-batches of 1 sequence'
    """
    return f"{describe_ranks(plan)}, {describe_rows(plan)}"


def describe_ranks(plan: Candidate) -> str:
    """Return the first part of ``describe_plan``, which the micro-batches do not change."""
    axes = [f"{size} {AXES[axis]}-parallel" for axis, size in plan.sizes.items() if size > 1] or ["one"]
    sequence = " with sequence parallelism" if plan.sequence_parallel else ""
    zero = f"ZeRO-{plan.zero_stage}" if plan.zero_stage else "no ZeRO"
    schedule = ""
    if plan.pp > 1:
        chunks = f" with {plan.chunks} stages on each rank" if plan.chunks > 1 else ""
        schedule = f", schedule {plan.schedule}{chunks}"
    ranks = "rank" if plan.world_size == 1 else "ranks"
    experts = f", experts over {plan.ep} ranks" if plan.ep > 1 else ""
    return f"{' x '.join(axes)} {ranks}{sequence}{experts}{schedule}, {zero}"


def describe_rows(plan: Candidate) -> str:
    """Return the second part of ``describe_plan``: the micro-batches and what is recomputed."""
    batches = "one micro-batch" if plan.accumulation == 1 else f"{plan.accumulation} micro-batches"
    again = {"none": "", "selective": ", attention recomputed", "full": ", all layers recomputed"}.get(
        plan.recompute, f", recompute {plan.recompute}"
    )
    if plan.recomputed is not None:
        again = f", {plan.recomputed} layer{'s' if plan.recomputed > 1 else ''} of each stage recomputed"
    return f"{batches} of {plan.micro_batch} sequence{'s' if plan.micro_batch > 1 else ''}{again}"


def launch_command(plan: str, nodes: int) -> str:
    """Return the command that runs a script under a plan in words.

    Example:
        >>> launch_command("dp2 tp2", 1)
        'meshwright launch --plan "dp2 tp2" train.py'
    """
    machines = f"--num_machines {nodes} --machine_rank $RANK --main_process_ip $HOST " if nodes > 1 else ""
    return f'meshwright launch {machines}--plan "{plan}" train.py'


def plan_command(found: Search, model: str, profile: str | None = None) -> str:
    """Return the command that plans another job, with fields in braces for the page's sliders.

    Args:
        found: the outcome of a search.
        model: the value of ``--model``.
        profile: the value of ``--profile``; None for a search without one.
    """
    cluster, job = found.cluster, found.job
    device, is_known = "", CATALOGUE.get(cluster.device.name) == cluster.device
    if found.profile.device is None:
        device = f" --gpu {cluster.device.name}" if is_known else f" --gpu-spec {shell_word(spec_of(cluster.device))}"
    device += "" if profile is None else f" --profile {shell_word(profile)}"
    device += "" if cluster.slow_link is None else f" --interconnect {8e-9 * cluster.slow_link:g}"
    is_usual = cluster.gpus_per_node == 8 and found.profile.device is None  # a profile's own number of devices differs
    in_node = "" if is_usual else f" --gpus-per-node {cluster.gpus_per_node}"
    precision = "" if job.precision == "bf16" else f" --precision {job.precision}"
    options = "" if job.expert_load == 1 else f" --expert-load {job.expert_load:g}"
    options += "" if job.images == 1 else f" --images-per-row {job.images:g}"
    options += "" if job.optimizer == "adamw" else f" --optimizer {job.kind.name}"
    if job.lora is not None:
        options += f" --lora {job.lora.rank}"
        options += "" if job.lora.quantised is None else f" --quantised {job.lora.quantised}"
        options += " --double-quant" * job.lora.double
    share = found.budget / cluster.device.memory
    options += "" if abs(share - 0.9) < 1e-9 else f" --memory {share:.4g}"
    options += " --allow-future" if found.allow_future else ""
    options += " --gather-logits" if job.logits == "gathered" else ""
    options += " --simple" if found.within == SIMPLER else ""
    return (
        f"meshwright plan --model {model} --gpus {{gpus}}{device}{in_node} --seq-len {{length}} "
        f"--global-batch {{batch}}{precision}{options} --html plan.html"
    )
