"""Replicas: made equal at the start, and compared during training.

At each meeting the ranks compare digests of the tokens, the optimizer's settings, ``requires_grad`` and the random
states from which the model draws. Every 50 steps (weights under ZeRO 1 and 2: every step) and before every save they
compare digests of buffers, of weights that several ranks hold, and of the optimizer's state of these. Only values that
must be bitwise equal are compared.

    replicate_model.py  makes ranks equal at the start   comparison.py  when what is compared   digests.py  digests
"""
