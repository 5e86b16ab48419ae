"""Second derivatives, as of a penalty on gradients: an error where a gradient has no graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
)

import meshwright as mw
from support.exact import Float64
from support.models import SIZES, tokens

DP = {"dp": 2}
LENGTH = 12


def second_order(plan: dict[str, Any], of: str) -> str:
    """What a penalty on gradients of a classifier's loss says."""
    torch.manual_seed(0)
    with Float64():
        config = LlamaConfig(**SIZES, num_labels=3, attn_implementation="eager")
        model = LlamaForSequenceClassification(config).double()
        model = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))[0]
        ids = tokens(4, LENGTH)[:: plan.get("dp", 1)]
        labels = torch.arange(len(ids)) % 3
        try:
            if of == "parameters":
                loss = model(input_ids=ids, labels=labels).loss
                torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
            elif of in ("inputs", "an own loss"):
                embedded = model.get_input_embeddings()(ids)
                if of == "inputs":
                    loss = model(inputs_embeds=embedded, labels=labels).loss
                else:
                    loss = F.cross_entropy(model(inputs_embeds=embedded).logits, labels)
                (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
                gradient.square().sum().backward()
            else:
                loss = model(input_ids=ids, labels=labels).loss
                loss.backward(create_graph=True)
                sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None).backward()
        except mw.UnreadableTensorError as error:
            return str(error)
        return ""


SECOND_ORDER: list[tuple[dict[str, Any], str, str]] = [
    ({"dp": 2}, "inputs", ""),
    ({"dp": 2}, "an own loss", ""),
    ({"dp": 2}, "backward", "ParallelPlan(dp=1, cp=1)"),
    ({"tp": 2}, "parameters", "the result of grad differs"),
    ({"dp": 2, "zero_stage": 2, "gradient_accumulation_steps": 2}, "backward", "gradient_accumulation_steps=1"),
    ({"tp": 2}, "inputs", "ParallelPlan(tp=1, cp=1, ep=1)"),
    ({"pp": 2, "gradient_accumulation_steps": 2}, "backward", "gradient_accumulation_steps=1"),
]


def second_orders() -> list[str]:
    return [second_order(plan, of) for plan, of, _ in SECOND_ORDER]


def test_a_penalty_on_gradients_without_a_graph_is_an_error(pool2: Any) -> None:
    for of_rank in pool2.run(second_orders):
        for (plan, _, instead), said in zip(SECOND_ORDER, of_rank, strict=True):
            assert instead in said and bool(instead) == bool(said), (plan, said)
    # On one rank, micro-batches that ran inside of the call would lack their part; without them there is a graph.
    for zero_stage in (0, 2):
        said = second_order({"gradient_accumulation_steps": 2, "zero_stage": zero_stage}, "backward")
        assert "gradient_accumulation_steps=1" in said
    assert all(second_order({}, of) == "" for of in ("inputs", "backward"))
