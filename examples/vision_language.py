"""Fine-tune a stock Qwen3-VL on drawn images, with Qwen's processor, and with its tower trained or frozen.

torchrun --nproc-per-node 2 -m examples.vision_language --plan "tp2+sp"
torchrun --nproc-per-node 2 -m examples.vision_language --plan "pp2 mb1"
python -m examples.vision_language --freeze-tower

Each image shows a shape in a colour, and the answer names both, so the loss falls only if the images reach the decoder.
One process trains the same model to the same losses. The images are of several sizes, so rows differ in their number of
patches and of tokens.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor
from transformers.models.qwen2_vl import Qwen2VLImageProcessorPil

import meshwright as mw

QUESTION, COLOURS, SHAPES = "What is in the picture ?", ("red", "green", "blue", "yellow"), ("square", "circle")
SIZES, ROWS = ((32, 32), (48, 32), (32, 64)), 8
MARKS = ["<pad>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
PROMPT = f"<|im_start|>user <|vision_start|><|image_pad|><|vision_end|> {QUESTION}<|im_end|><|im_start|>assistant "


class ImageTextProcessor(Qwen3VLProcessor):
    """Qwen3-VL's processor without its processor of videos, which needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def make_processor() -> ImageTextProcessor:
    """Return a processor whose words are those of the task, in place of AutoProcessor.from_pretrained(...)."""
    words = Tokenizer(models.WordLevel(unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    text = [f"user assistant {QUESTION}", *COLOURS, *SHAPES]
    words.train_from_iterator(text, trainers.WordLevelTrainer(special_tokens=MARKS, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<|im_end|>")
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}  # pixels of an image
    return ImageTextProcessor(Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, size=size), tokenizer)


def make_model(processor: ImageTextProcessor, seed: int = 0) -> Qwen3VLForConditionalGeneration:
    """Return a small Qwen3-VL, in place of Qwen3VLForConditionalGeneration.from_pretrained(...)."""
    widths = {"hidden_size": 64, "intermediate_size": 128}
    rotary = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}
    text = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    tower = {"depth": 2, "num_heads": 4, "patch_size": 8, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
    torch.manual_seed(seed)
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config={**widths, **text, "vocab_size": len(processor.tokenizer), "rope_parameters": rotary},
            vision_config={**widths, **tower},
            image_token_id=processor.image_token_id,
            video_token_id=processor.video_token_id,
            vision_start_token_id=processor.vision_start_token_id,
            vision_end_token_id=processor.vision_end_token_id,
        )
    )


def draw(index: int) -> tuple[Image.Image, str]:
    """Return an image and its answer."""
    generator = torch.Generator().manual_seed(index)
    colour, shape, size, left, top = torch.randint(2**31, (5,), generator=generator).tolist()
    width, height = SIZES[size % len(SIZES)]
    image = Image.new("RGB", (width, height), "white")
    left, top = left % (width - 20), top % (height - 20)
    place, colour_name = (left, top, left + 20, top + 20), COLOURS[colour % len(COLOURS)]
    pen = ImageDraw.Draw(image)
    (pen.rectangle if shape % 2 == 0 else pen.ellipse)(place, fill=colour_name)
    return image, f"{colour_name} {SHAPES[shape % 2]}"


class Collator:
    """Makes a batch of indices: the processor's inputs, and labels of the answers alone."""

    def __init__(self, processor: ImageTextProcessor):
        self.processor = processor

    def __call__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        images, answers = zip(*map(draw, indices), strict=True)
        texts = [f"{PROMPT}{answer}<|im_end|>" for answer in answers]
        batch = self.processor(text=texts, images=[[i] for i in images], padding=True, return_tensors="pt")
        ids = batch["input_ids"]
        prompts = (ids == self.processor.tokenizer.convert_tokens_to_ids("assistant")).long().cumsum(1).cumsum(1) < 2
        return {**batch, "labels": ids.masked_fill(prompts | (batch["attention_mask"] == 0), -100)}


def main(steps: int, plan: str | None, freeze_tower: bool) -> None:
    processor = make_processor()
    model: Any = make_model(processor)
    model.model.visual.requires_grad_(not freeze_tower)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    collate = Collator(processor)
    loader = DataLoader(list(range(ROWS * steps)), batch_size=ROWS, collate_fn=collate)
    held_out = DataLoader(list(range(10_000, 10_000 + 4 * ROWS)), batch_size=ROWS, collate_fn=collate)

    # Under tp the tower stays whole on each rank; the layers and the vocabulary of the decoder are cut.
    plan = plan or f"dp{os.environ.get('WORLD_SIZE', '1')}"
    model, optimizer, loader = mw.to_distributed(model, optimizer, loader, plan=plan)
    _, _, held_out = mw.to_distributed(model, None, held_out)

    for step, batch in enumerate(loader, 1):
        loss = model(**batch).loss
        loss.backward()
        mw.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps:
            model.eval()
            with torch.no_grad():
                validation = torch.stack([model(**batch).loss for batch in held_out]).mean().item()
            model.train()
            if os.environ.get("RANK", "0") == "0":
                print(f"step {step}: loss {loss.item():.4f}, validation {validation:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fine-tune on drawn images; see the text at the top of this file.")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: 60)")
    parser.add_argument("--plan", help="the plan in words (default: data-parallel over all processes)")
    parser.add_argument("--freeze-tower", action="store_true", help="train the decoder alone")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.plan, arguments.freeze_tower)
