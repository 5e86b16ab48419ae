"""Checks the arguments of torch.compile before a step runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch

from meshwright.errors import PlanError
from meshwright.plan.fields import nearest


def check_compile_options(options: object, *, has_collectives: bool = False) -> None:
    """Raise a PlanError unless the value is a dict of arguments of ``torch.compile``, with a backend that exists.

    Args:
        options: the value.
        has_collectives: whether the code to compile has collectives, at which a graph ends.
    """
    if not isinstance(options, Mapping):
        raise PlanError(f"compile_options={options!r} must be a dict, for example {{'backend': 'inductor'}}")
    known = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    for name in options:
        if name not in known:
            near = nearest(str(name), known)
            raise PlanError(
                f"compile_options has {name!r}, which torch.compile does not take; "
                f"{f'write {near!r}' if near else 'remove it'}. It takes {', '.join(known)}"
            )
    backend = options.get("backend", "inductor")
    if isinstance(backend, str) and backend not in (backends := torch.compiler.list_backends(exclude_tags=())):
        near, usual = nearest(backend, backends), ", ".join(torch.compiler.list_backends())
        raise PlanError(
            f"compile_options={{'backend': {backend!r}}} is not a backend of torch.compile; "
            f"{f'write {near!r}' if near else 'remove it'}. Usual backends are {usual}"
        )
    if has_collectives and options.get("fullgraph"):
        raise PlanError(
            "torch.compile(fullgraph=True): under tensor parallelism a graph ends at each collective; leave "
            "fullgraph out"
        )
