"""Measures the step of an optimizer that reads whole parameters: each owned by one rank, against replicated.

torchrun --nproc-per-node 2 -m benchmarks.owners

Both contenders are Muon for the matrices of the layers and AdamW for the rest, under dp. One of them has ZeRO-1, and so
an owner for each matrix; in the other every rank steps all of them. The optimizer's step alone is timed.
"""

from __future__ import annotations

import os
import time
import warnings
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor

import meshwright as mw
from benchmarks.contenders import Ours
from benchmarks.environment import environment
from benchmarks.summary import Ratio
from benchmarks.timing import say
from benchmarks.workload import Workload
from meshwright.faults.guard import active_guard
from meshwright.faults.interpose import observe

REPLICATED, OWNED = "dp2", "dp2 zero1"
GOAL = 0.65


class WithMuon(Workload):
    """The workload of the other benchmarks with few tokens, since forward and backward are not timed, and with Muon."""

    def optimizer(self, parameters: Any) -> Any:
        matrices, others = [], []
        for parameter in parameters:
            is_matrix = parameter.ndim == 2 and parameter.shape[0] != self.vocab_size
            (matrices if is_matrix else others).append(parameter)
        return mw.ChainedOptimizer(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3))
