"""Tools around training: the command line, and what it runs. What trains imports none of them.

cli/            the commands                           plan_page/     ``meshwright plan --html``
verification/   ``mw.verify``, ``meshwright verify``   report/        ``meshwright report``
tracing/        a step on fake ranks                   checkpoints/   ``meshwright inspect``, ``export``
calibration/    measured rates for the planner         doctor.py      ``meshwright doctor``
cluster_files/  ``meshwright plan --emit``
"""
