"""Classes for parameters and gradients of which this rank holds a part; they raise if the part is read as the whole.

A sharded parameter has the class :class:`ShardedParameter` wherever the user may see it. It is a plain
``nn.Parameter`` while its own module runs or its optimizer steps (see
:mod:`meshwright.parallel.shards.partial_gradients`), so modules and optimizers are not slowed down. Elementwise
arithmetic is exact on shards and gives shards (:class:`Shard`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshwright.faults.guard import active_guard
from meshwright.layout.tensor_layout import TensorLayout, layout_if_any
from meshwright.parallel.autograd_graph import in_backward
from meshwright.parallel.shards.stand_in import (
    METADATA,
    MODULES,
    ROW_READS,
    VALUES,
    VALUES_OF,
    StandIn,
    Values,
    become,
    describe,
    is_stage_running,
    plain_name,
    reading_shards,
    unreadable,
    values_of,
)

SCALER = (
    "The program looks for infinite gradients in a way of its own, on its own rank. This rank has a part of the "
    "gradients, so the ranks skip different steps and change their scales differently. Use torch.amp.GradScaler, which "
    "finds those of all ranks, or train in bfloat16, which needs no scaler: torch.autocast(device, torch.bfloat16)"
)

# Attributes of a parameter with what its ``.grad`` is in place of torch's: in a hook, and of another pipeline stage.
_WHOLE_GRADIENT, _GRADIENT_ELSEWHERE = "_meshwright_whole_gradient", "_meshwright_gradient_elsewhere"
_FREE = (METADATA | {"_amp_foreach_non_finite_check_and_unscale_"}) - {"detach"}

# In these operations, each element of the result depends only on the elements in the same place. A name, without
# underscores, stands for the in-place and list (torch._foreach_*) variants too.
_ELEMENTWISE_NAMES = """
    detach clone contiguous to float double half bfloat16 cpu cuda type zeros_like ones_like full_like empty_like
    copy fill zero add iadd radd sub isub rsub subtract mul imul rmul multiply div truediv itruediv rtruediv divide
    true_divide neg negative pos abs absolute sign sgn sqrt rsqrt square pow ipow rpow float_power exp expm1 log
    log1p tanh sigmoid erf reciprocal clamp clamp_min clamp_max clip minimum maximum lerp addcmul addcdiv where
    round floor ceil trunc nan_to_num isnan isinf isfinite eq ne lt le gt ge logical_not logical_and logical_or
    masked_fill
"""
_ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())


class Shard(StandIn):
    """This rank's part of a tensor, such as a parameter's ``.data``, or a result of arithmetic."""

    FREE = _FREE
    is_gradient: ClassVar[bool] = False

    @classmethod
    def run(cls, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "grad" and func.__name__ == "__get__":  # torch.autograd.grad has this name too
            for shown in (_WHOLE_GRADIENT, _GRADIENT_ELSEWHERE):
                if shown in vars(args[0]):
                    return _shown(args[0], shown)
        if name in cls.FREE or (func.__name__ == "__get__" and name not in VALUES):
            if name.startswith("_amp_") and (watching := active_guard()) is not None:
                watching.hint = SCALER
            with reading_shards():
                return func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload):  # called again by a dispatch mode, such as a profiler's
            with reading_shards():
                return func(*args, **kwargs)
        if func.__name__ in ("__get__", "__set__", "__delete__"):
            return _property(func, args, kwargs)
        if name == "view_as" and args[0] is args[1]:
            return _view(args[0])
        first = next((x for x in _flat(args, kwargs) if is_shard(x)), None)
        if is_stage_running() and _is_elsewhere(first) and not _is_in_place(name):
            with reading_shards():
                return func(*args, **kwargs)
        plain = plain_name(name)
        if plain in _ELEMENTWISE and "out" not in kwargs:
            on = _on_lists if name.startswith("_foreach_") else _on_elements
            return on(func, name, args, kwargs, _is_in_place(name))
        assert first is not None
        if plain in MODULES and isinstance(first, ShardedParameter) and in_backward():
            if (values := values_of(first)) is not None:
                values.lend()
            # The backward of an autograd function that its module called (DeepSpeed's linear), or a forward that the
            # program checkpoints and that torch runs again by itself, without the module's hooks.
            with reading_shards():
                return func(*args, **kwargs)
        reads = vars(first).get(ROW_READS)
        if name == "__getitem__" and reads is not None and (row := reads.row(*args)) is not None:
            return row
        raise unreadable(name, first)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        result: Tensor = memo.setdefault(id(self), self.detach().clone())
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise unreadable("pickling", self)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return describe(self)


class ShardedParameter(Shard, nn.Parameter):
    """A parameter of which this rank holds a part: the user's own object with its class changed."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            if values_of(self) is not None:
                raise unreadable("copying (without its model)", self)
            with reading_shards():
                new = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
            new.meshwright = self.meshwright  # type: ignore[attr-defined]
            memo[id(self)] = guard(new)
            if ROW_READS in vars(self):
                new.__dict__[ROW_READS] = copy.deepcopy(vars(self)[ROW_READS], memo)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"Parameter containing:\n{describe(self)}"


@contextlib.contextmanager
def whole_gradient(parameter: nn.Parameter, gradient: Tensor) -> Iterator[None]:
    """Let ``parameter.grad`` be a whole gradient inside the context, also if this rank has a part of the parameter."""
    if not isinstance(parameter, ShardedParameter):
        parameter.grad = gradient
        yield
        return
    parameter.__dict__[_WHOLE_GRADIENT] = gradient
    try:
        yield
    finally:
        del parameter.__dict__[_WHOLE_GRADIENT]


class LocalGradient(Shard):
    """The gradient of a sharded parameter, or of this rank's elements of a parameter.

    If reads did not raise, ``torch.nn.utils.clip_grad_norm_`` would clip by a different factor on each rank,
    and the replicas would silently diverge.
    """

    is_gradient = True

    @staticmethod
    def of(gradient: Tensor, layout: TensorLayout | None = None) -> Tensor:
        """Return the gradient marked as a shard."""
        guarded = gradient.as_subclass(LocalGradient)
        if layout is not None:
            guarded.__dict__["meshwright"] = layout
        return guarded


def guard(parameter: nn.Parameter, values: Values | None = None) -> nn.Parameter:
    """Make a parameter raise if it is read as the whole.

    Args:
        parameter: a parameter with a layout; a class other than ``nn.Parameter`` (quantised, fake) is kept.
        values: the parameter's values, if it has no memory of its own.
    """
    if values is not None:
        parameter.__dict__[VALUES_OF] = values
    if type(parameter) is nn.Parameter:
        become(parameter, ShardedParameter)
    return parameter


def show_elsewhere(parameter: Tensor, has_gradient: Callable[[], bool]) -> None:
    """Let ``.grad`` say of a parameter of another pipeline stage whether it has a gradient there, as on one device.

    The optimizer does not see it, since the parameter is a plain one while it steps.

    Args:
        parameter: the parameter.
        has_gradient: returns whether a pass has added to the gradient; called when the program reads it.
    """
    earlier = vars(parameter).get(_GRADIENT_ELSEWHERE)
    if not isinstance(earlier, LocalGradient):
        parameter.__dict__[_GRADIENT_ELSEWHERE] = [*(earlier or ()), has_gradient]


def _shown(parameter: Tensor, name: str) -> object:
    """Return what ``.grad`` is in place of torch's."""
    shown = vars(parameter)[name]
    if name == _GRADIENT_ELSEWHERE and not isinstance(shown, LocalGradient):
        if not any(has_gradient() for has_gradient in shown):
            del parameter.__dict__[name]
            return None
        with reading_shards():
            shown = LocalGradient.of(parameter.detach(), layout_if_any(parameter))
        parameter.__dict__[name] = shown
    return shown


def is_shard(x: object) -> bool:
    """Return whether this is a sharded parameter or another shard."""
    return isinstance(x, Shard)


def _property(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    name, owner, is_set = func.__self__.__name__, args[0], func.__name__ == "__set__"
    if name in VALUES[1:]:
        raise unreadable(f".{name}", owner)
    if name == "grad" and _WHOLE_GRADIENT in vars(owner):
        vars(owner)[_WHOLE_GRADIENT] = args[1] if is_set else None
        return None
    if is_set and name in ("data", "grad") and isinstance(args[1], Tensor) and not isinstance(args[1], StandIn):
        args = owner, _own_part(args[1], owner, is_gradient=name == "grad")
    if name == "data" and is_set and isinstance(owner, ShardedParameter):
        with reading_shards():
            is_alike = args[1].shape == owner.shape
        if not is_alike:
            raise unreadable("assigning another shape to .data", owner)
        if is_shard(args[1]) and values_of(args[1]) is not None:
            raise unreadable("assigning .data", owner, is_cast=args[1].dtype != owner.dtype)
        if _is_elsewhere(owner) and args[1].dtype == owner.dtype:
            return None
    if name == "grad" and _is_elsewhere(owner):
        vars(owner).pop(_GRADIENT_ELSEWHERE, None)
        if is_set and args[1] is not None:
            show_elsewhere(owner, lambda: True)
        return None
    with reading_shards():
        result = func(*args, **kwargs)
        if name != "data" or not isinstance(result, Tensor):
            return result
        return _marked(result if (values := values_of(owner)) is None else values.own(), owner)


def _view(x: Tensor) -> Tensor:
    """Return a view of a shard, by which torch finds the node of autograd that accumulates the shard's gradient."""
    with reading_shards():
        view = x.view_as(x)
    view.__dict__.update({key: value for key, value in vars(x).items() if key in ("meshwright", VALUES_OF)})
    become(view, Shard)
    return view


def _own_part(value: Tensor, owner: Tensor, *, is_gradient: bool) -> Tensor:
    """Return this rank's part of a tensor that the program gives as the whole; any other tensor as it is."""
    layout = layout_if_any(owner)
    with reading_shards():
        if layout is None or not layout.is_held or value.shape != layout.shape or value.shape == owner.shape:
            return value
    own = layout.take(value)
    return LocalGradient.of(own, layout) if is_gradient else own


def _on_elements(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_in_place: bool
) -> Any:
    like = next(x for x in _flat(args, kwargs) if is_shard(x))
    if is_in_place and not _may_write(args[0], like):
        raise unreadable(name, like, into=args[0])
    if is_in_place and _is_elsewhere(args[0]):
        return args[0]
    with reading_shards():
        new_args = [_operand(x, like, name) for x in args]
        new_kwargs = {key: _operand(x, like, name) for key, x in kwargs.items()}
        result = func(*new_args, **new_kwargs)
    if is_in_place:
        if (values := values_of(args[0])) is not None:
            values.changed()
        return args[0]
    return _marked(result, like)


def _on_lists(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_in_place: bool
) -> Any:
    count = len(args[0])
    likes = [next((x for x in (arg[i] for arg in args if _is_list(arg)) if is_shard(x)), None) for i in range(count)]
    for target, like in zip(args[0], likes, strict=True):
        if is_in_place and like is not None and not _may_write(target, like):
            raise unreadable(name, like, into=target)
    written = [not (is_in_place and _is_elsewhere(target)) for target in args[0]]
    if not any(written):
        return None
    with reading_shards():
        new_args = [
            [
                x if like is None else _operand(x, like, name)
                for x, like, is_written in zip(arg, likes, written, strict=True)
                if is_written
            ]
            if _is_list(arg)
            else arg
            for arg in args
        ]
        results = func(*new_args, **kwargs)
    if not is_in_place:
        return tuple(
            result if like is None else _marked(result, like) for result, like in zip(results, likes, strict=True)
        )
    for target in args[0]:
        if (values := values_of(target)) is not None:
            values.changed()
    return results


def _may_write(target: object, like: Tensor) -> bool:
    """Return whether values of a shard may go into a tensor: another shard, or any if this rank's stage has all."""
    layout = layout_if_any(like)
    return is_shard(target) or (layout is not None and not layout.is_sharded and values_of(like) is None)


def _is_in_place(name: str) -> bool:
    """Return whether an operation of this name writes into its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")


def _is_elsewhere(x: object) -> bool:
    """Return whether only another pipeline stage has the values of a shard, so that writing it here has no effect."""
    return (layout := layout_if_any(x)) is not None and not layout.is_held


def _is_list(x: object) -> bool:
    return isinstance(x, list | tuple)


def _flat(args: Iterable[Any], kwargs: dict[str, Any]) -> Iterable[Any]:
    for arg in (*args, *kwargs.values()):
        yield from arg if _is_list(arg) else (arg,)


def _operand(x: object, like: Tensor, name: str) -> object:
    """Return this rank's elements of an argument of an elementwise operation; called inside reading_shards."""
    if not isinstance(x, Tensor) or x.ndim == 0:
        return x
    values, layout = values_of(like), layout_if_any(like)
    if is_shard(x):
        other = layout_if_any(x)
        is_same = layout is None or other is None or other == layout
        if x.shape != like.shape or not is_same or (values_of(x) is None) != (values is None):
            raise unreadable(name, like, other=x)
        return x if values is None else values_of(x).own()  # type: ignore[union-attr]
    if layout is None:
        raise unreadable(name, like, other=x)
    if x.shape == layout.shape:
        own = layout.take(x) if layout.is_sharded else x
        return own if values is None else values.cut(own)
    places = [x.ndim - like.ndim + rows.dim for _, rows in layout.cuts if not rows.is_replicated]
    if values is None and all(place < 0 or x.shape[place] == 1 for place in places):
        return x  # broadcast along the rows
    raise unreadable(name, like, other=x)


class _OwnValues:
    """This rank's elements of a result that has no memory of its own."""

    def __init__(self, own: Tensor, source: Values):
        self._own, self._source = own, source

    def own(self) -> Tensor:
        return self._own

    def cut(self, local: Tensor) -> Tensor:
        return self._source.cut(local)

    def changed(self) -> None:
        if self._source.own().untyped_storage().data_ptr() == self._own.untyped_storage().data_ptr():
            self._source.changed()

    def lend(self) -> None:
        self._source.lend()


def _marked(result: object, like: Tensor) -> object:
    """Return the result of an operation on shards as a shard."""
    if not isinstance(result, Tensor):
        return result
    values, kind = values_of(like), LocalGradient if isinstance(like, LocalGradient) else Shard
    with reading_shards():
        if values is None:
            shard = result.as_subclass(kind) if type(result) is Tensor else result.detach().as_subclass(kind)
        else:
            shard = kind.of_shape(like.shape, result.dtype, result.device)
            shard.__dict__[VALUES_OF] = _OwnValues(result, values)
    if (layout := layout_if_any(like)) is not None:
        shard.__dict__["meshwright"] = layout
    return shard
