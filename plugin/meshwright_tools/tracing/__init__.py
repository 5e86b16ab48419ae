"""Measures the memory and the collectives of a plan by a run with fake tensors.

trace.py        a step on one rank of a fake world        compare.py      beside the planner's estimate
cuda_trace.py   the same for CUDA, and the order of collectives   host_waits.py   where the host would wait
"""
