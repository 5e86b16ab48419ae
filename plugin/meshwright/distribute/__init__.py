"""``to_distributed``: looks at a model, chooses a plan, decides, meets the other ranks, cuts, and installs.

Hooks, not forks: parameters keep their identity. Their storage is replaced, so lists, hooks, attributes and optimizers
that refer to parameters stay valid. Forward hooks and steps of methods are added; no module's class changes.
``evidence/patches.md`` lists what is replaced at run time, and how each replacement is undone.

    to_distributed.py    the call, step by step
    check_arguments.py   what is passed, and how many processes were launched
    meeting.py           the one exchange: whether all ranks have the same plan, options and weights
    decide.py            facts, plan and options make a Decision, or are refused: by the rows of each part of a plan
                         (``Feature.refusals``), which docs/support.md prints
    quantised.py         quantised and float8 layers that a plan cannot cut
    rehearse.py          tries what the program brought, and leaves whole what tp does not compute alike
    installation.py      FEATURES, the parts of a plan in their order; how a distributed model is copied
    attach_optimizer.py  an optimizer or a loader that is added later
    to_static.py         a whole step as one compiled graph
"""
