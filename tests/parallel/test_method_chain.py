"""The one replacement of a method: its steps run in their declared order, and a copy or a removal leaves the rest."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import meshwright as mw
from meshwright.parallel.method_chain import ChainStep, StepOrder, add_step, find_step, remove_step
from support.models import build


class Named(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, trace: list[str], *, last: str = "") -> list[str]:
        return [*trace, self.name + last]


class Outer(ChainStep):
    order = StepOrder.AUTOCAST

    def __call__(self, trace: list[str], **kwargs: Any) -> Any:
        return self.method([*trace, type(self).__name__], **kwargs)


class Inner(Outer):
    order = StepOrder.TOKENS


def test_steps_run_in_their_order_and_not_in_that_of_installation() -> None:
    module = Named("module")
    for step in (Inner(), Outer()):
        add_step(module, step)
    add_step(module, Inner())
    assert module([], last="!") == ["Outer", "Inner", "Inner", "module!"]
    assert list(inspect.signature(module.forward).parameters) == ["trace", "last"], "as callers see it"


def test_a_copy_calls_its_own_method() -> None:
    module = Named("module")
    add_step(module, Outer())
    other = copy.deepcopy(module)
    other.name = "copy"
    assert (module([]), other([])) == (["Outer", "module"], ["Outer", "copy"])
    assert find_step(other, Outer) is not find_step(module, Outer)


def test_a_step_is_taken_out_from_between_others() -> None:
    module, outer, inner = Named("module"), Outer(), Inner()
    add_step(module, outer)
    add_step(module, inner)
    remove_step(module, inner)
    assert module([]) == ["Outer", "module"]
    remove_step(module, outer)
    assert "forward" not in vars(module)


METHODS = ("forward", "generate", "save_pretrained", "resize_token_embeddings", "merge_and_unload", "unload")


def take_apart(plan: str) -> set[str]:
    """Compare what a call has put in the place of methods with these, and put a function around a forward."""
    model: Any = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"]))
    stock = {(part, name): getattr(part, name) for part in model.modules() for name in METHODS if hasattr(part, name)}
    mw.to_distributed(model, plan=plan)
    replaced = {(part, name) for part, name in stock if name in vars(part)}
    for part, name in replaced:
        own, method = stock[part, name], getattr(part, name)
        assert inspect.ismethod(method) and method.__self__ is part and method.__name__ == own.__name__
        assert inspect.signature(method) == inspect.signature(own) and method.__doc__ == own.__doc__
        assert not hasattr(method, "__wrapped__")  # by which accelerate's unwrap_model would go past it
    ids = torch.arange(8).view(2, 4)
    expected = model(input_ids=ids, labels=ids).loss
    decoder, calls = model.get_base_model(), []
    function = decoder.forward.__func__

    @functools.wraps(function)
    def around(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return function(self, *args, **kwargs)

    decoder.forward = around.__get__(decoder)
    assert torch.equal(model(input_ids=ids, labels=ids).loss, expected) and calls == [decoder]
    return {name for _, name in replaced}


def test_what_replaces_a_method_looks_like_it(pool2: Any) -> None:
    """Other libraries take a method apart, and put a function of their own around what they find."""
    assert pool2.run(take_apart, "tp2 ga2")[0] == set(METHODS)


def test_the_programs_own_replacement_stays() -> None:
    module, step = Named("module"), Outer()
    module.forward = own = lambda trace: [*trace, "own"]  # type: ignore[method-assign]
    add_step(module, step)
    assert module([]) == ["Outer", "own"]
    remove_step(module, step)
    assert module.forward is own
    add_step(module, step)
    chain = module.forward
    module.forward = lambda trace: chain([*trace, "later"])  # type: ignore[method-assign]
    add_step(module, Inner())
    assert module([]) == ["Inner", "later", "Outer", "own"]
