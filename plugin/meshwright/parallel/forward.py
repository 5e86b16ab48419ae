"""What one forward pass of a distributed model has to know before its layers run."""

from __future__ import annotations

import inspect
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn

from meshwright.faults.guard import Guard
from meshwright.faults.trace import describe_tensors
from meshwright.parallel.collectives import Axis
from meshwright.parallel.dropout import DropoutStreams, Restore
from meshwright.parallel.guarded import ShardedLogits


class ForwardState:
    """Hooks on the whole model: whether its logits may stay sharded, and its random stream.

    Args:
        model: the model.
        streams: its dropout streams.
        tp: the ranks that must get the same inputs.
        dp: the ranks that share a loss.
        guard: compares them, and counts the steps.
        has_sharded_loss: the model's loss function can use sharded logits.
        refuses_internals: hidden states and attention maps would be one rank's share, so asking for
            them raises.
    """

    def __init__(
        self,
        model: nn.Module,
        streams: DropoutStreams,
        *,
        tp: Axis,
        dp: Axis,
        guard: Guard | None,
        has_sharded_loss: bool,
        refuses_internals: bool,
    ):
        self.streams, self.tp, self.dp, self.guard = streams, tp, dp, guard
        self.has_sharded_loss, self.refuses_internals = has_sharded_loss, refuses_internals
        self._keeps_sharded = False
        self._restore: Restore | None = None
        self._signature = inspect.signature(model.forward)
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave, always_call=True)

    def keep_logits_sharded(self) -> bool:
        """Whether the pass under way computes a training loss from sharded logits."""
        return self._keeps_sharded

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.refuses_internals:
            _refuse_internals(model, kwargs)
        inputs = arguments(self._signature, args, kwargs)
        labels = inputs.get("labels")
        if self.guard is not None:
            if model.training and torch.is_grad_enabled():
                self.guard.begin_step()
            if self.tp.size > 1:
                self.guard.meet("forward", self.tp.group, _describe(model, inputs))
            if self.dp.size > 1 and labels is not None:
                self.guard.meet("forward", self.dp.group)
        self._keeps_sharded = self.has_sharded_loss and model.training and labels is not None
        self._restore = self.streams.enter_model(_device(args, kwargs))

    def _leave(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        was_sharded, self._keeps_sharded = self._keeps_sharded, False
        if self._restore is not None:
            self._restore()
            self._restore = None
        return _without_graph(output) if was_sharded else None


def _without_graph(output: Any) -> Any:
    """The outputs, with sharded logits cut off from the graph: the loss has overwritten them.

    An engine that puts a node of its own behind each output (DeepSpeed's ZeRO-3) would go through them otherwise.
    """
    if isinstance(output, tuple):
        return tuple(x.detach() if isinstance(x, ShardedLogits) else x for x in output)
    if isinstance(output, MutableMapping):
        for name, x in list(output.items()):
            if isinstance(x, ShardedLogits):
                output[name] = x.detach()
    return output


def arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward call by name, positional ones included."""
    return {**dict(zip(signature.parameters, args, strict=False)), **kwargs}


def _describe(model: nn.Module, inputs: dict[str, Any]) -> str:
    """What the ranks that share the layers must agree on before these run: it decides their collectives."""
    shapes = [f"{name} {describe_tensors(x)}" for name, x in inputs.items() if torch.is_tensor(x)]
    device = _device((), inputs).type
    precision = f"autocast to {torch.get_autocast_dtype(device)}" if torch.is_autocast_enabled(device) else ""
    return ", ".join(part for part in ("training" if model.training else "evaluation", precision, *shapes) if part)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    return next((x.device for x in (*args, *kwargs.values()) if torch.is_tensor(x)), torch.device("cpu"))


def _refuse_internals(model: nn.Module, kwargs: dict[str, Any]) -> None:
    for option in ("output_hidden_states", "output_attentions"):
        value = kwargs.get(option)  # PEFT passes None
        if getattr(getattr(model, "config", None), option, False) if value is None else value:
            raise ValueError(
                f"{option}=True is not available under tensor parallelism: each rank has only its own heads, and "
                "under sequence parallelism its own tokens. Turn it off, or run this on the one-device model"
            )
