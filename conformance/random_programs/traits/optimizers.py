"""Traits of the optimizer: which one, when it is made, and how it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from conformance.random_programs.trait import TOLD, Trait

if TYPE_CHECKING:
    from conformance.random_programs.run import Run

TRAITS: list[Trait] = []
add = TRAITS.append

_STOCK: dict[str, Any] = {
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-3),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
    "AMSGrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, amsgrad=True),
}
for _name, _make in _STOCK.items():
    add(Trait(name=_name, kind="optimizer", optimizer=lambda model, make=_make: make(list(model.parameters()))))


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3)


add(Trait(name="two groups", kind="optimizer", optimizer=_two_groups))
add(
    Trait(
        name="an optimizer of half the weights",
        kind="optimizer",
        may=TOLD,
        optimizer=lambda model: torch.optim.AdamW([*model.parameters()][::2], lr=1e-3),
    )
)
add(
    Trait(
        name="Adafactor",  # not elementwise: it averages over rows and columns of a weight
        kind="optimizer",
        may=TOLD,
        optimizer=lambda model: torch.optim.Adafactor(list(model.parameters()), lr=1e-3),
    )
)

_ONE = frozenset({"optimizer", "schedule", "resume"})


def _make_after(run: Run) -> None:
    run.optimizer = run.new_optimizer()


add(
    Trait(
        name="optimizer made after the call",
        kind="made",
        may=TOLD,
        has_no_optimizer=True,
        ready=_make_after,
        without=frozenset({"resume"}),
    )
)


def _pass_after(run: Run) -> None:
    run.optimizer = run.new_optimizer()
    run.distribute_optimizer()


add(Trait(name="optimizer passed later", kind="made", may=TOLD, has_no_optimizer=True, ready=_pass_after))


def _make_before(run: Run) -> None:
    run.memory["made before"] = run.new_optimizer()


def _use_it(run: Run) -> None:
    run.optimizer = run.memory["made before"]


add(
    Trait(
        name="optimizer made before and not passed",
        kind="made",
        may=TOLD,
        has_no_optimizer=True,
        before=_make_before,
        ready=_use_it,
        without=frozenset({"resume"}),
    )
)


class _Nothing:
    """An optimizer for a program whose weights are stepped elsewhere."""

    def step(self) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


def _step_inside(run: Run) -> None:
    """Step each weight as soon as its gradient is there, which saves the memory of gradients."""
    optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in run.model.parameters() if p.requires_grad}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    run.optimizer = _Nothing()


_INSIDE = frozenset(
    {"accumulation", "freezing", "clipping", "gradients", "tied", "two passes", "shared query weight", "hook"}
)
for _when in ("before", "after"):
    add(
        Trait(
            name=f"a step inside backward, made {_when}",
            kind="made",
            may=TOLD,
            has_no_optimizer=True,
            before=_step_inside if _when == "before" else None,
            ready=_step_inside if _when == "after" else None,
            values={"clips": False},
            without=_ONE | _INSIDE,
        )
    )


def _cosine(run: Run) -> None:
    run.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 2)


def _change_lr(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.3


add(
    Trait(
        name="a cosine schedule",
        kind="schedule",
        ready=_cosine,
        without=frozenset({"made"}),  # which has no optimizer yet
    )
)
add(Trait(name="learning rate set by hand", kind="schedule", event=_change_lr))
