"""Finds how the shape of each random draw of a module follows from the sizes of a batch.

The module runs without values: on a call's arguments, on their rows twice, and on fewer tokens. A dim of a draw that
has doubled has the rows, and one that has become smaller has tokens. A draw is known again by the lines of code that
lead to it.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, MethodType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.containers import rebuilt
from meshwright.errors import PACKAGES, PlanError
from meshwright.layout.tensor_layout import layout_if_any
from meshwright.parallel.batch.schema import CACHES, TOKENS, BatchSchema
from meshwright.parallel.draws.kernels import apart
from meshwright.parallel.draws.row_order import RowOrder
from meshwright.parallel.fake_passes.fake_pass import run_again_without_values
from meshwright.parallel.foreign_hooks import hook_tables
from meshwright.parallel.method_chain import find_chain
from meshwright.random_states import RandomStates
from meshwright.roles.brought import codes_of
from meshwright.temporarily import without_replacements

Line = tuple[CodeType, int]  # a function, and the place in it
Lines = tuple[Line, ...]  # those that lead to a draw, from the innermost

_KINDS = 64  # of batches whose draws are kept, such as those with sound of several lengths
_LONGEST = 16  # of the functions that lead to a draw: its module, the block, the layer and the stack around it
# The twin runs in a thread.
_LEFT_OUT = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/", threading.__file__
_CHOICE = torch.ops.aten._fused_sdp_choice.default  # which draws nothing


class _Drawn(NamedTuple):
    """A draw of a module: its shape, the numbers among its arguments, such as the bounds of ``torch.randint``, and the
    dim that has all entries of each row one after the other, if one is known."""

    shape: tuple[int, ...]
    numbers: tuple[float, ...]
    ordered: int | None


_Found = dict[Lines, list[_Drawn]]  # the draws at some lines, in their order


@dataclass(frozen=True)
class Dim:
    """A dim of a draw on one device.

    Args:
        has_rows: whether it has the rows of the batch, each with as many entries; otherwise it is of every row.
        fixed: the number of entries, of each row if it has the rows, that no size of the batch decides.
        tokens: the input whose tokens decide the number of further entries; None if none does.
        each: the number of entries for each of these tokens.
    """

    has_rows: bool
    fixed: int
    tokens: str | None = None
    each: int = 0

    def entries(self, lengths: Mapping[str, int]) -> int:
        """Return the number of entries, of each row if the dim has the rows, for inputs of some lengths."""
        return self.fixed + (0 if self.tokens is None else self.each * lengths[self.tokens])


Form = tuple[Dim, ...]


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of a batch.

    Args:
        rows: the number of rows.
        lengths: the number of tokens of the first of the inputs with as many tokens, by its name.
        others: the names of all inputs with tokens, and the sizes of what has none, apart from the rows.
    """

    rows: int
    lengths: Mapping[str, int]
    others: Hashable

    @classmethod
    def of(cls, schema: BatchSchema) -> BatchSizes:
        """Return the sizes of a batch."""
        lengths: dict[str, int] = {}
        names: dict[int, list[str]] = defaultdict(list)
        others = []
        for name, x in schema.tensors.items():
            if _has_tokens(name, x, schema.rows):
                names[x.shape[1]].append(name)
            else:
                others.append((name, tuple(x.shape[1:]) if len(x) == schema.rows else tuple(x.shape)))
        for length, group in names.items():
            lengths[group[0]] = length
        return cls(schema.rows, lengths, (tuple(sorted(map(tuple, names.values()))), tuple(others)))


@dataclass
class _SeenDraws:
    """The draws of a module in batches of one kind: their forms, and the lines for which it was run."""

    forms: dict[Lines, set[Form | None]] = field(default_factory=lambda: defaultdict(set))
    tried: set[Lines] = field(default_factory=set)

    def find(self, lines: Lines, *, is_inner: bool) -> set[Form | None]:
        """Return the forms of the draws at some lines, with None if some are not known.

        Args:
            lines: the lines.
            is_inner: whether a function that these call may draw, in whose place the runtime draws.
        """
        for count in range(len(lines), 0, -1):
            if (forms := self.forms.get(lines[:count])) is not None:
                return forms
        places = [place for place in self.forms if is_inner and place[1:] == lines[: len(place) - 1]]
        most = max(map(len, places), default=0)
        return set().union(*(self.forms[place] for place in places if len(place) == most)) if most > 1 else {None}


class DrawSites:
    """The draws of a module that were seen so far, by the lines that lead to them.

    Args:
        wholes: for modules that have read the sizes of a rank's part: what they had read of the whole.

    Attributes:
        failure: why the module could not be run without values; None if it could.
    """

    def __init__(self, wholes: Mapping[nn.Module, Mapping[str, Any]]) -> None:
        self.wholes = wholes
        self.failure: str | None = None
        self._seen: dict[Hashable, _SeenDraws] = {}

    def find(self, lines: Lines, sizes: BatchSizes, *, is_inner: bool = False) -> set[Form | None]:
        """Return the forms of the draws at some lines in a batch of some sizes, with None if some are not known.

        Args:
            lines: the lines.
            sizes: the sizes of the batch.
            is_inner: whether a function that these call may draw, in whose place the runtime draws.
        """
        seen = self._seen.get(sizes.others)
        return {None} if seen is None else seen.find(lines, is_inner=is_inner)

    def find_alike(self, lines: Lines, sizes: BatchSizes, own: Sequence[int], rows: int) -> set[Form | None]:
        """Return the form of a draw in a batch of a new kind, as of sound of another length, in which a rank has all
        of each row: its rows are where batches of two kinds have shown them. {None} if they have not.

        Args:
            lines: the lines that lead to the draw.
            sizes: the sizes of the batch.
            own: the shape of the draw.
            rows: the number of rows that run now.
        """
        if sizes.others in self._seen:
            return {None}
        found = [seen.find(lines, is_inner=False) for seen in self._seen.values()]
        known = [forms for forms in found if forms != {None}]
        dims = {tuple(dim.has_rows for dim in form) if form else () for forms in known for form in forms}
        if len(known) < 2 or len(dims) > 1 or len(has_rows := dims.pop()) != len(own):
            return {None}
        if any(size != rows for size, is_of_rows in zip(own, has_rows, strict=True) if is_of_rows):
            return {None}
        return {tuple(Dim(x, fixed=1 if x else size) for size, x in zip(own, has_rows, strict=True))}

    def observe(self, module: nn.Module, schema: BatchSchema, sizes: BatchSizes, lines: Lines) -> bool:
        """Run a module without values, unless it has run for these lines before; return whether it ran.

        Args:
            module: the module, whose weights may be cut.
            schema: the arguments of its call.
            sizes: their sizes.
            lines: those that lead to the draw that is not known yet. Hooks among them run too.
        """
        seen = self._seen.pop(sizes.others, _SeenDraws())
        while len(self._seen) >= _KINDS:
            del self._seen[next(iter(self._seen))]
        self._seen[sizes.others] = seen  # the last one
        if lines in seen.tried:
            return False
        seen.tried.add(lines)
        twin = whole_twin(module, {code for code, _ in lines}, self.wholes)
        once, self.failure = _draws_of(twin, schema.batch)
        doubled = schema.twice()
        of_rows = [doubled[name] for name, x in schema.batch.items() if _begins_with_rows(schema, name, x)]
        others = [_draws_of(twin, doubled, RowOrder(of_rows, 2 * schema.rows))[0]]
        are_rows_known = schema.rows > 0 and _are_doubled(schema.batch, doubled, schema.rows)
        names = [name for name, length in sizes.lengths.items() if length > 1]
        others += [_draws_of(twin, _shorter(schema, sizes.lengths[name]))[0] for name in names]
        _clear(twin)
        for place, drawn in once.items():
            again = [other.get(place, ()) for other in others]
            forms: set[Form | None] = {None}
            if all(len(other) == len(drawn) for other in again):
                forms = {_form(own, rest, sizes, names) for own, *rest in zip(drawn, *again, strict=True)}
            if not are_rows_known:  # a draw of the same shape may be of these rows
                forms = {form if form and any(dim.has_rows for dim in form) else None for form in forms}
            # Fewer lines are those of several draws, of which a pass that has ended early shows some.
            for count in range(1 if self.failure is None else len(place), len(place) + 1):
                seen.forms[place[:count]] |= forms
        return True


def _are_doubled(x: Any, twice: Any, rows: int) -> bool:
    """Return whether all of an argument that may have the rows of a batch has them twice."""
    if isinstance(x, Tensor):
        return rows not in x.shape or twice.shape != x.shape
    if isinstance(x, Mapping):
        return all(_are_doubled(item, twice[key], rows) for key, item in x.items())
    if isinstance(x, list | tuple):
        has_tensors = any(isinstance(item, Tensor | Mapping | list | tuple) for item in x)
        are_items = has_tensors and len(twice) == len(x)
        return len(twice) == 2 * len(x) or (are_items and all(map(_are_doubled, x, twice, [rows] * len(x))))
    return x is None or isinstance(x, int | float | str)


def _begins_with_rows(schema: BatchSchema, name: str, x: object) -> bool:
    is_tensor = isinstance(x, Tensor) and x.ndim > 0
    return is_tensor and schema.row_dim(name, x) == (0, range(schema.rows + 1))


def _has_tokens(name: str, x: Tensor, rows: int) -> bool:
    is_of_rows = x.ndim > 1 and len(x) == rows
    return is_of_rows and (name in TOKENS or (x.ndim == 2 and not x.is_floating_point()))


def _shorter(schema: BatchSchema, length: int) -> dict[str, Any]:
    """Return the arguments without the last token of the inputs that have so many."""

    def shorter(name: str, x: Any) -> Any:
        if isinstance(x, Mapping):
            return {key: shorter(f"{name}.{key}".lstrip("."), item) for key, item in x.items()}
        if isinstance(x, list | tuple):
            return rebuilt(x, [shorter(f"{name}.{i}", item) for i, item in enumerate(x)])
        is_so_long = name in schema.tensors and _has_tokens(name, x, schema.rows) and x.shape[1] == length
        return x[:, :-1].contiguous() if is_so_long else x

    found: dict[str, Any] = shorter("", schema.batch)
    return found


def lines_to(frame: FrameType | None, outer: FrameType | None = None) -> Lines:
    """Return the lines of the program and its libraries that lead to a draw, without those of torch and Meshwright.

    Args:
        frame: the frame that draws.
        outer: the frame from which the lines lead to the draw; None for the outermost.
    """
    found: list[Line] = []
    while frame is not None and frame is not outer and len(found) < _LONGEST:
        if _is_seen(frame.f_code):
            found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def words_for(lines: Lines) -> str:
    """Return the function and the line of a draw, for messages."""
    if not lines:
        return "a function of torch"
    code, last = lines[0]
    positions = list(code.co_positions())
    return f"{code.co_qualname}, {Path(code.co_filename).name}:{positions[last // 2][0]}"


@functools.cache
def _is_seen(code: CodeType) -> bool:
    # A layer's __call__ calls its forward at another line if backward computes the layer again.
    return not code.co_filename.startswith(_LEFT_OUT) and code.co_name != "__call__"


def _form(once: _Drawn, others: Sequence[_Drawn], sizes: BatchSizes, names: Sequence[str]) -> Form | None:
    """Return the form of a draw; None if its shapes do not show it, or if it is drawn by the number of a rank's rows.

    Args:
        once: the draw in a batch.
        others: the draw for the rows twice, and without one token of each of the inputs.
        sizes: the sizes of the batch.
        names: the names of these inputs.
    """
    if once.numbers != others[0].numbers or any(len(other.shape) != len(once.shape) for other in others):
        return None
    found = []
    for dim, size in enumerate(once.shape):
        twice, *shorter = (other.shape[dim] for other in others)
        has_rows = twice != size
        # Of several entries for each row, the shape does not show whether those of a row follow each other.
        is_ordered = size == sizes.rows or (others[0].ordered == dim and size % sizes.rows == 0)
        if has_rows and (twice != 2 * size or not is_ordered):
            return None
        entries, fewer = (size // sizes.rows, sizes.rows) if has_rows else (size, 1)
        grown = {name: entries - other // fewer for name, other in zip(names, shorter, strict=True) if other != size}
        if len(grown) > 1:
            return None
        tokens, each = next(iter(grown.items()), (None, 0))
        fixed = entries - (0 if tokens is None else each * sizes.lengths[tokens])
        found.append(Dim(has_rows, fixed, tokens, each))
    return tuple(found) if sum(dim.has_rows for dim in found) < 2 else None


def _draws_of(twin: nn.Module, batch: Mapping[str, Any], order: RowOrder | None = None) -> tuple[_Found, str | None]:
    """Return what a module draws, and why the pass has ended early, if it has."""
    batch = {name: _apart(x) if name in CACHES else x for name, x in batch.items()}
    watch = _DrawWatch(order or RowOrder((), 1))
    failures: list[str | None] = [None]

    def run() -> None:
        try:
            with apart():
                run_again_without_values(twin, batch, instead="draws='rank'", watch=watch)
        except PlanError as error:
            failures[0] = str(error.__cause__ or error)

    states = RandomStates()
    # A thread has none of the modes in which the running pass draws.
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    states.restore()
    return watch.found, failures[0]


def _apart(value: Any) -> Any:
    """Return a copy of the keys and values of earlier tokens, to which a pass without values may append."""
    if isinstance(value, Mapping):
        return copy.copy(value) if not isinstance(value, dict) else {name: _apart(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return rebuilt(value, [_apart(x) for x in value])
    if isinstance(value, Tensor | nn.Module | type) or callable(value) or not hasattr(value, "__dict__"):
        return value
    new = copy.copy(value)
    vars(new).update({name: _apart(x) for name, x in vars(value).items()})
    return new


class _DrawWatch(TorchDispatchMode):
    """Sees all draws.

    Args:
        order: what follows the rows of the batch.
    """

    def __init__(self, order: RowOrder) -> None:
        super().__init__()
        self._order = order

    def __enter__(self) -> Self:
        self.found: _Found = defaultdict(list)
        super().__enter__()
        return self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap each call for a compiler that does not run here

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_draw = torch.Tag.nondeterministic_seeded in func.tags and func is not _CHOICE
        if is_draw and kwargs.get("generator") is not None:
            kwargs["generator"] = None  # with which torch has no form of some
        result = func(*args, **kwargs)
        self._order.follow(func, args, result)
        if is_draw:
            drawn = result[0] if isinstance(result, tuple) else result
            numbers = tuple(x for x in (*args, *kwargs.values()) if type(x) in (int, float))
            ordered = self._order.of(drawn)
            self.found[lines_to(sys._getframe(1))].append(_Drawn(tuple(drawn.shape), numbers, ordered))
        return result


def whole_twin(root: nn.Module, hooked: set[CodeType], wholes: Mapping[nn.Module, Mapping[str, Any]]) -> nn.Module:
    """Return a module that runs the same code on whole weights without memory, and none of the runtime's.

    Args:
        root: the module.
        hooked: the code of the hooks that run in the twin too.
        wholes: what modules have read of the whole, where they now have what they read of a rank's part.
    """
    twins: dict[int, Any] = {}
    made: dict[int, Tensor] = {}

    def whole(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        if id(x) not in made:
            layout = layout_if_any(x)
            shape = x.shape if layout is None else layout.shape
            meta = torch.empty(shape, dtype=x.dtype, device="meta")
            made[id(x)] = nn.Parameter(meta, x.requires_grad) if isinstance(x, nn.Parameter) else meta
        return made[id(x)]

    def of(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return twin(value)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, twin(value.__self__))
        if type(value) is tuple:
            return tuple(map(of, value))
        if not isinstance(value, list | dict | set | deque) or id(value) in twins:
            return twins.get(id(value), value)
        copied: Any = copy.copy(value)  # in which a forward may keep what it computes
        twins[id(value)] = copied
        copied.clear()
        if isinstance(value, dict):
            copied.update({name: of(x) for name, x in value.items()})
        elif isinstance(value, set):
            copied.update(value)
        else:
            copied.extend(map(of, value))
        return copied

    def twin(module: nn.Module) -> Any:
        if id(module) in twins:
            return twins[id(module)]
        new = twins[id(module)] = object.__new__(type(module))
        own, tables = {**vars(module), **wholes.get(module, {})}, hook_tables(module)
        values = vars(new)
        for name, value in own.items():
            if any(value is table for table in tables):
                kept = {key: hook for key, hook in value.items() if hooked & set(codes_of(hook))}
                values[name] = type(value)(kept)
        values["_parameters"] = {name: whole(x) for name, x in module._parameters.items()}
        values["_buffers"] = {name: whole(x) for name, x in module._buffers.items()}
        values["_modules"] = {name: None if x is None else twin(x) for name, x in module._modules.items()}
        for name, value in own.items():
            value = getattr(value, "__wrapped__", value) if _is_of_runtime(value) else value
            if name not in values and not _is_of_runtime(value):
                values[name] = of(value)
        for name in [name for name in own if find_chain(module, name) is not None]:
            del values[name]
            function: Callable[..., Any] = without_replacements(module, name)
            of_class = getattr(type(module), name)
            if function is not getattr(of_class, "__func__", of_class):
                values[name] = MethodType(function, new)
        return new

    found: nn.Module = twin(root)
    return found


def _clear(twin: nn.Module) -> None:
    """Let go of all that a twin has, of which some refers to the twin again."""
    for module in list(twin.modules()):
        vars(module).clear()


def _is_of_runtime(value: object) -> bool:
    """Return whether a module's attribute is the runtime's, such as the loss of the global batch."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return str(getattr(named, "__module__", "")).partition(".")[0] in PACKAGES
