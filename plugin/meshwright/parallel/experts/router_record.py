"""Finds the routers from which a model's forward computes its load-balancing loss, in a pass on fake tensors."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from types import FunctionType

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.parallel.fake_passes.fake_pass import run_without_values
from meshwright.temporarily import temporarily

LOSS_FUNCTION = "load_balancing_loss_func"  # the global name by which the forward of transformers' models calls it
OPTION = "output_router_logits"  # the argument, or the field of the config, that asks for the loss
ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass(frozen=True, kw_only=True)
class RouterRecord:
    """The routers from which a model's forward computes its load-balancing loss, and where the output has it.

    Args:
        modules: the name of each router, and the place of the logits in the tuple that it returns; None for no tuple.
        num_experts: the number of experts that the forward passes to the loss.
        top_k: the number of experts of each token that the forward passes to the loss.
        loss: the name of the load-balancing loss in the model's output.
        logits: the name of the routers' logits in the model's output.
    """

    modules: tuple[tuple[str, int | None], ...]
    num_experts: int
    top_k: int
    loss: str
    logits: str

    @property
    def size(self) -> int:
        """How many numbers the statistics of the routers are."""
        return 2 * self.num_experts + 1


def forward_with_router_loss(model: nn.Module) -> FunctionType | None:
    """Return the code of a model's forward that calls transformers' load-balancing loss; None if none does."""
    for kind in type(model).__mro__:
        forward = inspect.unwrap(vars(kind).get("forward", object))
        if isinstance(forward, FunctionType) and LOSS_FUNCTION in forward.__code__.co_names:
            stock = forward.__globals__.get(LOSS_FUNCTION)
            return forward if stock and list(inspect.signature(stock).parameters) == ARGUMENTS else None
    return None


def record_routers(model: nn.Module) -> RouterRecord | None:
    """Run a model on fake tensors, and return the routers of its load-balancing loss; None if it has no such loss.

    Args:
        model: the model, with or without memory. It is not changed.
    """
    forward = forward_with_router_loss(model)
    if forward is None:
        return None
    seen = _Seen()
    inner = [(name, module) for name, module in model.named_modules() if name]
    handles = [module.register_forward_hook(functools.partial(seen.look, name)) for name, module in inner]
    try:
        with temporarily(sys.modules[forward.__module__], **{LOSS_FUNCTION: seen.loss}):
            output = run_without_values(model, rows=2, length=8, instead="ParallelPlan(pp=1)", options={OPTION: True})
    except PlanError:  # the option is then refused under pp
        return None
    finally:
        for handle in handles:
            handle.remove()
    return seen.record(output)


@dataclass
class _Seen:
    """What a forward pass shows: what its modules return, and what the load-balancing loss is given."""

    returned: list[tuple[Tensor, str, int | None]] = field(default_factory=list)
    number: Tensor = field(default_factory=lambda: torch.zeros(()))
    given: tuple[object, object, object] = (None, None, None)

    def look(self, name: str, module: nn.Module, args: object, output: object) -> None:
        """Take what a module returns, as a hook of its forward."""
        values = enumerate(output) if isinstance(output, tuple) else [(None, output)]
        self.returned.extend((x, name, place) for place, x in values if isinstance(x, Tensor))

    def loss(
        self, gate_logits: object, num_experts: object = None, top_k: object = 2, attention_mask: object = None
    ) -> Tensor:
        """Take the arguments of the load-balancing loss, and return a number in its place."""
        self.given = gate_logits, num_experts, top_k
        return self.number

    def record(self, output: object) -> RouterRecord | None:
        """Return the record of a pass with this output; None if a router or a place in the output is not known."""
        logits, num_experts, top_k = self.given
        if not isinstance(logits, tuple) or not isinstance(output, MutableMapping):
            return None
        found = {id(x): (name, place) for x, name, place in reversed(self.returned)}  # the innermost module ends first
        named = {id(x): name for name, x in output.items()}
        if not all(id(x) in found for x in logits) or not {id(self.number), id(logits)} <= named.keys():
            return None
        assert isinstance(num_experts, int) and isinstance(top_k, int)
        return RouterRecord(
            modules=tuple(found[id(x)] for x in logits),
            num_experts=num_experts,
            top_k=top_k,
            loss=named[id(self.number)],
            logits=named[id(logits)],
        )
