"""One walk shows a model to what decides about it and to what a plan installs, and a plan replaces no module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral import modeling_mixtral

import meshwright as mw
from meshwright.distribute.decide import cut
from meshwright.facts import Facts, fact
from meshwright.features.decision import Decision
from meshwright.parallel.fake_passes import fake_pass
from meshwright.parallel.fake_passes.remembered import forget
from support.models import SIZES, build

# Plan -> how often all modules are visited; it was 60, 91, 119 and 166 when each check walked over the model itself.
PLANS = {"dp2": 36, "tp2+sp zero1": 36, "pp2 mb2": 54, "cp2": 46}


def visits(plan: str) -> tuple[float, bool]:
    """Return how often a call visits all modules, and whether the modules are then the same."""
    model: Any = build("llama", num_hidden_layers=8)
    optimizer = torch.optim.AdamW(model.parameters())
    before, count, walk = Facts(model), [0], nn.Module.named_modules

    def counted(module: nn.Module, memo: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for found in walk(module, memo, *args, **kwargs):
            count[0] += memo is None  # not again for each module around it
            yield found

    with mock.patch.object(nn.Module, "named_modules", counted):
        mw.to_distributed(model, optimizer, plan=plan)
    return count[0] / len(before.names), Facts(model).modules == before.modules


def test_few_walks_and_the_same_modules(pool2: Any) -> None:
    found = {plan: pool2.run(visits, plan)[0] for plan in PLANS}
    assert all(is_same for _, is_same in found.values())
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


def passes(model: Any) -> tuple[Decision | None, list[int]]:
    """Return what is decided about a model under cp and pp, and the lengths of the passes without values for it."""
    lengths: list[int] = []
    found: Decision | None = None
    run = fake_pass._run

    def counted(*args: Any, **options: Any) -> Any:
        lengths.append(options["length"])
        return run(*args, **options)

    plan = mw.ParallelPlan(pp=2, cp=2)
    with mock.patch.object(fake_pass, "_run", counted), contextlib.suppress(mw.PlanError):
        found = cut(Facts(model), plan, mw.ToDistributedConfig(plan=plan), loss=None)
    return found, lengths


@pytest.mark.quick
def test_one_pass_for_each_length_and_none_for_a_model_that_is_alike() -> None:
    forget()
    (first, lengths), (second, again) = passes(mixtral()), passes(model := mixtral())
    assert (lengths, again) == ([11, 13], [])
    assert first is not None and second is not None
    assert first.cut is not None and second.cut is not None and first.context is not None
    assert second.cut.order == first.cut.order and first.cut.order.routers is not None
    assert second.context is not None and second.context.layers == tuple(model.model.layers)
    assert [site.module for site in second.context.sites] == [layer.self_attn for layer in model.model.layers]
    names = [{facts.names[layer]: dims for layer, dims in found.token_dims.items()}
             for facts, found in ((first.facts, first.context), (second.facts, second.context))]  # fmt: skip
    assert names[0] == names[1]


class OwnNorm(modeling_mixtral.MixtralRMSNorm):
    """A module of the program."""


def own(function: Any) -> Any:
    """Return a function of the program that does what one of a library does."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def of_own_forward(model: Any) -> None:
    model.model.layers[1].mlp.forward = own(model.model.layers[1].mlp.forward)


def with_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


def with_tied_weights(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def set_in(find: Callable[[Any], Any], **values: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for name, value in values.items():
            setattr(find(model), name, value)

    return change


CHANGES: dict[str, Callable[[Any], object]] = {
    "forward of an object": of_own_forward,
    "hook": with_hook,
    "class of a module": set_in(lambda model: model.model.norm, __class__=OwnNorm),
    "config": set_in(lambda model: model.config, sliding_window=3),
    "config inside of a list": set_in(lambda model: model.config, layer_types=["full_attention"] * 2),
    "what asks for a loss": set_in(lambda model: model.config, output_router_logits=True),
    "attention": lambda model: model.set_attn_implementation("eager"),
    "setting of a module": set_in(lambda model: model.model.layers[0].self_attn, scaling=0.25),
    "evaluation": lambda model: model.eval(),
    "a layer in evaluation": lambda model: model.model.layers[0].eval(),
    "frozen weights": lambda model: model.model.embed_tokens.requires_grad_(False),
    "dtype": lambda model: model.bfloat16(),
    "dtype of a module": lambda model: model.model.norm.double(),
    "tied weights": with_tied_weights,
    "another activation": set_in(lambda model: model.model.layers[0].mlp.experts, act_fn=nn.GELU()),
    "a function of the program": set_in(lambda model: model, _loss_function=own(torch.nn.functional.cross_entropy)),
    "loss": set_in(lambda model: model, loss_type="ForMaskedLM"),
    "recomputation": lambda model: model.gradient_checkpointing_enable(),
}


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def patched(owner: Any, name: str) -> Any:
    return mock.patch.object(owner, name, own(getattr(owner, name)))


AROUND: dict[str, Callable[[], Any]] = {
    "method of a class": lambda: patched(modeling_mixtral.MixtralAttention, "forward"),
    "function of a file": lambda: patched(modeling_mixtral, "apply_rotary_pos_emb"),
    "function of torch": lambda: patched(torch.nn.functional, "silu"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": default_dtype,
    "hook of all modules": lambda: contextlib.closing(
        mock.Mock(close=nn.modules.module.register_module_forward_hook(lambda *_: None).remove)
    ),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("name", [*CHANGES, *AROUND])
def test_a_model_that_may_show_something_else_is_observed_anew(name: str) -> None:
    forget()
    passes(mixtral())
    changed = mixtral()
    with AROUND[name]() if name in AROUND else contextlib.nullcontext():
        if name in CHANGES:
            CHANGES[name](changed)
        assert passes(changed)[1][:1] == [11]
    if name in AROUND:
        assert passes(mixtral())[1] == []
