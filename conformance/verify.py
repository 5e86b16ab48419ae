"""``python -m conformance.verify``: run meshwright verify on published configs and on models with a planted fault."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import CONFIG_MAPPING

import meshwright as mw
from conformance.families.models import DENSE, tiny_config

PLAN = "dp2 tp2+sp zero1"
EXPERTS_PLAN = "dp2 tp2+sp ep2 zero1"

# The values in the config.json of a published model that differ from its class's defaults.
PUBLISHED: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 4096, "n_head": 32, "n_layer": 30, "vocab_size": 250880},  # bloom-7b1
    "cohere2": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
                "num_key_value_heads": 8, "sliding_window": 4096, "vocab_size": 256000},  # command-r7b
    "gemma3_text": {"hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_hidden_layers": 26,
                    "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "vocab_size": 262144},  # 1b
    "gpt2": {"n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257},
    "gpt_neox": {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 32, "num_hidden_layers": 32,
                 "vocab_size": 50304},  # pythia-2.8b
    "llama": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
              "num_key_value_heads": 8, "vocab_size": 128256},  # Llama-3-8B
    "olmo2": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32,
              "num_key_value_heads": 32, "vocab_size": 100352},  # OLMo-2-7B
    "phi3": {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 32,
             "num_key_value_heads": 32, "vocab_size": 32064, "sliding_window": 2047},  # Phi-3-mini
    "qwen3": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28,
              "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True, "vocab_size": 151936},  # 0.6B
    "smollm3": {"hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_hidden_layers": 36,
                "num_key_value_heads": 4, "tie_word_embeddings": True, "vocab_size": 128256},  # SmolLM3-3B
}  # fmt: skip
PUBLISHED_EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "dots1": {"hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 62,
              "num_attention_heads": 32, "num_key_value_heads": 32, "n_routed_experts": 128, "n_shared_experts": 2,
              "num_experts_per_tok": 6, "first_k_dense_replace": 1, "vocab_size": 152064},  # dots.llm1
    "ernie4_5_moe": {"hidden_size": 2560, "intermediate_size": 12288, "moe_intermediate_size": 1536,
                     "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4,
                     "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
                     "moe_layer_end_index": 27, "vocab_size": 103424},  # 21B-A3B
    "glm4_moe": {"hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
                 "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
                 "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
                 "vocab_size": 151552},  # GLM-4.5-Air
    "gpt_oss": {"num_hidden_layers": 24, "num_local_experts": 32},  # 20b
    "granitemoe": {"hidden_size": 1536, "intermediate_size": 512, "num_hidden_layers": 32, "num_attention_heads": 24,
                   "num_key_value_heads": 8, "num_local_experts": 40, "num_experts_per_tok": 8,
                   "vocab_size": 49155},  # 3.0-3b-a800m
    "mixtral": {"vocab_size": 32000},  # 8x7B
    "olmoe": {"hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
              "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 50304},  # 1B-7B
    "qwen2_moe": {"hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
                  "shared_expert_intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
                  "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
                  "vocab_size": 151936},  # Qwen1.5-MoE-A2.7B
    "qwen3_moe": {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
                  "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                  "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936},  # 30B-A3B
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The outcome of one verification."""

    name: str
    code: int
    seconds: float
    what: str


def main(
    plan: Annotated[
        str | None, typer.Option(help=f"The plan (default: {PLAN}, and {EXPERTS_PLAN} for models with experts).")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="A family; may be given several times.")] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Verify all dense families instead, with the configs of make families.")
    ] = False,
    faults: Annotated[bool, typer.Option(help="Run the planted faults too.")] = True,
) -> None:
    """Verify twenty families with published sizes and models with planted faults; exit with 1 on a wrong result.

    Ten of the families have experts.

    Examples:

        python -m conformance.verify
        python -m conformance.verify --only gpt2 --only bloom --no-faults
        python -m conformance.verify --tiny --plan "dp2 tp2 zero3"
    """
    names = only or sorted(DENSE if tiny else PUBLISHED | PUBLISHED_EXPERTS)
    is_right = True
    for name in names:
        outcome = _family(name, plan or (EXPERTS_PLAN if name in PUBLISHED_EXPERTS else PLAN), tiny)
        is_right &= outcome.code == 0
        _show(outcome)
    if faults and not tiny:
        for name, expected in _faults().items():
            outcome = _fault(name)
            is_right &= outcome.what == expected
            _show(outcome)
        for outcome in _faults_of_experts():
            is_right &= outcome.code == 0
            _show(outcome)
    raise typer.Exit(0 if is_right else 1)


def _show(outcome: Outcome) -> None:
    print(f"{outcome.name:22} {outcome.code:2} {outcome.seconds:6.1f} s  {outcome.what}", flush=True)


def _family(name: str, plan: str, tiny: bool) -> Outcome:
    config = tiny_config(name) if tiny else CONFIG_MAPPING[name](**(PUBLISHED | PUBLISHED_EXPERTS)[name])
    with tempfile.TemporaryDirectory() as folder:
        values = {key: value for key, value in config.to_dict().items() if key not in ("dtype", "use_cache")}
        (Path(folder) / "config.json").write_text(json.dumps(values))
        command = [sys.executable, "-m", "meshwright_tools.cli", "verify", "--model", folder, "--plan", plan, "--json"]
        started = time.monotonic()
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - started
    if result.returncode == 0:
        worst = max(kind["value"] for kind in json.loads(result.stdout)["kinds"])
        return Outcome(name, 0, seconds, f"{worst:.1e}")
    what = str(json.loads(result.stdout)["suspect"]) if result.stdout else result.stderr.strip()[-2000:]
    return Outcome(name, result.returncode, seconds, what)


def _faults() -> dict[str, str]:
    """Return the planted faults, and the module or parameter that verify must report for each."""
    return {
        "norm_not_summed": "model.layers.1.input_layernorm.weight",
        "bias_added_twice": "model.layers.0.self_attn.o_proj",
        "wrong_fused_order": "model.layers.0.self_attn.o_proj",
        "uneven_heads": "model.layers.0.self_attn.o_proj",
        "hook_of_several_ranks": "model.layers.1.mlp.down_proj",
    }


def _fault(name: str) -> Outcome:
    from support import planted

    started = time.monotonic()
    report = mw.verify(getattr(planted, name), "tp2+sp", steps=1)
    suspect = report.suspect
    return Outcome(name, int(not report.ok), time.monotonic() - started, suspect.name if suspect else "nothing")


def _faults_of_experts() -> Iterator[Outcome]:
    """Verify models with a planted fault; the code is 0 if the report names what is wrong, which is in an MLP."""
    from support.planted_experts import FAULTS, faulty

    for name, fault in FAULTS.items():
        started = time.monotonic()
        try:
            report = mw.verify(functools.partial(faulty, name), fault.plan, steps=2)
            what = "nothing" if report.suspect is None else f"{report.suspect.kind}: {report.suspect.name}"
        except mw.PlanError as error:
            what = str(error).splitlines()[0]
        code = int(re.search(r"layers\.\d\.mlp", what) is None)
        yield Outcome(name, code, time.monotonic() - started, what)


if __name__ == "__main__":
    typer.run(main)
