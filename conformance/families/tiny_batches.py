"""Batches for any tiny model, from the signature of its forward and its config; each is tried on the model."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conformance.families.tiny_configs import FRAMES, IMAGE, PATCH, Words
from meshwright.parallel.fake_passes.example_images import number_in_configs

ROWS, TEXT = 2, 14  # rows of a batch, and words of a row besides those of images and of sound
CODES = 8  # words of a codebook
PLAIN = 60  # words below it may have no meaning
Batch = dict[str, Any]
_EDGES = ("start", "end")
_COUNTS = (4, 16, 1, 8, 2, 17, 5, 32, 10, 0)  # words of an image or a sound that are tried if the model does not tell


@dataclass
class Batches:
    """Makes batches for a model.

    Args:
        model: the model, on the CPU in float64.
        words: its words with a meaning.
        task: the mapping to which the model belongs.
    """

    model: Any
    words: Words
    task: str
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = frozenset(inspect.signature(self.model.forward).parameters)

    def first(self) -> Batch:
        """Return the first batch from which the model computes a loss.

        Raises:
            ValueError: if it computes none from any; the message is that of the first one.
        """
        why: Exception | None = None
        unread: Batch | None = None
        for batch in self.candidates():
            try:
                loss = self._loss(batch)
                changed = {name: x * 0.5 if x.is_floating_point() else x for name, x in batch.items()}
                if "text" not in self.task or self._loss(changed) != loss:
                    return batch
                unread = unread or batch
            except Exception as error:  # models raise errors of any type
                why = why or error
        if unread is not None:
            return unread
        raise ValueError(f"no batch: {type(why).__name__}: {str(why).strip()[:300]}") from why

    def _loss(self, batch: Batch) -> float:
        with torch.no_grad():
            loss = self.model(**batch).loss
        if loss is None or not torch.isfinite(loss).all() or loss.ndim:
            raise ValueError(f"the loss is {loss}")
        return loss.item()

    def candidates(self) -> Iterator[Batch]:
        """Yield batches, the likeliest first."""
        if self.task == "image-text":
            kind, media = "image", self._images()
        elif self.task == "audio-text":
            kind, media = "audio", self._sounds()
        else:
            kind, media = "", iter(({},))
        if self.task == "causal-lm" and "pixel_values" in self.names:
            media = itertools.chain(media, self._images())  # some compute no loss of words alone
        if self.task == "seq2seq" and {"input_features", "input_values"} & self.names:
            kind, media = "audio", itertools.chain(self._sounds(), media)
        for inputs in media:
            known = self._feature_count(kind, inputs) if kind else 0
            word = self._word_of(kind)
            placed = word is not None or "image_embeds_position_mask" in self.names
            counts = (known,) if known is not None else _COUNTS if placed else (0,)
            # An encoder's input and a decoder's labels may have two lengths; some compute no loss of these.
            for is_shorter, count in itertools.product((True, False) if self._has_decoder else (False,), counts):
                yield self._with_text(inputs, kind, word, count, is_shorter=is_shorter)
        if codebooks := self._in_configs("num_codebooks", 0):
            yield from self._of_codebooks(self._with_text({}, "", None, 0, is_shorter=False), codebooks)

    def _of_codebooks(self, batch: Batch, count: int) -> Iterator[Batch]:
        """Yield batches whose words are of several codebooks: beside a word of text, or in rows of their own."""
        codes = batch["input_ids"][..., None].expand(-1, -1, count) % self._in_configs("codebook_size", CODES)
        yield batch | {"input_ids": torch.cat([batch["input_ids"][..., None], codes], dim=-1)}
        yield batch | {"input_ids": codes.movedim(-1, 1).flatten(0, 1), "labels": codes}

    @property
    def _has_decoder(self) -> bool:
        return self.task == "seq2seq" and "decoder_input_ids" in self.names

    def _with_text(self, media: Batch, kind: str, word: int | None, count: int, *, is_shorter: bool) -> Batch:
        generator = torch.Generator().manual_seed(3)
        special = {*self.words.names.values(), 0, 1, 2}
        plain = torch.tensor([w for w in range(PLAIN) if w not in special])
        ids = plain[torch.randint(len(plain), (ROWS, TEXT), generator=generator)]
        if kind and word is not None and count:
            ends = [[w] if (w := self._edge(kind, pattern)) is not None else [] for pattern in _EDGES]
            middle = torch.tensor([*ends[0], *[word] * count, *ends[1]]).expand(ROWS, -1)
            ids = torch.cat([ids[:, :2], middle, ids[:, 2:]], dim=1)
        labels = ids.masked_fill(torch.isin(ids, torch.tensor(sorted(special))), -100)
        labels[1, :4] = -100
        if self.task == "sequence-classification":
            labels = torch.tensor([0, 1])
            if isinstance(end := getattr(self.model.config, "eos_token_id", None), int):
                ids[:, -1] = end  # some classify what is there
        batch: Batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        if is_shorter:
            batch["labels"] = labels[:, :9].contiguous()
        here = ids == (-1 if word is None else word)
        if word is None:
            here[:, 2 : 2 + count] = True
        for name, value in (
            ("mm_token_type_ids", here.int() if kind == "image" else here.int() * 3),
            ("token_type_ids", here.long() if kind == "image" else torch.zeros_like(ids)),
            ("image_embeds_position_mask", here),
            ("protein_input_ids", ids[:, :6]),
            ("protein_attention_mask", torch.ones_like(ids[:, :6])),
            ("qformer_input_ids", ids[:, :6]),
            ("qformer_attention_mask", torch.ones_like(ids[:, :6])),
        ):
            if kind and name in self.names:
                batch[name] = value
        if "bbox" in self.names:
            batch["bbox"] = torch.tensor([1, 2, 5, 7]).expand(*ids.shape, -1)
        if kind == "image" and "cross_attention_mask" in self.names:
            tiles = self._in_configs("max_num_tiles", 1)
            batch["cross_attention_mask"] = torch.ones(ROWS, ids.shape[1], 1, tiles, dtype=torch.long)
        if kind == "image" and "image_attention_mask" in self.names:
            batch["image_attention_mask"] = torch.ones(ROWS, ids.shape[1], 1, dtype=torch.long)
        batch |= media
        if "actions" in batch:
            del batch["labels"]
        return {name: value for name, value in batch.items() if name in self.names or name == "labels"}

    def _word_of(self, kind: str) -> int | None:
        names = [
            f"{k}_{x}"
            for k in (kind, *(["video"] * (kind == "image")))
            for x in ("token_id", "token_index", "patch_id")
        ]
        found = [getattr(self.model.config, name, None) for name in names]
        found += [w for n, w in self.words.names.items() if n in names]
        return next((w for w in found if isinstance(w, int)), None)

    def _edge(self, kind: str, pattern: str) -> int | None:
        kinds = {"image": ("vision", "image", "img"), "audio": ("audio",)}[kind]
        names = [f"{k}_{pattern}_token_id" for k in kinds] + [f"{k}_{pattern}_id" for k in kinds]
        names += [f"{pattern[0]}o{kind[0]}_token_{x}" for x in ("id", "index")]
        return next((w for name in names if (w := self.words.names.get(name)) is not None), None)

    def _feature_count(self, kind: str, media: Batch) -> int | None:
        """Return the number of words that stand for an image or a sound of a row, if the model tells."""
        owners = (self.model, getattr(self.model, "model", None), getattr(self.model, "base_model", None))
        for owner in owners:
            method = getattr(owner, f"get_{kind}_features", None)
            if method is None:
                continue
            known = inspect.signature(method).parameters
            try:
                with torch.no_grad():
                    found = method(**{name: value for name, value in media.items() if name in known})
                found = getattr(found, "pooler_output", found)
                parts = found if isinstance(found, list | tuple) else [found]
                rows = sum(part.reshape(-1, part.shape[-1]).shape[0] for part in parts)
                if rows % ROWS == 0:
                    return rows // ROWS
            except Exception:  # of any type, as the method reads something else; then counts are tried
                continue
        return None

    def _images(self) -> Iterator[Batch]:
        """Yield one image per row in the formats of processors."""
        channels, temporal = 3, self._in_configs("temporal_patch_size", self._in_configs("patch_temporal", 1))
        side, patch = self._in_configs("image_size", IMAGE), self._in_configs("patch_size", PATCH)
        high, tiles = side // patch, self._in_configs("max_num_tiles", 1)
        length = channels * patch * patch
        images = _random(ROWS, channels, side, side)
        patches = _random(ROWS, high * high, length)
        grid = torch.tensor([[1, high, high]] * ROWS)
        others: Batch = {
            "image_sizes": torch.tensor([[side, side]] * ROWS),
            "spatial_shapes": torch.tensor([[high, high]] * ROWS),
            "target_sizes": torch.tensor([[high, high]] * ROWS),
            "image_grid_thw": grid,
            "grid_thw": grid,
            "image_grid_hw": grid[:, 1:],
            "state": _random(ROWS, self._in_configs("max_state_dim", 8)),
            "actions": _random(ROWS, self._in_configs("chunk_size", 4), self._in_configs("max_action_dim", 8)),
            "noise": _random(ROWS, self._in_configs("chunk_size", 4), self._in_configs("max_action_dim", 8)),
            "timestep": _random(ROWS).sigmoid(),
            "image_merge_sizes": torch.full((ROWS,), self._in_configs("spatial_merge_size", 1)),
            "image_position_ids": torch.cartesian_prod(torch.arange(high), torch.arange(high)).expand(ROWS, -1, -1),
            "batch_num_images": torch.ones(ROWS, dtype=torch.long),
            "image_num_crops": torch.ones(ROWS, dtype=torch.long),
            "image_grids": torch.tensor([[high // 2, high // 2, 0, 0]] * ROWS),
            "image_token_pooling": torch.arange(ROWS * high * high).view(-1, 4),
            "aspect_ratio_ids": torch.ones(ROWS, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(ROWS, 1, tiles, dtype=torch.long),
        }
        others = {name: value for name, value in others.items() if name in self.names}
        others |= {name: images for name in self.names if name.endswith("_pixel_values")}
        main = next((n for n in ("pixel_values", "pixel_values_images", "flattened_patches") if n in self.names), None)
        if main is None:
            yield others
            return
        flat = _random(ROWS * high * high, length * temporal)
        place = torch.cartesian_prod(torch.arange(1, high + 1), torch.arange(1, high + 1)).expand(ROWS, -1, -1)
        formats: list[tuple[Tensor, Tensor]] = [
            (images, torch.ones(ROWS, side, side, dtype=torch.long)),
            (images[:, None], torch.ones(ROWS, 1, side, side, dtype=torch.long)),
            (patches, torch.ones(ROWS, high * high, dtype=torch.long)),
            (flat, torch.ones(ROWS * high * high, dtype=torch.long)),
            (images[:, None], torch.ones(ROWS, 1, dtype=torch.bool)),
            (
                images[:, None, None].repeat(1, 1, tiles, 1, 1, 1),
                torch.ones(ROWS, 1, tiles, side, side, dtype=torch.long),
            ),
            (flat.view(-1, channels, patch, patch) if temporal == 1 else flat, torch.ones(ROWS)),
            (torch.cat([place, patches], dim=2), torch.ones(ROWS, high * high, dtype=torch.long)),
            (_random(ROWS, 2, channels, side, side), torch.ones(ROWS, 2, side, side, dtype=torch.long)),
            (_random(ROWS * side * side, channels), torch.ones(ROWS * side * side)),
        ]
        if (pooled := self._in_configs("pooling_kernel_size", 1)) > 1:
            formats.append((_random(ROWS, high * high, length * pooled**2), formats[2][1]))
        if "target_sizes" in self.names:  # the patches of all images side by side
            wide = _random(1, channels, patch, patch * ROWS * high * high)
            formats.insert(0, (wide, torch.ones(1, ROWS * high * high, dtype=torch.long)))
        if {"image_grid_thw", "grid_thw", "image_grid_hw"} & self.names:
            formats.insert(0, formats[3])
        for pixels, mask in formats:
            others |= {name: mask for name in ("pixel_attention_mask", "pixel_mask") if name in self.names}
            yield {main: pixels, **others}
            if "image_sizes" in others:
                yield {main: pixels, **{name: value for name, value in others.items() if name != "image_sizes"}}

        merge = self._in_configs("spatial_merge_size", 1)  # patches of a word side by side, and a grid of words
        words, width = high // merge, merge * patch
        if merge > 1 and "image_grid_thw" in others:
            of_words = torch.tensor([[1, words, words]] * ROWS)
            yield {main: _random(ROWS * words**2, width, width, channels), **others, "image_grid_thw": of_words}

    def _sounds(self) -> Iterator[Batch]:
        """Yield one sound per row in the formats of feature extractors."""
        names = ("num_mel_bins", "n_mel_bins", "input_feat_size", "input_dim", "mel_dim", "feature_size")
        bins = next((found for name in names if (found := self._in_configs(name, 0))), 80)
        bins *= self._in_configs("num_stacked_frames", 1)
        mains = [
            n for n in ("input_features", "input_values", "audio_values", "audio_input_features") if n in self.names
        ]
        lengths = (FRAMES, 2 * FRAMES, 160, 8 * TEXT, 2 * self._in_configs("n_window", FRAMES))
        for has_mask, main, frames in itertools.product((True, False), mains or [None], lengths):
            for features in (
                _random(ROWS, bins, frames),
                _random(ROWS, frames, bins),
                _random(ROWS, 40 * frames),
                _random(ROWS, 1, 40 * frames),
            ):
                masks = ("feature_attention_mask", "input_features_mask", "audio_attention_mask")
                mask = torch.ones(ROWS, frames, dtype=torch.long)
                others = {name: mask for name in masks if has_mask and name in self.names}
                others |= {
                    name: torch.full((ROWS,), frames)
                    for name in ("audio_feature_lengths", "audio_embed_sizes", "feature_lengths")
                    if name in self.names
                }
                yield {**({main: features} if main else {}), **others}

    def _in_configs(self, name: str, default: int) -> int:
        return number_in_configs(self.model, name) or default


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
