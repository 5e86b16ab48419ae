"""The one replacement of a method of a model: the steps that the parts of a plan put around it, in a declared order.

Each part of a plan adds a step to the chain of a method, mostly of ``forward``. A step does its work and calls what
lies inside of it, the method itself at last. For example::

    decoder.forward    autocast -> the stages of pp, or the micro-batches in turn -> the tokens of cp -> the
                       documents of packed rows -> the router's loss -> stock forward
    layer.forward      the layer's stage -> the compiled function -> stock forward
    mixer.forward      the tokens of cp -> the documents of packed rows -> stock forward
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from torch import nn

from meshwright.compiling import pause_compiling

# The places of steps in a chain, from the outermost to the innermost, whichever is added first. ALONE is for a method
# that gets a step from one part of a plan only.
StepOrder = enum.IntEnum(
    "StepOrder",
    "WHOLE_HEAD AUTOCAST UNCOMPILED RECOMPUTED MICRO_BATCHES TOKENS DOCUMENTS BORDERS ROUTER_LOSS OWN_LOSS STAGE "
    "VOCABULARY HEAD LATER_GRADIENT COLUMN KERNEL COMPILED ALONE",
)


class ChainStep:
    """A step of a chain, added to it by :func:`add_step`.

    It is an object, not a function: ``copy.deepcopy`` of a model binds methods to the copy, but keeps a function as it
    is, so the copy would call the original model.

    Attributes:
        order: the place in the chain.
        method: what lies inside of the step, to be called by it.
    """

    order: ClassVar[StepOrder] = StepOrder.ALONE
    method: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        raise NotImplementedError


class BatchStep(ChainStep):
    """A step of a model's forward that takes the arguments of the call by name.

    Args:
        model: the model.
    """

    has_whole_cache: ClassVar[bool] = True
    """Whether a rank has the keys and values of all tokens and layers, so that the model may return them."""

    def __init__(self, model: nn.Module):
        self.model, self.signature = model, inspect.signature(model.forward)

    def batch_of(self, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        batch = arguments(self.signature, args, kwargs)
        if not self.has_whole_cache and "use_cache" in self.signature.parameters:
            batch["use_cache"] = False
        return batch


class Uncompiled(ChainStep):
    """Runs a method without compiling it, if its caller is compiled."""

    order = StepOrder.UNCOMPILED

    def __call__(self, *args: object, **kwargs: object) -> object:
        resume = pause_compiling()
        try:
            return self.method(*args, **kwargs)
        finally:
            resume()


class MethodChain:
    """A bound method with steps around it, which takes the method's place and is copied with the model.

    Args:
        method: the method.
    """

    def __init__(self, method: Callable[..., Any]):
        functools.update_wrapper(self, method)  # keeps the signature for callers that inspect it
        self.method = self.first = method
        self.steps: list[ChainStep] = []

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.first(*args, **kwargs)

    def link(self) -> None:
        """Let each step call the next one."""
        self.first = self.method
        for step in reversed(self.steps):
            step.method, self.first = self.first, step


StepT = TypeVar("StepT", bound=ChainStep)


def add_step(owner: nn.Module, step: ChainStep, name: str = "forward") -> MethodChain:
    """Add a step to the chain of a method, and return the chain; of two steps with one place the newer is outside.

    If the program has replaced the method since, the chain stays inside, and a new one is made around its function.
    """
    chain = vars(owner).get(name)
    if not isinstance(chain, MethodChain):
        chain = MethodChain(getattr(owner, name))
        object.__setattr__(owner, name, chain)
    chain.steps = sorted([step, *chain.steps], key=lambda each: each.order)
    chain.link()
    return chain


def remove_step(owner: nn.Module, step: ChainStep) -> None:
    """Take a step out of the chain of the forward, and give the owner its own back if no step is left."""
    chain = vars(owner).get("forward")
    if not isinstance(chain, MethodChain) or step not in chain.steps:
        return
    chain.steps.remove(step)
    chain.link()
    if not chain.steps:
        object.__delattr__(owner, "forward")
        if owner.forward != chain.method:  # the program had set it on this object
            object.__setattr__(owner, "forward", chain.method)


def find_step(owner: nn.Module, kind: type[StepT]) -> StepT | None:
    """Return the outermost step of a class in the chain of the forward; None if there is none."""
    chain = vars(owner).get("forward")
    steps = chain.steps if isinstance(chain, MethodChain) else []
    return next((step for step in steps if isinstance(step, kind)), None)


def arguments(signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of a call by name, including positional arguments."""
    return {**dict(zip(signature.parameters, args, strict=False)), **kwargs}
