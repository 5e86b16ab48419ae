"""What the planner counts of a program's own optimizer: its state and its work, as trial steps of copies show."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from meshwright.optim.chained import members
from meshwright.optim.reads import Reads, reads_of
from meshwright.optim.trial import trial_step
from meshwright.planner.job.optimizers import OPTIMIZERS, OptimizerKind

_ROWS, _COLUMNS = (64, 128), 96  # large enough for an optimizer that quantises the state of large parameters
_SMALL = 16, 12  # too small for it
_DEFAULT = "adamw"
_ROUNDING = 0.1  # of the number of tensors, by numbers beside them and by sums of rows
_ALIKE = 0.4  # of the singular values of an orthogonalised update; those of a random matrix of this shape reach 0.1


def kind_of(optimizer: Optimizer | None, model: nn.Module) -> str | OptimizerKind:
    """Return what an optimizer keeps and computes; "adamw" if it is what AdamW does, or cannot be found out.

    Args:
        optimizer: the optimizer, which stays as it is; None if it is not known yet.
        model: its model, whose embeddings tell which group has the matrices of layers.
    """
    if optimizer is None:
        return _DEFAULT
    groups = [(each, group) for each in members(optimizer) for group in each.param_groups]
    ends = {id(weight) for weight in _embeddings(model)}
    sizes = [[0, 0] for _ in groups]  # elements that are of matrices of layers, and others
    for (_, group), size in zip(groups, sizes, strict=True):
        for p in group["params"]:
            size[p.ndim < 2 or id(p) in ends] += p.numel()
    matrices, others = (max(range(len(groups)), key=lambda index: sizes[index][which]) for which in (0, 1))
    try:
        per_element, rest, is_orthogonal = _tried(*groups[matrices])
        of_others = None if others == matrices else round(_tried(*groups[others])[0] / 4)
        small = _state(*groups[matrices], _SMALL)[0] / (4 * math.prod(_SMALL))
    except Exception:  # of any optimizer's own code
        return _DEFAULT
    is_packed = abs(per_element / 4 - round(per_element / 4)) > _ROUNDING
    tensors = round(small if is_packed else per_element / 4)
    is_whole = reads_of(optimizer)[matrices] is Reads.PARAMETER
    name = " and ".join(type(each).__name__ for each in members(optimizer))
    found = OptimizerKind(
        name=name,
        tensors=tensors,
        packed=per_element if is_packed else 0.0,
        of_others=None if of_others == tensors else of_others,
        is_factored=tensors == 0 and rest > _COLUMNS,  # bytes; a number or two are no sums of rows and columns
        is_whole=is_whole,
        orthogonalises=is_whole and is_orthogonal,
        words=name,
    )
    known = OPTIMIZERS[_DEFAULT]
    return _DEFAULT if replace(found, name=known.name, words=known.words) == known else found


def _tried(optimizer: Optimizer, group: dict[str, Any]) -> tuple[float, float, bool]:
    """Return the bytes of state per element, those beside, and whether the update's singular values are alike."""
    (small, update), (large, _) = (_state(optimizer, group, (rows, _COLUMNS)) for rows in _ROWS)
    per_element = (large - small) / ((_ROWS[1] - _ROWS[0]) * _COLUMNS)
    values = torch.linalg.svdvals(update.float())
    return per_element, small - per_element * _ROWS[0] * _COLUMNS, bool(values[-1] > _ALIKE * values[0] > 0)


def _state(optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, int]) -> tuple[int, Tensor]:
    """Return the bytes of the state of a parameter after a trial step, and the step's update."""
    update, state = trial_step(optimizer, group, shape)
    return sum(x.numel() * x.element_size() for x in _tensors(list(state.values()))), update


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield the plain tensors in a state, those inside of quantised ones included."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        yield from _tensors([getattr(value, name) for name in value.__tensor_flatten__()[0]])
    elif isinstance(value, Tensor):
        yield value


def _embeddings(model: nn.Module) -> Iterator[Tensor]:
    for name in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, name, lambda: None)()
        if isinstance(weight := getattr(module, "weight", None), Tensor):
            yield weight
