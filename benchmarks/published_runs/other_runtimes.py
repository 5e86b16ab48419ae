"""The memory and the time of the programs that published runs used: Megatron-LM, NeMo, torchtitan and others.

Each class has the planner's estimate for this library, and replaces what other programs do in another way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from meshwright_plan.context_cost import Exchanges, exchanges
from meshwright_plan.job.candidate import Candidate, Job, Logits
from meshwright_plan.job.layer_shape import ExpertShape, LayerShape
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.memory.activations import Saved
from meshwright_plan.memory.peak import Memory, Stage, fullest_stages, saved_by_stage
from meshwright_plan.time.layer import REMOTE, Forward
from meshwright_plan.time.step import StepModel


@dataclass(frozen=True, kw_only=True)
class OtherJob(Job):
    """A job of a published run.

    Args:
        gradient_bytes: bytes per gradient element.
        fused_attention: whether the attention kernel keeps its scores on chip (flash attention, SDPA's fused kernels).
        whole_recompute: whether recompute repeats whole layers, as Megatron-LM's reentrant checkpoint does. That of
            PyTorch since 2.1 stops after the last tensor that backward reads.
    """

    gradient_bytes: int = 2
    fused_attention: bool = True
    whole_recompute: bool = False
    logits: Logits = "gathered"


class OtherModel(StepModel):
    """Estimates the time of a step of a published run."""

    skips_vocabulary = False

    def exchange(self, experts: ExpertShape, tokens: float, plan: Candidate, job: Job) -> float:
        """Return the seconds of an exchange by DeepEP or HybridEP, which send a token once to each node."""
        inside = min(plan.ep, self.cluster.domain)
        if inside == plan.ep:
            return super().exchange(experts, tokens, plan, job)
        row = experts.sent_bytes(tokens, plan.ep, job.element_bytes, job.expert_load) / plan.ep
        across = (plan.ep - inside) * row
        across *= experts.reached(plan.ep / inside) / experts.reached(plan.ep)
        within, k = (plan.ep - 1) * row, self.k  # the node passes it on
        slowest = max(within / (self.cluster.fast * k.fast_link), across / (self.cluster.slow * k.slow_link))
        return slowest + k.latency * REMOTE

    def is_fused(self, layer: LayerShape, plan: Candidate, job: Job) -> bool:
        return cast(OtherJob, job).fused_attention

    def over_context(self, layer: LayerShape, plan: Candidate, job: Job) -> tuple[Exchanges, tuple[float, float]]:
        """Return what Transformer Engine's ring sends: its backward begins with the last keys of forward."""
        forward, backward = exchanges(layer, plan, job)
        return (forward, 2 * forward if plan.context == "ring" else backward), (0.0, 0.0)

    def summed_bytes(self, plan: Candidate, job: Job) -> int:
        return cast(OtherJob, job).gradient_bytes

    def sent_bytes(self, plan: Candidate, job: Job) -> int:
        return cast(OtherJob, job).gradient_bytes

    def repeated(self, layer: LayerShape, plan: Candidate, job: Job, once: Forward) -> float:
        """Return the seconds of what backward recomputes, perhaps by torchtitan's checkpointing by operations.

        That keeps the result of attention, and of every second matmul in the order q, k, v, o, gate, up, down. Backward
        does not read the result of the last one.
        """
        if plan.recompute in ("none", "selective", "full"):
            return super().repeated(layer, plan, job, once)
        rows, h, q = plan.micro_batch_size * job.seq_len / plan.cp, layer.hidden, layer.query_width / plan.tp
        kv, ups = layer.local_kv_width(plan.tp), layer.mlp_inputs * bool(layer.ffn)
        sizes = [(h, q), (h, kv), (h, kv), (q, h)] + [(h, layer.ffn / plan.tp)] * ups
        matmuls = sum(self.matmul(rows, inner, columns, precision=job.precision) for inner, columns in sizes[1::2])
        # The gathers of sequence parallelism are repeated too, but its reduce-scatters are kept.
        return self.launched(matmuls + once.elementwise, once.launch) + (once.reduce if plan.sp > 1 else 0.0)

    def unread(self, layer: LayerShape, reduce: float, plan: Candidate, job: Job) -> float:
        return 0.0 if cast(OtherJob, job).whole_recompute else super().unread(layer, reduce, plan, job)


class OtherStage(Stage):
    """One rank of the pipeline of a published run."""

    sums_gradients = False

    @property
    def saved(self) -> Saved:
        shape, plan, job = self.shape, self.plan, self.job
        saved = saved_by_stage(shape, plan, job)
        if plan.recompute in ("none", "selective", "full"):
            return saved
        # If backward repeats every second matmul: the input, q, v, attention and its gate or up.
        rows, t = plan.micro_batch_size * job.seq_len / plan.cp, plan.tp
        runs = []
        for run, layer in zip(saved.runs, shape.runs, strict=True):
            kept = 2 * layer.query_width / t + layer.local_kv_width(t) + layer.ffn / t
            of_layer = run.kept + rows * (job.element_bytes * kept + 4 * layer.heads / t)
            runs.append(replace(run, layer=min(run.layer, of_layer)))
        return replace(saved, runs=tuple(runs))

    @property
    def gradient_bytes(self) -> int:
        return cast(OtherJob, self.job).gradient_bytes

    def states(self) -> float:
        return self.kept(1) * self.job.optimizer_bytes

    def stepped(self) -> float:
        return 4 * self.kept(1)

    def attention(self) -> float:
        return 0.0

    def logits(self) -> float:
        return self.whole_logits() if self.is_last else 0.0


def other_peak(shape: ModelShape, plan: Candidate, job: OtherJob) -> Memory:
    """Return the memory of the rank of a published run that needs the most."""
    stages = (OtherStage(shape=shape, plan=plan, job=job, rank=rank).memory() for rank in fullest_stages(shape, plan))
    return max(stages, key=lambda memory: memory.total)
