"""The planner: finds a parallel plan before anything runs, from shapes and hardware. It needs no torch and no GPU.

job/      what is trained       machine/  GPUs and links      context_cost.py      the time of cp
memory/   one device's peak     time/     a step's time       expected_traffic.py  bytes of each axis
search/   the fastest plan that fits                          answers/             what is shown
formatting.py  sizes, durations and tables as text
"""
