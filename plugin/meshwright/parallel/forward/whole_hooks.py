"""Gives the program's hooks in layers that tp cuts whole values: what a rank has in part is gathered for them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.compiling import pause_compiling
from meshwright.errors import PlanError
from meshwright.faults.statement import Statement
from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import all_reduce
from meshwright.parallel.foreign_hooks import is_foreign, source_of
from meshwright.parallel.tensor_parallel.apply import SequenceRegion
from meshwright.parallel.tensor_parallel.structure import DecoderStructure
from meshwright.progress import is_first_rank

logger = logging.getLogger(__name__)

Hook = Callable[..., Any]


class WholeHooks:
    """The program's hooks on modules of which a rank of tp has the inputs or outputs in part.

    Under sequence parallelism, what a hook gets between blocks is this rank's tokens: it is gathered, and what the hook
    returns is split again. The gradient of a block's input is an addend, and is summed. Inside of a block, a hook that
    is made after the model was cut is refused, since its activations are of some heads or channels.

    Args:
        structure: the decoder's structure.
        axis: the axis of tp.
        region: the region in which each rank has its own tokens; None without sequence parallelism.
    """

    def __init__(self, structure: DecoderStructure, axis: Axis, region: SequenceRegion | None):
        self.axis, self.region = axis, region
        self.inside = {module for block in structure.blocks for module in block.inside}
        inside = structure.facts.inside
        self.inside |= {module for owner in structure.routed for module in inside(owner) if module is not owner}
        self.entries = {m for block in structure.blocks for m in (block.module, *block.entries)} - self.inside
        parts = (*structure.layers, *(() if structure.final_norm is None else (structure.final_norm,)))
        of_tokens = {module for part in parts for module in inside(part)} if region is not None else set()
        self.modules = (self.entries | of_tokens | self.inside) - set(structure.embeddings)
        self._blocks = {block.module for block in structure.blocks}
        self.head, self._has_told = structure.head, False
        self._places: dict[str, str] = {}
        self.kept: Callable[[str, object], None] | None = None  # takes what hooks see of outputs

    @property
    def statements(self) -> tuple[Statement, ...]:
        """What the ranks compare, since the hooks of all of them must gather alike."""
        if not self._places:
            return ()
        text = hashlib.sha256(str(sorted(self._places.items())).encode()).hexdigest()[:16]
        return (
            Statement(
                text=text,
                details=lambda: {f"hooks on {name}": hooks for name, hooks in self._places.items()},
                advice="A hook gets whole values, which all ranks of tp gather together: register it on every rank",
            ),
        )

    def take(self, name: str, module: nn.Module) -> None:
        """Let the program's hooks on a module get whole values from now on.

        Raises:
            PlanError: if they are on a module inside of a block.
        """
        self._places.pop(name, None)
        if module not in self.modules and module is not self.head:
            return
        for hooks, key, kind in _hooks_of(module):
            hook = getattr(hooks[key], "of_program", hooks[key])
            if not is_foreign(hook):
                continue
            if hook is not hooks[key] or module is self.head:  # it has whole values, which the ranks make together
                self._places[name] = f"{self._places.get(name, '')} {source_of(hook)}".strip()
                continue
            if module in self.inside or kind is _Legacy:
                raise PlanError(
                    f"a hook on {name} ({source_of(hooks[key])}) would see this rank's heads or channels only, since "
                    "the plan has cut the module over tp. Register it before to_distributed, which then keeps the "
                    "block around it whole, with register_full_backward_hook for gradients; or use ParallelPlan(tp=1)"
                )
            if not self._has_told and is_first_rank() and self.region is not None:
                self._has_told = True
                logger.info(
                    "the hook on %s (%s), and any others in the layers, get all tokens: each call of a hook gathers "
                    "what its module gets and returns over the %d ranks of tp, in forward and in backward",
                    name, source_of(hooks[key]), self.axis.size,
                )  # fmt: skip
            self._places[name] = f"{self._places.get(name, '')} {source_of(hooks[key])}".strip()
            hooks[key] = kind(self, hooks[key], name, is_entry=module in self.entries, is_block=module in self._blocks)

    # What hooks get and return, between whole and in part.
    def whole(self, given: Any) -> Any:
        """Return the same with all tokens of the tensors that have this rank's."""
        return given if self.region is None else tree_map_only(Tensor, self._gathered, given)

    def own(self, given: Any) -> Any:
        """Return the same with this rank's tokens of the tensors that have all."""
        return given if self.region is None else tree_map_only(Tensor, self._split, given)

    def _gathered(self, x: Tensor) -> Tensor:
        assert self.region is not None
        return self.region.sequence.unsplit(x) if self._is_local(x) else x

    def _split(self, x: Tensor) -> Tensor:
        assert self.region is not None
        return self.region.sequence.split(x) if _is_hidden(x) and self.region.sequence.is_whole(x) else x

    def _is_local(self, x: Tensor) -> bool:
        assert self.region is not None
        sequence = self.region.sequence
        return _is_hidden(x) and sequence.is_local(x.shape[1]) and not sequence.is_kept_whole(x)

    def has_parts(self, given: Any) -> bool:
        """Return whether some of the tensors have this rank's tokens."""
        if self.region is None or not self.region.is_open():
            return False
        return any(isinstance(x, Tensor) and self._is_local(x) for x in tree_leaves(given))


class _WholeHook:
    """A hook of the program, called with whole values."""

    def __init__(self, hooks: WholeHooks, hook: Hook, name: str, *, is_entry: bool, is_block: bool):
        self.hooks, self.hook, self.name, self.is_entry, self.is_block = hooks, hook, name, is_entry, is_block
        self.of_program = hook

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        resume = pause_compiling()
        try:
            return self.run(module, *given)
        finally:
            resume()

    def run(self, module: nn.Module, *given: Any) -> Any:
        raise NotImplementedError

    def _require_known(self, given: Any, *, is_input: bool = False) -> None:
        """Raise if a hook gets an activation of which it is not known how ranks share it."""
        region = self.hooks.region
        tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.is_floating_point()]
        is_of_heads = self.is_block and not is_input and any(x.ndim > 3 for x in tensors)  # masks are inputs
        if is_of_heads or (region is not None and region.is_open() and tensors and not any(map(_is_hidden, tensors))):
            shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
            raise PlanError(
                f"a hook on {self.name} ({source_of(self.hook)}) gets tensors of the shapes {shapes}, of which the "
                "ranks of tp have parts that cannot be gathered for it. Put the hook on the layer, or use "
                "ParallelPlan(tp=1)"
            )


class _PreHook(_WholeHook):
    def run(self, module: nn.Module, *given: Any) -> Any:
        self._require_known(given, is_input=True)
        if not self.hooks.has_parts(given):
            return self.hook(module, *given)
        whole = self.hooks.whole(given)
        result = self.hook(module, *whole)
        if result is None:  # the graph passes what the hook has seen, which may have hooks of its own
            result = whole if len(whole) > 1 else whole[0]
        return self.hooks.own(result)


class _ForwardHook(_WholeHook):
    def run(self, module: nn.Module, *given: Any) -> Any:
        self._require_known(given[-1])
        if not self.hooks.has_parts(given):
            return self.hook(module, *given)
        whole = self.hooks.whole(given)
        if self.hooks.kept is not None:
            self.hooks.kept(self.name, whole[-1])
        result = self.hook(module, *whole)
        if not self.hooks.has_parts(given[-1]):
            return result
        return self.hooks.own(whole[-1] if result is None else result)


class _BackwardHook(_WholeHook):
    def run(self, module: nn.Module, *given: Any) -> Any:
        self._require_known(given)
        is_of_tokens = self.hooks.has_parts(given[0])  # of what the hook may change
        sums = self.is_entry and len(given) > 1 and not is_of_tokens
        first = self._summed(given[0]) if sums else self.hooks.whole(given[0])
        result = self.hook(module, first, *map(self.hooks.whole, given[1:]))
        if sums:
            return tree_map_only(Tensor, self._once, result)
        return self.hooks.own(result) if is_of_tokens else result

    def _summed(self, gradients: Any) -> Any:
        return tree_map_only(Tensor, lambda x: all_reduce(x.clone(), self.hooks.axis), gradients)

    def _once(self, x: Tensor) -> Tensor:
        return x if self.hooks.axis.rank == 0 else torch.zeros_like(x)


class _Legacy(_WholeHook):
    """A hook of ``register_backward_hook``, which gets the gradients of the last operation's inputs alone."""


def _is_hidden(x: Tensor) -> bool:
    return x.ndim == 3 and x.is_floating_point()


def _hooks_of(module: nn.Module) -> Iterator[tuple[MutableMapping[int, Hook], int, type[_WholeHook]]]:
    of_backward = _BackwardHook if module._is_full_backward_hook is not False else _Legacy
    kinds: list[tuple[MutableMapping[int, Hook], type[_WholeHook]]] = [
        (module._forward_pre_hooks, _PreHook),
        (module._forward_hooks, _ForwardHook),
        (module._backward_pre_hooks, _BackwardHook),
        (module._backward_hooks, of_backward),
    ]
    for hooks, kind in kinds:
        for key in list(hooks):
            yield hooks, key, kind
