"""The output of a model under pipeline parallelism: its losses on every rank, and the logits if they are asked for."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.faults.interpose import own_collectives
from meshwright.mesh.axes import Axis
from meshwright.parallel.experts.load_balancing import PartedRouterLogits
from meshwright.parallel.experts.routers import RouterRecord
from meshwright.parallel.forward.split_forward import read_only
from meshwright.parallel.shards.stand_in import StandIn
from meshwright.pipeline.links import DTYPES


@dataclass(kw_only=True)
class StageOutputs:
    """Makes the outputs of a decoder's forward from those of its last stage.

    Args:
        kind: the class of the decoder's output, a mapping with ``loss`` and ``logits``.
        pp: the pipeline's axis.
        last: the rank of the pipeline that holds the last stage.
        device: the device of the logits.
        balance: on the last stage, the load-balancing loss of the running batch so far.
    """

    kind: type
    pp: Axis
    last: int
    device: torch.device
    balance: Tensor | None = None
    _gathers: bool = False
    _logits: list[Tensor] = field(default_factory=list)
    _routers: RouterRecord | None = None

    def start(self, *, gathers_logits: bool, routers: RouterRecord | None) -> None:
        """Start a batch, and forget what is left of an earlier one.

        Args:
            gathers_logits: whether the logits are sent to every rank, or to none.
            routers: the routers whose load-balancing loss the batch has; None if it has none.
        """
        self._gathers, self._routers, self._logits, self.balance = gathers_logits, routers, [], None

    def keep(self, output: MutableMapping[str, Any] | tuple[Any, ...]) -> None:
        """Take the output of a micro-batch on the last stage."""
        if self._gathers:
            logits = output["logits"] if isinstance(output, MutableMapping) else output[1]
            self._logits.append(logits.detach())
        if self._routers is not None and isinstance(output, MutableMapping):
            number = output[self._routers.loss].detach()
            self.balance = number if self.balance is None else self.balance + number

    def of_batch(self, loss: Tensor | None, balance: Tensor | None, rows: list[int] | None = None) -> object:
        """Return the output of a batch.

        Args:
            loss: the loss, if there is one.
            balance: the load-balancing loss, if there is one.
            rows: the rows that count in each micro-batch; None if all do.
        """
        if rows is not None and self._logits:  # a micro-batch without rows ran one row that nobody asked for
            self._logits = [x[:count] for x, count in zip(self._logits, rows, strict=True)]
        logits: Tensor = LogitsElsewhere.of_shape((), torch.float32)
        if self._gathers:
            logits = self._shared()
            logits = read_only(logits) if torch.is_grad_enabled() else logits
        self._logits = []
        routed: dict[str, object] = {}
        if self._routers is not None and balance is not None:
            of_layers = [PartedRouterLogits.of_shape((), torch.float32) for _ in self._routers.modules]
            balance = read_only(balance) if torch.is_grad_enabled() else balance
            routed = {self._routers.loss: balance, self._routers.logits: tuple(of_layers)}
        return self.kind(loss=loss, logits=logits, **routed)

    @own_collectives()
    def _shared(self) -> Tensor:
        """Return the logits of the last stage on every rank."""
        is_last = self.pp.rank == self.last
        own = torch.cat(self._logits) if is_last else None
        size = torch.zeros(5, dtype=torch.int64)
        if own is not None:
            size = torch.tensor([*own.shape, *[0] * (4 - own.ndim), DTYPES.index(own.dtype)])
        size = size.to(self.device)
        dist.broadcast(size, group=self.pp.group, group_src=self.last)
        *shape, code = size.tolist()
        if own is None:
            own = torch.empty([n for n in shape if n], dtype=DTYPES[code], device=self.device)
        whole = own.contiguous()
        dist.broadcast(whole, group=self.pp.group, group_src=self.last)
        return whole


class LogitsElsewhere(StandIn):
    """Stands in for logits that only the last stage has; reading it raises on every rank."""

    MESSAGE = (
        "under ParallelPlan.pp > 1 only the ranks of the last stage have the logits. To have outputs.logits on every "
        "rank, pass ToDistributedConfig(gather_logits=True)"
    )
