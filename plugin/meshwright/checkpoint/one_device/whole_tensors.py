"""Gathers whole tensors on rank 0, under one-device names and in one-device shapes.

A tensor may be cut in any way, and is gathered a few megabytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.compiling import without_compilation
from meshwright.faults.every_rank import on_every_rank
from meshwright.faults.interpose import own_collectives
from meshwright.layout.packed_weights import state_without_packed
from meshwright.layout.row_layout import between, copy_blocks, numel, overlap, packed
from meshwright.layout.tensor_layout import TensorLayout, layout_of
from meshwright.mesh.axes import Axis, Mesh, Place
from meshwright.mesh.process_group import wait_for_message
from meshwright.optim.runtime import Runtime, device_of, find_runtime, runtime_of
from meshwright.parallel.collectives import maximum
from meshwright.parallel.shards.stand_in import own_shape, reading_shards

_CHUNK = 4 * 2**20  # bytes sent at a time; the first rank holds them in addition to the full tensor
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of gradients


@on_every_rank
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the one-device state dict of a distributed model, on the CPU of rank 0; other ranks get an empty dict.

    Every rank must make the call. A tied weight appears under each of its names. Weights that bitsandbytes has
    quantised are left out: they do not change. The dict holds the whole model in rank 0's memory;
    ``model.save_pretrained`` writes the model without holding it whole.

    Example::

        weights = mw.full_state_dict(model)
        if dist.get_rank() == 0:
            torch.save(weights, "model.pt")
    """
    model = without_compilation(model, "full_state_dict(model)")
    if (runtime := find_runtime(model)) is not None:
        runtime.compare_before_save()
    return gather_state(model, state_without_packed(model))


def gather_state(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gather some of a model's tensors as :func:`full_state_dict` does."""
    runtime = find_runtime(model)
    if runtime is None:
        return {name: value.detach().cpu().clone() for name, value in state.items()}
    full: dict[str, Tensor] = {}
    done: dict[int, Tensor | None] = {}
    for name, value in state.items():
        if id(value) not in done:
            whole = gather_full(value, runtime)
            # A tensor that is not sharded belongs to the model, so the user gets a copy.
            done[id(value)] = whole.cpu().clone() if whole is not None and whole.shape == own_shape(value) else whole
        if (whole := done[id(value)]) is not None:
            full[name] = whole
    return full


@on_every_rank
def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the one-device gradients of a distributed model, on the CPU of rank 0; other ranks get an empty dict.

    Every rank must make the call. Parameters without a gradient are left out; a tied parameter appears under its
    first name.

    Raises:
        ValueError: if the model is not distributed, or the last backward pass ran under ``no_sync``.
    """
    model = without_compilation(model, "full_gradients(model)")
    runtime = runtime_of(model)
    runtime.check_own("full_gradients", "it may have reduced or freed them already")
    runtime.gradients.check_synced()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    full: dict[str, Tensor] = {}
    local_ones = _local_gradients(runtime)
    for parameter, local in local_ones if runtime.mesh.pp.size == 1 else _of_all_stages(model, local_ones, runtime):
        whole = _gather(local, parameter, runtime)
        if whole is not None:
            full[names[id(parameter)]] = whole.cpu().clone() if whole.shape == local.shape else whole
    return {name: full[name] for name in names.values() if name in full}


def _local_gradients(runtime: Runtime) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter's gradient of its TP shard; ZeRO's slices are gathered over dp, one bucket at a time."""
    sharded_ones: set[int] = set()
    if runtime.gradients.zero is not None:
        runtime.gradients.zero.settle()
        sharded_ones = {id(parameter) for parameter in runtime.gradients.zero.parameters}
        for sharded in runtime.gradients.zero.sharded:
            for parameter, gradient in sharded.bucket.segments(sharded.gather_gradients()):
                if _has_any(parameter, runtime):
                    yield parameter, gradient
    for parameter in runtime.gradients.parameters:
        if id(parameter) not in sharded_ones and parameter.grad is not None:
            yield parameter, parameter.grad.as_subclass(Tensor)


def _of_all_stages(
    model: nn.Module, local_ones: Iterator[tuple[nn.Parameter, Tensor]], runtime: Runtime
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter that has a gradient on some pipeline stage, in the order of the model."""
    local = {id(parameter): gradient for parameter, gradient in local_ones}
    parameters = list(model.parameters())
    # ZeRO has float32 gradients of half-precision weights, and the ranks that receive a gradient must know its dtype.
    own = [0.0 if (grad := local.get(id(p))) is None else 1.0 + _DTYPES.index(grad.dtype) for p in parameters]
    numbers = maximum(torch.tensor(own, device=device_of(model)), runtime.mesh.pp).tolist()
    for parameter, number in zip(parameters, numbers, strict=True):
        if number:
            yield parameter, local.get(id(parameter), torch.empty(0, dtype=_DTYPES[int(number) - 1]))


def _has_any(parameter: nn.Parameter, runtime: Runtime) -> bool:
    """Return whether any data-parallel rank has a gradient for a parameter."""
    return bool(maximum(torch.tensor(float(parameter.grad is not None), device=parameter.device), runtime.mesh.tokens))


def gather_full(value: Tensor, runtime: Runtime) -> Tensor | None:
    """Return a distributed model's whole parameter or buffer on rank 0, None elsewhere; every rank must make the call.

    A sharded tensor is returned in new memory on the CPU, any other tensor as it is.
    """
    with reading_shards():
        return _gather_full(value, runtime)


def _gather_full(value: Tensor, runtime: Runtime) -> Tensor | None:
    if isinstance(value, nn.Parameter):
        if runtime.weights is not None:
            return assemble(runtime.weights.part(value), runtime.weights.layout(value), runtime.mesh)
        engine = runtime.gradients.engine
        if engine is None or engine.materialise is None:
            return _gather(value.detach(), value, runtime)
        with engine.materialise(value):
            whole = _gather(value.detach(), value, runtime)
            return None if whole is None else whole.cpu().clone()
    return value.detach() if runtime.mesh.is_first else None


def _gather(local: Tensor, parameter: nn.Parameter, runtime: Runtime) -> Tensor | None:
    """Gather a whole tensor from local tensors that have the shape of a parameter's shards."""
    layout = layout_of(parameter)
    # What stands in for a parameter of another pipeline stage has no memory, and would get some if it were reshaped.
    return assemble(local.reshape(-1) if layout.is_held else local.new_empty(0), layout, runtime.mesh)


def assemble(part: Tensor, layout: TensorLayout, mesh: Mesh) -> Tensor | None:
    """Return the whole tensor on the first rank, None elsewhere; every rank must make the call.

    The tensor is in new memory on the CPU, unless this rank's part is the whole tensor. A tensor of another pipeline
    stage is assembled there and sent on, since the other stages do not know how that stage slices it.

    Args:
        part: what this rank has of the tensor, 1-d; empty on a rank that has nothing of it.
        layout: which elements each rank of this rank's stage has.
        mesh: the ranks.
    """
    stage, step = layout.first_stage, max(1, _CHUNK // part.element_size())
    whole = _of_stage(part.contiguous(), layout, mesh, step) if mesh.pp.rank == stage else None
    if stage == 0 or mesh.tp.rank or mesh.tokens.rank or mesh.pp.rank not in (0, stage):
        return whole
    full = torch.empty(layout.shape, dtype=part.dtype) if whole is None else whole
    for values in full.view(-1).split(step):
        piece = values.to(part.device)
        _hop(piece, stage, mesh.pp)
        if whole is None:
            values.copy_(piece)
    return full if whole is None else None


def _of_stage(part: Tensor, layout: TensorLayout, mesh: Mesh, step: int) -> Tensor | None:
    """Return the whole tensor on the first rank of a pipeline stage, None on the stage's other ranks."""
    is_first = mesh.tp.rank == mesh.tokens.rank == 0
    if not layout.is_cut:
        return part.view(layout.shape) if is_first else None
    full = torch.empty(layout.shape, dtype=part.dtype) if is_first else None
    for shards, spans in layout.regions(mesh.places):
        for owner, *_ in shards[0]:
            hops = _hops(mesh.places[owner], mesh)
            if not hops and owner != mesh.index:
                continue
            blocks = layout.blocks(mesh.places[owner], spans)
            share = packed(blocks)
            for start in range(0, numel(share), step):
                chunk = between(share, start, start + step)
                piece = part.new_empty(numel(chunk))
                if owner == mesh.index:
                    copy_blocks(piece, part, overlap(chunk, blocks))
                for source, axis in hops:
                    _hop(piece, source, axis)
                if full is not None:
                    copy_blocks(full.view(-1), piece.cpu(), [block.swapped() for block in chunk])
    return full


def _hops(source: Place, mesh: Mesh) -> list[tuple[int, Axis]]:
    """Return the hops from a rank to the first rank of its stage, along tp and then tokens, that this rank is in."""
    tp, tokens = source["tp"], source["tokens"]
    hops = []
    if tp and mesh.tokens.rank == tokens and mesh.tp.rank in (0, tp):
        hops.append((tp, mesh.tp))
    if tokens and mesh.tp.rank == 0 and mesh.tokens.rank in (0, tokens):
        hops.append((tokens, mesh.tokens))
    return hops


@own_collectives()
def _hop(piece: Tensor, source: int, axis: Axis) -> None:
    """Send a piece from one rank of an axis to the first rank."""
    assert axis.group is not None
    if axis.rank == source:
        work = dist.isend(piece, dist.get_global_rank(axis.group, 0), group=axis.group)
    else:
        work = dist.irecv(piece, dist.get_global_rank(axis.group, source), group=axis.group)
    wait_for_message(work, axis.group, piece.device)
