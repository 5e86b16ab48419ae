"""Logits that are not computed until something reads them, so that the loss can compute them chunk by chunk.

In training with labels the head returns a stand-in: a tensor of the logits' shape and dtype that has no memory. It
records what the model does to the logits (scale, cap, cast), and the loss function computes head, steps and loss
together (:mod:`meshwright.parallel.losses.chunked_head`). For any other function the stand-in computes whole logits,
and the function runs on these. Sharded logits raise instead, as they do without a stand-in (see ShardedLogits).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from meshwright.autograd import TensorFunction
from meshwright.errors import UnreadableTensorError
from meshwright.parallel.foreign_hooks import has_foreign_hooks
from meshwright.parallel.losses.chunked_head import Cast, ChunkedHeadLoss, ChunkedLoss, LogitStep, step_of
from meshwright.parallel.losses.cross_entropy import Words
from meshwright.parallel.method_chain import ChainStep, StepOrder
from meshwright.parallel.shards.stand_in import (
    FACTS,
    SHAPE,
    InHead,
    ShardedLogits,
    StandIn,
    become,
    own_shape,
    reading_shards,
)
from meshwright.roles.linear_kernel import PLAIN, kernel_of

_GATHER = "pass ToDistributedConfig(gather_logits=True)"
_CHANGED = (
    "outputs.logits of training with labels are computed when they are first read, and the head's weights have changed "
    f"since the forward pass. Read them before optimizer.step(), or {_GATHER}"
)
_SAMPLED = 8  # number of a weight's rows, and of its columns, to compare


@dataclass(frozen=True, kw_only=True, eq=False)
class Deferral:
    """Decides when a head may defer its logits, and whether they can still be computed.

    Args:
        is_wanted: whether the running pass computes a training loss from the logits.
        is_sharded: whether a rank's logits are those of its own part of the vocabulary.
        count_steps: function that returns the number of optimizer steps that a weight's version counter does not show.
        has_values: whether a weight is in memory; False if reading it would communicate.
        token_loss: the loss that the model's own forward computes with torch's functions; see ``TokenLoss``.
    """

    is_wanted: Callable[[], bool]
    is_sharded: bool
    count_steps: Callable[[], int]
    has_values: Callable[[nn.Parameter], bool]
    token_loss: Callable[[Callable[..., Any], Sequence[object], dict[str, object]], Tensor | None] | None = None


class DeferringHead(ChainStep):
    """The ``forward`` of a linear head whose logits are computed when they are needed."""

    order = StepOrder.HEAD

    def __init__(self, head: nn.Linear, deferral: Deferral):
        self.head, self.deferral = head, deferral

    def __call__(self, x: Any) -> object:
        if isinstance(x, InHead):
            return x.run()
        return self.defer(x) if self.defers(x) else self.method(x)

    def defers(self, hidden: Tensor) -> bool:
        """Return whether the head's logits of these hidden states are deferred."""
        return (
            self.deferral.is_wanted()
            and torch.is_grad_enabled()
            and hidden.ndim > 1
            and self.head._parameters.get("weight") is not None
            and not torch.compiler.is_compiling()
            and not has_foreign_hooks(self.head, backward=True)  # they would see a stand-in
        )

    def defer(self, hidden: Tensor) -> Tensor:
        """Return the stand-in for the logits of hidden states."""
        kind = hidden.device.type
        casts = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64  # which autocast leaves alone
        return Deferred(
            head=self,
            hidden=hidden,
            casts=casts,
            product=torch.get_autocast_dtype(kind) if casts else hidden.dtype,
            made_at=self.moment(hidden),
            sample=self.sample(),
        ).stand_in()

    def moment(self, hidden: Tensor) -> tuple[int, ...]:
        """Return numbers that change when an optimizer steps, or when something else changes what logits depend on."""
        tensors = [x for x in (self.weight, self.head._parameters["bias"], hidden) if x is not None]
        # Another weight takes this one's place inside torch.func.functional_call.
        return (self.deferral.count_steps(), id(self.weight), *(x._version for x in tensors))

    def sample(self) -> Tensor:
        """Return the bytes of a few weights, which must be whole: a write to ``weight.data`` changes no version."""
        weight = self.weight.detach()
        rows, columns = (max(1, size // _SAMPLED) for size in weight.shape)
        return weight[::rows, ::columns].clone(memory_format=torch.contiguous_format).view(torch.uint8)

    @property
    def weight(self) -> nn.Parameter:
        weight = self.head._parameters["weight"]
        assert weight is not None
        return weight

    @staticmethod
    def is_deferrable(head: Any) -> bool:
        """Return whether a head is a linear layer with a kernel for chunks of tokens and a weight that is a parameter.

        A weight that is computed when it is read (a parametrization) may change by being read, so it is not.
        """
        if not isinstance(head, nn.Linear) or head._parameters.get("weight") is None:
            return False
        kernel = kernel_of(head)
        return kernel is not None and kernel.is_token_wise


@dataclass(kw_only=True, eq=False)
class Deferred:
    """The inputs from which the logits of one call of the head are computed.

    Args:
        head: the head.
        hidden: the head's input.
        casts: whether the head was called under autocast.
        product: the dtype of the head's matrix multiplication.
        made_at: the moment at which the head was called; see ``DeferringHead.moment``.
        sample: some of the weights at that moment.
        steps: what the model has done to the logits since.
        hooks: called with the gradient of the logits, if they are computed and a loss is computed from them.
    """

    head: DeferringHead
    hidden: Tensor
    casts: bool
    product: torch.dtype
    made_at: tuple[int, ...]
    sample: Tensor
    steps: tuple[LogitStep, ...] = ()
    hooks: list[Callable[[Tensor], None]] = field(default_factory=list)
    _values: Tensor | None = field(default=None, init=False)

    @property
    def is_computed(self) -> bool:
        """Whether something has read the logits, and may have changed them."""
        return self._values is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return next((step.target for step in reversed(self.steps) if isinstance(step, Cast)), self.product)

    @property
    def columns(self) -> int:
        """The number of this rank's logits per token."""
        return own_shape(self.head.weight)[0]

    def stand_in(self) -> Tensor:
        """Return a tensor that stands for the logits."""
        hidden, is_sharded = self.hidden, self.head.deferral.is_sharded
        shape = (*hidden.shape[:-1], self.columns)
        source = hidden if hidden.requires_grad else self.head.weight
        empty: Tensor = _Unseen.apply(None if is_sharded else source, shape, self.dtype, hidden.device)
        become(empty, _class_of(DeferredShards if is_sharded else DeferredLogits, type(empty)))
        empty.__dict__["deferred"] = self
        return empty

    def after(self, step: LogitStep) -> Tensor:
        """Return the stand-in for the logits after one more step."""
        return dataclasses.replace(self, steps=(*self.steps, step)).stand_in()

    def flat(self) -> Tensor:
        """Return the stand-in for the logits of all tokens in one dimension."""
        return dataclasses.replace(self, hidden=self.hidden.flatten(0, -2)).stand_in()

    def values(self) -> Tensor:
        """Return the differentiable logits, computed now unless they are already."""
        if self._values is None:
            self._check_readable()
            # Compute the logits with a graph, even if the first reader needs none (an autograd function's forward, a
            # metric). Keep them out of what torch.utils.checkpoint runs twice, since the second run would not compute
            # them again.
            with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
                logits = self._in_head(self._whole)
                for step in self.steps:
                    logits = step.plain(logits)
            self._values = logits.as_subclass(ShardedLogits) if self.head.deferral.is_sharded else logits
            if logits.requires_grad:
                for hook in self.hooks:
                    logits.register_hook(hook)
        return self._values

    def loss(self, targets_N: Tensor, words: Words, factor: Tensor | None) -> Tensor:
        """Return the sum of the tokens' losses; see ``ChunkedHeadLoss``.

        Args:
            targets_N: the target of each token.
            words: the part of the vocabulary that this rank scores.
            factor: what the gradients of the sum are multiplied by.
        """
        hidden = self.hidden.flatten(0, -2)
        if len(hidden) != len(targets_N):
            raise ValueError(
                f"the head has logits of {len(hidden)} tokens, but there are {len(targets_N)} labels. Pass labels of "
                "the same shape as input_ids; with logits_to_keep, pass those of the tokens whose logits are kept"
            )
        kernel = kernel_of(self.head.head) or PLAIN
        what = ChunkedLoss(words=words, steps=self.steps, dtype=self.product, kernel=kernel)

        def run() -> Tensor:
            bias = self.head.head._parameters["bias"]
            result: Tensor = ChunkedHeadLoss.apply(hidden, self.head.weight, bias, targets_N, factor, what)
            return result

        return self._in_head(run)

    def _whole(self) -> Tensor:
        if not torch.equal(self.sample, self.head.sample()):
            raise UnreadableTensorError(_CHANGED)
        kind = self.hidden.device.type
        with torch.autocast(kind, dtype=self.product if self.casts else None, enabled=self.casts):
            result: Tensor = self.head.method(self.hidden)
        return result

    def _in_head(self, run: Callable[[], Tensor]) -> Tensor:
        result: Tensor = self.head.head(InHead(run))
        return result

    def _check_readable(self) -> None:
        deferral = self.head.deferral
        if self.made_at != self.head.moment(self.hidden):
            raise UnreadableTensorError(_CHANGED)
        if not deferral.is_wanted() and not deferral.has_values(self.head.weight):
            raise UnreadableTensorError(
                "outputs.logits of training with labels are computed when they are first read, and under zero_stage=3 "
                f"the head's weights are no longer gathered. Read them before loss.backward(), or {_GATHER}"
            )


def deferred_of(logits: Tensor) -> Deferred | None:
    """Return what a stand-in stands for; None for other tensors."""
    found: Deferred | None = getattr(logits, "__dict__", {}).get("deferred")
    return found


def without_stand_in(logits: Tensor) -> Tensor:
    """Return the computed logits of a stand-in that was read; other tensors as they are."""
    deferred = deferred_of(logits)
    return logits if deferred is None else deferred.values()


def watch_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call a hook with the gradient of a tensor, or with that of a stand-in's logits if they are computed."""
    deferred = deferred_of(tensor)
    if deferred is None or deferred.is_computed:
        without_stand_in(tensor).register_hook(hook)
    else:
        deferred.hooks.append(hook)


_OF_GRADIENT = frozenset({"register_hook", "retain_grad"})
_OWN_FACTS = FACTS - {"as_subclass", "detach"} - _OF_GRADIENT


class _RecordedLogits(StandIn):
    """A tensor without values: it records steps, and passes what may be computed on to the logits themselves."""

    _OWN: ClassVar[frozenset[str]] = _OWN_FACTS

    @classmethod
    def run(cls, func: Callable[..., Any], name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        first = args[0] if args else None
        deferred = deferred_of(first) if isinstance(first, Tensor) else None
        if name == "is_contiguous" and deferred is not None:
            return False  # so that libraries make it contiguous before they pass it to a collective
        if deferred is not None and not deferred.is_computed:
            if name in cls._OWN:
                with reading_shards():
                    return func(*args, **kwargs)
            if name == "contiguous" and deferred.head.deferral.is_wanted():
                return first
            own = deferred.head.deferral.token_loss
            if own is not None and deferred.head.deferral.is_wanted():
                found = own(func, args, kwargs)
                if found is not None:
                    return found
            step = step_of(func, args, kwargs, deferred.dtype)
            if step is not None:
                is_same = isinstance(step, Cast) and step.target == deferred.dtype
                return first if is_same else deferred.after(step)
        cls._check(func, name, args)
        args, kwargs = tree_map_only(_RecordedLogits, without_stand_in, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def _check(cls, func: Callable[..., Any], name: str, args: tuple[object, ...]) -> None:
        """Raise if logits must not be computed for a function."""


class DeferredLogits(_RecordedLogits):
    """Stands in for whole logits. Whatever reads it gets the logits' values."""

    _OWN = _OWN_FACTS | SHAPE
    __repr__ = Tensor.__repr__  # type: ignore[assignment]

    @classmethod
    def _check(cls, func: Callable[..., Any], name: str, args: tuple[Any, ...]) -> None:
        if name in _OF_GRADIENT or (func is torch.autograd.grad and any(deferred_of(x) for x in args[1])):
            raise UnreadableTensorError(
                "in training with labels outputs.loss is computed without outputs.logits, so its gradient does not "
                f"reach them. To see the gradient of the logits, {_GATHER}"
            )


class DeferredShards(_RecordedLogits, ShardedLogits):
    """Stands in for the logits of this rank's part of the vocabulary, and raises wherever ShardedLogits do."""

    def detach(self) -> Tensor:
        """Return a tensor that cannot be read either; the logits are not computed."""
        with reading_shards():
            empty = Tensor.detach(self)
        become(empty, _class_of(ShardedLogits, type(empty)))
        return empty

    @classmethod
    def _check(cls, func: Callable[..., Any], name: str, args: tuple[object, ...]) -> None:
        if not cls.allows(name, args):
            raise UnreadableTensorError(cls.MESSAGE)


@functools.cache
def _class_of(kind: type, of_values: type) -> type:
    """Return the class of a stand-in; the fake tensors of a traced step stay what they are."""
    return kind if of_values is Tensor or issubclass(of_values, kind) else type(kind.__name__, (kind, of_values), {})


def _as_it_is(x: Tensor) -> Tensor:
    return x


class _Unseen(TensorFunction):
    """Connects a stand-in to its graph, and raises if an operation has used it without computing the logits."""

    has_graph = True  # backward always raises an error of its own

    @staticmethod
    def forward(
        ctx: Any, source: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise UnreadableTensorError(
            "an autograd function got outputs.logits of training with labels, which are computed when they are first "
            f"read, and its gradient would be lost. Pass it outputs.logits.clone(), or {_GATHER}"
        )
