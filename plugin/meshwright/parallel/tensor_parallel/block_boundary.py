"""Hooks at the two borders of a block: they gather or share its input, save this rank's rows of it, and reduce its
result.

One rank's pass through a block with sequence parallelism, for S tokens, a width of H and an inner width of F::

    [S/tp, H] ── all-gather ──> [S, H] ── q, k, v or gate, up ──> [S, F/tp] ── o or down ──> [S, H], an addend
                                                                                                │
    [S/tp, H] <─────────────────────────── reduce-scatter ──────────────────────────────────────┘

Without it every rank has the input [S, H], whose gradient is all-reduced in backward, and the addends are all-reduced.

Stock attention code may get biases and masks for each head as arguments. The hooks give it this rank's part of them.

In a block's first pass, the hooks also check for stock code that would silently give wrong results when sharded.

All projections of a block save the block's input for their weight gradients. Under sequence parallelism
this input is the whole sequence, and keeping it would cost most of the memory that sharding the activations
saves. As in Megatron (Korthikanti et al. 2022, section 4.2.2), backward does one more all-gather instead.

A pass through a block uses column_projections.py if ``ColumnProjections.can_enter``, and this module otherwise: for a
compiled block, a projection with an adapter or another forward, a part of a layer that is no module of its own, and an
input that requires no gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node as GraphNode
from torch.utils.hooks import RemovableHandle

from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.mesh.axes import Axis
from meshwright.parallel import saved_tensors as saved
from meshwright.parallel.autograd_graph import bypasses, in_backward
from meshwright.parallel.collectives import all_gather, gather_rows, reduce, share
from meshwright.parallel.dropout_streams import DropoutStreams, Rates, Restore
from meshwright.parallel.method_chain import Uncompiled, add_step
from meshwright.parallel.tensor_parallel.column_projections import ColumnProjections, LinearForward
from meshwright.parallel.tensor_parallel.sequence_parallel import SequenceSharding
from meshwright.roles.adapters import projection
from meshwright.roles.blocks import Block
from meshwright.roles.blocks.head_layout import HeadLayout
from meshwright.roles.linear_kernel import form_of, kernel_of


class GatheredInput:
    """The input of one block in one forward pass: gathered in forward, saved as this rank's rows."""

    def __init__(self, full: Tensor, local: Tensor, axis: Axis):
        self._local = local.detach().flatten(0, -2)
        self._axis = axis
        self._memory = saved.memory(full)
        self._numel = full.numel()
        self._packed = self._unpacked = 0
        self._full: Tensor | None = None

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is the gathered input, in any shape."""
        is_whole = tensor.numel() == self._numel and tensor.is_contiguous()
        return is_whole and saved.memory(tensor) == self._memory

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        self._packed += 1
        shape = tensor.shape
        return lambda: self._unpack(shape)

    def _unpack(self, shape: torch.Size) -> Tensor:
        if self._full is None:
            self._full = all_gather(self._local, self._axis)
        full = self._full
        self._unpacked += 1
        if self._unpacked == self._packed:  # the block's last projection has used it, so free it
            self._full, self._unpacked = None, 0
        return full.flatten()[: self._numel].view(shape)


class RegatheredProjections:
    """Hooks on a block's projections that swap the saved input for a :class:`GatheredInput`.

    The block's own pre-hook calls :meth:`open` with the gathered input; :meth:`close` ends the pass.
    """

    def __init__(self, projections: list[nn.Module]):
        self._current: GatheredInput | None = None
        self._is_pushed = self._spans_block = False
        self._projections = projections
        inner = {id(module): module for projection in projections for module in projection.modules()}.values()
        # Another kernel's own forward may save a copy of its input, which is not recognised here.
        self._forwards = [LinearForward(m) for m in inner if (kernel := kernel_of(m)) and not kernel.is_differentiable]
        self._handles: list[RemovableHandle] = []

    def span_block(self) -> None:
        """Swap what the whole block saves, from :meth:`open` to :meth:`close`, without hooks on the projections.

        A compiled block saves its input once, for all projections.
        """
        self._spans_block = True
        for handle in self._handles:
            handle.remove()
        for forward in self._forwards:
            forward.remove()
        self._projections = []

    def open(self, full: Tensor, local: Tensor, axis: Axis) -> None:
        if torch.is_grad_enabled() and not saved.is_checkpointing():  # checkpointing drops the gathered input anyway
            self._hook()
            self._current = GatheredInput(full, local, axis)
            if self._spans_block:
                self._swap(self._current)

    def _hook(self) -> None:
        """Add the hooks at the first use, since most blocks never need them (see column_projections.py)."""
        for linear in self._projections:
            self._handles.append(linear.register_forward_pre_hook(self._push))
            self._handles.append(linear.register_forward_hook(self._pop, always_call=True))
        self._projections = []

    def close(self) -> None:
        if self._spans_block:
            self._pop()
        self._current = None

    def _push(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        gathered = self._current
        # The program's own checkpoint keeps the gathered input, and runs the projection again without its block.
        if gathered is not None and gathered.holds(args[0]) and not saved.is_checkpointing():
            self._swap(gathered)

    def _swap(self, gathered: GatheredInput) -> None:
        saved.push(lambda tensor: gathered.pack(tensor) if gathered.holds(tensor) else None)
        self._is_pushed = True

    def _pop(self, *_: object) -> None:
        if self._is_pushed:
            self._is_pushed = False
            saved.pop()


_HEAD_BIASES = ("alibi", "position_bias")
PER_HEAD = ("attention_mask", *_HEAD_BIASES, "rel_pos", "rel_2d_pos")


@dataclass
class _BlockPass:
    """One call of a block, from its entry to its end.

    Args:
        entered: the block's full input, if this pass is checked.
        projections: how often the output projection has run.
        reduction: the graph node that reduces the block's result, or that makes what is reduced at the end of the
            block, if this pass is checked.
    """

    entered: Tensor | None
    projections: int = 0
    reduction: GraphNode | None = None


class BlockHooks:
    """Hooks that gather or share the input of one block and reduce its result."""

    def __init__(
        self, facts: Facts, block: Block, axis: Axis, sequence: SequenceSharding | None, streams: DropoutStreams
    ):
        self.axis, self.sequence, self.streams = axis, sequence, streams
        self._restore: Restore | None = None
        self._rates = Rates(facts, block.module)
        self._bias: nn.Parameter | None = None
        self._name, self._is_whole_module = block.name, block.entries == (block.module,)
        self._names = tuple(inspect.signature(block.reader.forward).parameters)
        self._is_checked = False
        self._pass: _BlockPass | None = None
        self._head_inputs = None if block.heads is None else HeadInputs(block.reader, block.heads, axis)
        self._regathered = RegatheredProjections(list(block.columns)) if sequence is not None else None
        columns = block.columns if block.entries == (block.reader,) else ()
        self._columns = ColumnProjections(columns, is_gathered=sequence is not None)
        for entry in block.entries:
            # prepend, since an entry may be a projection whose other hooks must see the gathered input.
            entry.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
            entry.register_forward_hook(self._close, always_call=True)
        self._output, self._reduces_at_end = block.row, block.returns_projected
        self._sharers = [self]  # the blocks with the same output projection
        # Only the projection has a bias. The reduction sums the projection's output and its adapters' output.
        self._row = projection(block.row)
        kernel = form_of(self._row)
        self._needs_bias = kernel is not None and kernel.needs_bias
        block.row.register_forward_pre_hook(self._lift_bias)
        block.row.register_forward_hook(self._reduce, always_call=True)

    def prepare_to_compile(self) -> None:
        """Leave no hook inside the block's code, so that torch.compile makes one graph of it.

        The output projection is not compiled: it runs between two hooks, and would be a graph of one operation.
        """
        if self._regathered is not None and self._is_whole_module:
            self._regathered.span_block()
        self._columns.remove()
        add_step(self._output, Uncompiled())

    def _enter(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        if self._head_inputs is not None:
            args, kwargs = self._head_inputs.take_own(args, kwargs)
        x, put_back = hidden_states(args, kwargs, self._names)
        x = _cast_for_autocast(x)
        overlaps = self._columns.can_enter(x)
        if self.sequence is None:
            # _restore is set already for the second input projection of an MLP that the layer owns.
            if self._restore is None and self._rates.is_any_on():
                self._restore = self.streams.enter_shard(x)
            full = self._columns.enter(x, self.axis) if overlaps else share(x, self.axis)
        else:
            full = self.sequence.gather(x, self._columns.enter if overlaps else gather_rows)
        if overlaps:
            self._columns.open(full)
        elif self._regathered is not None:
            self._regathered.open(full, x, self.axis)
        is_checked_now = self._is_whole_module and not self._is_checked and not torch.compiler.is_compiling()
        self._pass = _BlockPass(full if is_checked_now else None)
        return put_back(full)

    def _close(self, module: nn.Module, args: tuple[object, ...], output: object) -> object:
        self._columns.close(has_ended=output is not None)
        if self._regathered is not None:
            self._regathered.close()
        if not self._is_whole_module:  # the output projection runs later, in another part of the block or the layer
            return None
        current, self._pass = self._pass, None
        if output is None or current is None:  # the block raised
            return None
        if not current.projections:
            raise PlanError(
                f"{self._name} ran without calling its output projection as a module, so its result would be only one "
                "rank's part. Call the projection instead of reading its weight; if the model's config has these "
                "options, set pretraining_tp=1 and slow_but_exact=False"
            )
        if current.entered is not None and current.projections == 1 and torch.is_grad_enabled():
            if bypasses(output, current.entered, current.reduction):
                raise PlanError(
                    f"{self._name} adds its input to its output (a residual connection?), so the input's gradient "
                    "through this addition would count once per rank. Add the input in the decoder layer: x + block(x)"
                )
            self._is_checked = current.entered.requires_grad
        if not self._reduces_at_end:
            return None
        if not isinstance(output, tuple):
            return self._summed(output)
        return (self._summed(output[0]), *output[1:])

    def _lift_bias(self, module: nn.Module, args: tuple[object, ...]) -> None:
        if self._pass is None and any(other._pass is not None for other in self._sharers):
            return
        # Every rank would add the bias to its partial sum, so it is removed here and added once after the reduction.
        self._bias = self._row._parameters["bias"]
        none = torch.zeros_like(self._bias) if self._bias is not None and self._needs_bias else None
        self._row._parameters["bias"] = none  # type: ignore[assignment]  # a tensor without a gradient
        if self._pass is None and in_backward():  # the program's own checkpoint runs the inside of the block again
            return
        if self._pass is None:
            raise PlanError(
                f"the output projection of {self._name} ran, but the block was not called as a module: the gradient of "
                "its input would lack the other ranks' parts. Call block(x), not block.forward(x)"
            )
        self._pass.projections += 1

    def _reduce(self, module: nn.Module, args: tuple[object, ...], output: Tensor | None) -> Tensor | None:
        if self._pass is None and len(self._sharers) > 1:
            return None
        bias, self._bias = self._bias, None
        self._row._parameters["bias"] = bias
        if self._restore is not None:
            self._restore()
            self._restore = None
        if output is None:  # the projection raised; bias and random state are restored already
            return None
        result = output if self._reduces_at_end else self._summed(output)
        if self._pass is not None and self._pass.entered is not None:
            self._pass.reduction = result.grad_fn
        if not self._is_whole_module:  # nothing closes this pass
            self._pass = None
        return result

    def _summed(self, output: object) -> Tensor:
        """Return the sum of the ranks' outputs, plus the bias of the output projection."""
        assert isinstance(output, Tensor)
        summed = reduce(output, self.axis) if self.sequence is None else self.sequence.reduce_scatter(output)
        bias = self._row._parameters["bias"]
        return summed if bias is None else summed + bias.to(summed.dtype)


def share_output_projections(blocks: Iterable[BlockHooks]) -> None:
    """Let the hooks of blocks with one output projection act only while their own block runs."""
    sharers: dict[nn.Module, list[BlockHooks]] = {}
    for block in blocks:
        block._sharers = sharers.setdefault(block._output, [])
        block._sharers.append(block)


class HeadInputs:
    """Cuts an attention block's per-head arguments (biases, and masks that contain biases) to this rank's heads."""

    def __init__(self, attention: nn.Module, heads: HeadLayout, axis: Axis):
        self._names = tuple(inspect.signature(attention.forward).parameters)
        self._heads, self._rank = heads, axis.rank

    def take_own(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the arguments, cut to this rank's heads."""
        own = [self._take(name, value) for name, value in zip(self._names, args, strict=False)]
        cut = {name: self._take(name, kwargs[name]) for name in PER_HEAD if name in kwargs}
        return (*own, *args[len(own) :]), {**kwargs, **cut}

    def _take(self, name: str, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        if value.ndim == 4 and name in PER_HEAD and value.shape[1] == self._heads.heads:
            return self._heads.take_heads(value, self._rank, dim=1)
        if value.ndim == 3 and name in _HEAD_BIASES:  # dim 0 is heads, or batch times heads
            return self._heads.take_heads(value, self._rank)
        return value


class SharedDropout:
    """Hooks that make all ranks draw the same mask in a dropout on an activation that every rank holds whole."""

    def __init__(self, dropout: nn.Module, streams: DropoutStreams):
        self.streams = streams
        self._restore: Restore | None = None
        dropout.register_forward_pre_hook(self._enter)
        dropout.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if module.training and getattr(module, "p", 0) > 0:
            self._restore = self.streams.enter_shared(args[0])

    def _leave(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if self._restore is not None:
            self._restore()
            self._restore = None


# Argument names under which attention may get the same activation more than once.
_TWINS = frozenset({"q", "k", "v", "query", "key", "value", "queries", "keys", "values"})


def hidden_states(
    args: tuple[object, ...], kwargs: dict[str, object], names: tuple[str, ...] = ()
) -> tuple[Tensor, Callable[[Tensor], tuple[tuple[object, ...], dict[str, object]]]]:
    """Return the activation among a block's arguments, and a function that puts another activation in its place.

    Args:
        args: the block's positional arguments.
        kwargs: the block's keyword arguments.
        names: the names of the positional arguments. If the same activation is also passed under a name in _TWINS,
            that argument is replaced too. Under any other name, such as a residual's, the argument stays.
    """
    for at in (*range(len(args[:1])), "hidden_states", "x", *kwargs):
        old = args[at] if isinstance(at, int) else kwargs.get(at)
        if isinstance(old, Tensor) and old.is_floating_point():
            break
    else:
        raise AssertionError("a block was called without hidden states")

    def put(new: Tensor) -> tuple[tuple[object, ...], dict[str, object]]:
        def is_replaced(key: int | str) -> bool:
            return key == at or (names[key] if isinstance(key, int) and key < len(names) else key) in _TWINS

        positional = tuple([new if x is old and is_replaced(i) else x for i, x in enumerate(args)])
        return positional, {n: new if x is old and is_replaced(n) else x for n, x in kwargs.items()}

    return old, put


def _cast_for_autocast(x: Tensor) -> Tensor:
    """Cast to autocast's dtype before the collective, to halve its bytes; the projections would cast anyway.

    Autocast leaves float64 alone.
    """
    kind = x.device.type
    is_cast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if is_cast else x
