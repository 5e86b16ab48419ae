"""Runs mixers, which have recurrences or convolutions over tokens, on sequences that the ranks of cp share.

Each rank computes a mixer for its own tokens only, and hands its states on to the tokens that follow. If states cannot
be handed over, the mixer is given all tokens of the sequence instead.

A rank has chunks of each sequence, which are rows of their own while the mixer runs. For 2 ranks, of which one has
chunks 0 and 3, and the other one 1 and 2::

    chunk            0              1              2              3
    convolution      x ─last tokens─> x ─last tokens─> x ─last tokens─> x
    recurrence       x ────state────> x ────state────> x ────state────> x

The mixer's own code runs. While it does, the functions of its file in which tokens meet are those of
``linear_recurrences``, which exchange what goes from chunk to chunk.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from meshwright.compiling import eager
from meshwright.context.linear_recurrences import FORMS, Chunks
from meshwright.errors import PlanError
from meshwright.parallel.batch.document_rows import RowDocuments, hidden_states_in, is_of_tokens
from meshwright.parallel.dropout_streams import DropoutStreams
from meshwright.parallel.method_chain import ChainStep, StepOrder, add_step
from meshwright.parallel.sequence_parts import SequenceParts
from meshwright.roles.blocks import kind_of_mixer
from meshwright.temporarily import temporarily


class GatheredTokens(ChainStep):
    """The step of a mixer that gathers the tokens of all ranks in order, and keeps this rank's own of the result.

    Every rank computes the whole sequence. It uses only its own tokens of the result, so a weight gets from each rank
    the addend of the loss of this rank's tokens, as every weight does under cp. The gradients of the tokens are summed.
    The gathered sequence may have padding at its end, where a causal module does not look.

    Args:
        name: the name of the mixer, for messages.
        parts: how the ranks share each sequence.
        streams: the model's dropout streams.
    """

    order = StepOrder.TOKENS

    def __init__(self, name: str, parts: SequenceParts, streams: DropoutStreams):
        self.name, self.parts, self.streams = name, parts, streams

    def __call__(self, *args: object, **kwargs: object) -> object:
        hidden = hidden_states_in(args, kwargs)
        if hidden is None:
            raise PlanError(
                f"{self.name} has a recurrence or a convolution over tokens, and is called without hidden states, so "
                "the tokens of other ranks cannot be gathered for it. Use ParallelPlan(cp=1)"
            )
        own = hidden.shape[:2]
        args, kwargs = tree_map_only(
            Tensor, lambda x: self.parts.gather(x, 1) if is_of_tokens(x, own) else x, (args, kwargs)
        )
        restore = self.streams.enter_whole(hidden)
        try:
            output = self.method(*args, **kwargs)
        finally:
            restore()
        whole = own[0], own[1] * self.parts.axis.size
        return tree_map_only(Tensor, lambda x: self.parts.take(x, 1) if x.shape[:2] == whole else x, output)


class HandedStates(GatheredTokens):
    """The step of a mixer that computes this rank's own tokens. Rows of several documents are gathered instead.

    Args:
        name: the name of the mixer, for messages.
        parts: how the ranks share each sequence.
        streams: the model's dropout streams.
        mixer: the mixer, of a kind whose functions are known.
        documents: the documents of the batch that runs now.
    """

    def __init__(
        self, name: str, parts: SequenceParts, streams: DropoutStreams, mixer: nn.Module, documents: RowDocuments | None
    ):
        super().__init__(name, parts, streams)
        self.mixer, self.documents = mixer, documents
        kind = kind_of_mixer(mixer)
        assert kind is not None
        self.functions, self._has_training_kernel = kind.functions, kind.has_training_kernel

    def __call__(self, *args: object, **kwargs: object) -> object:
        hidden = hidden_states_in(args, kwargs)
        if hidden is None or (self.documents is not None and self.documents.of_layer() is not None):
            return super().__call__(*args, **kwargs)
        own, chunks = hidden.shape[:2], Chunks(self.parts)
        args, kwargs = tree_map_only(
            Tensor, lambda x: _as_rows(x, own, chunks.own) if is_of_tokens(x, own) else x, (args, kwargs)
        )
        output = self._run(chunks, args, kwargs)
        rows = own[0] * chunks.own, own[1] // chunks.own
        return tree_map_only(Tensor, lambda x: _as_tokens(x, own) if x.shape[:2] == rows else x, output)

    @eager  # a compiled mixer would be compiled anew in each call, whose functions are new
    def _run(self, chunks: Chunks, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run the mixer, with functions that exchange what goes from chunk to chunk."""
        called: list[str] = []

        def exchanging(name: str, *args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return FORMS[name](stock[name], chunks, *args, **kwargs)

        file = sys.modules[_forward_of(self.mixer).__module__]
        stock = {name: getattr(file, name) for name in self.functions}
        # As WithoutTrainingKernel of parallel/tensor_parallel/apply.py says.
        mode = {"training": False} if self._has_training_kernel else {}
        replaced = {name: functools.partial(exchanging, name) for name in self.functions}
        with temporarily(self.mixer, **mode), temporarily(file, **replaced):
            output = self.method(*args, **kwargs)
        if sorted(called) != sorted(self.functions):
            raise PlanError(
                f"{self.name} ({type(self.mixer).__name__}) called {called} and not {list(self.functions)}, so states "
                "were not handed from rank to rank. Use ParallelPlan(cp=1)"
            )
        return output


def part_mixers(
    mixers: Mapping[str, nn.Module], parts: SequenceParts, streams: DropoutStreams, documents: RowDocuments | None
) -> None:
    """Let mixers compute this rank's tokens of a sequence and hand states over, or else gather all tokens."""
    for name, mixer in mixers.items():
        if hands_states(mixer):
            add_step(mixer, HandedStates(name, parts, streams, mixer, documents))
        else:
            add_step(mixer, GatheredTokens(name, parts, streams))


def hands_states(mixer: nn.Module) -> bool:
    """Return whether the code of a mixer calls functions by which states are handed over, for its kind."""
    kind, forward = kind_of_mixer(mixer), _forward_of(mixer)
    return (
        kind is not None
        and bool(kind.functions)
        and {*kind.functions} <= {*forward.__code__.co_names} & forward.__globals__.keys()
    )


def _forward_of(mixer: nn.Module) -> Any:
    return inspect.unwrap(type(mixer).forward)


def _as_rows(x: Tensor, own: tuple[int, ...], chunks: int) -> Tensor:
    rows: Tensor = x.expand(*own, *x.shape[2:]).unflatten(1, (chunks, -1))
    return rows.flatten(0, 1)


def _as_tokens(x: Tensor, own: tuple[int, ...]) -> Tensor:
    rows: Tensor = x.unflatten(0, (own[0], -1))
    return rows.flatten(1, 2)
