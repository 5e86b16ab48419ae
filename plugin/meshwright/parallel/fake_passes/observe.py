"""One pass without values for all that ask something of it.

A module that asks what a decoder's forward does gives a :class:`Watcher`, and decides from what this has seen.
:func:`observe` runs the forward once for several of them. It gives what each layer returns tensors of its own, so that
all of them can tell the results of layers from what is computed from these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from meshwright.parallel.fake_passes.fake_pass import run_without_values
from meshwright.parallel.fake_passes.sources import Sources
from meshwright.roles import Decoder

T = TypeVar("T")


class Watcher:
    """Sees passes without values.

    Attributes:
        sources: knows what the tensors of the pass that runs are computed from.
    """

    sources: Sources

    def begin(self) -> None:
        """Forget what was seen, since a pass begins."""

    def watching(self) -> AbstractContextManager[object]:
        """Return a context in which this object sees a pass."""
        return contextlib.nullcontext()

    def has_ended(self) -> bool:
        """Return whether all was seen, so that an error of the pass no longer matters."""
        return False


def observe(
    decoder: Decoder,
    watchers: Sequence[Watcher],
    *,
    rows: int,
    length: int,
    instead: str,
    labels: tuple[int, ...] | None = None,
    options: Mapping[str, object] | None = None,
    source: int | None = None,
) -> Any:
    """Run a decoder once on tensors without values, seen by some watchers, and return its output.

    Args:
        decoder: the decoder, with or without memory. It is not changed.
        watchers: what is to see the pass. The output is None if an error has ended the pass after all have seen what
            they ask.
        rows, length, labels, options, source, instead: see ``run_without_values``.

    Raises:
        PlanError: if the decoder cannot be run in this way.
    """
    facts, sources = decoder.facts, Sources()

    def begin(*_: object) -> None:
        sources.begin()
        for watcher in watchers:
            watcher.begin()

    index = {layer: i for i, layer in reversed(list(enumerate(decoder.layers)))}

    def leave(layer: nn.Module, _: object, output: Any) -> Any:
        leaves, spec = tree_flatten(output)
        made = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        for old, new in zip(leaves, made, strict=True):
            if isinstance(new, Tensor):
                sources.set(new, [index[layer]] if sources.layers(old) else [])
        return tree_unflatten(made, spec)

    with contextlib.ExitStack() as stack:
        stack.enter_context(hooked([facts.model.register_forward_pre_hook(begin)]))
        stack.enter_context(hooked([layer.register_forward_hook(leave) for layer in index]))
        for watcher in watchers:
            watcher.sources = sources
            stack.enter_context(watcher.watching())
        return run_without_values(
            facts,
            rows=rows,
            length=length,
            labels=labels,
            instead=instead,
            options=options,
            watch=sources,
            source=source,
            is_done=lambda: all(watcher.has_ended() for watcher in watchers),
        )


def once(decoder: Decoder, what: str, find: Callable[[], T], *others: str) -> T:
    """Return what passes without values show of a decoder; they run once in a call of ``to_distributed``.

    It is not kept for another call, since a pass also depends on code that may be replaced between the two.

    Args:
        decoder: the decoder.
        what: what is asked.
        find: a function that runs the passes.
        others: the names of other modules that decide the answer.
    """
    parts = (*decoder.layers, decoder.embedding, *decoder.towers, decoder.final_norm, decoder.head)
    key: Hashable = (what, parts, others)
    kept = decoder.facts.found
    if key not in kept:
        kept[key] = find()
    found: T = kept[key]
    return found


@contextlib.contextmanager
def hooked(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of the context."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
