"""A figure of benchmarks.context: mixers that hand their states over ranks of cp, against gathered tokens."""

from __future__ import annotations

import time
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import meshwright as mw
from benchmarks.summary import Ratio
from benchmarks.timing import say
from meshwright.context.handed_states import GatheredTokens, HandedStates

_SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
# Of each kind of mixer: a family, and what its config needs for two layers with mixers.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated delta net": (
        "qwen3_next",
        {
            **_SIZES, "head_dim": 128, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_experts": 0,
            "layer_types": ["linear_attention"] * 2, "mlp_only_layers": [0, 1],
        },
    ),
    "Mamba 2": (
        "mamba2",
        {
            "vocab_size": 512, "hidden_size": 512, "num_hidden_layers": 2, "num_heads": 16, "head_dim": 64,
            "n_groups": 1, "expand": 2,
        },
    ),
    "short convolution": ("lfm2", {**_SIZES, "layer_types": ["conv"] * 2, "block_auto_adjust_ff_dim": False}),
}  # fmt: skip
TOKENS = 2048


def mixers(rounds: int) -> None:
    """Print CPU seconds and kept bytes of a forward and backward pass, with states and with gathered tokens."""
    import transformers

    say(f"{TOKENS} tokens on {dist.get_world_size()} ranks, {rounds} rounds\n")
    say("| kind | CPU s, gathered | handed / gathered | kept MiB, gathered | handed |\n|---|---|---|---|---|")
    for kind, (family, sizes) in MODELS.items():
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[family](**sizes)).train()
        mw.to_distributed(model, plan=mw.ParallelPlan(cp=dist.get_world_size()))
        ids = torch.randint(0, 512, (1, TOKENS), generator=torch.Generator().manual_seed(1))
        steps = {"handed": HandedStates.__call__, "gathered": GatheredTokens.__call__}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for _ in range(rounds + 1):
            for name, step in steps.items():
                with mock.patch.object(HandedStates, "__call__", step):
                    found[name].append(_pass(model, ids))
        seconds = {name: [x for x, _ in values[1:]] for name, values in found.items()}  # the first round warms up
        ratio = Ratio.paired(seconds["handed"], seconds["gathered"])
        kept = " | ".join(f"{found[name][0][1] / 2**20:.0f}" for name in ("gathered", "handed"))
        say(f"| {kind} | {median(seconds['gathered']):.2f} | {ratio} | {kept} |")


def _pass(model: Any, ids: torch.Tensor) -> tuple[float, float]:
    """Return the CPU seconds of a pass on this rank, and the bytes that autograd keeps between forward and backward."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    dist.barrier()
    start = time.process_time()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(input_ids=ids, labels=ids).loss
    size = float(sum(storage.nbytes() for storage in kept.values()))
    kept.clear()
    loss.backward()
    used = time.process_time() - start
    model.zero_grad()
    return used, size
