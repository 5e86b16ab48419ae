"""Whole tensors out of shards: one-device names and shapes, on rank 0."""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.checkpoint.assemble import assemble, is_first
from meshwright.optim.runtime import Runtime, find_runtime, runtime_of
from meshwright.parallel.layout import RowLayout, record_of


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The one-device state dict of a distributed model, on the CPU of rank 0; empty elsewhere.

    A collective call: every rank makes it. A tied weight appears under each of its names. The dict
    holds the whole model in rank 0's memory; ``model.save_pretrained`` writes it without.

    Example::

        weights = mw.full_state_dict(model)
        if dist.get_rank() == 0:
            torch.save(weights, "model.pt")
    """
    return gather_state(model, model.state_dict(keep_vars=True))


def gather_state(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As :func:`full_state_dict`, of some of a model's tensors."""
    runtime = find_runtime(model)
    if runtime is None:
        return {name: value.detach().cpu().clone() for name, value in state.items()}
    full: dict[str, Tensor] = {}
    done: dict[int, Tensor | None] = {}
    for name, value in state.items():
        if id(value) not in done:
            whole = gather_full(value, runtime)
            # A tensor that is not sharded is the model's own: the user gets a copy.
            done[id(value)] = whole.cpu().clone() if whole is not None and whole.shape == value.shape else whole
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
    runtime.check_own("full_gradients", "it may have reduced or freed them already")
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
            whole = _gather(found.as_subclass(Tensor), parameter, runtime)
            if whole is not None:
                full[name] = whole.cpu().clone() if whole.shape == found.shape else whole
    return full


def gather_full(value: Tensor, runtime: Runtime) -> Tensor | None:
    """The whole of a distributed model's parameter or buffer on rank 0, None elsewhere; every rank calls it.

    On the CPU, and in memory of its own, if it is sharded; else the tensor itself.
    """
    if isinstance(value, nn.Parameter):
        if runtime.materialise is None:
            return _gather(value.detach(), value, runtime)
        with runtime.materialise(value):
            whole = _gather(value.detach(), value, runtime)
            return None if whole is None else whole.cpu().clone()
    return value.detach() if is_first(runtime) else None


def _gather(local: Tensor, parameter: nn.Parameter, runtime: Runtime) -> Tensor | None:
    """The whole of a tensor shaped like a parameter's shard."""
    cut = RowLayout.replicated(local.numel(), runtime.dp.size)
    return assemble(local.reshape(-1), record_of(parameter), cut, runtime)
