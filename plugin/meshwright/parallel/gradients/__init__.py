"""Gradients: flat buckets, and their sums over ranks while backward runs.

Every reduction is an average. The contributions to a row that n ranks hold (a norm under sp, a replicated key head) are
multiplied by n, and the copies are averaged. Averaging equal values changes nothing, so the result does not depend on
how many backward passes are accumulated, or on which of them synchronise. With ``ToDistributedConfig.engine``, which an
integration sets, an engine averages, shards, clips and steps; the runtime sums partial gradients inside backward alone,
and a call that would do the engine's work a second time raises.

    sync.py            the all-reduce or reduce-scatter of gradients while backward runs
    buckets.py         which parameters travel together
    summed.py          sums of micro-batches and for an engine; the scale of a GradScaler
    gradient_hooks.py  the program's hooks, on whole gradients     program_hooks.py  keeps them from autograd
"""
