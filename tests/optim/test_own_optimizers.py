"""Optimizers, hooks of steps and wrappers that a program brings: as on one device, or refused by name."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

import meshwright as mw
from meshwright.optim.elementwise import ELEMENTWISE, Reads, is_known, reads_of
from meshwright.optim.trial import why_not_apart
from meshwright.parallel.shards.state_of_parts import ClosedState
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.optimizers import TrustRatio

PLANS = "dp2 zero1", "dp2 zero3", "tp2+sp"


class ByName(torch.optim.Optimizer):
    """Scales a step by the parameter's name, which it finds by identity, and by its shape, later also by its norm."""

    def __init__(self, model: torch.nn.Module):
        super().__init__(model.parameters(), {"lr": 1e-2})
        self.names, self.steps = {id(p): name for name, p in model.named_parameters()}, 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.steps += 1
        for p in self.param_groups[0]["params"]:
            rate = 2.0 if "mlp" in self.names[id(p)] else 1.0
            rate *= max(1.0, p.shape[0] / p.shape[-1]) * (p.norm().item() if self.steps > 2 else 1.0)
            p.sub_(p.grad.sign() * (1e-3 * rate))


def centre(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and p.ndim > 1):
        p.grad.sub_(p.grad.mean(1, keepdim=True))


@torch.no_grad()
def normalise(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for p in (p for group in optimizer.param_groups for p in group["params"] if p.ndim > 1):
        p.div_(p.norm(dim=1, keepdim=True).clamp(min=1e-3))  # the padding's row is 0


def clip_by_all(optimizer: torch.optim.Optimizer, *_: object) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    factor = 0.1 / sum(p.grad.norm().item() ** 2 for p in parameters) ** 0.5
    for p in parameters:
        p.grad.mul_(factor)


class Lookahead:
    """Keeps slow weights of an optimizer's groups, and puts them in the place of the fast ones in every second step."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer, self.steps = optimizer, 0
        self.slow = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1
        if self.steps % 2 == 0:
            fast = [p for group in self.optimizer.param_groups for p in group["params"]]
            for slow, p in zip(self.slow, fast, strict=True):
                slow.add_((p - slow) * 0.5)
                p.data.copy_(slow)


def hooked(model: torch.nn.Module, *, late: bool = False) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(centre)
    if not late:
        optimizer.register_step_post_hook(normalise)
    return optimizer


def late_hooked(model: torch.nn.Module) -> torch.optim.Optimizer:
    return hooked(model, late=True)


def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Failing(torch.optim.SGD):
    """Raises in its second step, before it changes anything."""

    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 2:
            raise ArithmeticError
        return super().step(closure)


def failing(model: torch.nn.Module) -> torch.optim.Optimizer:
    return Failing(model.parameters(), lr=0.1, momentum=0.9)


def failing_whole(model: torch.nn.Module) -> torch.optim.Optimizer:
    return failing(model)


class Decaying(torch.optim.SGD):
    """Works on the weights before the step of its base, of which torch runs the hooks too, as others have used it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.mul_(0.9)
        return super().step(closure)


Make = Callable[[Any], torch.optim.Optimizer]
PROGRAMS: dict[str, Make] = {
    "by name": ByName, "hooks": hooked, "a late hook": late_hooked, "wrapped": plain, "a step of parts raises": failing,
    "a whole step raises": failing_whole,
    "a step around its base's": lambda model: Decaying(model.parameters(), lr=0.1),
}  # fmt: skip


def train(make: Make, plan: str | None, *, steps: int = 4) -> dict[str, torch.Tensor]:
    with Float64():
        model: Any = build("qwen3").double()
        optimizer = make(model)
        if plan is not None:
            config = mw.ToDistributedConfig(optimizer_reads="element" if make is failing else None)
            model, optimizer, _ = mw.to_distributed(model, optimizer, plan=plan, config=config)
        if make is late_hooked:
            optimizer.register_step_post_hook(normalise)
        stepped: Any = Lookahead(optimizer) if make is plain else optimizer
        for step in range(steps):
            ids = tokens(4, 12, seed=step)
            rows = {"input_ids": ids, "labels": labels_for(ids)}
            if plan is not None and "dp2" in plan:
                rows = {name: value.chunk(2)[dist.get_rank()] for name, value in rows.items()}
            model(**rows).loss.backward()
            with contextlib.suppress(ArithmeticError):
                stepped.step()
            # Also after a step that raised, the program has the model's parameters, and the state is closed.
            stepped_now = {id(p) for group in optimizer.param_groups for p in group["params"]}
            assert stepped_now == set(map(id, model.parameters())), make
            assert plan is None or type(optimizer.state) is ClosedState, make
            optimizer.zero_grad()
        if plan is not None:  # the state of a parameter is a part, or that of a tensor that the program does not know
            state, weight = optimizer.state, model.model.norm.weight
            reads = (lambda: state[weight], lambda: weight in state, state.values, state.items, lambda: [*state])
            for read in (*reads, lambda: len(state), lambda: dict(state), lambda: copy.deepcopy(state)):
                with pytest.raises(mw.UnreadableTensorError, match=r"call meshwright.save_optimizer"):
                    read()
        return mw.full_state_dict(model)


def train_all(plan: str) -> dict[str, dict[str, torch.Tensor]]:
    return {name: train(make, plan) for name, make in PROGRAMS.items()}


@pytest.mark.parametrize("plan", PLANS)
def test_what_a_program_brings_has_whole_parameters(plan: str, pool2: Any) -> None:
    found = pool2.run(train_all, plan)[0]
    for name, make in PROGRAMS.items():
        expected = train(make, None)
        worst = max(relative_difference(found[name][key], weight) for key, weight in expected.items())
        assert worst < 1e-10, (name, worst)  # in float64, only the order of the sums of gradients differs


def refusals(plan: str) -> list[str]:
    """The errors of optimizers and hooks that read several parameters."""
    found = []

    def refused(make: Make) -> None:
        with pytest.raises(mw.OptimizerMismatchError) as error:
            train(make, plan)
        found.append(str(error.value))

    def clipped(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = TrustRatio(model.parameters())
        count = iter(range(10))
        optimizer.register_step_pre_hook(lambda *args: clip_by_all(*args) if next(count) > 0 else None)
        return optimizer

    def by_place(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = TrustRatio(model.parameters())
        step = type(optimizer).step

        class ByPlace(TrustRatio):
            def step(self) -> None:  # type: ignore[override]
                for place, p in enumerate(self.param_groups[0]["params"]):
                    p.grad.mul_(0.9**place)
                step(self)
                for p in self.param_groups[0]["params"]:
                    p.data.sub_(p.grad)

        return ByPlace(model.parameters())

    def replaced(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = plain(model)
        step = optimizer.step
        optimizer.step = lambda *_: (centre(optimizer), step())  # type: ignore[assignment,method-assign,return-value]
        return optimizer

    def drawing(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = plain(model)
        optimizer.register_step_pre_hook(lambda *_: np.random.rand() and None)
        return optimizer

    for make in (clipped, by_place, replaced, drawing):
        refused(make)
    return found


@pytest.mark.parametrize("plan", ["dp2 zero1", "tp2+sp"])
def test_what_reads_several_parameters_is_refused(plan: str, pool2: Any) -> None:
    for clipped, by_place, replaced, drawing in pool2.run(refusals, plan):
        assert "TrustRatio made of" in clipped and "stepped it beside other parameters" in clipped
        assert "ByPlace can be stepped neither" in by_place and "changes with the other parameters" in by_place
        assert "SGD.step is" in replaced and "register_step_pre_hook" in replaced
        assert "SGD drew random numbers in its step" in drawing


class Faint(torch.optim.SGD):
    """Decays weights by what it reads of all gradients, or draws, which changes less than a bit of a 32-bit weight."""

    reads = staticmethod(lambda gradients: sum(float(x.square().mean()) for x in gradients))

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        decay = 1e-9 / (1e-3 + self.reads([p.grad for p in parameters]))
        super().step()
        for p in parameters:
            p.mul_(1 - decay)


def test_a_trial_sees_what_is_less_than_a_bit() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for groups in (list(model.parameters()), [{"params": [p]} for p in model.parameters()]):
        assert "changes with the other parameters" in str(why_not_apart(Faint(groups)))
    state = np.random.get_state()[1:3]
    with mock.patch.object(Faint, "reads", lambda *_: np.random.rand()):
        assert "draws random numbers" in str(why_not_apart(Faint(model.parameters())))
    assert all(map(np.array_equal, state, np.random.get_state()[1:3]))
    optimizer = Faint([torch.nn.Parameter(torch.ones(1))], momentum=0.9)
    (number,) = optimizer.param_groups[0]["params"]
    optimizer.state[number]["momentum_buffer"] = torch.ones(1)
    with mock.patch.object(Faint, "reads", lambda *_: 0.0):
        assert why_not_apart(optimizer) is None
    assert optimizer.state[number]["momentum_buffer"] == 1  # which the trial's own steps have not written


def test_a_wrapper_that_is_no_optimizer_itself_is_refused() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer):
            self.inner, self.param_groups, self.defaults = inner, inner.param_groups, {}

    model = build("llama")
    with pytest.raises(mw.OptimizerMismatchError, match=r"optimizer = Wrapper\(inner\)"):
        mw.to_distributed(model, Wrapper(plain(model)), plan="dp1")


def test_only_what_a_library_brings_is_known() -> None:
    weight = [torch.nn.Parameter(torch.ones(3, 3))]
    for kind in ELEMENTWISE:
        optimizer = kind(weight, lr=1e-2)
        torch.optim.lr_scheduler.StepLR(optimizer, 2)  # which replaces step()
        assert is_known(optimizer), kind
        assert not is_known(type(kind.__name__, (kind,), {})(weight, lr=1e-2))
    optimizer = torch.optim.AdamW(weight)
    with mock.patch.object(torch.optim.Adam, "_init_group", lambda *_: False):
        assert not is_known(optimizer)
    optimizer._cuda_graph_capture_health_check = lambda: None  # type: ignore[method-assign]
    assert not is_known(optimizer)
    chain = mw.ChainedOptimizer(hooked(torch.nn.Linear(2, 2)), torch.optim.SGD(weight))
    assert reads_of(chain) == [Reads.PARAMETER, Reads.ELEMENT]
    chain.register_step_post_hook(normalise)
    assert reads_of(chain) == [Reads.PARAMETER, Reads.PARAMETER]


def test_a_model_may_be_freed_while_another_steps() -> None:
    kept: list[Any] = []

    def free(*_: object) -> None:
        kept.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(free)
    try:
        kept.append(mw.to_distributed(build("llama"), plan="dp1"))
        optimizer = plain(torch.nn.Linear(2, 2))
        optimizer.step()
    finally:
        handle.remove()
    assert not kept
