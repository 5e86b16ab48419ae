"""The ``forward`` of a decoder whose tokens are spread over the ranks of cp."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import torch
from torch import nn

from meshwright.context.region import ContextRegion
from meshwright.errors import PlanError
from meshwright.parallel.batch.schema import DECODED, BatchSchema
from meshwright.parallel.method_chain import BatchStep, StepOrder
from meshwright.parallel.shards.stand_in import ShardedLogits, StandIn


class ContextForward(BatchStep):
    """Runs a decoder's forward with the tokens of its layers cut over cp, and joins the logits that programs read.

    Args:
        decoder: the decoder, to whose forward this step is added.
        region: the region in which each rank has its own tokens.
        has_token_loss: whether the head and the loss take each token by itself, as those of a causal LM do. Otherwise
            the tokens are joined after the final norm.
        joins_logits: a function that returns whether the logits of a pass are joined, given whether the pass is one of
            training with labels.
    """

    order = StepOrder.TOKENS
    has_whole_cache = False

    def __init__(
        self, decoder: nn.Module, region: ContextRegion, *, has_token_loss: bool, joins_logits: Callable[[bool], bool]
    ):
        super().__init__(decoder)
        self.region, self.has_token_loss, self.joins_logits = region, has_token_loss, joins_logits

    def __call__(self, *args: object, **kwargs: object) -> object:
        batch = self.batch_of(args, kwargs)
        region = self.region
        of_decoder = {n.removeprefix("decoder_"): x for n, x in batch.items() if n.startswith("decoder_")}
        region.keeps_parted = self.has_token_loss and not region.joins
        region.inputs = BatchSchema(of_decoder if DECODED in self.signature.parameters else batch).per_token
        try:
            output = self.method(**batch)
        finally:
            region.keeps_parted, region.inputs = False, ()
            region.leave()
        if not self.has_token_loss or region.joins:
            return output
        trains = self.model.training and torch.is_grad_enabled() and batch.get("labels") is not None
        return self._with_logits(output, region.last_length, joins=self.joins_logits(trains))

    def _with_logits(self, output: object, length: int, *, joins: bool) -> object:
        if not isinstance(output, MutableMapping):
            raise PlanError(
                f"under ParallelPlan.cp > 1 {type(self.model).__name__} must return an output with loss and logits, "
                "as transformers' models do; call it without return_dict=False"
            )
        logits = output["logits"]
        if isinstance(logits, ShardedLogits):  # tensor parallelism gave logits that raise already
            return output
        if joins:
            output["logits"] = self.region.parts.join(logits, 1, length)
        else:
            shape = (logits.shape[0], length, logits.shape[-1])
            output["logits"] = PartedLogits.of_shape(shape, logits.dtype, logits.device)
        return output


class PartedLogits(StandIn):
    """Stands in for the logits of all tokens in training with labels; reading it raises an error."""

    MESSAGE = (
        "in training with labels the logits stay sharded over cp, and each rank has those of its own tokens. To read "
        "outputs.logits, pass ToDistributedConfig(gather_logits=True), or call the model in eval mode or without "
        "labels, where the logits are whole"
    )
