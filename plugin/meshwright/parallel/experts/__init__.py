"""Experts: their ways of tokens, slices, counts, and the load-balancing loss.

Experts gather nothing. Under sp each rank applies the router, and whole experts, to its own tokens. Without sp a module
that routes tokens takes this rank's tokens and gathers its result, so no two ranks route one token. A weight of experts
is cut over ``ep``, and along the channels between its projections over ``etp``. Its replicas are the ranks of
``copies``, over which its gradients are averaged, ZeRO shards it, and replicas are compared. These ranks have the
tokens of all others too, so its gradients are scaled on arrival by the ratio of the sizes of ``copies`` and ``tokens``.
``TensorLayout.over`` raises in code that does not know this cut.

    token_dispatchers.py  ep: the all-to-all of tokens      slices.py          etp: a slice of every expert
    load_balancing.py     the loss, from all ranks' tokens  routers.py         routers; recomputed layers choose alike
"""
