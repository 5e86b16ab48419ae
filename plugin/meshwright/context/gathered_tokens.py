"""Give mixers, which have recurrences or convolutions over tokens, all tokens of a sequence that ranks of cp share."""

from __future__ import annotations

from torch import Tensor
from torch.utils._pytree import tree_map_only

from meshwright.errors import PlanError
from meshwright.parallel.batch.document_rows import hidden_states_in, is_of_tokens
from meshwright.parallel.dropout_streams import DropoutStreams
from meshwright.parallel.method_chain import ChainStep, StepOrder
from meshwright.parallel.sequence_parts import SequenceParts


class GatheredTokens(ChainStep):
    """The step of a mixer that gathers the tokens of all ranks in order, and keeps this rank's own of the result.

    Every rank computes the whole sequence. It uses only its own tokens of the result, so a weight gets from each rank
    the addend of the loss of this rank's tokens, as every weight does under cp. The gradients of the tokens are summed.
    The gathered sequence may have padding at its end, where a causal module does not look.

    Args:
        name: the name of the mixer, for messages.
        parts: how the ranks share each sequence.
        streams: the model's dropout streams.
    """

    order = StepOrder.TOKENS

    def __init__(self, name: str, parts: SequenceParts, streams: DropoutStreams):
        self.name, self.parts, self.streams = name, parts, streams

    def __call__(self, *args: object, **kwargs: object) -> object:
        hidden = hidden_states_in(args, kwargs)
        if hidden is None:
            raise PlanError(
                f"{self.name} has a recurrence or a convolution over tokens, and is called without hidden states, so "
                "the tokens of other ranks cannot be gathered for it. Use ParallelPlan(cp=1)"
            )
        own = hidden.shape[:2]
        args, kwargs = tree_map_only(
            Tensor, lambda x: self.parts.gather(x, 1) if is_of_tokens(x, own) else x, (args, kwargs)
        )
        restore = self.streams.enter_whole(hidden)
        try:
            output = self.method(*args, **kwargs)
        finally:
            restore()
        whole = own[0], own[1] * self.parts.axis.size
        return tree_map_only(Tensor, lambda x: self.parts.take(x, 1) if x.shape[:2] == whole else x, output)
