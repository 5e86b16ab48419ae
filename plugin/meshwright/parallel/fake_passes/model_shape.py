"""Read a decoder's sizes from its modules, so that the planner can handle models without a transformers config."""

from __future__ import annotations

from torch import nn

from meshwright.errors import PlanError
from meshwright.parallel.tensor_parallel.structure import DecoderStructure
from meshwright.parallel.tensor_parallel.structure import describe as describe_structure
from meshwright.planner.job.shapes import ModelShape
from meshwright.roles import ShardingPlan
from meshwright.roles.blocks import Block
from meshwright.roles.projection import in_features, out_features, weight_of


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
    biases = sum(p.numel() for block in (attention, mlp) for p in _biases(block))
    matrices = sum(p.numel() for p in inside.values()) // layers - biases
    outside = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    others = outside - weight_of(structure.embedding).numel() - hidden  # without the embedding and the final norm
    head = 0 if _is_tied(structure) or others < vocab * hidden else vocab * hidden
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


def _biases(block: Block) -> list[nn.Parameter]:
    return [p for module in (*block.columns, block.row) for p in module.parameters() if p.ndim == 1]


def _is_tied(structure: DecoderStructure) -> bool:
    return structure.head is not None and weight_of(structure.head) is weight_of(structure.embedding)
