"""Tiny encoders and encoder-decoders with the heads of their tasks."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

from support.models import tokens

LENGTH = 12
_ENCODER: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_BOTH: dict[str, Any] = {
    "vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": 97, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2,
    "feed_forward_proj": "gated-gelu", "pad_token_id": 0, "decoder_start_token_id": 1,
}  # fmt: skip
_RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "position_buckets": 8}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert, rows": ("bert", "SequenceClassification", _ENCODER),
    "bert, words": ("bert", "MaskedLM", _ENCODER),
    "distilbert, tokens": (
        "distilbert", "TokenClassification",
        {"vocab_size": 97, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "pad_token_id": 0},
    ),
    "deberta, rows": ("deberta-v2", "SequenceClassification", {**_ENCODER, **_RELATIVE, "norm_rel_ebd": "layer_norm"}),
    "albert, tokens": ("albert", "TokenClassification", {**_ENCODER, "embedding_size": 16}),
    "fnet, rows": ("fnet", "SequenceClassification", _ENCODER),
    "bart, translations": ("bart", "ConditionalGeneration", _BOTH),
    "t5, translations": ("t5", "ConditionalGeneration", _T5),
    "whisper, translations": ("whisper", "ConditionalGeneration", {**_BOTH, "num_mel_bins": 8}),
}  # fmt: skip
SIZES = {"max_source_positions": 64, "max_target_positions": 64}


def build(name: str, **traits: Any) -> Any:
    """A seeded model of which every parameter has a random value of its own.

    Args:
        name: its name.
        traits: fields of its config.
    """
    family, task, sizes = MODELS[name]
    torch.manual_seed(0)
    sizes = {**sizes, **(SIZES if family == "whisper" else {}), **traits}
    config = transformers.CONFIG_MAPPING[family](**sizes, num_labels=3)
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    kind = {"deberta-v2": "DebertaV2", "distilbert": "DistilBert", "fnet": "FNet"}.get(family, family.capitalize())
    model = getattr(transformers, f"{kind}For{task}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.double().train()


def loader(name: str, *, rows: int = 4, steps: int = 3) -> Any:
    """Padded rows, each with another number of labels."""
    family, task, _ = MODELS[name]
    count = rows * steps
    ids = tokens(count, LENGTH)
    mask = torch.ones_like(ids)
    for row in range(count):
        mask[row, LENGTH - row % 4 :] = 0
    labels: Tensor = ids.clone() if task in ("MaskedLM", "ConditionalGeneration") else ids % 3
    if task == "SequenceClassification":
        labels = labels[:, 0]
    else:
        labels = labels.masked_fill((mask == 0) | (ids % 5 == 1), -100)
    if task == "ConditionalGeneration":
        labels = labels[:, :7]
    batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}
    if family == "whisper":
        features = torch.randn(count, 8, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        batch = {"input_features": features, "labels": labels}
    return DataLoader([{key: x[i] for key, x in batch.items()} for i in range(count)], batch_size=rows)
