"""Every collective of a training step on this version's runtime: how many of each kind, and their bytes, by axis."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from meshwright.planner.buckets import buckets, parameters
from meshwright.planner.candidate import Candidate
from meshwright.planner.shapes import ModelShape


@dataclass(kw_only=True)
class AxisTraffic:
    """Collectives over one axis in one phase of a step.

    Args:
        counts: calls by kind.
        bytes: of the whole tensors that they gather or reduce.
    """

    counts: Counter[str] = field(default_factory=Counter)
    bytes: int = 0

    def add(self, kind: str, count: int, size: int) -> None:
        """Add ``count`` collectives of ``size`` bytes each."""
        if count:
            self.counts[kind] += count
            self.bytes += count * size


def step_traffic(
    shape: ModelShape, plan: Candidate, *, seq_len: int, element_bytes: int, gloo: bool = False
) -> dict[str, dict[str, AxisTraffic]]:
    """Return phase -> axis -> collectives of one step.

    Args:
        shape: the model.
        plan: one that this version runs.
        seq_len: tokens of a sequence.
        element_bytes: of the model's dtype.
        gloo: on CPU, where a reduce-scatter is an all-to-all and a sum.

    Example:
        >>> shape = ModelShape(name="m", layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=100)
        >>> plan = Candidate(tp=2, sequence_parallel=True)
        >>> step_traffic(shape, plan, seq_len=16, element_bytes=2)["forward"]["tp"].counts["reduce-scatter"]
        4
    """
    phases = {name: {axis: AxisTraffic() for axis in _axes(plan)} for name in ("forward", "backward", "optimizer")}
    if plan.tp > 1:
        _tensor(shape, plan, seq_len, element_bytes, gloo, phases)
    if plan.dp > 1:
        _data(shape, plan, element_bytes, gloo, phases)
    return phases


def _axes(plan: Candidate) -> list[str]:
    return [name for name, size in (("tp", plan.tp), ("dp", plan.dp)) if size > 1]


def _tensor(
    shape: ModelShape, plan: Candidate, seq_len: int, b: int, gloo: bool, phases: dict[str, dict[str, AxisTraffic]]
) -> None:
    forward, backward = phases["forward"]["tp"], phases["backward"]["tp"]
    traits, micro, blocks = shape.traits, plan.accumulation, 2 * shape.layers
    rows = plan.micro_batch * seq_len
    whole = rows * shape.hidden * b
    # What is computed again is joined again, but for a last output that nothing after it needs.
    again = 0
    if plan.recompute == "full":
        again = blocks if traits.norms_outputs else shape.layers
    forward.add("all-reduce", micro, whole)  # the embedding's rows
    forward.add("all-gather", micro, 3 * rows * 4 * plan.tp)  # the loss: three numbers a token
    backward.add("all-reduce", micro, whole)  # the head's input
    if plan.sequence_parallel:
        padded = plan.micro_batch * -(-seq_len // plan.tp) * plan.tp * shape.hidden * b
        scatter = "all-to-all" if gloo else "reduce-scatter"
        forward.add("all-gather", micro * (blocks + 1), padded)
        forward.add(scatter, micro * blocks, padded)
        backward.add("all-gather", micro * (2 * blocks + 1), padded)  # inputs again, and gradients of outputs
        backward.add(scatter, micro * (blocks + again), padded)
    else:
        forward.add("all-reduce", micro * blocks, whole)
        backward.add("all-reduce", micro * (blocks + again), whole)
    if traits.query_norm == "whole":
        forward.add("all-reduce", micro * blocks, rows * 4)
        backward.add("all-reduce", micro * blocks * (2 if plan.recompute == "full" else 1), rows * 4)
    members = list(parameters(shape, plan))
    for bucket in buckets(members, b):
        if members[bucket[0]].is_grad_partial:
            wide = 4 if plan.zero_stage else b
            backward.add("all-reduce", 1, sum(members[index].full for index in bucket) * wide)


def _data(shape: ModelShape, plan: Candidate, b: int, gloo: bool, phases: dict[str, dict[str, AxisTraffic]]) -> None:
    phases["forward"]["dp"].add("all-gather", plan.accumulation, 24 * plan.dp)  # the numbers of tokens
    if plan.accumulation > 1:
        phases["forward"]["dp"].add("all-reduce", 2, 8)  # of the batch's tokens, and of micro-batches
    members = list(parameters(shape, plan))
    for bucket in buckets(members, b):
        numel = sum(members[index].numel for index in bucket)
        if plan.zero_stage:
            numel = math.ceil(numel / plan.dp) * plan.dp
            phases["backward"]["dp"].add("all-to-all" if gloo else "reduce-scatter", 1, numel * 4)
            phases["optimizer"]["dp"].add("all-gather", 1, numel * b)
        else:
            # One number more for each parameter: whether this rank has a gradient.
            phases["backward"]["dp"].add("all-reduce", 1, (numel + len(bucket)) * b)
