"""Losses: what a model computes becomes the mean over the global batch; logits may be sharded or deferred.

The numbers are those of one device: the loss is a sum over valid tokens, or over the rows or labels that other heads
average over, divided by their count over all ranks (``parallel/batch/mean_over_ranks.py``). Its gradient is multiplied
by dp, so that averaging gradients over dp, as DDP does and as a user's own loss expects, gives the gradient of the
global mean. Logits are whole in training only where something needs them: otherwise the head returns a stand-in, so
every family's own forward runs. The loss is computed inside a call of the head module, because ZeRO stage 3 gathers the
head's weight for that call. An operation that the stand-in does not know raises under tp, and gets whole logits without
it.

    head_losses.py       what a model's loss averages over, for heads of all kinds
    observed.py          the same, found in a pass on fake tensors
    causal_lm.py         the losses of causal LMs
    deferred_logits.py   the stand-in that records what the model does to its logits
    chunked_head.py      head and loss in chunks of tokens
    cross_entropy.py     cross-entropy over a vocabulary that tp cuts
"""
