"""The trial of what tp, sp and cp cut: a part of a decoder runs whole and cut, on random values in the forms that it is
given.
"""

from __future__ import annotations

import contextlib
import copy
import random
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import AllreduceOptions, ProcessGroup, ReduceOp
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.faults.interpose import COLLECTIVES, own_collectives
from meshwright.faults.together import attempt
from meshwright.layout.tensor_layout import layout_of
from meshwright.mesh.axes import Axis, Mesh
from meshwright.mesh.process_group import wire_device
from meshwright.parallel.collectives import all_reduce
from meshwright.parallel.dropout_streams import DropoutStreams
from meshwright.parallel.fake_passes.fake_pass import run_without_values
from meshwright.parallel.foreign_hooks import is_foreign
from meshwright.parallel.tensor_parallel.apply import attach_shards, install_tensor_parallel, make_shards
from meshwright.parallel.tensor_parallel.structure import describe
from meshwright.roles import ShardingPlan

_PERIOD = 65521  # of the random values of a large tensor: a prime, so that no two of its rows are equal


class RandomValues:
    """Draws random values that are equal on all ranks and leave torch's random state as it is.

    Args:
        dtype: the dtype of floating-point values.
        device: their device.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self.begin()

    def begin(self) -> None:
        """Begin again, with the values of the first time."""
        self._draws = torch.Generator().manual_seed(0)

    def words(self, size: int, *shape: int) -> Tensor:
        """Return random words of a vocabulary."""
        return torch.randint(size, shape, generator=self._draws).to(self.device)

    def normal(self, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """Return values of a normal distribution."""
        size = torch.Size(shape).numel()
        drawn = torch.randn(min(size, _PERIOD), generator=self._draws, dtype=torch.float64)
        drawn = drawn.to(self.device, self.dtype)
        return drawn.repeat(-(-size // _PERIOD) or 1)[:size].view(shape)

    def weight(self, like: Tensor) -> nn.Parameter:
        """Return a parameter of the size of a weight: a matrix that keeps the size of its input, or a vector near 1."""
        if not like.is_floating_point():
            raise TypeError(f"a weight of {like.dtype} has no gradient")
        drawn = self.normal(like.shape)
        return nn.Parameter(drawn / like.shape[-1] ** 0.5 if like.ndim > 1 else 1 + drawn / 8)

    def buffer(self, like: Tensor) -> Tensor:
        """Return a copy of a buffer, which has the values that the program gave it, if it has any."""
        if not like.is_meta:
            return like.detach().to(self.device, self.dtype if like.is_floating_point() else like.dtype, copy=True)
        return self.argument(like)

    def argument(self, like: Tensor) -> Tensor:
        """Return an argument of a layer: positions in their order, masks that hide nothing, and random numbers."""
        if like.is_floating_point():
            return self.normal(like.shape)
        if like.dtype is torch.bool:
            return torch.ones(like.shape, dtype=torch.bool, device=self.device)
        positions = torch.arange(like.shape[-1] if like.ndim else 1, device=self.device, dtype=like.dtype)
        return positions.expand(like.shape) if like.ndim else positions[0]

    def arguments(self, given: Any) -> Any:
        """Return what a layer was given with values, one tensor for each that a pass without values had."""
        made: dict[int, Tensor] = {}

        def value(x: Tensor) -> Tensor:
            if id(x) not in made:
                made[id(x)] = self.argument(x)
            return made[id(x)]

        return tree_map_only(Tensor, value, given)


def calls_of(
    model: nn.Module, layers: Collection[nn.Module], *, rows: int, length: int, instead: str
) -> dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments that layers get in a pass without values, which ends with the last of them.

    Args:
        model: the decoder.
        layers: some of its layers.
        rows: the number of rows.
        length: the number of tokens of a row.
        instead: the plan to use if the decoder cannot be run in this way, for the message.

    Raises:
        PlanError: if the decoder cannot be run in this way.
    """
    found: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.setdefault(layer, (args, kwargs))
        if len(found) == len(layers):
            raise _Done

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_pre_hook(layer, keep))
        with contextlib.suppress(_Done):
            run_without_values(
                model, rows=rows, length=length, instead=instead, is_done=lambda: len(found) == len(layers)
            )
    return found


@contextlib.contextmanager
def _pre_hook(layer: nn.Module, hook: Any) -> Iterator[None]:
    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


class _Done(Exception):
    """Ends a pass that has shown what is asked."""


# Stock norms compute in float32 inside of a pass in float64, so sums in another order differ by some of its roundings.
_IN_FLOAT32 = 128 * torch.finfo(torch.float32).eps
_LARGE = 2**28  # parameters, of which a trial holds about three copies
_ROUNDINGS = 8  # of a narrower dtype, for a module that runs in no other
_ZERO = 1e-3  # a gradient so much smaller than the largest may be a rounding of zero, as that of a key's bias
_DROPOUTS = (F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout)

# Takes random values; returns the positional and keyword arguments of a module.
Arguments = Callable[[RandomValues], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class TriedPart:
    """A part of a decoder that is tried.

    Args:
        modules: its modules, by their names in the decoder; each gets the output of the one before it.
        arguments: what the first of them is given.
        beside: stand-ins of the decoder's embedding and layers, by name, for a part without these.
        dtype: the dtype of its weights.
    """

    modules: dict[str, nn.Module]
    arguments: Arguments
    beside: Mapping[str, nn.Module]
    dtype: torch.dtype


def differs(
    part: TriedPart, plan: ShardingPlan, mesh: Mesh, device: torch.device, *, sequence_parallel: bool
) -> str | None:
    """Return how a part of a decoder computes something else over the ranks of tp than whole; None if it does not.

    The part runs in float64, or in its own dtype if that fails. Every rank of tp must make the call. If one fails, each
    gets an answer, in words of its own.

    Args:
        part: the part, which stays as it is.
        plan: the roles of the decoder's modules.
        mesh: the axes.
        device: the device to run on.
        sequence_parallel: whether the ranks share the tokens between blocks.
    """
    assert mesh.tp.group is not None
    root = _decoder_of({**part.beside, **part.modules})
    failure = ""
    size = sum(p.numel() for module in part.modules.values() for p in module.parameters())
    wide = torch.float64 if size < _LARGE else torch.float32  # the tolerance is that of float32's roundings
    for dtype in dict.fromkeys((wide, part.dtype)):
        group: Any = WatchedGroup(mesh.tp.group)
        watched = replace(mesh, tp=replace(mesh.tp, group=group))
        with untouched(root, device), _WithoutDropout(), torch.enable_grad():
            trial = _Trial(part, root, RandomValues(dtype, device))
            whole, error = attempt(trial.whole)
            if not group.agree("run whole", is_well=whole is not None):
                failure = f"it cannot be run on random values ({_in_words(error)})"
                error = None  # its frames hold the tensors of the run
                continue
            assert whole is not None
            try:
                found = trial.difference(whole, plan, watched, sequence_parallel=sequence_parallel)
            except Exception as raised:
                found = f"cut over tp it raises {_in_words(raised)}"
            is_equal = group.agree("compare", is_well=found is None)
            return None if is_equal else found or "on another rank it differs"
    return failure


def differs_by_tokens(
    part: TriedPart, device: torch.device, parts: Sequence[tuple[slice, Callable[[Any], Any]]]
) -> str | None:
    """Return how a part of a decoder computes something else of some tokens of a row than of all; None if it does not.

    It runs in the dtypes of :func:`differs`.

    Args:
        part: the part, which stays as it is; its output has the tokens in dim 1.
        device: the device to run on.
        parts: some of the tokens, and what leaves them alone of the part's arguments, a tuple of ``(args, kwargs)``.
    """
    root, failure = _decoder_of({**part.beside, **part.modules}), ""
    for dtype in dict.fromkeys((torch.float64, part.dtype)):
        with untouched(root, device), _WithoutDropout():
            trial = _Trial(part, root, RandomValues(dtype, device))
            try:
                whole = trial.of_tokens()
            except Exception as error:
                failure = f"it cannot be run on random values ({_in_words(error)})"
                continue
            try:
                found = max(_distance(trial.of_tokens(cut), whole[:, tokens]) for tokens, cut in parts)
            except Exception as error:
                return f"of some of the tokens it raises {_in_words(error)}"
            return None if found <= _tolerance(dtype) else f"its output differs by {found:.0e} of its largest element"
    return failure


def _tolerance(dtype: torch.dtype) -> float:
    return max(_IN_FLOAT32, _ROUNDINGS * torch.finfo(dtype).eps)


@dataclass(frozen=True)
class _Result:
    """What one run of a part gives: its output, and the gradients of its input and of its weights."""

    output: Tensor
    of_input: Tensor | None
    of_weights: list[Tensor | None]


class _Trial:
    """The runs of a part in one dtype, on parameters and buffers that take the places of the program's."""

    def __init__(self, part: TriedPart, root: nn.Module, values: RandomValues):
        self.part, self.root, self.values = part, root, values
        places: list[tuple[Any, Callable[[Tensor], Tensor]]] = [
            (module._parameters, values.weight) for module in root.modules()
        ]
        places += [(module._buffers, values.buffer) for module in root.modules()]
        self._owned = [(held, name, x, make) for held, make in places for name, x in held.items() if x is not None]

    def whole(self) -> _Result:
        """Run the part as it is."""
        self._renew()
        return self._passed()

    def of_tokens(self, cut: Callable[[Any], Any] = lambda given: given) -> Tensor:
        """Return the output of the part without gradients, of what ``cut`` leaves of its arguments."""
        self._renew()
        args, kwargs = cut(self.part.arguments(self.values))
        with torch.no_grad():
            return self._ran(args, kwargs)

    def difference(self, whole: _Result, plan: ShardingPlan, mesh: Mesh, *, sequence_parallel: bool) -> str | None:
        """Cut the part, run it over the ranks, and return how the result differs; None if it does not."""
        self._renew()
        tp, device = mesh.tp, self.values.device
        structure = describe(self.root, plan, tp=tp.size, sequence_parallel=sequence_parallel, is_part=True)
        shards = make_shards(structure.facts, structure.parameters, mesh, device, lambda *_: None)
        attach_shards(structure.facts, shards)
        streams = DropoutStreams(mesh=mesh, seed=0)
        install_tensor_parallel(structure, tp, streams=streams, keep_logits_sharded=lambda: False, is_staged=False)
        cut = self._passed()
        tolerance = _tolerance(self.values.dtype)
        if _distance(cut.output, whole.output) > tolerance:
            return f"its output differs by {_distance(cut.output, whole.output):.0e} of its largest element"
        if whole.of_input is not None and _distance(cut.of_input, whole.of_input) > tolerance:
            return "the gradient of its input differs"
        largest = max((float(x.abs().max()) for x in whole.of_weights if x is not None), default=0.0)
        for (name, p), own, known in zip(self.root.named_parameters(), cut.of_weights, whole.of_weights, strict=True):
            own, known = _whole_gradients(p, own, known, tp)
            if _distance(own, known, least=_ZERO * largest) > tolerance:
                return f"the gradient of {name} differs"
        return None

    def _renew(self) -> None:
        """Give the modules parameters and buffers with the values that they have in each run."""
        self.values.begin()
        made: dict[int, Any] = {}
        for held, name, own, make in self._owned:
            if id(own) not in made:
                made[id(own)] = make(own)
            held[name] = made[id(own)]

    def _passed(self) -> _Result:
        args, kwargs = self.part.arguments(self.values)
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
        given = inputs[0].requires_grad_() if inputs else None
        output = self._ran(args, kwargs)
        output.backward(self.values.normal(output.shape))
        parameters = list(self.root.parameters())
        return _Result(output.detach(), None if given is None else given.grad, [p.grad for p in parameters])

    def _ran(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        for module in self.part.modules.values():
            returned = module(*args, **kwargs)
            output: Tensor = returned[0] if isinstance(returned, tuple) else returned
            args, kwargs = (output,), {}
        if not output.isfinite().all():
            raise ValueError("its output is not finite")
        return output


def _whole_gradients(p: nn.Parameter, own: Tensor | None, known: Tensor | None, tp: Axis) -> tuple[Tensor, Tensor]:
    """Return a cut gradient and the part of the whole gradient that it should be, or both whole where ranks add."""
    layout = layout_of(p)
    own = torch.zeros_like(p.detach()) if own is None else own
    known = own.new_zeros(layout.shape) if known is None else known
    if not layout.has_addends:
        return own, layout.take(known) if layout.is_sharded else known
    if not layout.is_sharded:
        return all_reduce(own.clone(), tp), known
    places = layout.take(torch.arange(1, known.numel() + 1, device=own.device).view(known.shape)).flatten()
    total = own.new_zeros(known.numel() + 1).index_add_(0, places, own.flatten())  # padding is at place 0
    return all_reduce(total, tp)[1:].view(known.shape), known


def _distance(own: Tensor | None, known: Tensor, least: float = 0.0) -> float:
    """Return the largest difference of elements, relative to the largest element; infinite if shapes differ."""
    if own is None or own.shape != known.shape:
        return float("inf")
    if not known.numel():
        return 0.0
    largest = max(float(known.abs().max()), least)
    distance = float((own - known).abs().max())
    return distance / largest if largest else distance


def _decoder_of(modules: dict[str, nn.Module]) -> nn.Module:
    """Return a module in which each of these has its name."""
    root = nn.Module()
    for name, module in modules.items():
        owner, parts = root, name.split(".")
        for part in parts[:-1]:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner._modules[part]  # type: ignore[assignment]
        owner.add_module(parts[-1], module)
    return root


def _in_words(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}"[:200]


class _WithoutDropout(TorchFunctionMode):
    """Leaves out dropout, whose masks over several ranks are others than on one device by design."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        if func is F.multi_head_attention_forward:  # it drops out by itself
            kwargs = {**kwargs, "training": False}
        return func(*args, **kwargs)


_KINDS = (dict, OrderedDict, defaultdict, set, list)  # plain containers; others may refuse to be filled again
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def untouched(root: nn.Module, device: torch.device) -> Iterator[None]:
    """Undo all that the context sets in modules, such as hooks and parameters, and leave out the program's own hooks.

    The program's hooks do not run in the context: a hook may count its calls or keep what it sees. What a forward
    writes into objects that are no modules, such as a global, is not undone.

    Args:
        root: the module around all modules that may change.
        device: the device whose random state is kept.
    """
    modules = list(root.modules())
    before = [(module, dict(vars(module)), _contents(module)) for module in modules]
    of_python = random.getstate()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            for module in modules:
                for hooks in (vars(module)[name] for name in _HOOKS):
                    for key in [key for key, hook in hooks.items() if is_foreign(hook)]:
                        del hooks[key]
            yield
    finally:
        random.setstate(of_python)
        for module, own, contents in before:
            vars(module).clear()
            vars(module).update(own)
            for held, values in contents:
                held.clear()
                held.update(values) if isinstance(held, dict | set) else held.extend(values)


def _contents(module: nn.Module) -> list[tuple[dict | set | list, dict | set | list]]:  # type: ignore[type-arg]
    """Return the containers that a module holds, each with a copy, since handles of hooks refer to the containers."""
    return [(x, copy.copy(x)) for x in vars(module).values() if type(x) in _KINDS]


class Stopped(Exception):
    """Another rank has failed, or the ranks were about to call different collectives."""


class WatchedGroup:
    """Stands in place of a process group, whose ranks agree before each collective that all of them are well.

    Args:
        group: the process group.
    """

    def __init__(self, group: ProcessGroup):
        self._group, self._device = group, wire_device(group=group)
        self._is_stopped = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)
        if name not in COLLECTIVES:
            return method

        def call(*args: Any) -> Any:
            shapes = [(tuple(x.shape), x.dtype) for x in tree_leaves(args) if isinstance(x, Tensor)]
            if not self.agree(f"{name} {shapes}"):
                raise Stopped("another rank of tp failed")
            return method(*args)

        return call

    @own_collectives()
    def agree(self, what: str, *, is_well: bool = True) -> bool:
        """Return on every rank whether all are well and about to do the same.

        Args:
            what: what this rank is about to do.
            is_well: whether nothing has failed on this rank.
        """
        if self._is_stopped:
            return False
        number = zlib.crc32(what.encode())
        report = torch.tensor([int(not is_well), number, -number], device=self._device)
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX  # type: ignore[assignment]  # as torch.distributed does
        self._group.allreduce([report], options).wait()
        failed, most, least = report.tolist()
        self._is_stopped = bool(failed) or most != -least
        return not self._is_stopped
