"""The two borders of an attention or MLP block: activations are gathered at its entry, its result is reduced.

What stock code could do that would make a sharded block wrong without a word is looked for in its first pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.parallel.autograd_graph import bypasses
from meshwright.parallel.collectives import Axis, reduce, share
from meshwright.parallel.dropout_streams import DropoutStreams, Rates, Restore
from meshwright.parallel.local_heads import HeadInputs
from meshwright.parallel.regather import RegatheredProjections
from meshwright.parallel.sequence_parallel import SequenceSharding
from meshwright.parallel.structure import Block
from meshwright.roles.adapters import projection
from meshwright.roles.projection import is_transposed


class BlockHooks:
    """The two borders of one block."""

    def __init__(self, block: Block, axis: Axis, sequence: SequenceSharding | None, streams: DropoutStreams):
        self.axis, self.sequence, self.streams = axis, sequence, streams
        self._restore: Restore | None = None
        self._rates = Rates(block.module)
        self._bias: nn.Parameter | None = None
        self._name, self._is_whole_module = block.name, block.entries == (block.module,)
        self._names = tuple(inspect.signature(block.module.forward).parameters)
        self._is_entered = self._is_reduced = self._is_checked = False
        self._entered: Tensor | None = None  # what the block was given, and the node that made its result whole,
        self._reduction: Any = None  # for the one pass in which they are compared
        self._head_inputs = None if block.heads is None else HeadInputs(block.module, block.heads, axis)
        self._projections = RegatheredProjections(list(block.columns)) if sequence is not None else None
        for entry in block.entries:
            # First of its hooks: an entry may be a projection, whose input is then to be seen gathered.
            entry.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
            entry.register_forward_hook(self._close, always_call=True)
        for dropout in block.shared_dropouts:
            _SharedDropout(dropout, streams)
        # The bias is the projection's own; the sum is that of its output and its adapters'.
        self._row = projection(block.row)
        block.row.register_forward_pre_hook(self._lift_bias)
        block.row.register_forward_hook(self._reduce, always_call=True)

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._head_inputs is not None:
            args, kwargs = self._head_inputs.take_own(args, kwargs)
        self._is_entered, self._is_reduced = True, False
        x, put_back = hidden_states(args, kwargs, self._names)
        x = _cast_for_autocast(x)
        if self.sequence is None:
            if self._restore is None and self._rates.is_any_on():  # else the second column of a layer's own MLP
                self._restore = self.streams.enter_shard(x)
            full = share(x, self.axis)
        else:
            assert self._projections is not None
            full = self.sequence.gather(x)
            self._projections.open(full, x, self.axis)
        if self._is_whole_module and not self._is_checked and not torch.compiler.is_compiling():
            self._entered = full
        return put_back(full)

    def _close(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._projections is not None:
            self._projections.close()
        if not self._is_whole_module:  # one of the columns of a layer's own MLP
            return
        self._is_entered = False
        if output is not None and not self._is_reduced:
            raise PlanError(
                f"{self._name} ran without calling its output projection as a module, so its result would be one "
                "rank's part; it must not read the projection's weight itself (pretraining_tp, slow_but_exact)"
            )
        if self._entered is not None and output is not None and torch.is_grad_enabled():
            self._check_result(output)
        self._entered = self._reduction = None

    def _check_result(self, output: Any) -> None:
        """Once: the result may depend on the block's input through the output projection only."""
        assert self._entered is not None
        if bypasses(output, self._entered, self._reduction):
            raise PlanError(
                f"{self._name} adds to its output what it was given (a residual connection of its own?): each rank "
                "would count that part of the gradient; let the layer add it"
            )
        self._is_checked = self._entered.requires_grad

    def _lift_bias(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._is_reduced = True
        # Each rank would add the bias to its partial sum: take it out of the call, add it once after.
        self._bias = self._row._parameters["bias"]
        none = torch.zeros_like(self._bias) if self._bias is not None and is_transposed(self._row) else None
        self._row._parameters["bias"] = none  # Conv1D cannot do without
        if not self._is_entered:
            raise PlanError(
                f"the output projection of {self._name} ran before the block was called as a module, so its input "
                "would lack a part of its gradient; call the block itself, not its forward method"
            )

    def _reduce(self, module: nn.Module, args: tuple[Any, ...], output: Tensor | None) -> Tensor | None:
        bias, self._bias = self._bias, None
        self._row._parameters["bias"] = bias
        if self._restore is not None:
            self._restore()
            self._restore = None
        if output is None:  # the projection raised; the hook runs only to put back what it changed
            return None
        summed = reduce(output, self.axis) if self.sequence is None else self.sequence.reduce_scatter(output)
        if self._entered is not None:
            self._reduction = summed.grad_fn
        return summed if bias is None else summed + bias.to(summed.dtype)


class _SharedDropout:
    """A dropout that all ranks apply to the same activation, amid others on parts of one."""

    def __init__(self, dropout: nn.Module, streams: DropoutStreams):
        self.streams = streams
        self._restore: Restore | None = None
        dropout.register_forward_pre_hook(self._enter)
        dropout.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and getattr(module, "p", 0) > 0:
            self._restore = self.streams.enter_shared(args[0])

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._restore is not None:
            self._restore()
            self._restore = None


# What attention calls the same activation where it takes it three times.
_TWINS = frozenset({"q", "k", "v", "query", "key", "value", "queries", "keys", "values"})


def hidden_states(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...] = ()
) -> tuple[Tensor, Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The activation among a block's arguments, and how to put another in its place.

    Args:
        names: of the positional arguments; the activation may be given again as one of _TWINS. (It may also
            be given again as a residual, which stays as it is.)
    """
    candidates = [*enumerate(args[:1]), *((n, kwargs.get(n)) for n in ("hidden_states", "x", *kwargs))]
    for place, value in candidates:
        if isinstance(value, Tensor) and value.is_floating_point():
            keys = (*range(len(args)), *kwargs)
            twins = {
                key for key in keys if (names[key] if isinstance(key, int) and key < len(names) else key) in _TWINS
            }

            def put(new: Tensor, old: Tensor = value, keys: Any = twins | {place}) -> Any:
                positional = tuple(new if i in keys and x is old else x for i, x in enumerate(args))
                return positional, {n: new if n in keys and x is old else x for n, x in kwargs.items()}

            return value, put
    raise AssertionError("a block was called without hidden states")


def _cast_for_autocast(x: Tensor) -> Tensor:
    """Under autocast the projections would cast their input anyway: doing it first halves the bytes."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
