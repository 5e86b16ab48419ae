"""The plans that are legal, and the fastest of those that fit.

A slot is a layout of the ranks with a micro-batch size. To weigh a plan is to estimate its memory, before its time is
simulated.

    space.py   the plans that are legal, and the reasons against all others
    search.py  the fastest of them that fit, best first by lower bounds
"""
