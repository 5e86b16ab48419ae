"""The one replacement of a method of a model: the steps that the parts of a plan put around it, in a declared order.

Each part of a plan adds a step to the chain of a method, mostly of ``forward``. A step does its work and calls what
lies inside of it, the method itself at last. For example::

    decoder.forward    autocast -> the stages of pp, or the micro-batches in turn -> the tokens of cp -> the
                       documents of packed rows -> the router's loss -> stock forward
    layer.forward      the layer's stage -> the compiled function -> stock forward
    mixer.forward      the tokens of cp -> the documents of packed rows -> stock forward

What a distributed model carries besides its weights and gradients, one object of each kind.

Finds the calls at the two borders of a decoder's layers, also if a module runs at several places of the decoder.

``StepOrder`` says which step lies inside of which, whatever is installed first. Chain and steps are objects instead of
closures over the model, so a copied model calls its own methods.
"""

from __future__ import annotations

import copy
import enum
import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

from meshwright.compiling import pause_compiling, without_compilation
from meshwright.errors import PlanError
from meshwright.roles import Decoder
from meshwright.temporarily import replace_method

# The places of steps in a chain, from the outermost to the innermost, whichever is added first. ALONE is for a method
# that gets a step from one part of a plan only.
StepOrder = enum.IntEnum(
    "StepOrder",
    "ENTERED WHOLE_HEAD CALL_HOOKS AUTOCAST UNCOMPILED RECOMPUTED MICRO_BATCHES TOKENS DOCUMENTS BORDERS ROUTER_LOSS "
    "OWN_LOSS STAGE VOCABULARY HEAD LATER_GRADIENT COLUMN KERNEL COMPILED ALONE",
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
    """The steps around a method of an object, the method itself at last.

    The object has a bound method in the method's place, which calls the chain: :func:`add_step` makes both. So other
    code sees a method, and a copy of the object, whose chains are copied, calls its own.

    Args:
        method: the method.
    """

    def __init__(self, method: Callable[..., Any]):
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
_CHAINS = "_meshwright_chains"  # attribute of an object: its chains, the place of each of which its function knows
_places: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def add_step(owner: nn.Module, step: ChainStep, name: str = "forward") -> MethodChain:
    """Add a step to the chain of a method, and return the chain; of two steps with one place the newer is outside.

    If the program has replaced the method since, the chain stays inside, and a new one is made around its function.
    """
    chain = find_chain(owner, name) or _new_chain(owner, name)
    chain.steps = sorted([step, *chain.steps], key=lambda each: each.order)
    chain.link()
    return chain


def _new_chain(owner: nn.Module, name: str) -> MethodChain:
    chains: list[MethodChain] = vars(owner).setdefault(_CHAINS, [])
    method = getattr(owner, name)
    chain = next((each for each in chains if not each.steps and each.method == method), None)
    if chain is None:
        chain = MethodChain(method)
        chains.append(chain)
    place = chains.index(chain)

    def call(self: Any, *args: object, **kwargs: object) -> object:
        return self._meshwright_chains[place](*args, **kwargs)

    replace_method(owner, name, call)
    _places[call] = place
    return chain


def find_chain(owner: nn.Module, name: str = "forward") -> MethodChain | None:
    """Return the chain that is a method of an object now; None if there is none, or the program has replaced it."""
    method = vars(owner).get(name)
    place = _places.get(method.__func__) if isinstance(method, MethodType) else None
    return None if place is None else vars(owner)[_CHAINS][place]


def remove_step(owner: nn.Module, step: ChainStep) -> None:
    """Take a step out of the chain of the forward, and give the owner its own back if no step is left."""
    chain = find_chain(owner)
    if chain is None or step not in chain.steps:
        return
    chain.steps.remove(step)
    chain.link()
    if not chain.steps:
        object.__delattr__(owner, "forward")
        if owner.forward != chain.method:  # the program had set it on this object
            object.__setattr__(owner, "forward", chain.method)


def find_step(owner: nn.Module, kind: type[StepT]) -> StepT | None:
    """Return the outermost step of a class in the chain of the forward; None if there is none."""
    chain = find_chain(owner)
    return next((step for step in chain.steps if isinstance(step, kind)), None) if chain is not None else None


def arguments(signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of a call by name, including positional arguments."""
    return {**dict(zip(signature.parameters, args, strict=False)), **kwargs}


T = TypeVar("T")


class Features:
    """The objects that the parts of a plan have installed on a model, found by their class.

    A part of a plan adds its object when it is installed, and whoever needs the object asks for its class. So a new
    part needs no field in the runtime, and a copied model gets a copy of each object.

    Example:
        >>> features = Features()
        >>> features.add([1, 2])
        [1, 2]
        >>> features.find(list), features.find(dict)
        ([1, 2], None)
    """

    def __init__(self) -> None:
        self._all: list[tuple[object, bool]] = []  # each with whether it is copied

    def add(self, feature: T, *, is_copied: bool = True) -> T:
        """Add an object in the place of one of the same class, if there is one, and return it.

        Args:
            feature: the object.
            is_copied: whether a copy of the model gets a copy of the object; otherwise it has none.
        """
        others = [(one, is_kept) for one, is_kept in self._all if type(one) is not type(feature)]
        self._all = [(feature, is_copied), *others]
        return feature

    def find(self, kind: type[T]) -> T | None:
        """Return the newest object of a class; None if no part of the plan has added one."""
        return next((one for one, _ in self._all if isinstance(one, kind)), None)

    def get(self, kind: type[T]) -> T:
        """Return the object of a class, which an earlier part of the plan has added."""
        feature = self.find(kind)
        assert feature is not None, f"no part of the plan has added a {kind.__name__}"
        return feature

    def __deepcopy__(self, memo: dict[int, object]) -> Features:
        new = Features()
        new._all = [(copy.deepcopy(one, memo), True) for one, is_copied in self._all if is_copied]
        return new


class RegionBorders:
    """The first layer and the module after which the layers have ended: the final norm, else the last layer.

    Args:
        structure: the decoder's structure.

    Attributes:
        first: the first layer.
        is_first_again: whether the first layer runs at a later place too.
        last: the final norm or the last layer.
    """

    def __init__(self, structure: Decoder):
        layers = structure.layers
        self.first, self.last = layers[0], structure.final_norm or layers[-1]
        self.is_first_again = layers.count(self.first) > 1
        self._calls = self._calls_left = max(1, layers.count(self.last))
        self._depth = 0  # of running layers that have the final norm inside
        self._handles: list[RemovableHandle] = []
        self._stacks = [
            (name, stack, stack[0], stack[-1])
            for stack, name in structure.facts.names.items()
            if isinstance(stack, nn.ModuleList) and self.first in list(stack)
        ]
        for layer in dict.fromkeys(layers):
            if layer is not self.last and self.last in structure.facts.inside(layer):
                self._handles.append(layer.register_forward_pre_hook(self._enter))
                self._handles.append(layer.register_forward_hook(self._leave, always_call=True))

    def check(self) -> None:
        """Raise if the program has changed which layers are at the borders.

        Raises:
            PlanError: another layer stands in the place of the first one, or of the last if no final norm follows.
        """
        for name, stack, first, last in self._stacks:
            now = list(map(without_compilation, stack))  # a compiled layer runs the hooks of the one inside
            if now[:1] != [first] or (last is self.last and now[-1:] != [last]):
                raise PlanError(
                    f"{name} has another layer at its {'start' if now[:1] != [first] else 'end'} than at the call of "
                    "to_distributed, which cuts the tokens before the first layer and joins them after the last, so "
                    f"the ranks would have tokens that do not belong together. Change {name} before to_distributed, or "
                    'use a plan without sequence parallelism and cp, such as plan="tp2"'
                )

    def begin(self) -> None:
        """Begin a pass through the layers."""
        self._calls_left = self._calls

    def has_ended(self) -> bool:
        """Return whether the call of ``last`` that ends now is the one after which the layers have ended."""
        if self._depth:
            return False
        self._calls_left -= 1
        return self._calls_left == 0

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, layer: nn.Module, args: tuple[object, ...]) -> None:
        self._depth += 1

    def _leave(self, layer: nn.Module, args: tuple[object, ...], output: object) -> None:
        self._depth -= 1
