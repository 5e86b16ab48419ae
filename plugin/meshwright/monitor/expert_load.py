"""How unevenly tokens are spread over the experts of each layer, and over the ranks that share them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import ceil

import torch
from torch import Tensor, nn

from meshwright.parallel.experts.counts import ExpertCounts


class ExpertLoad:
    """This rank's counts of the tokens of each expert, for the lines of a run.

    Args:
        model: the model that the program has, whose names of modules are shown.
        counts: what counts the tokens.
        device: the device of this rank.
    """

    def __init__(self, model: nn.Module, counts: ExpertCounts, device: torch.device):
        self._counts, self._before = counts, torch.zeros((), dtype=torch.int64, device=device)
        self._sent: tuple[Tensor, torch.Event] | None = None
        if not counts.is_on:
            counts.begin(device)
        names = {module: name for name, module in model.named_modules()}
        self._names = {module: names.get(module, "") for module in counts.sizes}

    def take(self) -> dict[str, list[int]]:
        """Return the tokens of each expert by the name of its module, since the last call.

        On CUDA they are those of the call before, which have reached the host by now, so that it does not wait.
        """
        own = self._counts.own()
        new, self._before = own - self._before, own
        if new.is_cuda:
            sent, host = self._sent, torch.empty(new.shape, dtype=new.dtype, pin_memory=True)
            host.copy_(new, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._sent = (host, event)
            if sent is None or not sent[1].query():
                return {}
            new = sent[0]
        return {self._names[experts]: part.tolist() for experts, part in self._counts.by_module(new).items()}


def fullest_loads(of_ranks: Sequence[Mapping[str, Sequence[int]]], ep: int) -> tuple[dict[str, float], float | None]:
    """Return the load of each layer's fullest expert, and the load of the fullest of the ranks that share experts.

    A load is a number of tokens relative to the mean.

    Args:
        of_ranks: for each rank, what :meth:`ExpertLoad.take` has returned.
        ep: the number of ranks that share the experts of a layer.

    Example:
        >>> fullest_loads([{"layers.0": [3, 1, 0, 0]}, {"layers.0": [1, 1, 1, 1]}], 2)
        ({'layers.0': 2.0}, 1.5)
    """
    sums: dict[str, list[int]] = {}
    for own in of_ranks:
        for name, counts in own.items():
            sums[name] = [sum(pair) for pair in itertools.zip_longest(sums.get(name, ()), counts, fillvalue=0)]
    routed = {name: counts for name, counts in sums.items() if any(counts)}
    experts = {name: max(counts) * len(counts) / sum(counts) for name, counts in routed.items()}
    if ep == 1 or not routed:
        return experts, None
    ranks = [0] * ep
    for counts in routed.values():
        each = ceil(len(counts) / ep)
        for rank in range(ep):
            ranks[rank] += sum(counts[rank * each : (rank + 1) * each])
    return experts, max(ranks) * ep / sum(ranks)
