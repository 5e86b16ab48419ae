"""Counts the bytes that a forward pass keeps for the backward pass on this rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from benchmarks.contenders import Contender


class SavedBytes:
    """Counts the storages that autograd saves while active. Each storage counts once; parameters do not count.

    Args:
        parameters: the tensors that exist with or without a backward pass.

    Example:
        >>> weight = torch.ones(3, requires_grad=True)
        >>> with SavedBytes([weight]) as saved:
        ...     loss = (weight * torch.ones(3)).exp().sum()
        >>> saved.total  # the factor and the result of exp, 3 floats each
        24
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._excluded = {_storage(parameter).data_ptr() for parameter in parameters}
        # Storages are kept, not just addresses, since the address of a freed storage may be used again.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)

    @property
    def total(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage.data_ptr() not in self._excluded:
            self._storages[storage.data_ptr()] = storage
        return tensor


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    local = getattr(tensor, "_local_tensor", tensor)  # a DTensor's own storage is an empty shell
    return local.untyped_storage()


def saved_bytes(contender: Contender) -> int:
    """Return the bytes that a contender's forward pass saves on this rank."""
    with SavedBytes(contender.model.parameters()) as saved:
        contender.forward()
    return saved.total
