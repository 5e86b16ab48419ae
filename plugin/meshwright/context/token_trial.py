"""Tries what the program brought into the parts whose tokens cp cuts: some tokens of a row against all of them.

Attention, in which tokens meet, is replaced by a function of each token, so that all else of a layer is compared.

The layers with something that the program brought, the final norm and the head run; what differs is an error.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.context.attention import AttentionKind, attach_attention, detach_attention
from meshwright.context.recorded_pass import map_tensors, tensors_in
from meshwright.errors import PlanError
from meshwright.faults.together import succeed_together, texts_of_all
from meshwright.parallel.rehearsal import Arguments, RandomValues, TriedPart, calls_of, differs_by_tokens, untouched
from meshwright.roles import Decoder
from meshwright.roles.brought import Brought, kind_of
from meshwright.roles.linear_kernel import in_features

_ROWS = 2
_LENGTHS = 8, 10  # a size that differs between the two lengths counts tokens
_PARTS = (slice(0, 3), slice(3, 8))  # of the tokens of the first length


def check_tokens_apart(decoder: Decoder, device: torch.device) -> None:
    """Raise if a part of a decoder that the program brought computes something else of some tokens of a row.

    Every rank must make the call, before weights are cut.

    Args:
        decoder: the decoder, which stays as it is.
        device: the device to run on.

    Raises:
        PlanError: on every rank, if there is such a part on one of them.
    """
    trial = _TokenTrial(decoder, device)
    texts = texts_of_all(succeed_together(lambda: next(trial.differing(), "")))
    if found := next(filter(None, texts), None):
        raise PlanError(
            f"{found}. Under context parallelism each rank has some of the tokens of a row, and on one device it sees "
            "all of them. Let it use each token by itself, or use ParallelPlan(cp=1)"
        )


class _TokenTrial:
    """The trials of one decoder's parts."""

    def __init__(self, decoder: Decoder, device: torch.device):
        self.decoder, self.device, self.brought = decoder, device, Brought()
        self._names = decoder.facts.names

    def differing(self) -> Iterator[str]:
        """Yield a description of each part that differs."""
        kinds: dict[object, nn.Module] = {}
        for index, layer in enumerate(dict.fromkeys(self.decoder.layers)):
            if self.brought.with_own_code(layer):
                kinds.setdefault(kind_of(layer, index), layer)
        yield from self._of_layers(list(kinds.values())) if kinds else ()
        for module in (self.decoder.final_norm, self.decoder.head):
            if module is not None and self.brought.with_own_code(module):
                yield from self._of_states(module)

    def _of_layers(self, layers: list[nn.Module]) -> Iterator[str]:
        with untouched(self.decoder.model, self.device), _attending_alone(self.decoder):
            calls, others = (
                calls_of(self.decoder.model, layers, rows=_ROWS, length=length, instead="ParallelPlan(cp=1)")
                for length in _LENGTHS
            )
            for layer in layers:
                arguments = functools.partial(RandomValues.arguments, given=calls[layer])
                yield from self._tried(layer, arguments, _token_dims(calls[layer], others[layer]))

    def _of_states(self, module: nn.Module) -> Iterator[str]:
        weight = next(module.parameters(), None)
        size: Any = self.decoder.embedding.embedding_dim if weight is None else weight.shape[-1]
        if module is self.decoder.head:
            size = in_features(module)
        shape = (_ROWS, _LENGTHS[0], size)
        yield from self._tried(module, lambda values: ((values.normal(shape),), {}), {(0, 0): 1})

    def _tried(self, module: nn.Module, arguments: Arguments, dims: dict[Any, int]) -> Iterator[str]:
        """Run a module on all tokens and on parts of them; ``dims`` has the dim of the tokens of each argument."""

        def of_tokens(tokens: slice) -> Callable[[Any], Any]:
            def cut(x: Tensor, place: Any) -> Tensor:
                return x.movedim(dims[place], 0)[tokens].movedim(0, dims[place]) if place in dims else x

            return lambda given: map_tensors(cut, given)

        name = self._names[module]
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        part = TriedPart(modules={name: module}, arguments=arguments, beside={}, dtype=dtype)
        if why := differs_by_tokens(part, self.device, [(tokens, of_tokens(tokens)) for tokens in _PARTS]):
            inner = self.brought.with_own_code(module)[0]
            own = f"{name}.{inner}".rstrip(".")
            source = self.brought.source_of(module.get_submodule(inner))
            yield f"{own} ({source}) computes something else of some tokens of a row than of all: {why}"


def _token_dims(call: Any, other: Any) -> dict[Any, int]:
    """Return the dim of the tokens of each argument that has one, from calls of two lengths; masks have two."""
    others = dict(tensors_in(other))
    found = {}
    for place, x in tensors_in(call):
        sizes = others[place].shape if place in others else x.shape
        dims = [dim for dim, size in enumerate(x.shape) if size != sizes[dim]]
        if len(dims) == 1:
            found[place] = dims[0]
    return found


@contextlib.contextmanager
def _attending_alone(decoder: Decoder) -> Iterator[None]:
    """Let each token of a decoder attend to itself alone."""
    attach_attention(decoder, _Alone())
    try:
        yield
    finally:
        detach_attention(decoder.facts)


class _Alone:
    """Stands in the place of a ContextAttention: a token's result is that of its own query, key and value."""

    def is_across(self, kind: AttentionKind, q: Tensor, k: Tensor) -> bool:
        return q.shape[2] != k.shape[2]

    def attend(self, call: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return (torch.sigmoid((q * k).mean(-1, keepdim=True)) * v).transpose(1, 2)

    def attend_across(self, call: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        v = v.mean(2, keepdim=True).repeat_interleave(q.shape[1] // v.shape[1], 1)
        return (torch.sigmoid(q.mean(-1, keepdim=True)) * v).transpose(1, 2)
