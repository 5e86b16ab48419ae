"""One way to run one training job: the job's sizes, and a point of the planner's space."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from meshwright.errors import PlanError

Recompute = Literal["none", "selective", "full"]
Precision = Literal["bf16", "fp8"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, apart from the model.

    Args:
        seq_len: tokens of one sequence.
        global_batch: sequences of one optimizer step, over all devices.
        precision: of the layers' matmuls; the head and attention stay in 16 bits.
        weight_bytes: bytes of one weight as the layers read it.
        gradient_bytes: bytes of one gradient.
        optimizer_bytes: bytes of optimizer state for one weight: 8 for Adam over 32-bit weights, 12 with a 32-bit
            master copy of 16-bit ones.
        activation_bytes: bytes of one activation: 2, or 4 where everything is computed in 32 bits.
        fused_attention: the attention kernel keeps its scores on chip (flash attention, SDPA's fused kernels).
        own_runtime: it runs on this library, whose memory is known tensor by tensor; else on one like Megatron-LM.
        on_cpu: on CPU with gloo.

    Raises:
        PlanError: sizes below one.

    Example:
        >>> Job(seq_len=4096, global_batch=256).tokens
        1048576
    """

    seq_len: int
    global_batch: int
    precision: Precision = "bf16"
    weight_bytes: int = 2
    gradient_bytes: int = 2
    optimizer_bytes: int = 12
    activation_bytes: int = 2
    fused_attention: bool = True
    own_runtime: bool = False
    on_cpu: bool = False

    def __post_init__(self) -> None:
        for name in ("seq_len", "global_batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"--{name.replace('_', '-')}={value!r} must be a positive integer")
        if self.precision not in ("bf16", "fp8"):
            raise PlanError(f"--precision={self.precision!r} must be 'bf16' or 'fp8'")

    def in_32_bits(self) -> Job:
        """Return the same job with everything in 32 bits, as Adam trains a float32 model.

        Example:
            >>> Job(seq_len=8, global_batch=2).in_32_bits().activation_bytes
            4
        """
        return replace(self, weight_bytes=4, gradient_bytes=4, optimizer_bytes=8, activation_bytes=4)

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.seq_len * self.global_batch


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A point of the planner's space.

    Args:
        replicate: data-parallel groups that hold whole copies of what ``shard`` divides.
        shard: data-parallel ranks that ZeRO divides state over; ``dp`` is the product of both.
        tp: tensor-parallel size.
        sequence_parallel: shard the activations between blocks over tp too.
        cp: context-parallel size; ``ring`` says how, by ring exchange or by all-to-all (Ulysses).
        pp: pipeline stages; ``interleave`` chunks of layers on each.
        micro_batch: sequences that one data-parallel rank runs at once.
        accumulation: micro-batches of one step.
        zero_stage: what ZeRO divides: 1 optimizer state, 2 gradients too, 3 weights too.
        recompute: what backward computes again: nothing, attention, or ``recomputed`` whole layers of each stage.
        recomputed: how many layers of a stage with recompute="full"; None for all.

    Example:
        >>> Candidate(replicate=4, tp=2, micro_batch=1, accumulation=8).global_batch
        32
    """

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    ring: bool = True
    pp: int = 1
    interleave: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    zero_stage: int = 0
    recompute: Recompute = "none"
    recomputed: int | None = None

    @property
    def dp(self) -> int:
        return self.replicate * self.shard

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def global_batch(self) -> int:
        return self.dp * self.micro_batch * self.accumulation

    @property
    def runs_today(self) -> bool:
        """Whether this version's runtime can run it; the rest is planned ahead only."""
        return (
            self.cp == self.pp == 1
            and self.recompute != "selective"
            and self.recomputed is None
            and (self.zero_stage == 0 or self.replicate == 1)
        )

    @property
    def label(self) -> str:
        """The plan in a few words.

        Example:
            >>> Candidate(shard=8, tp=2, sequence_parallel=True, zero_stage=1, recompute="full").label
            'dp8 tp2+sp zero1 mb1x1 recompute=full'
        """
        parts = [f"dp{self.dp}" + (f"({self.replicate}x{self.shard})" if self.replicate > 1 < self.shard else "")]
        if self.tp > 1:
            parts.append(f"tp{self.tp}" + ("+sp" if self.sequence_parallel else ""))
        if self.cp > 1:
            parts.append(f"cp{self.cp}" + ("" if self.ring else "(ulysses)"))
        if self.pp > 1:
            parts.append(f"pp{self.pp}" + (f"x{self.interleave}" if self.interleave > 1 else ""))
        parts.append(f"zero{self.zero_stage}")
        parts.append(f"mb{self.micro_batch}x{self.accumulation}")
        if self.recompute != "none":
            first = "" if self.recomputed is None else f"({self.recomputed})"
            parts.append(f"recompute={self.recompute}{first}")
        return " ".join(parts)


@lru_cache(maxsize=1024)
def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return how many layers each stage holds: as even as can be, the ends lighter, since they hold the vocabulary.

    Example:
        >>> stage_layers(70, 12)
        (5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5)
    """
    small, extra = divmod(layers, stages)
    counts = [small] * stages
    # From the middle outwards: the last stage gets one last of all, since the head costs more than the embedding.
    for index in sorted(range(stages), key=lambda i: (i == stages - 1, i == 0, i))[:extra]:
        counts[index] += 1
    return tuple(counts)


def layers_of(candidate: Candidate, layers: int) -> tuple[int, ...]:
    """Return the layers of each pipeline stage."""
    return stage_layers(layers, candidate.pp)


def recomputed_share(candidate: Candidate, layers: int) -> float:
    """Return the share of a stage's layers that backward computes again in full."""
    if candidate.recompute != "full":
        return 0.0
    held = math.ceil(layers / candidate.pp)
    return 1.0 if candidate.recomputed is None else min(1.0, candidate.recomputed / held)
