"""Several optimizers as one, such as Muon for the matrices of a model and AdamW for the rest."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from meshwright.errors import UnreadableTensorError

_CHAIN = "_meshwright_chain"


class ChainedOptimizer(Optimizer):
    """Several optimizers that step one after the other, as one optimizer for the whole model.

    It has the groups and the state of all of them, so a scheduler, a scaler, ``zero_grad`` and a checkpoint reach each.
    Nothing is copied: a group of the chain is the group of its optimizer. A program may also step and clear the
    optimizers by themselves, in any order, as it did before they were chained. Their state dicts are that of the chain.

    Args:
        optimizers: the optimizers, each of other parameters, in the order in which they step.

    Raises:
        ValueError: without optimizers, if one of them is a chain, or if two of them have the same parameter.

    Example::

        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "head" not in n]
        others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
        optimizer = mw.ChainedOptimizer(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3))
        model, optimizer, loader = mw.to_distributed(model, optimizer, loader)
    """

    def __init__(self, *optimizers: Optimizer):
        if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
            raise ValueError("ChainedOptimizer takes torch optimizers: ChainedOptimizer(Muon(...), AdamW(...))")
        if any(isinstance(each, ChainedOptimizer) for each in optimizers):
            raise ValueError("a chain cannot be a part of another: ChainedOptimizer(*chain.optimizers, optimizer)")
        self.optimizers = optimizers
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        for each in optimizers:
            self.state.update(each.state)
        self._begin()

    def _begin(self) -> None:
        """Let the optimizers be parts of this chain."""
        self._alone: Optimizer | None = None  # the only one that steps now
        self._steps: dict[int, Callable[[], object]] = {}  # of a distributed chain, whose optimizers step as its parts
        self._own = [(each.param_groups, each.state) for each in self.optimizers]
        self._refusals = [
            register(_refuse_state_dict)
            for each in self.optimizers
            for register in (each.register_state_dict_pre_hook, each.register_load_state_dict_pre_hook)
        ]
        self._share()

    def release(self) -> None:
        """Let the optimizers be by themselves again, as before a chain that nothing has stepped or distributed yet."""
        assert not self._steps, "a distributed chain stays one"
        for refusal in self._refusals:
            refusal.remove()
        for each, (groups, state) in zip(self.optimizers, self._own, strict=True):
            each.param_groups, each.state = groups, state

    def _share(self) -> None:
        """Let the optimizers have the groups and the state of the chain."""
        groups = list(self.param_groups)
        for each in self.optimizers:
            count = len(each.param_groups)
            each.param_groups, groups = groups[:count], groups[count:]
            each.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step each optimizer; a closure is evaluated once, before the first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in stepping(self):
            each.__dict__["_opt_called"] = True  # what a scheduler of one of them asks for
            self._steps.get(id(each), each.step)()
        return loss

    def step_together(self) -> None:
        """Make a step of one of the optimizers a step of the chain in which the others do nothing.

        A distributed chain has hooks, which bring gradients to the optimizers and weights to the model.
        """
        for each in self.optimizers:
            if id(each) not in self._steps:
                self._steps[id(each)] = each.step
                each.step = types.MethodType(_step_alone, each)  # type: ignore[method-assign]
                each.__dict__[_CHAIN] = self

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise, except for the groups that the optimizers already have: add others to an optimizer before."""
        if not any(param_group is group for each in self.optimizers for group in each.param_groups):
            raise ValueError("add the group to one of the optimizers before they are chained")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "optimizers" in state:  # of a copy, whose optimizers are copies with the same state
            self._begin()
            return
        self._share()
        for each in self.optimizers:
            each.__setstate__({"state": self.state, "param_groups": each.param_groups})


def _refuse_state_dict(optimizer: Optimizer, *_: object) -> None:
    raise UnreadableTensorError(
        f"this {type(optimizer).__name__} is a part of a ChainedOptimizer, which has the state of all its parts. Call "
        "state_dict() or load_state_dict() of the chain; or, on all ranks, meshwright.save_optimizer(model, optimizer, "
        "folder) and meshwright.load_optimizer"
    )


def stepping(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers of a chain that step now, or the optimizer itself."""
    alone = optimizer._alone if isinstance(optimizer, ChainedOptimizer) else None
    return members(optimizer) if alone is None else (alone,)


def step_name(optimizer: Optimizer) -> str:
    """Return what the present step is called where ranks meet, which all must make."""
    if len(stepping(optimizer)) == len(members(optimizer)):
        return "optimizer step"
    (alone,) = stepping(optimizer)
    return f"step of {type(alone).__name__} alone, number {members(optimizer).index(alone) + 1} of the chain"


def groups_of(optimizer: Optimizer, chain: Optimizer) -> list[int]:
    """Return the indices of an optimizer's groups among those of its chain, or of itself."""
    own = {id(group) for group in optimizer.param_groups}
    return [index for index, group in enumerate(chain.param_groups) if id(group) in own]


def chain_of(optimizer: Optimizer) -> Optimizer:
    """Return the distributed chain of which an optimizer is a part, or the optimizer itself."""
    chain: Optimizer = optimizer.__dict__.get(_CHAIN, optimizer)
    return chain


def _step_alone(optimizer: Optimizer, *args: Any, **kwargs: Any) -> object:
    """Step an optimizer of a distributed chain, in the place of its own method."""
    chain: ChainedOptimizer = optimizer.__dict__[_CHAIN]
    chain._alone = optimizer
    try:
        return chain.step(*args, **kwargs)
    finally:
        chain._alone = None


_step_alone._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch's schedulers warn of other methods


def members(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers of a chain, or the optimizer itself."""
    return optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else (optimizer,)
