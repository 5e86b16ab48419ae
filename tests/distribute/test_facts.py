"""One walk shows a model to what decides about it and to what a plan installs, and a plan replaces no module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import meshwright as mw
from meshwright.distribute.decide import cut, with_roles
from meshwright.facts import Facts, fact
from meshwright.faults import together
from meshwright.features.decision import Decision
from meshwright.parallel.fake_passes import fake_pass
from meshwright.roles import plan_for
from support.models import SIZES, build

# Plan -> how often all modules are visited; it was 60, 91, 119 and 166 when each check walked over the model itself,
# and 35, 35, 53 and 45 when what is installed did.
PLANS = {"dp2": 2, "tp2+sp zero1": 2, "pp2 mb2": 3, "cp2": 3}


def visits(plan: str) -> tuple[float, bool, int]:
    """Return the visits of all modules, whether the modules are then the same, and the number of exchanges."""
    model: Any = build("llama", num_hidden_layers=8)
    optimizer = torch.optim.AdamW(model.parameters())
    before, count, walk = Facts(model), [0], nn.Module.named_modules

    def counted(module: nn.Module, memo: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for found in walk(module, memo, *args, **kwargs):
            count[0] += memo is None  # not again for each module around it
            yield found

    said: list[Any] = []
    gather = together._bytes_of_all
    exchange = mock.patch.object(together, "_bytes_of_all", lambda own, group: said.append(own) or gather(own, group))
    with exchange, mock.patch.object(nn.Module, "named_modules", counted):
        mw.to_distributed(model, optimizer, plan=plan)
    exchanges = sum(len(own) > 0 for own in said)  # the others have only the lengths: no rank has failed
    return count[0] / len(before.names), Facts(model).modules == before.modules, exchanges


def test_few_walks_and_the_same_modules(pool2: Any) -> None:
    found = {plan: pool2.run(visits, plan)[0] for plan in PLANS}
    assert all(is_same and exchanges == 1 for _, is_same, exchanges in found.values()), found
    assert all(found[plan][0] <= most for plan, most in PLANS.items()), found


def test_facts_are_those_of_a_walk() -> None:
    model = build("llama")
    model.lm_head = model.model.layers[0].mlp.up_proj  # a module with two names
    facts, layer = Facts(model), model.model.layers[1]
    assert facts.modules == dict(model.named_modules(remove_duplicate=False))
    assert facts.names == {module: name for name, module in model.named_modules()}
    assert facts.parameters == dict(model.named_parameters(remove_duplicate=False))
    assert facts.inside(layer) == tuple(layer.modules()) and facts.inside(model) == tuple(model.modules())
    assert list(facts.parameters_inside(layer)) == list(layer.parameters())
    assert facts.part(layer).modules == dict(layer.named_modules(remove_duplicate=False))


def test_what_is_found_is_found_once() -> None:
    calls: list[nn.Module] = []

    @fact
    def count(facts: Facts) -> int:
        calls.append(facts.model)
        return len(facts.names)

    model = nn.Linear(2, 2)
    facts = Facts(model)
    assert (count(facts), count(facts), count(model)) == (1, 1, 1)
    assert calls == [model, model]  # a model has no facts of its own


def mixtral(**sizes: Any) -> Any:
    return MixtralForCausalLM(MixtralConfig(**{**SIZES, "num_local_experts": 4, **sizes}))


def passes(decide: Callable[[], Decision]) -> tuple[Decision, list[int]]:
    """Return what is decided, and the lengths of the passes without values that run for it."""
    lengths: list[int] = []
    run = fake_pass._run

    def counted(*args: Any, **options: Any) -> Any:
        lengths.append(options["length"])
        return run(*args, **options)

    with mock.patch.object(fake_pass, "_run", counted):
        return decide(), lengths


@pytest.mark.quick
def test_one_pass_for_each_length_in_a_call() -> None:
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(pp=2, cp=2))
    facts = Facts(mixtral())
    first, lengths = passes(lambda: cut(facts, config.plan, config, loss=None))
    assert lengths == [11, 13]
    assert first.cut is not None and first.cut.order.routers is not None and first.context is not None
    again, lengths = passes(lambda: with_roles(first, plan_for(facts)))
    assert lengths == []
    assert again.cut is not None and again.cut.order == first.cut.order and again.context == first.context
