"""A rank's parameters in the order of the model, and the buckets in which their gradients travel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.planner.candidate import Candidate
from meshwright.planner.shapes import ModelShape

BUCKET_BYTES = 25 * 2**20  # ToDistributedConfig.bucket_size_mb


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a rank.

    Args:
        numel: elements on this rank.
        full: elements of the whole parameter, where the ranks of tp hold parts of its gradient.
    """

    numel: int
    full: int = 0

    @property
    def is_grad_partial(self) -> bool:
        return self.full > 0


def parameters(shape: ModelShape, plan: Candidate) -> Iterator[Parameter]:
    """Yield a rank's parameters.

    Args:
        shape: the model.
        plan: its tp and sequence_parallel decide.

    Example:
        >>> shape = ModelShape(name="m", layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=100)
        >>> sum(parameter.numel for parameter in parameters(shape, Candidate())) == shape.parameters
        True
    """
    tp, traits, hidden = plan.tp, shape.traits, shape.hidden
    words = -(-shape.vocab // tp)  # of the first rank
    query, keys = shape.query_width // tp, shape.local_kv_width(tp)
    copied = keys * tp > shape.kv_width  # several ranks hold the same key heads

    def replicated(numel: int, *, by_rows: bool) -> Parameter:
        """Seen by each rank for its own positions (with sequence parallelism) or its own heads."""
        return Parameter(numel=numel, full=numel if tp > 1 and by_rows else 0)

    def projection(rows: int, columns: int, *, key: bool = False) -> Parameter:
        return Parameter(numel=rows * columns, full=shape.kv_width * columns if key and copied else 0)

    yield Parameter(numel=words * hidden)
    if shape.positions:
        yield replicated(shape.positions * hidden, by_rows=plan.sequence_parallel)
    for _ in range(shape.layers):
        for width, key in [(query + 2 * keys, False)] if traits.fused_qkv else [(query, False), (keys, True), (keys, True)]:
            yield projection(width, hidden, key=key)
            if traits.qkv_bias:
                yield projection(width, 1, key=key)
        yield Parameter(numel=query * hidden)
        if traits.output_bias:
            yield replicated(hidden, by_rows=plan.sequence_parallel)
        if traits.query_norm == "head":
            yield from [replicated(shape.head_dim, by_rows=True)] * 2
        elif traits.query_norm == "whole":
            yield from (Parameter(numel=query), projection(keys, 1, key=True))
        ups = 2 if shape.gated else 1
        for _ in range(1 if traits.fused_qkv else ups):
            yield Parameter(numel=shape.ffn // tp * hidden * (ups if traits.fused_qkv else 1))
            if traits.mlp_bias:
                yield Parameter(numel=shape.ffn // tp)
        yield Parameter(numel=shape.ffn // tp * hidden)
        if traits.mlp_bias:
            yield replicated(hidden, by_rows=plan.sequence_parallel)
        yield from [replicated(hidden, by_rows=plan.sequence_parallel)] * traits.norms
    yield replicated(hidden, by_rows=plan.sequence_parallel)
    if not shape.tied:
        yield Parameter(numel=words * hidden)


def buckets(members: list[Parameter], element_bytes: int) -> list[list[Parameter]]:
    """Return the buckets in the order in which backward fills them; those of partial gradients come last.

    Args:
        members: in the order of the model.
        element_bytes: of the parameters.
    """
    backwards = members[::-1]
    whole = [parameter for parameter in backwards if not parameter.is_grad_partial]
    partial = [parameter for parameter in backwards if parameter.is_grad_partial]
    return [bucket for group in (whole, partial) for bucket in _fill(group, element_bytes)]


def _fill(members: list[Parameter], element_bytes: int) -> Iterator[list[Parameter]]:
    filling: list[Parameter] = []
    filled = 0
    for parameter in members:
        size = parameter.numel * element_bytes
        if filling and filled + size > BUCKET_BYTES:
            yield filling
            filling, filled = [], 0
        filling.append(parameter)
        filled += size
    if filling:
        yield filling
