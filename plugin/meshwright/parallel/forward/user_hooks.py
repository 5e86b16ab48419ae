"""The program's own hooks inside a distributed model: they get whole values where tp cuts, and a warning where they see
parts of the batch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.autograd import Node, TensorFunction
from meshwright.compiling import pause_compiling
from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.faults.statement import Statement
from meshwright.mesh.axes import Axis
from meshwright.parallel.autograd_graph import in_backward
from meshwright.parallel.collectives import all_reduce
from meshwright.parallel.foreign_hooks import (
    has_foreign_hooks,
    hook_tables,
    hooks_of_all_modules,
    is_foreign,
    is_of_program,
    source_of,
)
from meshwright.parallel.tensor_parallel.apply import SequenceRegion
from meshwright.parallel.tensor_parallel.structure import DecoderStructure
from meshwright.progress import is_first_rank
from meshwright.roles import Decoder
from meshwright.temporarily import temporarily

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
        self.head, self._has_logged = structure.head, False
        self._places: dict[str, str] = {}
        self.keep_output: Callable[[str, object], None] | None = None  # takes what hooks see of outputs

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
            if not self._has_logged and is_first_rank() and self.region is not None:
                self._has_logged = True
                logger.info(
                    "the hook on %s (%s), and any others in the layers, get all tokens: each call of a hook gathers "
                    "what its module gets and returns over the %d ranks of tp, in forward and in backward",
                    name, source_of(hooks[key]), self.axis.size,
                )  # fmt: skip
            self._places[name] = f"{self._places.get(name, '')} {source_of(hooks[key])}".strip()
            hooks[key] = kind(self, hooks[key], name, is_entry=module in self.entries, is_block=module in self._blocks)

    # What hooks get and return, between whole and in part.
    def whole(self, values: Any) -> Any:
        """Return the same with all tokens of the tensors that have this rank's."""
        return values if self.region is None else tree_map_only(Tensor, self._gathered, values)

    def own(self, values: Any) -> Any:
        """Return the same with this rank's tokens of the tensors that have all."""
        return values if self.region is None else tree_map_only(Tensor, self._split, values)

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

    def has_parts(self, values: Any) -> bool:
        """Return whether some of the tensors have this rank's tokens."""
        if self.region is None or not self.region.is_open():
            return False
        return any(isinstance(x, Tensor) and self._is_local(x) for x in tree_leaves(values))


class _WholeHook:
    """A hook of the program, called with whole values."""

    def __init__(self, hooks: WholeHooks, hook: Hook, name: str, *, is_entry: bool, is_block: bool):
        self.hooks, self.hook, self.name, self.is_entry, self.is_block = hooks, hook, name, is_entry, is_block
        self.of_program = hook

    def __call__(self, module: nn.Module, *values: Any) -> Any:
        resume = pause_compiling()
        try:
            return self.run(module, *values)
        finally:
            resume()

    def run(self, module: nn.Module, *values: Any) -> Any:
        raise NotImplementedError

    def _require_known(self, values: Any, *, is_input: bool = False) -> None:
        """Raise if a hook gets an activation of which it is not known how ranks share it."""
        region = self.hooks.region
        tensors = [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point()]
        is_of_heads = self.is_block and not is_input and any(x.ndim > 3 for x in tensors)  # masks are inputs
        if is_of_heads or (region is not None and region.is_open() and tensors and not any(map(_is_hidden, tensors))):
            shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
            raise PlanError(
                f"a hook on {self.name} ({source_of(self.hook)}) gets tensors of the shapes {shapes}, of which the "
                "ranks of tp have parts that cannot be gathered for it. Put the hook on the layer, or use "
                "ParallelPlan(tp=1)"
            )


class _PreHook(_WholeHook):
    def run(self, module: nn.Module, *values: Any) -> Any:
        self._require_known(values, is_input=True)
        if not self.hooks.has_parts(values):
            return self.hook(module, *values)
        whole = self.hooks.whole(values)
        result = self.hook(module, *whole)
        if result is None:  # the graph passes what the hook has seen, which may have hooks of its own
            result = whole if len(whole) > 1 else whole[0]
        return self.hooks.own(result)


class _ForwardHook(_WholeHook):
    def run(self, module: nn.Module, *values: Any) -> Any:
        self._require_known(values[-1])
        if not self.hooks.has_parts(values):
            return self.hook(module, *values)
        whole = self.hooks.whole(values)
        if self.hooks.keep_output is not None:
            self.hooks.keep_output(self.name, whole[-1])
        result = self.hook(module, *whole)
        if not self.hooks.has_parts(values[-1]):
            return result
        return self.hooks.own(whole[-1] if result is None else result)


class _BackwardHook(_WholeHook):
    def run(self, module: nn.Module, *values: Any) -> Any:
        self._require_known(values)
        is_of_tokens = self.hooks.has_parts(values[0])  # of what the hook may change
        sums = self.is_entry and len(values) > 1 and not is_of_tokens
        first = self._summed(values[0]) if sums else self.hooks.whole(values[0])
        result = self.hook(module, first, *map(self.hooks.whole, values[1:]))
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


_PARTED = (
    "a forward hook on %s sees this rank's tokens only, since ParallelPlan.cp > 1 cuts every sequence. A loss computed "
    "from them differs from one device. Compute the loss from the model's output, or use ParallelPlan(cp=1)"
)
_SHARED = (
    "a backward hook on %s (%s) sees the gradient of this rank's rows or tokens, or of one micro-batch, since the plan "
    "cuts the batch: a norm or a limit that it computes differs from one device. Work on the gradients of weights, "
    "which are those of the whole batch: p.register_hook(hook), or mw.clip_grad_norm_(model, 1.0)"
)
_SPLIT = (
    "a forward hook on %s has kept its output, but runs once for each micro-batch, and the backward passes of all but "
    "the last are over when the model returns: a loss on these outputs would be of some rows or of none. Compute the "
    "loss from the model's output, or set ParallelPlan(gradient_accumulation_steps=1, micro_batch_size=None). To log "
    "the output, keep output.detach()"
)

_OVER = (
    "a loss uses the output of %s, which a forward hook has kept, but under ParallelPlan.pp > 1 the backward passes of "
    "all layers are over when the model returns. Compute the loss from the model's output, or use pp=1. To log the "
    "output, keep output.detach()"
)

_ON_ONE_STAGE = (
    "a forward hook on %s changes nothing, so the program may read later what it has kept. Under ParallelPlan.pp > 1 a "
    "hook on a layer runs on the ranks that hold the layer, and what it keeps is missing on the others. Let each rank "
    "use what it has (kept.get(name)), gather it (torch.distributed.all_gather_object), or use pp=1"
)


class HookedModules:
    """Finds the modules on which a program has hooks.

    Args:
        model: the model whose inner modules are searched.
        is_split: whether modules run once for each of several micro-batches; this attribute may change later.
        is_staged: whether the model's call runs every backward pass, as a pipeline does; see ``running``.
        is_shared: whether ranks of dp or cp share the batch.
        parted: the model's structure under context parallelism, where modules have this rank's tokens only.

    Attributes:
        whole: what gives hooks whole values under tensor parallelism; None without it.
    """

    whole: WholeHooks | None = None

    def __init__(
        self,
        facts: Facts,
        *,
        is_split: bool,
        is_staged: bool = False,
        is_shared: bool = False,
        parted: Decoder | None = None,
    ):
        self._modules = [(name, module) for module, name in facts.names.items() if name]
        self._tables = [table for _, module in self._modules for table in hook_tables(module)]
        parted_ids = {id(module) for module in _parted(facts, parted)}
        self._parted = {name for name, module in self._modules if id(module) in parted_ids}
        self._hooks_seen: tuple[int, bool] | None = None
        self._has_warned = self._has_warned_of_backward = self._has_named = False
        self.returned: object = None  # what a module has returned before the program's hooks ran
        self.is_split, self.is_staged, self._is_shared = is_split, is_staged, is_shared
        self._watched: set[str] = set()
        self._outputs: dict[str, list[list[weakref.ref[Tensor]]]] = {}  # of each micro-batch of the last pass
        self.is_running = False

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Let backward run through outputs that hooks see, inside the context only."""
        return temporarily(self, is_running=True)

    @property
    def statements(self) -> tuple[Statement, ...]:
        """What the ranks of tp compare before a pass."""
        return () if self.whole is None else self.whole.statements

    def look(self, *, trains: bool) -> None:
        """Give new hooks whole values under tp, and warn once if hooks see parts, from which a loss would be wrong.

        Args:
            trains: whether the pass that begins trains.

        Raises:
            PlanError: if hooks would see parts that cannot be made whole.
        """
        self.look_at_kept(has_ended=True)
        self._outputs.clear()
        if self.whole is not None and (every := hooks_of_all_modules()):
            raise PlanError(
                f"a hook on all modules of torch ({source_of(every[0])}) would see this rank's parts of activations, "
                "since the plan cuts them over tp. Register it on the modules that it needs, before to_distributed: "
                "module.register_forward_hook(hook)"
            )
        sees_parts = self._parted or self.is_split or self.is_staged or self._is_shared
        if self.whole is None and not (trains and sees_parts):
            return
        hooks = sum(map(sum, self._tables))  # of their numbers, which torch gives once
        if (hooks, trains) == self._hooks_seen:
            return
        self._hooks_seen = hooks, trains
        if trains and (self._is_shared or self.is_split) and not self._has_warned_of_backward:
            self._look_at_backward()
        found = {name: module for name, module in self._modules if has_foreign_hooks(module)}
        if trains and not self._has_warned and (parted := next((name for name in found if name in self._parted), None)):
            self._has_warned = True
            logger.warning(_PARTED, parted)
        for name, module in found.items() if trains and (self.is_staged or self.is_split) else ():
            if name not in self._watched:
                self._watched.add(name)
                module.register_forward_hook(functools.partial(_watch, self, name), prepend=True)
                if self.is_staged:
                    module.register_forward_hook(functools.partial(self._name_observer, name))
        if self.whole is not None:
            self.whole.keep_output = self.add_output if self.is_split and not self.is_staged else None
            for name, module in self._modules:
                self.whole.take(name, module)

    def _name_observer(self, name: str, module: nn.Module, args: object, output: object) -> None:
        """Warn once of a hook that returned nothing, in a stage that calls it."""
        returned, self.returned = self.returned, None
        is_called = returned is output and any(map(is_of_program, module._forward_hooks.values()))
        if is_called and not self._has_named:
            self._has_named = True
            logger.warning(_ON_ONE_STAGE, name)

    def _look_at_backward(self) -> None:
        """Warn once if a hook sees gradients of a part of the batch."""
        for name, module in self._modules:
            for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
                if is_of_program(hook):
                    self._has_warned_of_backward = True
                    logger.warning(_SHARED, name, source_of(getattr(hook, "of_program", hook)))
                    return

    def look_at_kept(self, *, has_ended: bool) -> None:
        """Warn once if the program keeps outputs of micro-batches whose backward is over.

        Args:
            has_ended: whether the backward of the pass's last micro-batch is over too.
        """
        for name, of_calls in self._outputs.items() if not self._has_warned else ():
            over = of_calls if has_ended else of_calls[:-1]
            if any(output() is not None for outputs in over for output in outputs):
                self._has_warned = True
                logger.warning(_SPLIT, name)
                return

    def take_output(self, name: str, output: object) -> None:
        """Take what a module with hooks of the program returns in a micro-batch."""
        if torch.is_grad_enabled() and not in_backward():
            self._outputs.setdefault(name, []).append(_with_graph(output))

    def add_output(self, name: str, output: object) -> None:
        """Take what a hook sees of an output that :meth:`take_output` has taken in part."""
        if (of_calls := self._outputs.get(name)) and not in_backward():
            of_calls[-1] += _with_graph(output)


def _with_graph(output: object) -> list[weakref.ref[Tensor]]:
    return [weakref.ref(x) for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]


def _watch(hooked: HookedModules, name: str, module: nn.Module, args: object, output: object) -> object:
    if not hooked.is_staged:
        if hooked.is_split:
            hooked.take_output(name, output)
        return None
    returned = tree_map_only(Tensor, lambda x: _Watched.apply(x, hooked, name) if x.requires_grad else x, output)
    hooked.returned = returned if hooked.is_staged else None
    return returned


class _Watched(TensorFunction):
    """Returns a module's output as it is; backward raises if the call that computed it is over."""

    has_graph = True

    @staticmethod
    def forward(ctx: Node, x: Tensor, hooked: HookedModules, name: str) -> Tensor:
        ctx.of_module = hooked, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Node, grad: Tensor) -> tuple[object, ...]:
        hooked, name = ctx.of_module
        if not hooked.is_running:
            raise PlanError(_OVER % name)
        return grad, None, None


def _parted(facts: Facts, structure: Decoder | None) -> list[nn.Module]:
    """Return the modules whose inputs or outputs hold some of the tokens under context parallelism."""
    if structure is None:
        return []
    around = [module for module in facts.names if structure.layers[0] in facts.inside(module)]
    after = [module for module in (structure.final_norm, structure.head) if module is not None]
    return [*around, *after, *(inner for layer in structure.layers for inner in facts.inside(layer))]
