"""Follows tensor types through a forward pass: through torch's operations and the runtime's own collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from conformance.spmd.rules import makes_width, reduces_width, result_of
from conformance.spmd.types import Kind, Typed, TypeMismatch
from meshwright.mesh.axes import Axis
from meshwright.parallel import collectives
from meshwright.parallel.batch import mean_over_ranks as mean
from meshwright.parallel.losses.chunked_head import ChunkedHeadLoss
from meshwright.parallel.losses.cross_entropy import VocabParallelCrossEntropy

# (forward, backward) of a differentiable collective -> (the types that it takes, the type that it returns).
_SIGNATURES: dict[tuple[Any, Any], tuple[tuple[Kind, ...], Kind]] = {
    (collectives.all_gather, collectives.reduce_scatter): ((Kind.VARYING,), Kind.REPLICATED),
    (collectives.reduce_scatter, collectives.all_gather): ((Kind.PARTIAL,), Kind.VARYING),
    (collectives._own_rows, collectives.all_gather): ((Kind.INVARIANT,), Kind.VARYING),
    (collectives.all_gather, collectives._own_rows): ((Kind.VARYING,), Kind.INVARIANT),
    (collectives._same, collectives._sum): ((Kind.INVARIANT,), Kind.REPLICATED),
    (collectives._sum, collectives._same): ((Kind.PARTIAL,), Kind.INVARIANT),
    (collectives._same, collectives._of_first): ((Kind.REPLICATED,), Kind.INVARIANT),
    # This pair computes the mean square of a sharded width: each rank adds the sum over its own part.
    (collectives._sum, collectives._sum): ((Kind.PARTIAL, Kind.VARYING), Kind.REPLICATED),
}

_TRANSPOSED = frozenset({Tensor.T.__get__, Tensor.mT.__get__, Tensor.H.__get__, Tensor.mH.__get__})  # type: ignore[attr-defined]
_ALIASES = frozenset({Tensor.data.__get__})  # type: ignore[attr-defined]
_SAME_VALUES = frozenset(
    ["to", "float", "double", "bfloat16", "half", "detach", "contiguous", "type", "as_subclass", "clone"]
)


@dataclass(frozen=True)
class Finding:
    """A place where one rank's part would be treated as the whole.

    Args:
        module: the innermost module that was running, or the parameter's name for a gradient.
        operation: the torch operation or the collective.
        problem: what is wrong with the operation.
    """

    module: str
    operation: str
    problem: str

    def __str__(self) -> str:
        return f"{self.module}: {self.operation} {self.problem}"


class TypeMode(TorchFunctionMode):
    """While active, gives a type over the tp axis to every tensor that is computed from a typed tensor.

    Args:
        axis: the tp axis, whose collectives are followed.
        wide_norms: the names of the norms whose mean square the runtime computes over the axis.
    """

    def __init__(self, axis: Axis, wide_norms: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.axis, self._wide_norms = axis, wide_norms
        self.findings: list[Finding] = []
        self._types: Any = WeakIdKeyDictionary()
        self._modules: list[str] = []
        self._is_inside = False  # whether the runtime's own collective or loss is running; its type is declared

    def declare(
        self, tensor: Tensor, kind: Kind, *, dim: int | None = None, is_wide: bool = False, name: str = ""
    ) -> None:
        """Set a tensor's type; see ``Typed``."""
        self._types[tensor] = (kind, dim, is_wide, name)

    def type_of(self, x: Any) -> Typed | None:
        """Return a tensor's type; None for a constant."""
        if not isinstance(x, Tensor) or (found := self._types.get(x)) is None:
            return None
        kind, dim, is_wide, name = found
        return Typed(kind, x.requires_grad and torch.is_grad_enabled(), dim, is_wide, name)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._is_inside or name == "__set__":
            return func(*args, **kwargs)
        # Computed before the call, since an in-place operation changes the type of its input.
        kind = self._result(name, args, kwargs)
        result = func(*args, **kwargs)
        if kind is not None:
            shared = self._shared(func, name, args, result)
            for x in [result] if isinstance(result, Tensor) else result if isinstance(result, list | tuple) else []:
                if isinstance(x, Tensor):
                    is_wide = kind is Kind.VARYING and makes_width(name, args, kwargs, x, self.type_of)
                    self.declare(x, kind, dim=shared[0], is_wide=is_wide, name=shared[1])
        return result

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[TypeMode]:
        """Follow the model's forward passes inside the context."""
        handles = []
        for name, module in model.named_modules():
            label = name or type(model).__name__
            enter = lambda _, __, label=label: self._modules.append(label)  # noqa: E731
            leave = lambda *_: self._modules.pop() and None  # noqa: E731
            enter.watches_parts = leave.watches_parts = True
            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        with contextlib.ExitStack() as stack:
            for owner, apply in (
                (collectives._Collective, self._collective),
                (VocabParallelCrossEntropy, self._loss_of_shards),
                (ChunkedHeadLoss, self._loss_of_head),
                (mean._ReplaceValue, self._global_value),
            ):
                stack.enter_context(mock.patch.object(owner, "apply", _declared(owner.apply, apply)))
            stack.enter_context(self)
            try:
                yield self
            finally:
                for handle in handles:
                    handle.remove()

    def _result(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind | None:
        is_wide_norm = bool(self._modules) and self._modules[-1] in self._wide_norms
        if not is_wide_norm and (part := reduces_width(name, args, kwargs, self.type_of)) is not None:
            self._report(name, f"reduces the last dim of {part.said}, but this rank has only its own part of that dim")
        try:
            return result_of(name, args, kwargs, self.type_of)
        except TypeMismatch as mismatch:
            self._report(name, str(mismatch))
            return mismatch.result

    def _report(self, operation: str, problem: str) -> None:
        finding = Finding(self._modules[-1] if self._modules else "the model", operation, problem)
        if finding not in self.findings:
            self.findings.append(finding)

    def _shared(self, func: Any, name: str, args: tuple[Any, ...], result: Any) -> tuple[int | None, str]:
        """Return (sharded dim, name) if the result is a sharded parameter, possibly transposed or cast.

        Otherwise return (None, "").
        """
        source = self.type_of(args[0]) if args else None
        if source is None or source.dim is None or not isinstance(result, Tensor) or result.ndim != args[0].ndim:
            return None, ""
        if result.ndim == 2 and (func in _TRANSPOSED or name in ("t", "transpose")):
            return 1 - source.dim, source.name
        return (source.dim, source.name) if name in _SAME_VALUES or func in _ALIASES else (None, "")

    # ---- the runtime's own operations, whose types are declared

    def _collective(self, apply: Any, x: Tensor, axis: Any, run: Any, run_backward: Any) -> Tensor:
        result = self._apart(apply, x, axis, run, run_backward)
        if axis.name != self.axis.name:
            return result
        takes, gives = _SIGNATURES[run, run_backward]
        typed = self.type_of(x)
        if typed is not None and typed.kind not in takes and not _is_alike(typed, takes):
            self._report(
                f"{run.__name__.strip('_')} over {axis.name}",
                f"gets {typed.said}, but expects {' or '.join(kind.value for kind in takes)}",
            )
        self.declare(result, gives)
        return result

    def _loss_of_shards(self, apply: Any, logits: Tensor, *rest: Any) -> Tensor:
        result = self._apart(apply, logits, *rest)
        typed = self.type_of(logits)
        if typed is not None and typed.kind is not Kind.VARYING:
            self._report("VocabParallelCrossEntropy", f"gets {typed.said}, but expects {Kind.VARYING.value}")
        self.declare(result, Kind.INVARIANT)
        return result

    def _loss_of_head(self, apply: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        kind = self._result("linear", (hidden, weight, bias), {})
        result = self._apart(apply, hidden, weight, bias, *rest)
        if self.axis.size == 1:  # whole logits
            if kind is not None:
                self.declare(result, kind)
            return result
        if kind is not None and kind is not Kind.VARYING:
            self._report("ChunkedHeadLoss", f"makes {kind.value} logits, but expects {Kind.VARYING.value}")
        self.declare(result, Kind.INVARIANT)
        return result

    def _global_value(self, apply: Any, x: Tensor, *rest: Any) -> Tensor:
        result = self._apart(apply, x, *rest)
        if (typed := self.type_of(x)) is not None:
            self.declare(result, typed.kind)
        return result

    def _apart(self, apply: Any, *args: Any) -> Tensor:
        with self.unfollowed():
            result: Tensor = apply(*args)
            return result

    @contextlib.contextmanager
    def unfollowed(self) -> Iterator[None]:
        """Give no types inside the context."""
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before


def _is_alike(typed: Typed, takes: tuple[Kind, ...]) -> bool:
    """Return whether a collective takes the type, since without a gradient INVARIANT and REPLICATED are the same."""
    equal = {Kind.INVARIANT, Kind.REPLICATED}
    return typed.kind in equal and not equal.isdisjoint(takes) and not typed.has_gradient


def _declared(apply: Any, method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: method(apply, *args)
