"""The collectives of a training step on this version's runtime: number and bytes of each kind, by phase and axis."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from meshwright.plan.parts import flat_offsets, head_chunk, local_tokens, sharded_length
from meshwright_plan.context_cost import exchanges
from meshwright_plan.job.adapters import ADAPTER_BYTES
from meshwright_plan.job.candidate import Candidate, Job, count_recomputed
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.memory.activations import keeps_inputs, logit_bytes
from meshwright_plan.memory.held_states import Parameter, buckets, parameters, trained_members, units


@dataclass(kw_only=True)
class AxisTraffic:
    """The collectives over one axis in one phase of a step.

    Args:
        counts: kind -> number of calls.
        bytes: total size of the whole tensors that these collectives gather or reduce.
    """

    counts: Counter[str] = field(default_factory=Counter)
    bytes: int = 0

    def add(self, kind: str, count: int, size: int) -> None:
        """Add ``count`` collectives of ``size`` bytes each."""
        if count:
            self.counts[kind] += count
            self.bytes += count * size


def step_traffic(shape: ModelShape, plan: Candidate, job: Job) -> dict[str, dict[str, AxisTraffic]]:
    """Return the collectives of one step, as phase -> axis -> ``AxisTraffic``.

    Args:
        shape: the model.
        plan: a plan that this version can run.
        job: the job; adapters are on a base that is not quantised. On CPU, a reduce-scatter is an all-to-all and a sum.

    Example:
        >>> shape = ModelShape.of(name="m", layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=100)
        >>> plan = Candidate(tp=2, sequence_parallel=True)
        >>> step_traffic(shape, plan, Job(seq_len=16, global_batch=1))["forward"]["tp"].counts["reduce-scatter"]
        4
    """
    phases = {name: {axis: AxisTraffic() for axis in _axes(plan)} for name in ("forward", "backward", "optimizer")}
    if plan.tp > 1:
        _tensor(shape, plan, job, phases)
    if plan.cp > 1:
        _context(shape, plan, job, phases)
    if plan.data_ranks > 1:
        _data(shape, plan, job, phases)
    return phases


_Phases = dict[str, dict[str, AxisTraffic]]


def _scatter(job: Job) -> str:
    return "all-to-all" if job.on_cpu else "reduce-scatter"


def _axes(plan: Candidate) -> list[str]:
    return [name for name, size in reversed(plan.group_sizes.items()) if name != "pp" and size > 1]


def _context(shape: ModelShape, plan: Candidate, job: Job, phases: _Phases) -> None:
    first, micro = 0, plan.gradient_accumulation_steps
    for run in shape.runs:
        forward, backward = exchanges(run, plan, job)
        again = min(run.count, max(0, count_recomputed(plan, shape.layers) - first))
        for phase, sent, layers in (
            ("forward", forward, run.count), ("backward", backward, run.count), ("backward", forward, again)
        ):  # fmt: skip
            for exchange in sent:
                kind = _scatter(job) if exchange.kind == "reduce-scatter" else exchange.kind
                phases[phase]["cp"].add(kind, micro * layers * exchange.count, exchange.bytes)
        first += run.count


def _tensor(shape: ModelShape, plan: Candidate, job: Job, phases: _Phases) -> None:
    seq_len, b, lora = job.seq_len, job.element_bytes, job.lora
    forward, backward = phases["forward"]["tp"], phases["backward"]["tp"]
    traits, micro, blocks = shape.traits, plan.gradient_accumulation_steps, 2 * shape.layers
    tokens = local_tokens(seq_len, plan.cp)
    rows = plan.micro_batch_size * tokens
    whole = rows * shape.hidden * b
    # Recompute reduces the outputs of blocks again, except a layer's last output if no norm reads that output.
    recomputed = count_recomputed(plan, shape.layers)
    again = (2 if traits.norms_outputs else 1) * recomputed
    # Below a frozen embedding nothing has a gradient, except where recompute asks for that of a layer's input.
    ends = int(lora is not None and not recomputed)
    forward.add("all-reduce", micro, plan.micro_batch_size * seq_len * shape.hidden * b)  # the embedding's output
    chunk = head_chunk(rows, shape.hidden, element_bytes=logit_bytes(shape, b), cpu=job.on_cpu, frozen=lora is not None)
    for first in range(0, rows, chunk):  # the loss: three numbers per token
        forward.add("all-gather", micro, 3 * min(chunk, rows - first) * 4 * plan.tp)
    backward.add("all-reduce", micro, whole)  # the gradient of the head's input
    if plan.sequence_parallel:
        padded = plan.micro_batch_size * -(-tokens // plan.tp) * plan.tp * shape.hidden * b
        scatter = _scatter(job)
        forward.add("all-gather", micro * (blocks + 1), padded)
        forward.add(scatter, micro * blocks, padded)
        # Inputs that weights read are gathered again, and so are gradients of outputs.
        inputs = blocks if keeps_inputs(lora, b) else 2 * recomputed
        backward.add("all-gather", micro * (inputs + blocks + 1 - ends), padded)
        backward.add(scatter, micro * (blocks + again - ends), padded)
    else:
        forward.add("all-reduce", micro * blocks, whole)
        backward.add("all-reduce", micro * (blocks + again - ends), whole)
    if traits.query_norm == "whole":
        forward.add("all-reduce", micro * blocks, rows * 4)
        backward.add("all-reduce", micro * (blocks + 2 * recomputed), rows * 4)
    members, b = list(trained_members(shape, plan, lora)), job.trained_bytes
    is_gathered = plan.zero_stage == 3 and plan.data_ranks > 1
    # Stages 2 and 3 reduce the gradients of every micro-batch.
    times = micro if plan.zero_stage > 1 and plan.data_ranks > 1 else 1
    for bucket in units(members, shape.layers) if is_gathered else buckets(members, b):
        partial = [members[index] for index in bucket if members[index].is_grad_partial]
        backward.add("all-reduce", times * bool(partial), _summed(partial, len(bucket)) * plan.summed_bytes(b))


def _summed(partial: list[Parameter], count: int) -> int:
    """Return how many elements the sum over tp of the partial gradients of a bucket of ``count`` parameters sends."""
    if len(partial) == count and all(member.full == member.numel for member in partial):
        return flat_offsets(member.numel for member in partial)[-1]  # sent in place, with the padding
    return sum(member.full for member in partial)


def _data(shape: ModelShape, plan: Candidate, job: Job, phases: _Phases) -> None:
    phases["forward"]["dp"].add("all-gather", 1, 8 * plan.data_ranks)  # the count of the batch's tokens
    micro = plan.gradient_accumulation_steps
    numbers = 1 if micro == 1 else 2  # the sums of the losses, and with micro-batches what they count
    phases["forward"]["dp"].add("all-gather", micro, 8 * numbers * plan.data_ranks)
    if micro > 1:
        phases["forward"]["dp"].add("all-reduce", 1, 8)  # the number of micro-batches
    members, b = list(trained_members(shape, plan, job.lora)), job.trained_bytes
    if plan.zero_stage == 3:
        _gathered_weights(list(parameters(shape, plan)), shape, plan, job, phases)
        if job.lora is not None:
            _gathered_adapters(members, shape.layers, plan, job, phases)
        return
    for bucket in buckets(members, b):
        sizes = [members[index].numel for index in bucket]
        if plan.zero_stage:
            numel = sharded_length(sizes, plan.data_ranks)
            times = micro if plan.zero_stage == 2 else 1
            phases["backward"]["dp"].add(_scatter(job), times, numel * plan.sent_bytes(b))
            phases["optimizer"]["dp"].add("all-gather", 1, numel * b)
        else:
            # One extra number per parameter says whether this rank has a gradient of the parameter.
            phases["backward"]["dp"].add("all-reduce", 1, (flat_offsets(sizes)[-1] + len(bucket)) * plan.sent_bytes(b))


def _gathered_weights(members: list[Parameter], shape: ModelShape, plan: Candidate, job: Job, phases: _Phases) -> None:
    """Add ZeRO-3's collectives: all-gathers of each unit's weights, and reduce-scatters of its gradients."""
    forward, backward = phases["forward"]["dp"], phases["backward"]["dp"]
    micro, b = plan.gradient_accumulation_steps, job.element_bytes
    for unit in units(members, shape.layers):
        numel = sharded_length((members[index].numel for index in unit), plan.data_ranks)
        first = members[unit[0]]
        is_embedding, is_head = first.layer < 0, first.layer == shape.layers and unit[0] == len(members) - 1
        # The embedding and the head both gather a tied matrix. Their backward does not read it.
        is_norm = first.layer == shape.layers and (shape.tied or not is_head)
        # Backward does not read the weight of a norm that multiplies by a copy of it.
        is_kept = is_embedding or (is_norm and shape.traits.norm_copies_weight) or (is_head and not shape.tied)
        is_twice = shape.tied and unit[0] == 0
        forward.add("all-gather", micro * (1 + is_twice), numel * b)
        backward.add("all-gather", 0 if is_kept else micro, numel * b)
        backward.add(_scatter(job), 0 if job.lora is not None else micro, numel * plan.sent_bytes(b))


def _gathered_adapters(members: list[Parameter], layers: int, plan: Candidate, job: Job, phases: _Phases) -> None:
    """Add what ZeRO-3 sends of the adapters of each layer, beside its frozen weights."""
    micro = plan.gradient_accumulation_steps
    for unit in units(members, layers):
        numel = sharded_length((members[index].numel for index in unit), plan.data_ranks)
        for phase in ("forward", "backward"):
            phases[phase]["dp"].add("all-gather", micro, numel * ADAPTER_BYTES)
        phases["backward"]["dp"].add(_scatter(job), micro, numel * plan.sent_bytes(ADAPTER_BYTES))
