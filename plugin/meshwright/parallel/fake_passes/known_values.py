"""Keeps the values of small tensors, such as token ids and the sizes of images, in a pass on tensors without values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

_LARGEST = 2**18  # elements of a new tensor whose values are kept
_aten = torch.ops.aten


class KnownValues(TorchDispatchMode):
    """Computes what follows from known values for real, beside the pass without values.

    A model reads values where an image has several sizes: it makes positions, cuts a batch of patches into images, and
    finds the tokens of an image. What it reads of unknown values is zero, and a mask of unknown values is True
    everywhere. Must be entered inside of a FakeTensorMode.

    Args:
        batch: the real tensors of a batch by name; other values are passed on.

    Example:
        >>> from torch._subclasses.fake_tensor import FakeTensorMode
        >>> batch = {"ids": torch.tensor([1, 0, 2])}
        >>> with FakeTensorMode(allow_non_fake_inputs=True), KnownValues(batch) as known:
        ...     x = torch.ones(3, 4)[known.batch["ids"] > 0]
        >>> x.shape
        torch.Size([2, 4])
    """

    def __init__(self, batch: Mapping[str, object]):
        super().__init__()
        self.batch: dict[str, Any] = dict(batch)
        self._values = WeakIdKeyDictionary()
        self._lists = _Lists(self._values)

    def __enter__(self) -> Self:
        self.batch = {name: self._fake(x) if isinstance(x, Tensor) else x for name, x in self.batch.items()}
        self._lists.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._lists.__exit__(kind, error, trace)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not all(not isinstance(x, FakeTensor) or x in self._values for x in given):
            return self._of_unknown(func, args, kwargs)
        if not given:
            made = func(*args, **kwargs)
            is_random = torch.Tag.nondeterministic_seeded in func.tags
            if isinstance(made, Tensor) and made.numel() <= _LARGEST and not is_random:
                self._values[made] = self._real(func, args, kwargs)
            return made
        real = self._real(func, args, kwargs)
        if not any(returned.alias_info for returned in func._schema.returns):
            return tree_map_only(Tensor, self._fake, real)
        made = func(*args, **kwargs)  # a view, or what an operation in place returns
        for x, value in zip(tree_leaves(made), tree_leaves(real), strict=True):
            if isinstance(x, Tensor):
                self._values[x] = value
        return made

    def _of_unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if func in (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default):
            args = (args[0], list(self._positions(args[1])), *args[2:])
        elif func is _aten.nonzero.default:
            return torch.empty(args[0].numel(), args[0].ndim, dtype=torch.int64)
        elif func is _aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return False if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0
        return func(*args, **kwargs)

    def _positions(self, indices: Sequence[Tensor | None]) -> Iterable[Tensor | None]:
        """Yield masks as the positions where they are True."""
        for x in indices:
            if x is None or x.dtype is not torch.bool:
                yield x
            elif x in self._values:
                with unset_fake_temporarily():
                    found = self._values[x].nonzero(as_tuple=True)
                yield from map(self._fake, found)
            else:
                yield from (torch.empty(x.numel(), dtype=torch.int64) for _ in range(x.ndim))

    def _real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with unset_fake_temporarily():
            given = tree_map_only(Tensor, lambda x: self._values[x] if isinstance(x, FakeTensor) else x, (args, kwargs))
            return func(*given[0], **given[1])

    def _fake(self, real: Tensor) -> Tensor:
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
        self._values[fake] = real
        return fake


class _Lists(TorchFunctionMode):
    """Lets torch.tensor read a list of tensors, whose memory it would read, and gives known values as a list at once.

    FakeTensor's own ``tolist`` runs several operations for each element.
    """

    def __init__(self, values: WeakIdKeyDictionary):
        super().__init__()
        own = FakeTensor.tolist

        def tolist(x: FakeTensor) -> Any:
            if x not in values:
                return own(x)
            with _disable_current_modes():
                return values[x].tolist()

        self._patch = mock.patch.object(FakeTensor, "tolist", tolist)

    def __enter__(self) -> Self:
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._patch.stop()

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.tensor:
            args = tree_map_only(Tensor, lambda x: x.item() if x.ndim == 0 else x, args)
        return func(*args, **(kwargs or {}))
