"""Tiny models of eight families that see images, and batches whose rows have any number of images."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from support.models import labels_for, tokens

Sample = dict[str, Any]
FAMILIES = ("llava", "gemma3", "qwen2_5_vl", "qwen3_vl", "internvl", "mistral3", "paligemma", "smolvlm")
IMAGE, START, END, VIDEO = 90, 91, 92, 93  # words; IMAGE is the one in whose places the features of an image go
FEATURES = 4  # of an image
LENGTH = 27  # tokens of a row, which has at most three images
COUNTS = ((1, 1), (2, 0), (0, 0), (3, 1), (0, 2))  # images in the rows of the batches of a short training
_TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_TOWER: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    "depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
}  # fmt: skip


def config_of(family: str) -> Any:
    """The config of a family; all but Qwen's have images of 8 x 8 pixels, or of 16 x 16 whose features are merged."""
    text = {**_TEXT, "head_dim": 8}
    image = {"image_token_id": IMAGE}
    large = {**_TOWER, "image_size": 16}
    words = {**image, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    rotary = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    match family:
        case "llava":
            tower = transformers.CLIPVisionConfig(**_TOWER)
            return transformers.LlavaConfig(
                vision_config=tower, text_config=transformers.LlamaConfig(**_TEXT), image_seq_length=FEATURES, **image
            )
        case "gemma3":
            layers = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
            return transformers.Gemma3Config(
                vision_config={"model_type": "siglip_vision_model", **large},
                text_config={**text, **layers, "query_pre_attn_scalar": 8},
                mm_tokens_per_image=FEATURES, boi_token_index=START, eoi_token_index=END, image_token_index=IMAGE,
            )  # fmt: skip
        case "qwen2_5_vl":
            return transformers.Qwen2_5_VLConfig(
                vision_config={**_QWEN, "window_size": 16, "fullatt_block_indexes": [1]},
                text_config={**text, "rope_parameters": rotary}, **words,
            )  # fmt: skip
        case "qwen3_vl":
            return transformers.Qwen3VLConfig(
                vision_config={**_QWEN, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
                text_config={**text, "num_hidden_layers": 4, "rope_parameters": rotary}, **words,
            )  # fmt: skip
        case "internvl":
            return transformers.InternVLConfig(
                vision_config={**large, "image_size": [16, 16], "patch_size": [4, 4]},
                text_config={**_TEXT, "model_type": "qwen2"},
                image_seq_length=FEATURES, downsample_ratio=0.5, **image,
            )  # fmt: skip
        case "mistral3":
            return transformers.Mistral3Config(
                vision_config={**large, "model_type": "pixtral", "head_dim": 12},
                text_config={**text, "model_type": "mistral"},
                image_token_index=IMAGE, spatial_merge_size=2, vision_feature_layer=-1,
            )  # fmt: skip
        case "paligemma":
            return transformers.PaliGemmaConfig(
                vision_config={"model_type": "siglip_vision_model", **_TOWER},
                text_config={**text, "model_type": "gemma"},
                image_token_index=IMAGE, projection_dim=32, hidden_size=32,
            )  # fmt: skip
        case _:
            return transformers.SmolVLMConfig(
                vision_config=large,
                text_config={**text, "model_type": "llama"},
                scale_factor=2,
                pad_token_id=0,
                **image,
            )


def build(family: str, *, freezes_tower: bool = False, layers: int | None = None) -> Any:
    """A seeded model of which every parameter has a random value of its own, with some number of decoder layers."""
    torch.manual_seed(0)
    config = config_of(family)
    if layers is not None:
        config.text_config.num_hidden_layers = layers
    model = transformers.AutoModelForImageTextToText.from_config(config)
    tower = next(module for name, module in model.named_modules() if "vis" in name)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.05))
            # Softmax leaves the gradient of such a bias no value but rounding.
            parameter.requires_grad_(not name.endswith(("k_proj.bias", "key.bias")))
    if freezes_tower:
        tower.requires_grad_(False)
    return model.double().train()


def samples(family: str, counts: Sequence[int]) -> list[Sample]:
    """A row of tokens with labels for each number of images; the images are listed beside the tokens."""
    ids = tokens(len(counts), LENGTH, vocab_size=IMAGE - 3) + 3
    found = []
    for row, count in enumerate(counts):
        for at in range(1, 1 + count * (FEATURES + 2), FEATURES + 2):
            ids[row, at] = START
            ids[row, at + 1 : at + 1 + FEATURES] = IMAGE
            ids[row, at + 1 + FEATURES] = END
        generator = torch.Generator().manual_seed(row + 10 * count)
        size = 8 if family in ("llava", "paligemma") else 16
        shape = (16, 3 * 2 * 4 * 4) if "qwen" in family else (3, size, size)
        images = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]
        sample = {"input_ids": ids[row], "labels": labels_for(ids)[row], "images": images}
        sample["labels"] = sample["labels"].masked_fill(ids[row] == IMAGE, -100)
        if "qwen" in family:
            sample["mm_token_type_ids"] = (ids[row] == IMAGE).int()
        if family in ("gemma3", "paligemma"):
            sample["token_type_ids"] = (ids[row] == IMAGE).long()
        found.append(sample)
    return found


def collate(family: str, rows: list[Sample]) -> dict[str, Tensor]:
    """Stack the rows, and join their images as the family's processor does; without images there is no such input."""
    batch: dict[str, Tensor] = default_collate([{k: x for k, x in row.items() if k != "images"} for row in rows])
    images = [image for row in rows for image in row["images"]]
    if not images:
        return batch
    if "qwen" in family:
        grid = torch.tensor([[1, 4, 4]] * len(images))
        return {**batch, "pixel_values": torch.cat(images), "image_grid_thw": grid}
    if family == "smolvlm":  # rows with fewer images than others are padded with black ones, which it leaves out
        most = max(len(row["images"]) for row in rows)
        padded = [[*row["images"], *[torch.zeros_like(images[0])] * (most - len(row["images"]))] for row in rows]
        return {**batch, "pixel_values": torch.stack([torch.stack(row) for row in padded])}
    sizes = {"image_sizes": torch.tensor([[16, 16]] * len(images))} if family == "mistral3" else {}
    return {**batch, "pixel_values": torch.stack(images), **sizes}


def loader(family: str, counts: Sequence[Sequence[int]] = COUNTS) -> Any:
    rows = [sample for batch in counts for sample in samples(family, batch)]
    return DataLoader(rows, batch_size=len(counts[0]), collate_fn=functools.partial(collate, family))
