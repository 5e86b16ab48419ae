"""Shares the images of a batch among the ranks that have the same rows, each of which would run a tower on all of them.

For n images and t ranks, on each rank::

    images [n, ...] ── its own n/t ──> tower ──> features [n/t, ...] ── all-gather ──> features [n, ...]

The first time that a tower gets several images, it runs on all of them too. If what it computes of some images then
depends on the others, as with dropout, or if its result does not have a part for each image, it is not shared.

Backward over cp sums the gradients of each feature. Over tp each rank has the whole gradient of the features, and the
gradients of the tower's weights are addends.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from meshwright.faults.memory_digest import has_values
from meshwright.mesh.axes import Axis
from meshwright.parallel.autograd_graph import tensors_in
from meshwright.parallel.collectives import count_once, gather_rows, largest, share, unsplit_rows
from meshwright.parallel.method_chain import ChainStep, arguments
from meshwright.plan.config import ParallelPlan


@dataclass(frozen=True)
class Images:
    """The images that a tower is called with.

    Args:
        inputs: the arguments of the call, by name.
        rows: the number of rows that each image has in the pixels: 1, or its number of patches.
        cuts: for each argument that is cut, where its part of each image begins, and where the last one ends.
    """

    inputs: dict[str, Any]
    rows: Sequence[int]
    cuts: dict[str, Sequence[int]]

    @staticmethod
    def of(inputs: dict[str, Any]) -> Images | None:
        """Return the images of a call; None if it has not a part for each image in all of its tensors.

        ::

            [images, channels, ...]                       images of one size
            [patches, ...] beside sizes [images, 3]       patches of images of any size, in time, height and width
        """
        tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        pixels = next((x for x in tensors.values() if x.is_floating_point() and x.ndim > 1), None)
        if pixels is None:
            return None
        rows = [1] * len(pixels)
        for sizes in tensors.values():
            if sizes.ndim == 2 and sizes.shape[1] == 3 and not sizes.is_floating_point():
                patches = sizes.prod(-1).tolist()
                if sum(patches) == len(pixels):
                    rows = patches
        if len(rows) == len(pixels) and pixels.ndim < 4:
            return None
        ends = {len(rows): range(len(rows) + 1), len(pixels): [0, *accumulate(rows)]}
        if any(x.ndim == 0 or len(x) not in ends for x in tensors.values()):
            return None
        return Images(inputs, rows, {name: ends[len(x)] for name, x in tensors.items()})

    def part(self, low: int, high: int) -> dict[str, Any]:
        """Return the arguments of a call with the images from ``low`` to ``high - 1``."""
        return {**self.inputs, **{name: self.inputs[name][at[low] : at[high]] for name, at in self.cuts.items()}}


def shares_towers(plan: ParallelPlan, engine: str | None) -> bool:
    """Return whether ranks share the images of a tower under a plan, run by an engine such as DeepSpeed if given.

    Where the weights are gathered for each call, ranks with other images would gather them more or less often.
    """
    gathers = engine is not None or (plan.zero_stage == 3 and plan.dp * plan.cp > 1)
    return plan.tp * plan.cp > 1 and not gathers


class SharedTower(ChainStep):
    """The step of a tower's forward that runs it on this rank's images alone, and gathers the features of all.

    Args:
        tower: the tower.
        axis: the ranks that share the images of a call.
        peers: the axes whose ranks make the same call.
        has_own_tokens: whether each of these ranks uses the features of its own tokens, so that a feature's gradient is
            the sum of theirs. Otherwise each has the whole gradient, and the gradients of the tower's weights become
            addends.
    """

    def __init__(self, tower: nn.Module, axis: Axis, peers: Sequence[Axis], *, has_own_tokens: bool):
        self.tower, self.axis, self.peers, self.has_own_tokens = tower, axis, peers, has_own_tokens
        self.signature = inspect.signature(tower.forward)
        self._is_shared: dict[bool, bool] = {}  # in training, and in evaluation

    def __call__(self, *args: object, **kwargs: object) -> object:
        inputs = arguments(self.signature, args, kwargs)
        if not self.has_own_tokens:
            inputs = tree_map_only(Tensor, lambda x: share(x, self.axis) if x.requires_grad else x, inputs)
        images, mode = Images.of(inputs), self.tower.training
        if images is not None and len(images.rows) > 1:
            if self._is_shared.get(mode):
                return self._run(images)
            if mode not in self._is_shared:
                whole = self.method(**inputs)
                self._is_shared[mode] = self._agrees(images, whole)
                return self._counted_once(whole)
        return self._counted_once(self.method(**inputs))

    def _run(self, images: Images) -> object:
        size, count = self.axis.size, len(images.rows)
        ends = [rank * count // size for rank in range(size + 1)]
        low, high = ends[self.axis.rank], ends[self.axis.rank + 1]
        own = low, max(high, low + 1)  # a rank without an image runs one, of whose features it gives none
        total = sum(images.rows[slice(*own)])
        sizes = [sum(images.rows[a:b]) for a, b in pairwise(ends)]
        output = self.method(**images.part(*own))

        def gathered(x: Tensor) -> Tensor:
            ratio = Fraction(len(x), total)
            rows = [int(ratio * patches) for patches in sizes]
            padding = x.new_zeros(max(rows) - rows[self.axis.rank], *x.shape[1:])
            padded = torch.cat([x[: rows[self.axis.rank]], padding])
            whole = (gather_rows if self.has_own_tokens else unsplit_rows)(padded, self.axis)
            return torch.cat([part[:n] for part, n in zip(whole.chunk(size), rows, strict=True)])

        return _mapped(gathered, output)

    def _counted_once(self, output: object) -> object:
        """Let the first rank alone have the gradient of what every rank has computed, whose gradients are summed."""
        if self.has_own_tokens:
            return output
        return tree_map_only(Tensor, lambda x: count_once(x, self.axis) if x.requires_grad else x, output)

    def _agrees(self, images: Images, whole: object) -> bool:
        """Return whether the parts of a result on all images are those of the images alone, on every rank."""
        count, expected, differs = len(images.rows), list(tensors_in(whole)), 0
        if not all(map(has_values, expected)):  # a traced step has the memory of this first pass
            return False
        for low, high in ((0, count // 2), (count // 2, count)):
            with torch.no_grad():
                found = list(tensors_in(self.method(**images.part(low, high))))
            ends = [Fraction(sum(images.rows[:end]), sum(images.rows)) for end in (low, high)]
            differs |= len(found) != len(expected)
            differs |= not all(_is_part(x, y, *ends) for x, y in zip(found, expected, strict=False))
        for axis in self.peers:
            differs = largest(int(differs), axis)
        return not differs


def _is_part(part: Tensor, whole: Tensor, begin: Fraction, end: Fraction) -> bool:
    """Return whether a tensor has the rows of another between two shares of them."""
    if not whole.ndim:
        return False
    low, high = begin * len(whole), end * len(whole)
    if low.denominator != 1 or high.denominator != 1:
        return False
    expected = whole.detach()[int(low) : int(high)]
    if part.shape != expected.shape or not part.is_floating_point():
        return part.shape == expected.shape and torch.equal(part, expected)
    # Matrices of another size may be multiplied in another order.
    largest_value = whole.detach().abs().max().clamp(min=1e-30)
    return bool(((part - expected).abs().max() / largest_value) <= torch.finfo(part.dtype).eps ** 0.5)


def _mapped(change: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Return an output with ``change(tensor)`` for each tensor; those of a tuple are made when they are read."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, dict):
        return type(output)(**{name: _mapped(change, value) for name, value in output.items()})
    if isinstance(output, list):
        return [_mapped(change, value) for value in output]
    return _WhenRead(change, output) if isinstance(output, tuple) else output


class _WhenRead(tuple[Any, ...]):
    """Values of which each is changed when it is first read, on all ranks alike.

    A model may ask its tower for the hidden states of all layers, and use those of one. To code that reads tuples by
    another way than Python's, such as ``torch.stack``, all values are None, which is an error there.
    """

    _change: Callable[[Tensor], Tensor]
    _values: tuple[Any, ...]
    _changed: dict[int, Any]

    def __new__(cls, change: Callable[[Tensor], Tensor], values: tuple[Any, ...]) -> _WhenRead:
        found = super().__new__(cls, [None] * len(values))
        found._change, found._values, found._changed = change, values, {}
        return found

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index = range(len(self))[index]
        if index not in self._changed:
            self._changed[index] = _mapped(self._change, self._values[index])
        return self._changed[index]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))
