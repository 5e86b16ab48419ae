"""What the hooks of a plan cost the host, beside the stock model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.host_time import PLANS, per_layer
from conformance.gpu.races import Contest, burn, race
from conformance.gpu.ranks import rank_pools
from conformance.gpu.section import Check, Place, Section

# A step of a stock model is almost all Python here, and a plan adds hooks, collectives and what the ranks compare.
_MOST = 3.0  # times of the stock model's host time that a plan may add
_LAYERS, _ROUNDS = 16, 6
_WAYS = ("stock", "meshwright", "compiled", "meshwright compiled")
_BUSY = 0.02  # seconds of a planted fault, in each layer
# A model whose layers are so narrow that the host is the limit.
_NARROW = Contest(
    name="narrow model, where the host is the limit", rows=1, length=128, hidden=256, layers=24, ffn=512, heads=4,
    kv_heads=4, vocab=1024,
)  # fmt: skip


class HostTime(Section):
    """Measures CPU time per layer with a fake process group, which needs no device."""

    name = "host"
    question = "How much CPU time does a layer cost the host under a plan, beside the stock model?"
    share = 2.0

    def run(self, place: Place) -> Iterator[Check]:
        torch.set_num_threads(1)
        for words in PLANS:
            found = per_layer(words, _LAYERS, _ROUNDS, _busy if place.plants else lambda model: None)
            added = found.forward + found.backward
            yield Check(
                what=f"{words}: host time that a layer adds, relative to the stock layer's",
                figure=added / found.stock,
                goal=_MOST,
                details={"ms stock": found.stock, "ms forward": found.forward, "ms backward": found.backward},
            )
        if place.is_cuda:
            with rank_pools() as pools:
                (found,) = pools.run(1, race, _NARROW, _WAYS, place.device, 0.0)
            for name, turn in found.turns.items():
                yield Check(what=f"{_NARROW.name}: {name}", figure=1e3 * turn.seconds / _NARROW.layers,
                            unit="ms per layer")  # fmt: skip
            for name, why in found.missing.items():
                yield Check(what=f"{_NARROW.name}: {name}", figure=float("nan"), note=why)


def _busy(model: Any) -> None:
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: burn(_BUSY))
