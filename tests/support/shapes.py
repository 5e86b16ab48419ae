"""Shapes of models for the tests of the planner."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright_plan.job.layer_shape import LayerShape
from meshwright_plan.job.shapes import ModelShape

OF_LAYER = {field.name for field in dataclasses.fields(LayerShape)}


def changed(shape: ModelShape, **sizes: Any) -> ModelShape:
    """Return a model of one run of layers with other sizes, of the model or of its layers."""
    if "layers" in sizes:
        sizes["count"] = sizes.pop("layers")
    (run,) = shape.runs
    run = dataclasses.replace(run, **{name: sizes.pop(name) for name in OF_LAYER & sizes.keys()})
    return dataclasses.replace(shape, runs=(run,), **sizes)


def in_runs(shape: ModelShape, *counts: int) -> ModelShape:
    """Return the same model with its equal layers in several runs."""
    (run,) = shape.runs
    return dataclasses.replace(shape, runs=tuple(dataclasses.replace(run, count=count) for count in counts))
