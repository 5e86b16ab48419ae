"""Images in the format of a model's processor, of the size that its config states, for passes that need no content."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from meshwright.errors import PlanError
from meshwright.parallel.fake_passes.fake_pass import fake_values, number_in_configs
from meshwright.parallel.fake_passes.known_values import KnownValues

_SIDE = 448  # pixels, of a tower that takes images of any size
_GRIDS = ("image_grid_thw", "grid_thw", "image_grid_hws")


@dataclass(frozen=True, kw_only=True)
class ExampleImages:
    """One image for each of some rows.

    Args:
        inputs: the arguments of forward beside those of tokens.
        tokens: tokens of one image in the decoder.
        word: the token in whose places the features of an image go.
        text: what an image is, for people.
    """

    inputs: dict[str, Tensor]
    tokens: int
    word: int
    text: str
    types: tuple[str, ...] = ()  # arguments that tell the tokens of images from others

    def in_dtype(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the inputs, with pixels in a dtype."""
        return {name: x.to(dtype) if x.is_floating_point() else x for name, x in self.inputs.items()}

    def batch(self, rows: int, length: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Return the arguments of forward for rows that begin with an image, with labels.

        Raises:
            PlanError: if an image has more tokens than a row.
        """
        if length <= self.tokens:
            raise PlanError(f"a row has {length} tokens, but {self.text} takes {self.tokens}: use longer rows")
        other = 0 if self.word else 1
        ids = torch.full((rows, length), other)
        ids[:, : self.tokens] = self.word
        of_image = (ids == self.word).long()
        of_rows = {name: torch.cat([x] * rows) for name, x in self.in_dtype(dtype).items()}
        types = dict.fromkeys(self.types, of_image)
        return {"input_ids": ids, "labels": torch.full_like(ids, other), **of_rows, **types}


def example_images(model: nn.Module) -> ExampleImages:
    """Return an image for one row of a model of transformers.

    Raises:
        PlanError: if the model's format of images is not known.
    """
    why = "it has no get_image_features"
    for inputs, text in _formats(model):
        try:
            features = _features(model, inputs)
        except PlanError:
            raise
        except Exception as error:  # of many kinds, where the tower takes another format
            why = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        word = number_in_configs(model, "image_token_id") or number_in_configs(model, "image_token_index")
        if word is None:
            why = "its config has no image_token_id"
            break
        names = inspect.signature(model.forward).parameters
        types = tuple(name for name in ("mm_token_type_ids", "token_type_ids") if name in names)
        return ExampleImages(inputs=inputs, tokens=features, word=word, text=text, types=types)
    raise PlanError(f"the format of the images of {type(model).__name__} is not known ({why})")


def run_tower(model: Any, inputs: Mapping[str, object]) -> Any:
    """Return the features of images.

    Raises:
        PlanError: if the model has no ``get_image_features``.
    """
    owner = next((m for m in (getattr(model, "model", None), model) if hasattr(m, "get_image_features")), None)
    if owner is None:
        raise PlanError(f"{type(model).__name__} has no get_image_features, so its tower is not called alone")
    known = inspect.signature(owner.get_image_features).parameters
    return owner.get_image_features(**{name: value for name, value in inputs.items() if name in known})


def _features(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Return the number of features of one image."""
    with FakeTensorMode(allow_non_fake_inputs=True), fake_values(model), torch.no_grad():
        dtype = next(model.parameters()).dtype
        given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
        with KnownValues(given) as known:
            output = run_tower(model, known.batch)
        found = [x for x in tree_leaves(getattr(output, "pooler_output", output)) if isinstance(x, Tensor)]
        return sum(x.numel() // x.shape[-1] for x in found)


def _formats(model: nn.Module) -> Iterator[tuple[dict[str, Tensor], str]]:
    """Yield one image in the formats of processors, the likeliest first, and what it is."""
    names = inspect.signature(model.forward).parameters
    number = functools.partial(number_in_configs, model)
    stated, patch = number("image_size"), number("patch_size") or 1
    merged = patch * (number("spatial_merge_size") or 1)
    side = stated or _SIDE // merged * merged
    high, channels = side // patch, number("in_channels") or number("num_channels") or 3
    text = f"an image of {side} x {side} pixels"
    image, grid = torch.zeros(1, channels, side, side), torch.tensor([[1, high, high]])
    others = {name: grid for name in _GRIDS if name in names}
    if "image_sizes" in names:
        others["image_sizes"] = torch.tensor([[side, side]])
    length = channels * patch * patch * (number("temporal_patch_size") or 1)
    patches = torch.zeros(high * high, length)
    for pixels in (patches, image, image[:, None]) if others.keys() & set(_GRIDS) else (image, image[:, None], patches):
        yield {"pixel_values": pixels + 0.5, **others}, text
        yield {"pixel_values": pixels + 0.5, **{name: x for name, x in others.items() if name != "image_sizes"}}, text
