"""Describes the job of a call to the planner: the model's sizes, the logits that are in memory at once, and the
optimizer's state and work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from meshwright.errors import PlanError
from meshwright.mesh.process_group import world_size
from meshwright.optim.chained import members
from meshwright.optim.elementwise import Reads, reads_of
from meshwright.optim.trial import trial_step
from meshwright.parallel.fake_passes.measured_shape import needs_measuring
from meshwright.parallel.fake_passes.routed_shape import on_meta, routed_shape
from meshwright.parallel.foreign_hooks import has_foreign_hooks
from meshwright.parallel.losses.deferred_logits import DeferringHead
from meshwright.parallel.tensor_parallel.structure import describe as describe_structure
from meshwright.plan.config import ToDistributedConfig
from meshwright.roles import ShardingPlan, find_decoder, plan_for
from meshwright.roles.adapters import without_wrappers
from meshwright.roles.blocks import Mixer
from meshwright.roles.blocks.experts import experts_of_own_code, has_experts
from meshwright.roles.decoder import load_of_towers
from meshwright.roles.linear_kernel import in_features, out_features, weight_of
from meshwright_plan.job.candidate import Logits
from meshwright_plan.job.optimizers import OPTIMIZERS, OptimizerKind
from meshwright_plan.job.shapes import ModelShape, describe


def logits_in_training(model: nn.Module, config: ToDistributedConfig) -> Logits:
    """Return the logits that are in memory at once in training with labels, as in ``Job``.

    Args:
        model: the model, before or after it was distributed.
        config: the options of ``to_distributed``.

    Example:
        >>> from torch import nn
        >>> logits_in_training(nn.Linear(2, 2), ToDistributedConfig(gather_logits=True))
        'gathered'
    """
    if config.gather_logits:
        return "gathered"
    find = getattr(without_wrappers(model)[1], "get_output_embeddings", None)
    head = find() if callable(find) else None
    if head is not None and has_foreign_hooks(head, backward=True):
        return "gathered"  # for the hook, also over the ranks of tp
    # An adapter on the head and an engine that gathers weights need all logits of this rank.
    is_whole = config.engine is not None or (head is not None and not DeferringHead.is_deferrable(head))
    return "sharded" if is_whole else "chunked"


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


def describe_model(model: nn.Module, config: ToDistributedConfig) -> ModelShape:
    """Describe the model by its transformers config or, without one or if that does not tell, by its structure.

    Raises:
        PlanError: the planner does not know the model's sizes.
    """
    name = type(model).__name__
    if hasattr(getattr(model, "config", None), "to_dict"):
        decoder = without_wrappers(model)[1]
        if shows_more_than_its_config(decoder):
            shape = routed_shape(on_meta(decoder), name=name)
            # What the program has frozen is trained in a new model.
            return dataclasses.replace(shape, tower_layers=load_of_towers(find_decoder(decoder)))
        return describe(model.config, name=name, architecture=type(decoder).__name__)
    try:
        return shape_of(model, config.sharding_plan or plan_for(model))
    except PlanError as error:
        raise PlanError(
            f"picking a plan needs a transformers config or a decoder's structure, and {name} has neither; pass a "
            f"plan: plan='dp{world_size()}' ({error})"
        ) from error


def shows_more_than_its_config(decoder: nn.Module) -> bool:
    """Return whether the planner reads sizes from the modules: those of experts, of mixers and of towers."""
    try:
        parts = find_decoder(decoder)
    except PlanError:
        return has_experts(decoder)
    is_decoder = not getattr(decoder.config, "is_encoder_decoder", False)
    if experts_of_own_code(decoder):
        return False
    return is_decoder and (has_experts(decoder) or needs_measuring(parts))


def against_tensor(model: nn.Module, sharding_plan: ShardingPlan | None = None) -> str | None:
    """Return why no plan with tp may be picked for a model with experts, mixers or towers; None if one may.

    Other models are asked for each size of tp, which costs more.
    """
    decoder = without_wrappers(model)[1]
    if not hasattr(getattr(decoder, "config", None), "to_dict") or not shows_more_than_its_config(decoder):
        return None
    try:
        found = describe_structure(decoder, sharding_plan or plan_for(decoder), tp=1, sequence_parallel=False)
    except PlanError as error:
        return str(error).splitlines()[0]
    if not has_experts(decoder):
        return None
    if mixer := next((block for block in found.blocks if isinstance(block, Mixer)), None):
        return f"{mixer.name} is cut by heads under tp, which the planner does not estimate beside experts"
    return next((f"{name} stays whole under tp, which the planner does not estimate" for name in found.whole), None)


def shape_of(model: nn.Module, plan: ShardingPlan) -> ModelShape:
    """Return the sizes of a decoder, read from its modules; each parameter counts once.

    Args:
        model: a decoder.
        plan: the roles of its modules.

    Raises:
        PlanError: if the model's structure is not a decoder's.
    """
    structure = describe_structure(model, plan, tp=1, sequence_parallel=False)
    attention = next((block for block in structure.blocks if block.heads is not None), None)
    mlp = next((block for block in structure.blocks if block.heads is None), None)
    if attention is None or mlp is None or attention.heads is None:
        lacking = "attention" if attention is None else "MLP"
        raise PlanError(f"{plan.source} finds no {lacking} block in {type(model).__name__}")
    hidden, ffn, heads = out_features(mlp.row), in_features(mlp.row), attention.heads
    layers, vocab = len(structure.layers), structure.embedding.num_embeddings
    inside = {id(p): p for layer in structure.layers for p in layer.parameters()}
    projections = [m for block in (attention, mlp) for m in (*block.columns, block.row)]
    biases = sum(p.numel() for m in projections for p in m.parameters() if p.ndim == 1)
    matrices = sum(p.numel() for p in inside.values()) // layers - biases
    outside = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    others = outside - weight_of(structure.embedding).numel() - hidden  # without the embedding and the final norm
    is_tied = structure.head is not None and weight_of(structure.head) is weight_of(structure.embedding)
    head = 0 if is_tied or others < vocab * hidden else vocab * hidden
    query, kv = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
    gated = sum(out_features(column) for column in mlp.columns) == 2 * ffn
    return ModelShape.of(
        name=type(model).__name__,
        layers=layers,
        hidden=hidden,
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        ffn=ffn,
        vocab=vocab,
        gated=gated,
        tied=not head,
        biases=biases,
        norms=max(0, matrices - hidden * (2 * query + 2 * kv) - hidden * ffn * (3 if gated else 2)),
        positions=max(0, others - head) // hidden,
    )
