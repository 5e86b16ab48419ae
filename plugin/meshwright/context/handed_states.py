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

Each runs the function that it replaces on the rank's own chunks, which are rows of their own, and adds what reaches
them from the chunks before. A recurrence is linear in its state: a chunk makes ``A S + B`` of a state S, and its
results are those without a state plus a linear function of S. So the ranks compute all A and B at the same time.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from meshwright.compiling import eager
from meshwright.errors import PlanError
from meshwright.parallel.batch.document_rows import RowDocuments, hidden_states_in, is_of_tokens
from meshwright.parallel.dropout_streams import DropoutStreams
from meshwright.parallel.method_chain import ChainStep, StepOrder, add_step
from meshwright.parallel.sequence_parts import SequenceParts
from meshwright.roles.blocks import kind_of_mixer
from meshwright.temporarily import temporarily


@dataclass(frozen=True)
class Chunks:
    """The chunks of a sequence, of which each rank of cp has some as rows ``[B * chunks, ...]``.

    Args:
        parts: how the ranks share the sequence.
    """

    parts: SequenceParts

    @property
    def own(self) -> int:
        """The number of a rank's chunks of each sequence."""
        return len(self.parts.chunks_of[0])

    def gather(self, x: Tensor) -> Tensor:
        """Return the values of all chunks, ``[B, all chunks, ...]``, in order; backward sums over the ranks."""
        return self.parts.gather(x.unflatten(0, (-1, self.own)), 1)

    def take(self, x: Tensor) -> Tensor:
        """Return the values of this rank's chunks: the way back from :meth:`gather`."""
        return self.parts.take(x, 1).flatten(0, 1)

    def states_before(self, made: Tensor, advance: Callable[[Tensor, Tensor], Tensor], first: Tensor) -> Tensor:
        """Return the state before each of this rank's chunks.

        Args:
            made: what each chunk makes of a state.
            advance: the function of what a chunk makes of a state, and of this state, that returns the next one.
            first: the state before the first chunk, ``[B * chunks, ...]``.
        """
        states = [first[: len(made) // self.own]]
        for each in self.gather(made).unbind(1)[:-1]:
            states.append(advance(each, states[-1]))
        return self.take(torch.stack(states, 1))


def convolve(
    function: Callable[..., Tensor], chunks: Chunks, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Run a causal convolution of ``[B * chunks, channels, tokens]``, after the last tokens before each chunk."""
    reach = weight.shape[-1] - 1
    if reach == 0:
        return function(x, weight, *args, **kwargs)
    ends = chunks.gather(x[..., -reach:])  # of all tokens, if a chunk has fewer
    size = ends.shape[-1]
    line = F.pad(ends.movedim(1, 2).flatten(2), (reach, 0))
    before = line.unfold(2, reach, size)[:, :, : ends.shape[1]].movedim(2, 1)
    return function(torch.cat([chunks.take(before), x], -1), weight, *args, **kwargs)[..., reach:]


def delta_rule(
    function: Callable[..., tuple[Tensor, Tensor]],
    chunks: Chunks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run a gated delta rule, whose state is a matrix ``[keys, values]`` for each head.

    Values are columns of the state, and independent of each other. Columns that begin as the unit matrix, and get no
    values, become the matrix A, and their results are those of any state that is multiplied from the right.
    """
    keys, values = key.shape[-1], value.shape[-1]
    wide = torch.promote_types(value.dtype, torch.float32)
    unit = F.pad(torch.eye(keys, dtype=wide, device=value.device), (values, 0))
    kwargs |= {
        "initial_state": unit.expand(len(value), value.shape[2], -1, -1).contiguous(),
        "output_final_state": True,
    }
    results, made = function(query, key, F.pad(value, (0, keys)), *args, **kwargs)
    without, of_state = results.split((values, keys), -1)
    with torch.autocast(value.device.type, enabled=False):  # states stay in the dtype of the kernel's
        first = torch.zeros_like(made[..., :values])
        state = chunks.states_before(made, lambda each, state: each[..., values:] @ state + each[..., :values], first)
        added = (of_state.to(state.dtype).transpose(1, 2) @ state).transpose(1, 2)
        return (without + added).to(without.dtype), None


def scan(
    function: Callable[..., tuple[Tensor, Tensor]],
    chunks: Chunks,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    dt_bias: Tensor,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    **kwargs: Any,
) -> Tensor:
    """Run the scan of Mamba 2, whose state ``[channels, states]`` each head multiplies by a number per token."""
    kwargs |= {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit, "return_final_states": True}
    results, last = function(x, dt, a, b, c, **kwargs)
    with torch.autocast(x.device.type, enabled=False):
        steps = dt.to(last.dtype) + dt_bias.to(last.dtype)
        steps = (F.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
        decay = (a.to(last.dtype) * steps).cumsum(1).exp()  # [B * chunks, tokens, heads]
        made = torch.cat([last, decay[:, -1, :, None, None].expand(*last.shape[:2], 1, last.shape[-1])], 2)
        state = chunks.states_before(
            made, lambda each, state: each[..., -1:, :] * state + each[..., :-1, :], torch.zeros_like(last)
        )
        by_group = state.unflatten(1, (c.shape[2], -1))
        added = torch.einsum("btgn,bghpn->btghp", c.to(state.dtype), by_group).flatten(2, 3)
        return (results + added * decay[..., None]).to(results.dtype)


# By the global name by which a mixer's code calls the function.
FORMS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolve,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": scan,
}


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
