"""Finds which rows of a projection's weight the stock attention code uses as queries, keys and values.

The projection's output is replaced by its row numbers, which views pass on unchanged. The first operation that is not
a view shows which rows the code uses as one group, for example the rows of one head. Each rank of tp must use the same
groups. Otherwise the plan has cut a head in two, or has ordered the rows of a fused matrix differently from the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from conformance.spmd.rules import names
from meshwright.layout.tensor_layout import layout_if_any
from meshwright.parallel.tensor_parallel.structure import DecoderStructure
from meshwright.roles.adapters import projection
from meshwright.roles.linear_kernel import out_features

Rows = tuple[int, ...]

_VIEWS = names(
    """
    __getitem__ chunk contiguous expand flatten movedim narrow permute reshape select split squeeze swapaxes t
    tensor_split transpose unbind unflatten unsqueeze view clone detach alias
    """
)

_METADATA = names("__get__ size dim numel stride is_contiguous")


@dataclass
class RowsRead:
    """The groups of rows that a model's attention blocks use together, for each projection of the blocks.

    Args:
        uses: by the name of a projection, one set of groups for each use of its output. A group is the row numbers that
            lie together along the last dim of the used tensor, such as those of one head.
        rows: name of a projection -> the one-device number of each row that this rank holds.
    """

    uses: dict[str, list[set[Rows]]] = field(default_factory=dict)
    rows: dict[str, list[int]] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module, structure: DecoderStructure, inputs: dict[str, Tensor]) -> RowsRead:
        """Run a forward pass in which each attention projection outputs its row numbers."""
        read = RowsRead()
        name_of = {id(module): name for name, module in model.named_modules()}
        mode = _Followed(read)
        handles = []
        for block in (block for block in structure.blocks if block.heads is not None):
            for column in block.columns:
                module = projection(column)
                name = name_of[id(module)]
                read.rows[name] = _rows_held(module)
                handles.append(column.register_forward_hook(mode.numbered(name)))
        was_training = model.training
        try:
            with torch.no_grad(), mode:
                model.eval()(**{key: x for key, x in inputs.items() if key != "labels"})
        finally:
            model.train(was_training)
            for handle in handles:
                handle.remove()
        return read


class _Followed(TorchFunctionMode):
    """Follows row numbers through views, and records which rows are used together."""

    def __init__(self, read: RowsRead) -> None:
        super().__init__()
        self._read = read
        self._names: Any = WeakIdKeyDictionary()

    def numbered(self, name: str) -> Callable[..., Tensor]:
        def replace(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            numbers = torch.arange(output.shape[-1], dtype=output.dtype).expand(output.shape).contiguous()
            self._names[numbers] = name
            return numbers

        replace.watches_parts = True  # type: ignore[attr-defined]
        return replace

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = getattr(func, "__name__", "")
        followed = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x in self._names]
        if operation in _VIEWS and followed and followed[0] is args[0]:
            result = func(*args, **kwargs)
            name = self._names[followed[0]]
            for x in [result] if isinstance(result, Tensor) else result:
                self._names[x] = name
            return result
        if operation not in _METADATA:
            for x in followed:
                self._note(self._names.pop(x), x)
        return func(*args, **kwargs)

    def _note(self, name: str, numbers: Tensor) -> None:
        groups = {tuple(int(x) for x in group) for group in numbers.reshape(-1, numbers.shape[-1]).unique(dim=0)}
        self._read.uses.setdefault(name, []).append(groups)


def compare_rows(whole: RowsRead, own: RowsRead, rank: int) -> Iterator[tuple[str, str]]:
    """Yield the name and the problem of each projection whose rows a rank uses differently.

    Args:
        whole: the rows that the one-device model uses.
        own: the rows that the model on ``rank`` of the tp axis uses.
        rank: the rank, for messages.
    """
    for name, uses in own.uses.items():
        expected = whole.uses.get(name, [])
        if len(uses) != len(expected):
            yield name, f"its output {len(uses)} times on rank {rank} of tp, but {len(expected)} times on one device"
            continue
        rows = own.rows[name]
        for theirs, ours in zip(expected, uses, strict=True):
            taken = {tuple(rows[row] for row in group) for group in ours}
            if {len(group) for group in taken} != {len(group) for group in theirs}:  # whole widths, not heads
                taken, theirs = {tuple({x for g in taken for x in g})}, {tuple({x for g in theirs for x in g})}
                if set(*taken) <= set(*theirs):
                    continue
            elif taken <= theirs:
                continue
            group = sorted(taken - theirs)[0]
            yield (
                name,
                f"rows {_short(group)} as one group on rank {rank} of tp, but on one device they are not one head, or "
                "not of the same matrix",
            )
            break


def _rows_held(module: Any) -> list[int]:
    layout = layout_if_any(module.weight)
    if layout is None:
        return list(range(out_features(module)))
    return [row for start, stop in layout.over("tp").spans[layout.rank("tp")] for row in range(start, stop)]


def _short(rows: Rows) -> str:
    return f"{rows[0]}..{rows[-1]}" if len(rows) > 4 else ", ".join(map(str, rows))
