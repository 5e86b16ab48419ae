"""Models with torchao's float8 layers, emulated, whose products are summed in float64 so that no sum rounds visibly.

The layers cast to float8 in float32 as always. torchao's emulation sums products in float32, and another order of the
sum may move an element over an edge of float8. In float64 the chance of that is too small to be seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from meshwright.parallel.tensor_parallel import float8
from support.exact import Float64
from support.models import build
from support.short_programs import Plan, batches, distribute, losses_of, next_words, weights_of

Scales = dict[str, list[Tensor]]
Float8Run = tuple[list[float], dict[str, Tensor], dict[str, list[float]]]


def with_float8(model: nn.Module, recipe: str, *, keep: str = "lm_head", **options: Any) -> nn.Module:
    """Convert all linear layers but those whose name contains ``keep``, with emulation."""
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


def run(
    plan: Plan,
    recipe: str,
    keep: str,
    length: int,
    steps: int,
    *,
    is_shared: bool = True,
    is_exact: bool = True,
    parts: Sequence[Sequence[int]] = ((0, 1, 2, 3),),
    gathers: bool = False,
) -> Float8Run:
    """Return the losses, the whole weights, and the scales of each role, under a plan or on one device.

    Args:
        plan: the fields of the plan; None for one device.
        recipe: torchao's name of the recipe.
        keep: a part of the names of layers that stay as they are.
        length: the tokens of a row.
        steps: the steps.
        is_shared: whether ranks take maxima together, as they must.
        is_exact: whether all but the casts to float8 is in float64; otherwise all is in float32, as torchao does it.
        parts: the rows of each of the micro-batches in which one device computes a batch.
        gathers: whether the layers ask for all-gathers in float8.
    """
    alone = mock.patch.object(float8, "maximum", lambda x, axis: x)
    with contextlib.ExitStack() as stack:
        scales: Scales = {}
        if is_exact:
            stack.enter_context(Float64())  # type: ignore[arg-type]
            scales = stack.enter_context(exact_products())
        if not is_shared:
            stack.enter_context(alone)
        model = build("llama", mlp_bias=True)
        model = with_float8(
            model.double() if is_exact else model, recipe, keep=keep, enable_fsdp_float8_all_gather=gathers
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        rows = sum(map(len, parts))
        data = [{name: x[:rows, :length] for name, x in batch.items()} for batch in batches(steps)]
        model, optimizer, loader = distribute(plan, model, optimizer, data)

        def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
            pieces = [{name: x[list(own)] for name, x in batch.items()} for own in parts]
            return torch.stack([model(**piece).loss * next_words(piece) for piece in pieces]).sum() / next_words(batch)

        how = (loss_of,) if plan is None and len(parts) > 1 else ()
        losses = losses_of(model, optimizer, loader, *how)
    tokens = 1 if plan is None else plan.get("dp", 1) * plan.get("cp", 1)
    found = {}
    for role, seen in scales.items():
        # A pass that records shapes has fake tensors.
        every = torch.cat([x.flatten() for x in seen if type(x) is Tensor and not x.is_meta] or [torch.zeros(0)])
        # The gradient of a token that no loss uses is zero, and its scale that of torchao's smallest amax.
        own = every[every < 1e12] * (tokens if role == "grad_output" else 1)
        found[role] = own.unique().tolist()
    return losses, weights_of(model, plan), found
