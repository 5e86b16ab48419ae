"""The one-device program that both runs share: the model, optimizer, schedule and loader."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from examples.demo.corpus import load_corpus
from examples.demo.settings import Settings


def build(
    settings: Settings, device: torch.device
) -> tuple[LlamaForCausalLM, torch.optim.AdamW, LambdaLR, DataLoader[Any]]:
    """Build all of the one-device program except its loop. Equal settings give equal weights and batches."""
    torch.manual_seed(settings.seed)
    model = build_model(settings).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = warmup_and_cosine(optimizer, settings.warmup_steps, settings.steps)
    loader = DataLoader(
        load_corpus(settings),
        batch_size=settings.batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(settings.seed),
        collate_fn=collate,
        drop_last=True,
    )
    return model, optimizer, scheduler, loader


def build_model(settings: Settings) -> LlamaForCausalLM:
    """Return a Llama with random weights, which has about 10 M parameters with the default settings."""
    config = LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=settings.seq_length,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def warmup_and_cosine(optimizer: torch.optim.Optimizer, warmup_steps: int, steps: int) -> LambdaLR:
    """Return a schedule of a linear warm-up, then half a cosine down to zero."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))

    return LambdaLR(optimizer, factor)


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack rows of [seq_length] to a batch of [rows, seq_length]; the model shifts the labels."""
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def batches(loader: Iterable[dict[str, Tensor]], steps: int) -> Iterator[dict[str, Tensor]]:
    """Yield ``steps`` batches, repeating the corpus as often as necessary."""

    def forever() -> Iterator[dict[str, Tensor]]:
        while True:
            yield from loader

    return islice(forever(), steps)


def tensor_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes that this process holds for the tensors among the values.

    ``tensor.nbytes`` would be the bytes of the whole of a sharded tensor, as its shape is.
    """
    storages = (x.untyped_storage() for x in tensors if torch.is_tensor(x))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer's state."""
    return tensor_bytes(value for state in dict.values(optimizer.state) for value in state.values())
