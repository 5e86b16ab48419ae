"""``python -m benchmarks.footprint``: compare the planner's estimates of memory and traffic with traced steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from rich.progress import track

import meshwright as mw
from meshwright_plan.expected_traffic import step_traffic
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.shapes import describe
from meshwright_plan.memory.footprint import footprint
from meshwright_tools.tracing.trace import trace_step

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Phi3", "Olmo2")
PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "tp4+sp recompute": {"tp": 4, "sequence_parallel": True, "recompute": "full"},
    "dp2": {"dp": 2},
    "dp2 zero1": {"dp": 2, "zero_stage": 1},
    "dp2 tp2+sp zero1": {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1},
}
# (rows, tokens, sizes): in the first case activations and logits dominate, in the second the weights do.
CASES = (
    (4, 512, {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 16000}),
    (1, 128, {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 32000}),
)
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "use_cache": False, "pad_token_id": 0}


def ratios() -> Iterator[tuple[str, float, float, bool]]:
    """Yield each case's name, estimate / trace of activations and of the peak, and whether collectives are equal."""
    cases = [(case, family, plan) for case in CASES for family in FAMILIES for plan in PLANS]
    for (rows, length, sizes), family, name in track(cases, "tracing", disable=not sys.stderr.isatty()):
        for dtype in (torch.float32, torch.bfloat16):
            config = getattr(transformers, f"{family}Config")(
                **sizes, **HEADS, head_dim=sizes["hidden_size"] // 8, sliding_window=64
            )
            with torch.device("meta"):
                model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).train()
            fields = dict(PLANS[name])
            trace = trace_step(model, mw.ParallelPlan(**fields), rows=rows, length=length)
            plan = Candidate(micro_batch_size=rows, **fields)
            job = Job(seq_len=length, global_batch=rows, on_cpu=True)
            job = job.in_32_bits() if dtype is torch.float32 else job
            held = footprint(describe(model.config), plan, job)
            sent = step_traffic(describe(model.config), plan, job)
            is_equal = all(
                (traffic.counts, traffic.bytes) == (trace.traffic[phase][axis].counts, trace.traffic[phase][axis].bytes)
                for phase, axes in sent.items()
                for axis, traffic in axes.items()
            )
            label = f"{family} {name} {str(dtype).removeprefix('torch.')} {rows} x {length}"
            yield label, held.activations / trace.activations, held.peak / trace.peak, is_equal


def main() -> None:
    """Print the lowest and highest ratio of each figure."""
    found = list(ratios())
    print(f"{len(found)} steps: 7 families x {len(PLANS)} plans x 2 sizes x float32 and bfloat16")
    for index, name in ((1, "saved activations"), (2, "peak")):
        values = [item[index] for item in found]
        lowest, highest = min(found, key=lambda item: item[index]), max(found, key=lambda item: item[index])
        mean = sum(abs(value - 1) for value in values) / len(values)
        print(f"{name}: estimate / trace {lowest[index]:.3f} ({lowest[0]}) to {highest[index]:.3f} ({highest[0]}), "
              f"off by {mean:.2%} in the mean")  # fmt: skip
    print(f"collectives, count and bytes by axis and phase: equal in {sum(item[3] for item in found)} of {len(found)}")


if __name__ == "__main__":
    main()
