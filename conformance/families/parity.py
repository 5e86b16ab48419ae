"""Compares a family on two ranks with sequence parallelism with the same program on one device, in float64.

The tolerance is 1e-10 of a tensor's largest value: only the order of sums differs, by about 1e-16 per sum.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from conformance.families.models import DENSE, build, tiny_config
from meshwright.parallel.tensor_parallel.structure import DecoderStructure, describe
from meshwright.roles import Role, plan_for
from meshwright.roles.linear_kernel import output_dim
from meshwright_tools.verification.float64_modules import in_float64
from support.exact import gradient_differences, relative_difference

TOLERANCE = 1e-10
PLAN = mw.ParallelPlan(tp=2, sequence_parallel=True)
ROWS, LENGTH = 2, 11  # the length is not divisible by 2


@dataclass
class Numbers:
    """The results of one pass of a model, for comparison."""

    logits: Tensor
    loss: float
    gradients: dict[str, Tensor] = field(default_factory=dict)


def batch(*, packed: bool = False) -> dict[str, Tensor]:
    """Return rows of random tokens, or packed rows of two documents each."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 97, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[1, :4] = -100
    if not packed:
        return {"input_ids": ids, "labels": labels}
    positions = torch.cat([torch.arange(LENGTH // 2), torch.arange(LENGTH - LENGTH // 2)])
    return {"input_ids": ids, "labels": labels, "position_ids": positions.expand(ROWS, -1)}


def numbers(model: nn.Module, inputs: dict[str, Tensor], *, distributed: bool) -> Numbers:
    """Return the logits in evaluation, where they are whole, and the loss and whole gradients of a training step."""
    model.eval()
    with torch.no_grad():
        logits = model(**{name: x for name, x in inputs.items() if name != "labels"}).logits.clone()
    model.train()
    loss = model(**inputs).loss
    loss.backward()
    if distributed:
        return Numbers(logits, loss.item(), mw.full_gradients(model))
    return Numbers(logits, loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def differences(
    model_type: str,
    *,
    packed: bool = False,
    plan: mw.ParallelPlan = PLAN,
    inputs: dict[str, Tensor] | None = None,
    **overrides: Any,
) -> dict[str, float]:
    """Return the relative differences of logits, loss and every gradient; every rank must make the call.

    Args:
        packed: whether each row has two documents.
        inputs: inputs of the model besides the batch.
        overrides: values of the tiny config to replace.

    Raises:
        AssertionError: if a parameter has a gradient in one program only.
    """
    given = batch(packed=packed) | (inputs or {})
    with in_float64():
        expected = numbers(build(model_type, **overrides), given, distributed=False)
        model = mw.to_distributed(build(model_type, **overrides), config=mw.ToDistributedConfig(plan=plan))[0]
        actual = numbers(model, given, distributed=True)
    found = {
        "logits": relative_difference(actual.logits, expected.logits),
        "loss": abs(actual.loss - expected.loss) / abs(expected.loss),
    }
    if torch.distributed.get_rank() == 0:  # only rank 0 has whole gradients
        found |= gradient_differences(actual.gradients, expected.gradients)
    return found


@dataclass(frozen=True)
class Record:
    """The largest difference of each program of a family; None for a program that the family cannot run.

    Args:
        parity: the difference with tp=2 and sequence parallelism.
        kv: the difference for a model with one key/value head, which both ranks hold.
        tied: the difference for a model with one matrix for embedding and head.
        packed: the difference for rows of two documents each.
        traits: the differences between the family's structure and Llama's.
    """

    family: str
    parity: float
    kv: float | None
    tied: float | None
    packed: float | None
    traits: str

    @property
    def passes(self) -> bool:
        return all(value is None or value <= TOLERANCE for value in (self.parity, self.kv, self.tied, self.packed))


def check(family: str) -> Record:
    """Return the record of all programs of a family; both ranks must make the call."""

    def largest(**options: Any) -> float:
        values = differences(family, **options).values()
        return max(value if value == value else float("inf") for value in values)

    base = build(family)
    kv, tied = {"num_key_value_heads": 1}, {"tie_word_embeddings": True}
    parity = largest()
    replicates = _replicates_kv(base)
    can_replicate = not replicates and _has_kv_heads(family) and _replicates_kv(build(family, **kv))
    return Record(
        family=family,
        parity=parity,
        kv=parity if replicates else largest(**kv) if can_replicate else None,
        tied=largest(**tied) if _is_tied(build(family, **tied)) else None,
        packed=largest(packed=True) if _separates_documents(base) else None,
        traits=traits(base),
    )


def _structure(model: nn.Module) -> DecoderStructure:
    return describe(model, plan_for(model), tp=2, sequence_parallel=True)


def _replicates_kv(model: nn.Module) -> bool:
    heads = [block.heads for block in _structure(model).blocks if block.heads is not None]
    return any(layout.num_local_kv_heads * layout.tp > layout.kv_heads for layout in heads)


def _has_kv_heads(family: str) -> bool:
    return hasattr(tiny_config(family), "num_key_value_heads") and DENSE[family].get("num_key_value_heads") is None


def _is_tied(model: nn.Module) -> bool:
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    return head is not None and head.weight is model.get_input_embeddings().weight  # type: ignore[operator]


def _separates_documents(model: nn.Module) -> bool:
    """Return whether positions that restart at 0 keep a row's second document from attending to the first."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    first, inputs = LENGTH // 2, batch(packed=True)
    alone = {name: inputs[name][:, first:] for name in ("input_ids", "position_ids")}
    model.eval()
    with in_float64(), torch.no_grad():
        together = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"]).logits[:, first:]
        separate = model(**alone).logits
    model.train()
    return relative_difference(together, separate) < TOLERANCE


_TRAITS = {
    Role.QKV: "q, k, v fused by kind",
    Role.QKV_BY_GROUP: "q, k, v fused by group",
    Role.QKV_IN_FOUR: "q, v, k fused in four parts",
    Role.GATE_UP: "gate and up fused",
    Role.HEAD_NORM: "norm of each head",
    Role.Q_NORM: "norm of all heads",
    Role.INNER_NORM: "norm before the output projection",
}


def traits(model: nn.Module) -> str:
    """Return how a family's structure differs from Llama's, according to its sharding plan and its modules."""
    structure, plan = _structure(model), plan_for(model)
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    roles = {role: name for name in names if (role := plan.role_of(name)) is not None}
    found = [label for role, label in _TRAITS.items() if role in roles]
    if any("kv_a" in name for name in names):
        found.append("latent attention")
    elif Role.PER_HEAD in roles:
        found.append("a sink for each head")
    if any(output_dim(module) == 1 for module in model.modules()):
        found.append("transposed weights")
    if any(block.module in structure.layers for block in structure.blocks):
        found.append("MLP owned by the layer")
    if Role.GATE not in roles and Role.GATE_UP not in roles:
        found.append("plain MLP")
    if any(isinstance(m, nn.Embedding) and m is not structure.embedding for m in model.modules()):
        found.append("position embeddings")
    if {"alibi", "position_bias"} & {
        p for b in structure.blocks for p in inspect.signature(b.module.forward).parameters
    }:
        found.append("alibi")
    return ", ".join(found)
