"""What an output's autograd graph shows: its tensors, its loss, and parameters that no output depends on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node as GraphNode

from meshwright.autograd import Node, TensorFunction
from meshwright.containers import rebuilt
from meshwright.temporarily import temporarily

_KEPT = "_meshwright_kept_node"
_end = SimpleNamespace(is_reached=False)


def tensors_in(output: object) -> Iterator[Tensor]:
    """Yield the tensors in a forward pass's output, at any depth of sequences, mappings and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, (list, tuple, set)):
        for value in output:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name, None))


def keep_until_backward(owner: object, output: object) -> None:
    """Keep an object until the backward pass of a forward pass's output has ended, or the graph is dropped.

    A program may drop a model before the backward of its loss. Without this, the garbage collector of each rank would
    decide when its hooks no longer average gradients, and the ranks would differ. The graph gives the object up after
    its pass, since the collector would not find it there if the object keeps the output.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for x in tensors_in(output):
            # A view that a function has returned and something has written, as DeepSpeed does, has no node to be asked.
            with contextlib.suppress(RuntimeError):
                if x.grad_fn is not None:
                    _keep_with(x.grad_fn, owner)


def _keep_with(node: GraphNode, owner: object) -> None:
    held = [owner]

    def reached(_: object) -> None:
        handle.remove()
        torch.autograd.Variable._execution_engine.queue_callback(held.clear)

    handle = node.register_prehook(reached)


def bypasses(output: object, start: Tensor, *gates: GraphNode | None) -> bool:
    """Return whether the first tensor in ``output`` depends on ``start`` along a path that avoids the nodes ``gates``.

    Later tensors are ignored, since they may be attention weights. The search skips graph nodes older than the node of
    ``start``, so it never visits earlier parts of the graph.
    """
    if start.grad_fn is None:
        return False
    oldest = start.grad_fn._sequence_nr()
    nodes = [t.grad_fn for t in tensors_in(output)][:1]
    seen = set(gates)
    while nodes:
        node = nodes.pop()
        if node is start.grad_fn:
            return True
        if node is None or node in seen or node._sequence_nr() < oldest:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False


def unused_parameters(outputs: list[Tensor], parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that no output depends on; [] without outputs or under reentrant checkpointing."""
    unused = {id(p): p for p in parameters}
    seen: set[GraphNode] = set()
    nodes = [t.grad_fn for t in outputs]
    if not nodes:
        return []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":  # reentrant: its part of the graph is built in backward
            return []
        seen.add(node)
        unused.pop(id(getattr(node, "variable", None)), None)
        nodes += [following for following, _ in node.next_functions]
    return list(unused.values())


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return the values of ``x``; backward multiplies the gradient by ``factor``."""
    return _ScaleGradient.apply(x, factor)


def in_backward() -> bool:
    """Return whether autograd runs backward on this thread. A layer that runs during backward is being recomputed."""
    return torch._C._current_graph_task_id() != -1 and not _end.is_reached


def after_backward() -> contextlib.AbstractContextManager[None]:
    """Count what runs inside this context as after backward, although autograd has not returned from the pass yet."""
    return temporarily(_end, is_reached=True)


def keep_node(parameter: nn.Parameter) -> None:
    """Before torch drops the node that accumulates a parameter's gradient, keep it if hooks of the program may know it.

    ``torch.autograd.graph.register_multi_grad_hook`` asks of each of its nodes whether the running pass reaches it.
    """
    if parameter._backward_hooks and parameter.requires_grad:
        with torch.enable_grad():
            parameter.__dict__[_KEPT] = InPass.apply(None, parameter)


def take_kept_node(parameter: nn.Parameter) -> Tensor | None:
    """Return a tensor whose graph has the node that :meth:`keep_node` kept, and keep the node no longer."""
    node: Tensor | None = parameter.__dict__.pop(_KEPT, None)
    return node


class InPass(TensorFunction):
    """Calls a function in a backward pass that reaches some tensors, which get no gradients."""

    has_graph = True

    @staticmethod
    def forward(ctx: Node, call: Callable[[], None] | None, *tensors: Tensor) -> Tensor:
        ctx.call, ctx.count = call, len(tensors)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Node, grad: Tensor) -> tuple[None, ...]:
        if ctx.call is not None:
            ctx.call()
        return tuple([None] * (1 + ctx.count))


class _ScaleGradient(TensorFunction):
    has_graph = True

    @staticmethod
    def forward(ctx: Node, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Node, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def loss_of(output: object) -> Tensor | None:
    """Return an output's loss: its ``loss``, a tuple's first item, or the output itself if scalar; None without one."""
    if isinstance(output, tuple | list):
        output = output[0] if output else None
    if isinstance(output, Tensor):
        return output if output.ndim == 0 else None
    loss = output.get("loss") if isinstance(output, MutableMapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def with_loss(output: object, loss: Tensor) -> object:
    """Return the output with another loss, changed in place where possible."""
    if isinstance(output, Tensor):
        return loss
    if isinstance(output, tuple | list):
        return rebuilt(output, [loss, *output[1:]])
    if isinstance(output, MutableMapping):
        output["loss"] = loss
    else:
        setattr(output, "loss", loss)  # noqa: B010
    return output


def tensors_of(output: object) -> list[Tensor]:
    """Return the tensors at the top level of an output."""
    if isinstance(output, Tensor):
        return [output]
    named = output if isinstance(output, MutableMapping) else getattr(output, "__dict__", {})
    values = output if isinstance(output, tuple | list) else named.values()
    return [x for x in values if isinstance(x, Tensor)]
