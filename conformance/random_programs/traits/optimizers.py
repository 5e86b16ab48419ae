"""Traits of the optimizer: which one, when it is made, and how it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from conformance.random_programs.trait import EQUAL, TOLD, Trait

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


def _made_early(make: Callable[[Run], Any]) -> dict[str, Any]:
    """Return the points of a trait whose optimizer is made before the call and used after it."""

    def keep(run: Run) -> None:
        run.memory["early"] = make(run)

    def use(run: Run) -> None:
        run.optimizer = run.memory["early"]

    return {"before": keep, "ready": use}


add(
    Trait(
        name="optimizer made before and not passed",
        kind="made",
        may=TOLD,
        has_no_optimizer=True,
        **_made_early(lambda run: run.new_optimizer()),
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


# ---- more of torch's classes and options


for _name, _make in {
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-3, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=1e-3),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=1.0),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, lr=1e-3),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=1e-2, t0=0),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=1e-3),
    "SGD that maximizes": lambda parameters: torch.optim.SGD(
        parameters, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True
    ),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, fused=True),
    "a learning rate in a tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-3)),
    "Muon of matrices": lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=1e-3),
}.items():
    _may = TOLD if _name == "Muon of matrices" else EQUAL
    add(
        Trait(
            name=_name, kind="optimizer", may=_may, optimizer=lambda model, make=_make: make(list(model.parameters()))
        )
    )


# ---- optimizers of the program


class _Own(torch.optim.Optimizer):
    """An optimizer whose update of a weight is a function of the optimizer, the place in the group, and the weight."""

    def __init__(self, parameters: Any, update: Any, lr: float = 1e-2):
        super().__init__(parameters, {"lr": lr})
        self.update, self.steps = update, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for place, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.sub_(self.update(self, place, p), alpha=group["lr"])


def _sign_of_momentum(own: _Own, place: int, p: Tensor) -> Tensor:
    """Return Lion's update."""
    average = own.state[p].setdefault("average", torch.zeros_like(p))
    update = average.lerp(p.grad, 0.1).sign() * 0.1
    average.lerp_(p.grad, 0.01)
    return update


def _orthogonal(own: _Own, place: int, p: Tensor) -> Tensor:
    """Return Muon's update: a matrix with singular values near 1."""
    if p.ndim < 2:
        return p.grad
    x = p.grad / (p.grad.norm() + 1e-7)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x * max(1, p.shape[0] / p.shape[1]) ** 0.5


_UPDATES: dict[str, Any] = {
    "signs of momentum": _sign_of_momentum,
    "orthogonal updates": _orthogonal,
    "steps by the shape": lambda own, place, p: p.grad * max(1, p.shape[0] / p.shape[-1]) ** 0.5,
    "steps by the place": lambda own, place, p: p.grad * 0.9**place,
    "steps by the size": lambda own, place, p: p.grad * (0.5 if p.numel() > 1000 else 1.0),
    "trust ratios": lambda own, place, p: p.grad * (p.norm() / (p.grad.norm() + 1e-6)).clamp(max=10),
    "trust ratios after a warm-up": lambda own, place, p: p.grad / (1 if own.steps < 2 else p.grad.norm() + 1e-6),
    "centred gradients": lambda own, place, p: p.grad - p.grad.mean(-1, keepdim=True) if p.ndim > 1 else p.grad,
    "the sign of each row": lambda own, place, p: p.grad.sum(-1, keepdim=True).sign().expand_as(p) * 0.01,
}
for _name, _update in _UPDATES.items():
    add(
        Trait(
            name=f"own optimizer: {_name}",
            kind="optimizer",
            may=TOLD,
            tells="_Own",
            optimizer=lambda model, update=_update: _Own(list(model.parameters()), update),  # type: ignore[misc]
        )
    )


class _Clips(torch.optim.AdamW):
    """Clips inside of its step, by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


def _rates_by_shape(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": 0.32 / p.shape[-1]} for p in model.parameters()])


def _rates_by_layer(model: nn.Module) -> torch.optim.Optimizer:
    """Make groups whose rates fall from layer to layer."""
    named = list(model.named_parameters())
    return torch.optim.AdamW([{"params": [p], "lr": 1e-3 * (0.5 if ".0." in name else 1.0)} for name, p in named])


for _name, _make_of in {
    "clips inside of step": lambda model: _Clips(list(model.parameters()), lr=1e-3),
    "rates by shape": _rates_by_shape,
    "rates by layer": _rates_by_layer,
}.items():
    add(Trait(name=_name, kind="optimizer", may=TOLD, optimizer=_make_of))


# ---- hooks on steps, replaced steps, and wrappers


def _matrices(optimizer: Any) -> Any:
    return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and p.ndim > 1)


def _centre(optimizer: Any, *rest: Any) -> None:
    for p in _matrices(optimizer):
        p.grad.sub_(p.grad.mean(1, keepdim=True))


@torch.no_grad()
def _normalise_rows(optimizer: Any, *rest: Any) -> None:
    """Give each row of a matrix the norm 1, as nGPT does."""
    for p in _matrices(optimizer):
        p.div_(p.norm(dim=1, keepdim=True).clamp(min=1e-6))


def _replace_step(run: Run) -> None:
    """Scale gradients in a step that replaces the optimizer's."""
    inner = run.optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        for group in run.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        return inner(*args, **kwargs)

    run.optimizer.step = step


class _Lookahead:
    """Keeps slow weights beside an optimizer's, as a plain class around it."""

    def __init__(self, inner: Any):
        self.inner, self.param_groups = inner, inner.param_groups
        self.slow = [[p.detach().clone() for p in group["params"]] for group in inner.param_groups]

    def step(self) -> None:
        self.inner.step()
        for group, slow in zip(self.inner.param_groups, self.slow, strict=True):
            for p, kept in zip(group["params"], slow, strict=True):
                if not p.is_floating_point():
                    continue
                kept.add_(p.data - kept, alpha=0.5)
                p.data.copy_(kept)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none=set_to_none)


def _wrap(run: Run) -> None:
    run.optimizer = _Lookahead(run.optimizer)


for _name, _points in {
    "centred gradients by a step hook": lambda run: run.optimizer.register_step_pre_hook(_centre),
    "normalised rows by a step hook": lambda run: run.optimizer.register_step_post_hook(_normalise_rows),
    "a replaced step": _replace_step,
}.items():
    for _when, _point in {"before": "before", "after": "ready"}.items():
        add(
            Trait(
                name=f"{_name}, {_when}",
                kind="step hook",
                may=TOLD,
                tells="hooks of its step|_replace_step|gradient|the result of norm",
                without=frozenset({"made", "schedule"}),
                **{_point: _points},  # type: ignore[arg-type]
            )
        )
_WRAPPED = frozenset({"made", "schedule", "resume", "step hook"})
add(Trait(name="a Lookahead class, after", kind="step hook", may=TOLD, ready=_wrap, without=_WRAPPED))
add(
    Trait(
        name="a Lookahead class, before",
        kind="step hook",
        may=TOLD,
        **_made_early(lambda run: _Lookahead(run.optimizer)),
        without=_WRAPPED,
    )
)


def _sharpen(run: Run, direction: Any) -> None:
    """Take the gradient at the worst weights nearby, as SAM does."""
    moved = [(p, 0.01 * direction(p.grad)) for p in run.model.parameters() if p.grad is not None]
    with torch.no_grad():
        for p, move in moved:
            p.add_(move)
    run.optimizer.zero_grad()
    run.model(**run.current).loss.backward()
    with torch.no_grad():
        for p, move in moved:
            p.sub_(move)


for _name, _direction in {
    "of each weight": lambda grad: grad / (grad.norm() + 1e-6),
    "by signs": torch.sign,
}.items():
    add(
        Trait(
            name=f"sharpness {_name}",
            kind="gradients",
            may=TOLD,
            tells="gradient",
            gradients=lambda run, direction=_direction: _sharpen(run, direction),  # type: ignore[misc]
            without=frozenset({"loss", "keyword", "factor", "term", "accumulation", "state", "hook", "module hook"}),
        )
    )


# ---- groups and rates that change during the run


def _group_by_shape(run: Run) -> None:
    """Replace the groups by one for each parameter, with rates by its fan-in."""
    run.optimizer.param_groups.clear()
    for p in run.model.parameters():
        run.optimizer.add_param_group({"params": [p], "lr": 1e-3 * 32 / p.shape[-1]})


def _freeze_small(run: Run) -> None:
    for p in run.model.parameters():
        p.requires_grad_(p.shape[0] > 40)


def _warm_up(run: Run) -> None:
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: (step + 1) / 3)


def _add_group(run: Run) -> None:
    """Train a weight that the optimizer did not have."""
    known = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    missing = [p for p in run.model.parameters() if id(p) not in known]
    if missing:
        run.optimizer.add_param_group({"params": missing})


add(Trait(name="a warm-up", kind="schedule", ready=_warm_up, without=frozenset({"made"})))
add(
    Trait(
        name="groups by shape after the call",
        kind="schedule",
        may=TOLD,
        tells="add_param_group",
        ready=_group_by_shape,
        without=frozenset({"made", "optimizer", "head", "resume"}),
    )
)
add(Trait(name="frozen by shape after the call", kind="freezing", may=TOLD, ready=_freeze_small))
add(
    Trait(
        name="a group that is added later",
        kind="schedule",
        may=TOLD,
        tells="group",
        optimizer=lambda model: torch.optim.AdamW([*model.parameters()][::2], lr=1e-3),
        event=_add_group,
        without=frozenset({"made", "optimizer", "resume"}),
    )
)
