"""Traits of the weights between steps: averages, writes, and what the program reads."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from conformance.random_programs.trait import TOLD, Trait

if TYPE_CHECKING:
    from conformance.random_programs.run import Run

TRAITS: list[Trait] = []
add = TRAITS.append


# ---- averages of the weights


def _averaged(run: Run) -> None:
    run.average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def _update_average(run: Run) -> None:
    run.average.update_parameters(run.model)


def _copied(run: Run) -> None:
    run.average = copy.deepcopy(run.model)


def _update_by_hand(run: Run) -> None:
    with torch.no_grad():
        for ours, theirs in zip(run.average.parameters(), run.model.parameters(), strict=True):
            ours.mul_(0.9).add_(theirs, alpha=0.1)


_SAME = frozenset({"parametrization", "sharing"})
for _name, _points in {
    "an average made before": {"build": _averaged, "stepped": _update_average},
    "an average made after": {"ready": _averaged, "stepped": _update_average},
    "an average by hand": {"ready": _copied, "stepped": _update_by_hand},
}.items():
    add(Trait(name=_name, kind="average", may=TOLD, without=_SAME, **_points))


# ---- writes of weights


def _each_weight(run: Run, change: Any) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            change(parameter)


def _load(run: Run) -> None:
    run.model.load_state_dict(run.new_model(seed=5).state_dict())


def _slow_weights(run: Run) -> None:
    run.memory["slow"] = [parameter.detach().clone() for parameter in run.model.parameters()]


def _look_ahead(run: Run) -> None:
    """Move half of the way to the fast weights, as the Lookahead optimizer does."""
    with torch.no_grad():
        for slow, fast in zip(run.memory["slow"], run.model.parameters(), strict=True):
            slow.add_(fast - slow, alpha=0.5)
            fast.copy_(slow)


def _average_weights(run: Run) -> None:
    with torch.no_grad():
        for slow, fast in zip(run.memory["slow"], run.model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)


def _swap(run: Run) -> None:
    """Evaluate with the averaged weights, then put the trained ones back, as EMA loops do."""
    trained = [parameter.detach().clone() for parameter in run.model.parameters()]
    with torch.no_grad():
        for parameter, slow in zip(run.model.parameters(), run.memory["slow"], strict=True):
            parameter.copy_(slow)
    run.say(run.evaluate(run.model))
    with torch.no_grad():
        for parameter, value in zip(run.model.parameters(), trained, strict=True):
            parameter.copy_(value)


def _assign_data(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.data = parameter.data * 0.9


def _zero_a_row(run: Run) -> None:
    with torch.no_grad():
        run.model.get_input_embeddings().weight[7].zero_()


for _name, _event in {
    "clamp": lambda run: _each_weight(run, lambda p: p.clamp_(-0.05, 0.05)),
    "p.mul_": lambda run: _each_weight(run, lambda p: p.mul_(0.9)),
    "p.data": _assign_data,
    "load_state_dict": _load,
    "a zeroed row": _zero_a_row,
}.items():
    add(Trait(name=_name, kind="write", may=TOLD, event=_event))
add(
    Trait(
        name="weight decay by hand",
        kind="write",
        may=TOLD,
        stepped=lambda run: _each_weight(run, lambda p: p.mul_(0.99)),
    )
)
add(Trait(name="lookahead", kind="write", may=TOLD, ready=_slow_weights, stepped=_look_ahead))
add(
    Trait(
        name="an average swapped in",
        kind="write",
        may=TOLD,
        ready=_slow_weights,
        stepped=_average_weights,
        event=_swap,
        without=frozenset({"state", "parametrization"}),
    )
)


# ---- what the program reads


def _say_gradient_norm(run: Run) -> None:
    squares = [(p.grad**2).sum() for p in run.model.parameters() if p.grad is not None]
    run.say(sum(squares, torch.zeros(())).item())


def _say_weight_norm(run: Run) -> None:
    run.say(sum((p.detach() ** 2).sum() for p in run.model.parameters()).item())  # type: ignore[union-attr]


def _say_state(run: Run) -> None:
    run.say(sum(x.double().abs().sum().item() for x in run.model.state_dict().values()))


add(
    Trait(
        name="a count of parameters",
        kind="reading",
        may=TOLD,
        stepped=lambda run: run.say(sum(p.numel() for p in run.model.parameters())),
    )
)
add(Trait(name="a norm of weights", kind="reading", may=TOLD, stepped=_say_weight_norm))
add(Trait(name="a norm of gradients", kind="reading", may=TOLD, gradients=_say_gradient_norm))
add(Trait(name="the state dict", kind="reading", may=TOLD, stepped=_say_state))
add(
    Trait(
        name="a copy of the model",
        kind="reading",
        may=TOLD,
        stepped=lambda run: run.say(run.evaluate(copy.deepcopy(run.model))),
        without=frozenset({"parametrization"}),
    )
)


# ---- what the program changes in the model after the call


def _tie(run: Run) -> None:
    run.model.lm_head.weight = run.model.model.embed_tokens.weight


def _swap_layers(run: Run) -> None:
    run.layers[0], run.layers[1] = run.layers[1], run.layers[0]


def _drop_layer(run: Run) -> None:
    del run.layers[-1]
    run.model.config.num_hidden_layers -= 1


def _new_activation(run: Run) -> None:
    for layer in run.layers:
        layer.mlp.act_fn = nn.GELU()


def _larger_epsilon(run: Run) -> None:
    for module in run.model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.1


def _new_weight(run: Run) -> None:
    """Replace a weight by a new one of other values."""
    norm = run.model.model.norm
    norm.weight = nn.Parameter(norm.weight.detach() * 0.5)


def _alternate(run: Run) -> None:
    """Train one half of the weights in each step."""
    for index, parameter in enumerate(run.model.parameters()):
        parameter.requires_grad_(index % 2 == run.step % 2)


def _late_adapter(run: Run) -> None:
    """Add a trained adapter, and a group for it."""
    layer = run.layers[0]
    layer.late = nn.Linear(32, 32, bias=False).double()
    nn.init.constant_(layer.late.weight, 0.01)
    layer.mlp.register_forward_hook(lambda module, args, output: output + layer.late(args[0]))
    run.optimizer.add_param_group({"params": [layer.late.weight]})


_LATER = {"after": "ready", "in step 1": "event"}
for _name, _names, _change, _more in (
    ("tied", "lm_head.weight|embed_tokens", _tie, {"head", "tied", "gemma2", "parametrization"}),
    ("layers swapped", "layers", _swap_layers, {"state"}),
    ("a layer dropped", "layers", _drop_layer, {"state", "load_state_dict"}),
    ("another activation", "act_fn", _new_activation, {"phi3"}),
    ("another epsilon", "variance_epsilon", _larger_epsilon, set[str]()),
    ("a new weight", "norm.weight", _new_weight, {"state"}),
    ("an adapter added", "late|add_param_group", _late_adapter, {"load_state_dict"}),
):
    for _when, _point in _LATER.items():
        add(
            Trait(
                name=f"{_name}, {_when}",
                kind="change",
                may=TOLD,
                tells=_names,
                place="mlp.act_fn" if _change is _new_activation else "",
                without=frozenset({"sharing", "average", "write", "made", "resume", "optimizer", "freezing", *_more}),
                **{_point: _change},  # type: ignore[arg-type]
            )
        )
add(
    Trait(
        name="halves trained in turn",
        kind="freezing",
        may=TOLD,
        ready=_alternate,
        stepped=_alternate,
        without=frozenset({"sharing", "tied"}),
    )
)


def _average_of_all(run: Run) -> None:
    run.average = AveragedModel(run.model)


def _use_average(run: Run) -> None:
    """Go on with the average of all steps, as stochastic weight averaging does."""
    run.average.update_parameters(run.model)
    run.model.load_state_dict(run.average.module.state_dict())


add(
    Trait(
        name="an average that takes over",
        kind="average",
        may=TOLD,
        without=_SAME,
        ready=_average_of_all,
        event=_use_average,
    )
)
