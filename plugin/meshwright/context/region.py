"""The region of a forward pass in which each rank of cp has its own tokens, and the ``forward`` of a decoder that has
one.

It starts at the first layer, since models compute positions, rotary embeddings and masks for the whole row before it.
It ends after the final norm: the head and the causal-LM loss take each token by itself. Under a pipeline every stage
has such a region, which ends with the stage. It starts at the first layer's hook, which also runs on the stages where
this layer only passes its input on. For B rows of S tokens, on each rank of cp::

    tokens [B, S] ──> embedding, positions, masks [B, S, ...]
                                  │ cut at the first layer
                                  v
                 layers [B, S/cp, H] ──> final norm, head, loss [B, S/cp, ...] ──> sum of the losses over cp
                        │      ^                │
             q [B, S/cp]│      │output          └── joined to [B, S, ...] where a program reads all tokens
                        v      │
                 attention over the keys and values [B, S] of all ranks (context/attention.py)
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.context.masks import ContextMask
from meshwright.context.record import ContextRecord
from meshwright.context.recorded_pass import Place, map_tensors, mask_in, tensors_in
from meshwright.errors import PlanError
from meshwright.parallel.autograd_graph import in_backward
from meshwright.parallel.batch.schema import BORDERS, DECODED, BatchSchema
from meshwright.parallel.dropout_streams import DropoutStreams, Restore
from meshwright.parallel.method_chain import BatchStep, RegionBorders, StepOrder
from meshwright.parallel.sequence_parts import SequenceParts
from meshwright.parallel.shards.stand_in import InHead, ShardedLogits, StandIn
from meshwright.parallel.tensor_parallel.block_boundary import hidden_states
from meshwright.roles import Decoder
from meshwright.temporarily import temporarily


class ContextRegion:
    """Hooks that cut the arguments of layers, and join the tokens again where a program reads all of them.

    Install it after the hooks of tensor parallelism.

    Args:
        structure: the decoder's structure.
        record: which arguments of the layers have a value for each token.
        parts: how the ranks share a sequence by default.
        streams: the model's dropout streams. Each rank draws for its own tokens, and all draw the same for joined ones.
        balances: whether the ranks share a row of documents by its work, which attention then finds in the mask.
    """

    def __init__(
        self,
        structure: Decoder,
        record: ContextRecord,
        parts: SequenceParts,
        streams: DropoutStreams,
        *,
        balances: bool,
    ):
        self.record, self.streams, self.balances = record, streams, balances and record.gives_masks
        self.parts = self._default = parts  # how the ranks share the last sequence
        self.length = 0  # the number of tokens of the last sequence
        self.keeps_parted = False  # whether the caller of the pass takes each rank's own tokens
        self.takes_padding = True  # whether layers may compute with padding, which no token that counts may see
        self.joins = False  # whether passes join their tokens after the final norm, also those of a causal LM
        self.inputs: tuple[Tensor, ...] = ()  # what the caller passes for each token, ``[B, S, ...]``
        self._borders = RegionBorders(dataclasses.replace(structure, layers=record.layers))
        self.last_length = 0  # of the last forward pass, which recomputation in backward reads
        self._restore: Restore | None = None  # restores the random stream that the ranks share
        self._cut: dict[int, tuple[Tensor, Tensor]] = {}  # arguments that several layers share, cut once per pass
        structure.model.register_forward_pre_hook(self._begin_pass)
        for layer in dict.fromkeys(structure.layers):
            layer.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        self._borders.last.register_forward_hook(self._end)
        if record.reshapes and structure.head is not None:
            structure.head.register_forward_pre_hook(self._enter_head)

    def joining(self) -> contextlib.AbstractContextManager[None]:
        """Join the tokens after the final norm in passes inside this context, for a head that is not the model's."""
        return temporarily(self, joins=True)

    def leave(self) -> None:
        """End the region, if it has not ended at the final norm."""
        self.length = 0
        self._cut.clear()

    def _begin_pass(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._borders.check()

    def _enter(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, _ = hidden_states(args, kwargs)
        mask = mask_in(args, kwargs) if self.balances else None
        is_first = self._is_first(layer, hidden)
        if is_first:  # in backward too, which starts from the random state before this switch
            self._restore = self.streams.enter_part(hidden)
        if in_backward():  # activation checkpointing runs a layer again, perhaps after other sequences
            parts = self.parts if mask is None or mask.parts is None else mask.parts
        else:
            if is_first:
                self.length = self.last_length = hidden.shape[self.record.hidden_dim]
                self.parts = self._parts_of(mask)
                held = self.parts.axis.size * sum(run.size for run in self.parts.runs(self.length))
                if held != self.length and not self.takes_padding:
                    raise PlanError(
                        f"the sequence has {self.length} tokens, and ParallelPlan.cp={self.parts.axis.size} pads it to "
                        f"{held}; the scales of float8 layers would see the padding. Pad the batch to a multiple of "
                        f"{2 * self.parts.axis.size}, without padding_free rows, or use cp=1"
                    )
                self._borders.begin()
            parts = self.parts
            if mask is not None:
                mask.parts = parts
            known = self.record.arguments[layer]
            for place, x in tensors_in((args, kwargs)):
                if place not in known and place[-1] not in BORDERS and self.length in x.shape and not self._is_input(x):
                    raise ValueError(
                        f"a layer ({type(layer).__name__}) is given {place[-1]!r} of shape {tuple(x.shape)} in this "
                        "call, but not in a call with input_ids and labels alone, so it is not known how to cut it for "
                        "ParallelPlan.cp > 1. Leave the argument out, or use cp=1"
                    )
        length = self.length
        dims, known = self.record.token_dims[layer], self.record.arguments[layer]

        def cut(x: Tensor, place: Place) -> Tensor:
            dim = dims.get(place, 1 if place not in known and self._is_input(x) else None)
            if dim is None or (x is hidden and not is_first):
                return x
            if x.shape[dim] != length and not in_backward():
                raise ValueError(
                    f"a layer ({type(layer).__name__}) is given {place[-1]!r} of shape {tuple(x.shape)} in this call, "
                    f"whose dim {dim} should have the {length} tokens of the row, so it is not known how to cut "
                    "it for ParallelPlan.cp > 1. Use cp=1"
                )
            return self._own(x, dim, parts, keep=x is not hidden)

        own_args: tuple[Any, ...] = map_tensors(cut, args, (0,))
        return own_args, map_tensors(cut, kwargs, (1,))

    def _is_first(self, layer: nn.Module, hidden: Tensor) -> bool:
        """Return whether a layer runs at the first place, where its hidden states have all tokens of the row."""
        if layer is not self._borders.first or not self._borders.is_first_again:
            return layer is self._borders.first
        return hidden.shape[self.record.hidden_dim] == self.last_length if in_backward() else self.length == 0

    def _is_input(self, x: Tensor) -> bool:
        return any(x is given or _is_view_of_all(x, given) for given in self.inputs)

    def _parts_of(self, mask: ContextMask | None) -> SequenceParts:
        work = None if mask is None else mask.work()
        return self._default if work is None else self._default.balanced(work)

    def _own(self, x: Tensor, dim: int, parts: SequenceParts, *, keep: bool) -> Tensor:
        if not keep or in_backward():
            return parts.take(x, dim)
        if id(x) not in self._cut:
            self._cut[id(x)] = x, parts.take(x, dim)
        return self._cut[id(x)][1]

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Tensor | tuple[Any, ...]) -> Any:
        # A model may apply the norm to its embeddings or inside of layers too.
        if self.length == 0 or not self._borders.has_ended():
            return None
        length = self.length
        self.leave()
        if self.keeps_parted and not self.record.reshapes:
            return None
        if self._restore is not None:
            self._restore()
        x, *others = (output,) if isinstance(output, Tensor) else output
        x = self.parts.join(x, 1, length, is_taken_again=self.keeps_parted)
        return x if isinstance(output, Tensor) else (x, *others)

    def _enter_head(self, head: nn.Module, args: tuple[Any, ...]) -> Any:
        if not self.keeps_parted or isinstance(args[0], InHead):  # called by the loss, which has its tokens already
            return None
        return self.parts.take(args[0], 1), *args[1:]


def _is_view_of_all(x: Tensor, given: Tensor) -> bool:
    """Return whether a tensor is all of another one, such as a mask of which a model takes the last S of S tokens."""
    own, other = x.untyped_storage(), given.untyped_storage()
    is_same = own._cdata == other._cdata and x.storage_offset() == given.storage_offset()
    return is_same and x.shape == given.shape and x.stride() == given.stride()


class ContextForward(BatchStep):
    """Runs a decoder's forward with the tokens of its layers cut over cp, and joins the logits that programs read.

    Args:
        decoder: the decoder, to whose forward this step is added.
        region: the region in which each rank has its own tokens.
        has_token_loss: whether the head and the loss take each token by itself, as those of a causal LM do. Otherwise
            the tokens are joined after the final norm.
        joins_logits: a function that returns whether the logits of a pass are joined, given whether the pass is one of
            training with labels.
    """

    order = StepOrder.TOKENS
    has_whole_cache = False

    def __init__(
        self, decoder: nn.Module, region: ContextRegion, *, has_token_loss: bool, joins_logits: Callable[[bool], bool]
    ):
        super().__init__(decoder)
        self.region, self.has_token_loss, self.joins_logits = region, has_token_loss, joins_logits

    def __call__(self, *args: object, **kwargs: object) -> object:
        batch = self.batch_of(args, kwargs)
        region = self.region
        of_decoder = {n.removeprefix("decoder_"): x for n, x in batch.items() if n.startswith("decoder_")}
        region.keeps_parted = self.has_token_loss and not region.joins
        region.inputs = BatchSchema(of_decoder if DECODED in self.signature.parameters else batch).per_token
        try:
            output = self.method(**batch)
        finally:
            region.keeps_parted, region.inputs = False, ()
            region.leave()
        if not self.has_token_loss or region.joins:
            return output
        trains = self.model.training and torch.is_grad_enabled() and batch.get("labels") is not None
        return self._with_logits(output, region.last_length, joins=self.joins_logits(trains))

    def _with_logits(self, output: object, length: int, *, joins: bool) -> object:
        if not isinstance(output, MutableMapping):
            raise PlanError(
                f"under ParallelPlan.cp > 1 {type(self.model).__name__} must return an output with loss and logits, "
                "as transformers' models do; call it without return_dict=False"
            )
        logits = output["logits"]
        if isinstance(logits, ShardedLogits):  # tensor parallelism gave logits that raise already
            return output
        if joins:
            output["logits"] = self.region.parts.join(logits, 1, length)
        else:
            shape = (logits.shape[0], length, logits.shape[-1])
            output["logits"] = PartedLogits.of_shape(shape, logits.dtype, logits.device)
        return output


class PartedLogits(StandIn):
    """Stands in for the logits of all tokens in training with labels; reading it raises an error."""

    MESSAGE = (
        "in training with labels the logits stay sharded over cp, and each rank has those of its own tokens. To read "
        "outputs.logits, pass ToDistributedConfig(gather_logits=True), or call the model in eval mode or without "
        "labels, where the logits are whole"
    )
