"""The functions of transformers in which the tokens of mixers meet, for chunks of a sequence that ranks of cp share.

Each runs the function that it replaces on the rank's own chunks, which are rows of their own, and adds what reaches
them from the chunks before. A recurrence is linear in its state: a chunk makes ``A S + B`` of a state S, and its
results are those without a state plus a linear function of S. So the ranks compute all A and B at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.parallel.sequence_parts import SequenceParts


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
