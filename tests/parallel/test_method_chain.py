"""The one replacement of a method: its steps run in their declared order, and a copy or a removal leaves the rest."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import nn

from meshwright.parallel.method_chain import ChainStep, StepOrder, add_step, find_step, remove_step


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
