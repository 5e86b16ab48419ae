"""Whole tensors out of shards: one-device names and shapes, on rank 0."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.optim.runtime import Runtime, find_runtime, runtime_of
from meshwright.parallel.collectives import all_gather
from meshwright.parallel.layout import ShardRecord, record_of


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The one-device state dict of a distributed model, on the CPU of rank 0; empty elsewhere.

    A collective call: every rank makes it. A tied weight appears under each of its names.

    Example::

        weights = mw.full_state_dict(model)
        if dist.get_rank() == 0:
            torch.save(weights, "model.pt")
    """
    runtime = find_runtime(model)
    state = model.state_dict(keep_vars=True)
    if runtime is None:
        return {name: value.detach().cpu().clone() for name, value in state.items()}
    full: dict[str, Tensor] = {}
    done: dict[int, Tensor | None] = {}
    for name, value in state.items():
        if id(value) not in done:
            is_parameter = isinstance(value, nn.Parameter)
            whole = _assemble(value.detach(), record_of(value), runtime) if is_parameter else value.detach()
            done[id(value)] = whole.cpu().clone() if whole is not None and _is_first(runtime) else None
        if (whole := done[id(value)]) is not None:
            full[name] = whole
    return full


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The one-device gradients of a distributed model, on the CPU of rank 0; empty elsewhere.

    A collective call: every rank makes it. Parameters without a gradient are left out; a tied one
    appears under its first name.

    Raises:
        ValueError: if the model is not distributed, or the last backward pass ran under ``no_sync``.
    """
    runtime = runtime_of(model)
    runtime.check_synced()
    local: dict[int, Tensor] = {}
    if runtime.zero is not None:
        runtime.zero.drop_cleared()
        for sharded in runtime.zero.sharded:
            for parameter, gradient in sharded.bucket.segments(sharded.gather_gradients()):
                if parameter.grad is not None:
                    local[id(parameter)] = gradient
    full: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        found = local.get(id(parameter), parameter.grad)
        if found is not None:
            whole = _assemble(found.as_subclass(Tensor), record_of(parameter), runtime)
            if whole is not None and _is_first(runtime):
                full[name] = whole.cpu().clone()
    return full


def export_with_full_weights(model: nn.Module) -> None:
    """Make ``model.save_pretrained`` write one-device weights, from rank 0; every rank calls it."""
    save_pretrained = getattr(model, "save_pretrained", None)
    if save_pretrained is None:
        return

    @functools.wraps(save_pretrained)
    def save_full(save_directory: Any, *args: Any, **kwargs: Any) -> None:
        state = full_state_dict(model)
        if _is_first(runtime_of(model)):
            kwargs.setdefault("state_dict", state)
            save_pretrained(save_directory, *args, **kwargs)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()

    object.__setattr__(model, "save_pretrained", save_full)


def _is_first(runtime: Runtime) -> bool:
    return runtime.tp.rank == 0 and runtime.dp.rank == 0


def _assemble(local: Tensor, record: ShardRecord, runtime: Runtime) -> Tensor | None:
    """The whole tensor, on the first data-parallel rank's TP ranks; None on the others, which wait for nobody."""
    if not record.is_sharded:
        return local
    if runtime.dp.rank != 0:
        return None
    pieces = all_gather(local[None], runtime.tp)
    full = local.new_zeros(record.global_shape)
    for rank, piece in enumerate(pieces):
        record.layout.put(full, piece, rank)
    return full
