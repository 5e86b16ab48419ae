"""Layers of a pipeline after the call: their hooks, their places, and what a pass without values did not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import meshwright as mw
from meshwright.faults.guard import active_guard
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens


def batch(rows: int = 4, length: int = 10, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = tokens(rows, length, seed=seed)
    return {"input_ids": ids, "labels": labels_for(ids)}


def steered(plan: str | None, kind: str) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    """Losses and weights of a model with hooks that change what its layers pass on, and the calls of each layer's."""
    with Float64():
        model: Any = build("llama", num_hidden_layers=4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if plan is not None:
            model, optimizer, _ = mw.to_distributed(model, optimizer, plan=plan)
        calls = [0] * 4

        def changed(layer: int, x: torch.Tensor) -> torch.Tensor:
            calls[layer] += 1
            return 1.3 * x

        for i, layer in enumerate(model.model.layers):
            if kind == "forward":
                layer.register_forward_hook(lambda _, args, output, i=i: changed(i, output))
                layer.register_forward_pre_hook(lambda _, args, i=i: (changed(i, args[0]), *args[1:]))
            else:
                layer.register_full_backward_hook(lambda _, grad, out, i=i: (changed(i, grad[0]), *grad[1:]))
        losses = []
        for step in range(2):
            loss = model.forward(**batch(seed=step)).loss  # which is a pass as model(...) is
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model.state_dict() if plan is None else mw.full_state_dict(model), calls


def run_on_stages() -> tuple[list[Any], dict[str, str]]:
    found: list[Any] = [steered("pp2 mb2", kind) for kind in ("forward", "backward")]
    said = {}
    for what in ("swapped", "tied", "deleted"):
        model: Any = mw.to_distributed(build("llama", num_hidden_layers=4), plan="pp2 mb2")[0].train()
        layers = model.model.layers
        if what == "swapped":
            layers[1], layers[2] = layers[2], layers[1]
        elif what == "tied":
            model.lm_head.weight = model.model.embed_tokens.weight
        else:
            del layers[3]
        try:
            model(**batch())
        except mw.errors.PlanError as error:
            said[what] = str(error)
    return found, said


def test_layers_of_a_pipeline_have_their_hooks_and_their_places(pool2: Any) -> None:
    found = pool2.run(run_on_stages, timeout=120)
    for number, kind in enumerate(("forward", "backward")):
        losses, weights, calls = steered(None, kind)
        counts = []
        for ran, _ in found:
            assert ran[number][0] == pytest.approx(losses, rel=1e-10)  # only the order of sums differs
            far = (
                {name: relative_difference(ran[number][1][name], x) for name, x in weights.items()}
                if ran[number][1]
                else {}
            )
            assert max(far.values(), default=0) < 1e-10, far
            counts.append(ran[number][2])
        # Two micro-batches; each layer's hooks run on the rank that holds it.
        assert counts == [[2 * n for n in calls[:2]] + [0, 0], [0, 0] + [2 * n for n in calls[2:]]]
    for _, said in found:
        names = {"swapped": "model.layers.1", "tied": "lm_head.weight", "deleted": "model.layers.3"}
        assert said.keys() == names.keys()
        assert all(
            said[what].startswith(name) and "before to_distributed" in said[what] for what, name in names.items()
        )


class RareHead(nn.Module):
    """A decoder with a second head, for rows that a batch may lack, as the batch without values does."""

    def __init__(self) -> None:
        super().__init__()
        stock = build("llama", num_hidden_layers=4)
        self.config, self.model, self.lm_head = stock.config, stock.model, stock.lm_head
        self.rare = nn.Linear(32, 3)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **more: Any) -> Any:
        hidden = self.model(input_ids=input_ids, **more).last_hidden_state
        loss = self.lm_head(hidden).square().mean()
        if (is_rare := labels[:, -1] > 0).any():
            loss = loss + self.rare(hidden[is_rare, -1]).square().mean()
        return CausalLMOutput(loss=loss)


def run_a_rare_head() -> None:
    config = mw.ToDistributedConfig(plan="pp2 mb2", loss_averages_over="rows")
    model = mw.to_distributed(RareHead(), config=config)[0]
    try:
        ids = tokens(4, 10)
        model(input_ids=ids, labels=ids)
    except Exception:
        active_guard().close("its program failed")  # type: ignore[union-attr]
        raise


def test_a_head_that_no_pass_without_values_ran_is_named(pool2: Any) -> None:
    """The last stage does not have its weights: it computed NaN before."""
    _, last = pool2.run_expecting_error(run_a_rare_head)
    assert last[0] == "PlanError" and last[1].startswith("rare runs after the layers in this pass")
