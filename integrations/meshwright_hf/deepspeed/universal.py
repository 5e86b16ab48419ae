"""Universal checkpoints: describes how each parameter is cut over tp, so that DeepSpeed can merge and reshard it.

DeepSpeed's converter (``python -m deepspeed.checkpoint.ds_to_universal``) reads the layouts from the checkpoint. They
are affine maps, which list blocks of the full tensor and their positions in each rank's shard. When DeepSpeed loads a
checkpoint, it reads the layouts from the parameters.
"""

from __future__ import annotations

import math
import os
import re
import types
from typing import Any

import torch
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.affine import AFFINE_MAP_FORMAT_VERSION, AffinePiece, ParamAffineMap
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch import Tensor, nn

from meshwright.checkpoint.one_device.stock_optimizer import read_pickle
from meshwright.layout.tensor_layout import TensorLayout, layout_of
from meshwright.mesh.axes import Axis
from meshwright.optim.runtime import Runtime
from meshwright.roles.decoder import ask

# The parameter attribute that DeepSpeed's stage 1 and 2 loader reads; without it the loader assumes an even split.
RESTORE = keys.DS_AUTOTP_UC_META

# The classes of DeepSpeed that its stage 3 stores beside tensors and numbers.
_STORED = (ZeroStageEnum, LossScaler, DynamicLossScaler)


def describe_for_universal(model: nn.Module, tp: Axis) -> None:
    """Store the layouts as attributes of the model and its parameters; DeepSpeed reads them to save and load."""
    found = (ask(model, getter) for getter in ("get_input_embeddings", "get_output_embeddings"))
    vocabulary = {id(module.weight) for module in found if module is not None}
    maps: dict[str, Any] = {}
    padded: list[str] = []
    unsupported: dict[str, str] = {}
    words = 0
    for name, parameter in model.named_parameters():
        layout, pattern = layout_of(parameter), f"^{re.escape(name)}$"
        rows = layout.over("tp")
        has_padding = rows.local_size * tp.size > rows.size and not rows.has_copies and rows.dim == 0
        if id(parameter) in vocabulary:
            padded.append(pattern)
            words = rows.size
        elif has_padding:
            unsupported[pattern] = "it is padded, but DeepSpeed strips padding only from vocabulary matrices"
        maps[pattern] = affine_map(layout).to_dict()
        if layout.is_sharded and not has_padding:
            restore = {"conversion": {"affine_map": maps[pattern]}, "logical_shape": tuple(layout.shape)}
            setattr(parameter, RESTORE, restore)
    model.universal_checkpoint_info = {  # type: ignore[assignment]
        keys.UNIVERSAL_CHECKPOINT_VERSION_KEY: keys.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        keys.ORIGINAL_VOCAB_SIZE: words,
        keys.PADDED_VOCAB_SIZE: math.ceil(words / tp.size) * tp.size,
        keys.VOCABULARY_PARAMETER_PATTERNS: padded,
        keys.AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS: unsupported,
        keys.AFFINE_MAP: {keys.AFFINE_MAP_VERSION: AFFINE_MAP_FORMAT_VERSION, keys.AFFINE_MAP_PARAMS: maps},
    }


def affine_map(layout: TensorLayout) -> ParamAffineMap:
    """Return a parameter's layout as DeepSpeed's affine map; padding rows follow the end of the full tensor.

    Example:
        >>> from meshwright.layout.row_layout import RowLayout
        >>> rows = RowLayout.even(4, 2)
        >>> layout = TensorLayout(shape=torch.Size((4, 3)), cuts=(("tp", rows),))
        >>> shards = {rank: rows.take(torch.arange(12.0).view(4, 3), rank) for rank in range(2)}
        >>> torch.equal(affine_map(layout).rebuild(shards), torch.arange(12.0).view(4, 3))
        True
    """
    rows, shape = layout.over("tp"), list(layout.shape)
    ranks = range(len(rows.spans))
    spans = {rank: list(rows.spans[rank]) for rank in ranks}
    if not rows.is_replicated and not rows.has_copies:
        end = rows.size
        for rank in ranks:
            if missing := rows.local_size - rows.real_rows(rank):
                spans[rank].append((end, end + missing))
                end += missing
        if shape:
            shape[rows.dim] = end
    local = [*shape]
    if shape:
        local[rows.dim] = rows.local_size
    holders = {span: [rank for rank in ranks if span in spans[rank]] for rank in ranks for span in spans[rank]}
    source, target = _strides(shape), _strides(local)
    pieces: dict[int, list[AffinePiece]] = {rank: [] for rank in ranks}
    for rank in ranks:
        offset = 0
        for start, stop in spans[rank]:
            block = [stop - start if dim == rows.dim else size for dim, size in enumerate(local)]
            piece = AffinePiece(
                shape=block,
                source_offset=start * source[rows.dim] if block else 0,
                source_strides=source,
                dest_offset=offset * target[rows.dim] if block else 0,
                dest_strides=target,
                locations=holders[start, stop],
            )
            pieces[rank].append(piece)
            offset += stop - start
    return ParamAffineMap(shape, dict.fromkeys(ranks, local), pieces)


def _strides(shape: list[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def adapt_universal_loading(optimizer: Any, runtime: Runtime) -> None:
    """Make stage 3 cut a universal checkpoint's tensors over tp, and restore each parameter group's options.

    DeepSpeed's stage 3 only supports its own tensor parallelism. It gives all groups the learning rate and the weight
    decay of the first group. It also gives torch's Adam one step counter for all groups, so each step counts once per
    group.
    """
    load_states = optimizer.load_hp_checkpoint_state_from_checkpoint_dir_stage3

    def load_shard(self: object, folder: str, key: str, param: nn.Parameter) -> Tensor:
        loaded = read_pickle(os.path.join(folder, f"{key}.pt"))
        full = loaded[keys.PARAM] if isinstance(loaded, dict) else loaded
        layout = layout_of(param)
        local = layout.take(full.view(layout.shape)).flatten()
        size = math.ceil(local.numel() / runtime.mesh.tokens.size)
        padded = local.new_zeros(size * runtime.mesh.tokens.size)
        padded[: local.numel()] = local
        return padded.narrow(0, runtime.mesh.tokens.rank * size, size)

    def load_with_groups(self: Any, folder: str) -> None:
        load_states(folder)
        common = read_pickle(os.path.join(folder, "zero", "optimizer_state.pt"), classes=_STORED)
        saved_groups = common[keys.OPTIMIZER_STATE_DICT]["param_groups"]
        for group, saved in zip(self.optimizer.param_groups, saved_groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()  # one tensor for all groups would count each group's step

    optimizer.load_hp_checkpoint_state = types.MethodType(load_shard, optimizer)
    optimizer.load_hp_checkpoint_state_from_checkpoint_dir_stage3 = types.MethodType(load_with_groups, optimizer)
