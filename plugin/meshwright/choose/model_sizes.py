"""Describe the sizes of a model to the planner: by its transformers config, or by its modules."""

from __future__ import annotations

import dataclasses

from torch import nn

from meshwright.errors import PlanError
from meshwright.mesh.process_group import world_size
from meshwright.parallel.fake_passes.measured_shape import needs_measuring
from meshwright.parallel.fake_passes.routed_shape import on_meta, routed_shape
from meshwright.parallel.tensor_parallel.structure import describe as describe_structure
from meshwright.plan.config import ToDistributedConfig
from meshwright.planner.job.shapes import ModelShape, describe
from meshwright.roles import ShardingPlan, find_decoder, plan_for
from meshwright.roles.adapters import without_wrappers
from meshwright.roles.blocks import Mixer
from meshwright.roles.blocks.experts import experts_of_own_code, has_experts
from meshwright.roles.decoder import load_of_towers
from meshwright.roles.projection import in_features, out_features, weight_of


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
