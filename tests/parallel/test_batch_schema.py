"""The rows of a batch keep their images, videos and sounds, however a processor lists them, whatever rows are taken.

What a collate function makes of some rows is the part of these rows in what it makes of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.parallel.batch.items import BatchFormat, Items
from meshwright.parallel.batch.schema import BatchSchema
from meshwright.plan.config import RowsOf
from support.tiers import crossings

IMAGE, VIDEO, AUDIO, START = 90, 91, 92, 93
FORMAT = BatchFormat.of(SimpleNamespace(image_token_id=IMAGE, video_token_id=VIDEO, audio_token_index=AUDIO))
Size = tuple[int, int, int]
Row = dict[str, list[Size]]  # the sizes of a row's items, by kind
_values = iter(range(1, 10**9))


def new(*shape: int) -> Tensor:
    """A tensor that no other one equals."""
    return torch.full(shape, float(next(_values)))


def placeholders(sizes: list[Size], token: int, features: Callable[[Size], int]) -> list[int]:
    return [word for size in sizes for word in (START, *[token] * features(size))]


def batch_of(rows: list[list[int]]) -> dict[str, Tensor]:
    longest = max(map(len, rows)) + 2
    ids = torch.tensor([[*row, *[1] * (longest - len(row))] for row in rows])
    return {"input_ids": ids, "labels": ids, "attention_mask": ids != 1}


class Patches:
    """Patches of images and videos beside their sizes, of which four make a feature, as Qwen's processor lists them."""

    def of_row(self, row: Row) -> dict[str, Any]:
        ids = placeholders(row["image"], IMAGE, self.features) + placeholders(row["video"], VIDEO, self.features)
        images, videos = ([new(math.prod(size) * 4, 3) for size in row[kind]] for kind in ("image", "video"))
        return {"ids": ids, "images": images, "videos": videos, "sizes": row}

    @staticmethod
    def features(size: Size) -> int:
        return math.prod(size)

    @staticmethod
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = batch_of([row["ids"] for row in rows])
        batch["position_ids"] = batch["input_ids"].expand(3, -1, -1)
        for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if patches := [x for row in rows for x in row[f"{kind}s"]]:
                sizes = [size for row in rows for size in row["sizes"][kind]]
                batch |= {pixels: torch.cat(patches), f"{kind}_grid_thw": torch.tensor(sizes) * torch.tensor([1, 2, 2])}
                if kind == "video":
                    batch["video_seconds"] = [float(size[0]) for size in sizes]
        return batch


class Alike(Patches):
    """Images of one size, each a row of its own in the tensor, as Llava's processor lists them."""

    def of_row(self, row: Row) -> dict[str, Any]:
        ids = placeholders(row["image"], IMAGE, lambda size: 4)
        return {"ids": ids, "images": [new(1, 2, 2) for _ in row["image"]]}

    @staticmethod
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = batch_of([row["ids"] for row in rows])
        images = [x for row in rows for x in row["images"]]
        return {**batch, **({"pixel_values": torch.stack(images)} if images else {})}


class Padded(Alike):
    """As many images in each row as in the row with most of them, black where it has fewer, as Idefics' processor."""

    @staticmethod
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = batch_of([row["ids"] for row in rows])
        most = max(len(row["images"]) for row in rows)
        if not most:
            return batch
        padded = [torch.stack([*row["images"], *[torch.zeros(1, 2, 2)] * (most - len(row["images"]))]) for row in rows]
        return {**batch, "pixel_values": torch.stack(padded)}


class Sized(Patches):
    """Images padded to the largest, beside their sizes in pixels, as Pixtral's processor lists them."""

    def of_row(self, row: Row) -> dict[str, Any]:
        ids = placeholders(row["image"], IMAGE, lambda size: size[1] * size[2])
        images = [new(1, 14 * h, 14 * w) for _, h, w in row["image"]]
        return {"ids": ids, "images": images}

    @staticmethod
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = batch_of([row["ids"] for row in rows])
        images = [x for row in rows for x in row["images"]]
        if not images:
            return batch
        padded = [torch.nn.functional.pad(x, (0, 42 - x.shape[2], 0, 42 - x.shape[1])) for x in images]
        return {
            **batch,
            "pixel_values": torch.stack(padded),
            "image_sizes": torch.tensor([x.shape[1:] for x in images]),
        }


class Wide(Patches):
    """Patches of all images side by side, beside their sizes in patches, as MiniCPM's processor lists them."""

    def of_row(self, row: Row) -> dict[str, Any]:
        ids = placeholders(row["image"], IMAGE, lambda size: size[1] * size[2])
        return {"ids": ids, "images": [new(3, 2, 8 * h * w) for _, h, w in row["image"]], "sizes": row["image"]}

    @staticmethod
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = batch_of([row["ids"] for row in rows])
        sizes = [(2 * h, 2 * w) for row in rows for _, h, w in row["sizes"]]
        if not sizes:
            return batch
        wide = torch.cat([x for row in rows for x in row["images"]], -1).unsqueeze(0)
        return {**batch, "pixel_values": wide, "target_sizes": torch.tensor(sizes)}


class Sounds(Patches):
    """Sounds of several lengths, beside a mask of their frames, whose number of features no proportion tells."""

    def of_row(self, row: Row) -> dict[str, Any]:
        ids = placeholders(row["audio"], AUDIO, lambda size: size[1] * size[2] // 2 + 1)
        return {"ids": ids, "sounds": [(new(2, 12), size[1] * size[2]) for size in row["audio"]]}

    @staticmethod
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = batch_of([row["ids"] for row in rows])
        sounds = [x for row in rows for x in row["sounds"]]
        if not sounds:
            return batch
        mask = torch.stack([torch.arange(12) < length for _, length in sounds]).long()
        features = {"input_features": torch.stack([x for x, _ in sounds]), "feature_attention_mask": mask}
        return {**batch, **features}


class OfRows(Alike):
    """A list of the images of each row, and a value of each row in a nested input."""

    @staticmethod
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = batch_of([row["ids"] for row in rows])
        nested = {"more": {"of_row": batch["input_ids"] * 2}, "names": [str(row["ids"]) for row in rows], "scale": 2.0}
        images = {"pixel_values": [row["images"] for row in rows]} if any(row["images"] for row in rows) else {}
        return {**batch, **nested, **images}


FORMATS = {kind.__name__: kind() for kind in (Patches, Alike, Padded, Sized, Wide, Sounds, OfRows)}
sizes = st.lists(st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3)), max_size=3)
rows_of = st.lists(st.fixed_dictionaries({"image": sizes, "video": sizes, "audio": sizes}), min_size=1, max_size=5)


def assert_equal(actual: Any, expected: Any, name: str) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), name
        for key in expected:
            assert_equal(actual[key], expected[key], f"{name}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), name
        for one, other in zip(actual, expected, strict=True):
            assert_equal(one, other, name)
    elif isinstance(expected, Tensor):
        assert torch.equal(actual, expected), name
    else:
        assert actual == expected, name


def without_padding(batch: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A batch whose tensors have the padding of another one, whose rows are shorter, cut away."""

    def cut(x: Any, like: Any) -> Any:
        if isinstance(x, dict):
            return {key: cut(item, like.get(key)) for key, item in x.items()}
        if not isinstance(x, Tensor) or not isinstance(like, Tensor) or x.ndim != like.ndim:
            return x
        return x[(slice(None), *(slice(n) for n in like.shape[1:]))] if x.shape[0] == like.shape[0] else x

    return {name: cut(x, own.get(name)) for name, x in batch.items()}


@pytest.mark.parametrize("name", crossings(FORMATS, only=[], quick=["Patches"]))
@settings(max_examples=60, deadline=None)
@given(rows=rows_of, data=st.data())
def test_a_part_is_what_the_rows_alone_are_collated_to(name: str, rows: list[Row], data: st.DataObject) -> None:
    made = [FORMATS[name].of_row(row) for row in rows]
    low = data.draw(st.integers(0, len(rows) - 1))
    high = data.draw(st.integers(low + 1, len(rows)))
    schema = BatchSchema(FORMATS[name].collate(made), FORMAT)
    own = FORMATS[name].collate(made[low:high])
    assert_equal(without_padding(schema.part(slice(low, high)), own), own, name)


def test_images_cut_evenly_would_be_caught() -> None:
    """A fault: the images are spread evenly over the rows."""
    made = [FORMATS["Patches"].of_row({"image": [(1, 1, 1)] * count, "video": []}) for count in (2, 0, 1, 1)]
    schema = BatchSchema(FORMATS["Patches"].collate(made), FORMAT)
    with mock.patch.object(Items, "of_items", range(5)), pytest.raises(AssertionError, match="pixel_values"):
        own = Patches.collate(made[:1])
        assert_equal(without_padding(schema.part(slice(0, 1)), own), own, "batch")


def images(*tokens: int) -> dict[str, Any]:
    """A batch whose rows have these numbers of placeholders, without words between them."""
    return batch_of([[IMAGE] * count for count in tokens])


def test_what_cannot_be_assigned_is_refused_with_its_cure() -> None:
    sizes = torch.tensor([[14, 14], [14, 28], [28, 28]])
    batch = {**images(5, 2), "pixel_values": new(3, 1, 28, 28), "image_sizes": sizes}
    with pytest.raises(PlanError, match=r"pixel_values has shape \(3, 1, 28, 28\) in a batch of 2 rows.*batch_dims"):
        BatchSchema(batch, FORMAT).split(2)
    for name, x in {"scores": torch.ones(5), "frames": [torch.ones(5)] * 3, "graph": torch.ones(3, 2)}.items():
        with pytest.raises(PlanError, match=rf"{name} has .* in a batch of 2 rows.*'{name}': lambda"):
            BatchSchema({**images(4, 4), name: x}, FORMAT).split(2)
    # Three images, and the tokens of two.
    batch = {**images(4, 4), "pixel_values": new(48, 3), "image_grid_thw": torch.tensor([[1, 4, 4]] * 3)}
    with pytest.raises(PlanError, match=r"pixel_values has shape \(48, 3\)"):
        BatchSchema(batch, FORMAT).split(2)


def test_patches_side_by_side_that_their_sizes_do_not_explain_are_refused() -> None:
    sizes = torch.tensor([[2, 2], [2, 4], [2, 2]])
    batch = {**images(3, 1), "pixel_values": new(1, 3, 2, 32), "target_sizes": sizes}
    parts = BatchSchema(batch, FORMAT).split(2)
    assert [part["pixel_values"].shape[-1] for part in parts] == [24, 8]
    others: list[dict[str, Any]] = [images(2, 2), {"pixel_values": new(1, 3, 2, 34)}, {"target_sizes": sizes[:2]}]
    for other in others:  # tokens, patches or sizes that contradict the others
        with pytest.raises(PlanError, match=r"(pixel_values|target_sizes) has .*batch_dims"):
            BatchSchema({**batch, **other}, FORMAT).split(2)
    # Nothing but the sizes of these shapes [images, 2] tells that the second row has no image.
    batch = {**images(3, 0), "pixel_values": new(2, 8, 3), "spatial_shapes": sizes[:2]}
    first, second = BatchSchema(batch, FORMAT).split(2)
    assert len(first["spatial_shapes"]) == len(first["pixel_values"]) == 2 and "spatial_shapes" not in second


def test_the_program_says_where_the_rows_are() -> None:
    sizes = torch.tensor([[14, 14], [14, 28], [28, 28]])
    batch = {**images(5, 2), "pixel_values": torch.arange(3.0), "image_sizes": sizes, "bias": torch.ones(7, 2)}
    batch |= {"weights": torch.ones(5)}
    dims: dict[str, RowsOf] = {
        "pixel_values": lambda batch: [2, 1],
        "image_sizes": lambda batch: [2, 1],
        "bias": 1,
        "weights": None,
    }
    first, second = BatchSchema(batch, BatchFormat(placeholders=FORMAT.placeholders, dims=dims)).split(2)
    assert (first["pixel_values"].tolist(), second["pixel_values"].tolist()) == ([0.0, 1.0], [2.0])
    assert torch.equal(second["image_sizes"], sizes[2:])
    assert first["bias"].shape == (7, 1) and len(second["weights"]) == 5
    wrong: list[tuple[RowsOf, str]] = [
        (0, "names the dim of bias that has the rows, but its shape is \\(7, 2\\)"),
        (3, "its shape is"),
        (lambda batch: [1, 2], "2 numbers with the sum 7, but it returned"),
    ]
    for said, match in wrong:
        with pytest.raises(PlanError, match=match):
            BatchSchema({**images(5, 2), "bias": torch.ones(7, 2)}, BatchFormat(dims={"bias": said})).split(2)
    with pytest.raises(PlanError, match=r"batch_dims\['bias'\]='rows' must be the dim"):
        mw.ToDistributedConfig(batch_dims={"bias": "rows"})  # type: ignore[dict-item]
