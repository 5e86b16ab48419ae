"""Models with torchao's float8 layers, emulated, whose products are summed in float64 so that no sum rounds visibly.

The layers cast to float8 in float32 as always. torchao's emulation sums products in float32, and another order of the
sum may move an element over an edge of float8. In float64 the chance of that is too small to be seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

Scales = dict[str, list[Tensor]]


def with_float8(model: nn.Module, recipe: str, *, keep: str = "lm_head", **options: Any) -> nn.Module:
    """Convert all linear layers but those whose name contains ``keep``, with emulation."""
    import dataclasses

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), **{"emulate": True, **options})
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: keep not in name)


@contextlib.contextmanager
def exact_products() -> Iterator[Scales]:
    """Sum the products of float8 tensors in float64, and yield the scales of the operands by their roles."""
    from torchao.float8 import float8_utils
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

    seen: Scales = {"input": [], "weight": [], "grad_output": []}

    def product(operation: Any, args: Any, kwargs: Any = None) -> Tensor:
        for operand in args:
            seen[operand._gemm_input_role.value].append(operand._scale.detach().clone())
        wide = [(operand._data.float() / operand._scale).double() for operand in args]
        result: Tensor = torch.mm(*wide).to(args[0]._orig_dtype)
        return result

    own = float8_utils.amax_to_scale

    def scale(*args: Any, **kwargs: Any) -> Tensor:  # in float32, also inside of Float64
        with mock.patch.object(Tensor, "to", getattr(Tensor.to, "__wrapped__", Tensor.to)):
            result: Tensor = own(*args, **kwargs)
        return result

    patched = mock.patch.dict(FLOAT8_OPS_TABLE, {torch.ops.aten.mm.default: product})
    with patched, mock.patch.object(float8_utils, "amax_to_scale", scale):
        yield seen
