"""Traits of what the program reads of weights, gradients, buffers and the optimizer, and of steps by hand."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from conformance.random_programs.trait import TOLD, Trait

if TYPE_CHECKING:
    from conformance.random_programs.run import Run

TRAITS: list[Trait] = []
add = TRAITS.append


def _trained(run: Run) -> list[nn.Parameter]:
    return [p for p in run.model.parameters() if p.requires_grad]


def _say(run: Run, read: Any) -> None:
    """Print a number, or each of a list."""
    found = read(run)
    for value in found if isinstance(found, list) else [found]:
        run.say(value)


def _size(x: Any) -> Any:
    return x.double().abs().sum().item() if isinstance(x, Tensor) else x


# ---- gradients that are read after backward


def _gradients(run: Run) -> list[Any]:
    """Return the gradients as a loop reads them that takes each trained weight to have one."""
    return [p.grad for p in _trained(run)]


_GRADIENTS: dict[str, Any] = {
    "the norm of each gradient": lambda run: [g.norm().item() for g in _gradients(run)],
    "the norm of each gradient that is there": lambda run: [g.norm().item() for g in _gradients(run) if g is not None],
    "the largest gradient of the head": lambda run: run.model.get_output_embeddings().weight.grad.abs().max().item(),
    "the largest gradient of the words": lambda run: run.model.get_input_embeddings().weight.grad.abs().max().item(),
    "gradients in one vector": lambda run: torch.cat([g.flatten() for g in _gradients(run)]).norm().item(),
    "how many gradients there are": lambda run: sum(g is not None for g in _gradients(run)),
    "shapes of gradients": lambda run: [list(g.shape) for g in _gradients(run)],
    "zeros among gradients": lambda run: [(g == 0).sum().item() for g in _gradients(run)],
    "a NaN among gradients": lambda run: any(torch.isnan(g).any().item() for g in _gradients(run)),
    "norms by torch._foreach_norm": lambda run: [x.item() for x in torch._foreach_norm(_gradients(run))],
    "norms by torch's function": lambda run: torch.nn.utils.get_total_norm(_gradients(run)).item(),
}
_HEADED = frozenset({"head", "tied", "parametrization"})
for _name, _read in _GRADIENTS.items():
    add(
        Trait(
            name=_name,
            kind="reading",
            may=TOLD,
            gradients=lambda run, read=_read: _say(run, read),  # type: ignore[misc]
            without=frozenset({"made", "freezing", *_HEADED}),
        )
    )


def _compare_directions(run: Run) -> None:
    """Say how much the gradients turn from step to step."""
    last = run.memory.get("gradients")
    run.memory["gradients"] = [g.clone() for g in _gradients(run)]
    if last is not None:
        run.say(sum((a * b).sum().item() for a, b in zip(last, run.memory["gradients"], strict=True)))


def _add_up(run: Run) -> None:
    """Step by the mean of this step's and the last step's gradients, which the loop keeps."""
    kept = run.memory.setdefault("kept", [torch.zeros_like(p) for p in _trained(run)])
    for parameter, before in zip(_trained(run), kept, strict=True):
        now = parameter.grad.clone()  # type: ignore[union-attr]
        parameter.grad = (now + before) / 2
        before.copy_(now)


def _centre(run: Run) -> None:
    for parameter in _trained(run):
        parameter.grad -= parameter.grad.mean()  # type: ignore[union-attr,operator]


def _drop(run: Run) -> None:
    """Step every second weight only."""
    for parameter in _trained(run)[run.step % 2 :: 2]:
        parameter.grad = None


def _clip_by_layer(run: Run) -> None:
    for layer in run.layers:
        nn.utils.clip_grad_norm_(layer.parameters(), 0.1)


_BY_HAND: dict[str, Any] = {
    "gradients compared with the last": _compare_directions,
    "gradients averaged with the last": _add_up,
    "gradients centred by hand": _centre,
    "every second gradient dropped": _drop,
    "gradients clipped layer by layer": _clip_by_layer,
    "gradients clipped by value": lambda run: nn.utils.clip_grad_value_(run.model.parameters(), 1e-3),
    "gradients over their sizes": lambda run: [g.div_(g.norm() + 1) for g in _gradients(run)],
    "signs of gradients": lambda run: [g.sign_().mul_(1e-3) for g in _gradients(run)],
    "gradients in place of all": lambda run: torch._foreach_mul_(_gradients(run), 0.5),
}
for _name, _change in _BY_HAND.items():
    add(Trait(name=_name, kind="gradients", may=TOLD, gradients=_change, without=frozenset({"made", "freezing"})))


def _step_by_hand(run: Run) -> None:
    """Step without an optimizer, as tutorials do."""
    with torch.no_grad():
        for parameter in _trained(run):
            parameter -= 1e-2 * parameter.grad  # type: ignore[operator]
            parameter.grad = None


def _step_data_by_hand(run: Run) -> None:
    for parameter in _trained(run):
        parameter.data.add_(parameter.grad.data, alpha=-1e-2)  # type: ignore[union-attr]
        parameter.grad.zero_()  # type: ignore[union-attr]


class _Nothing:
    def step(self) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


def _no_optimizer(run: Run) -> None:
    run.optimizer = _Nothing()


for _name, _change in {"a step by hand": _step_by_hand, "a step of .data by hand": _step_data_by_hand}.items():
    add(
        Trait(
            name=_name,
            kind="made",
            may=TOLD,
            has_no_optimizer=True,
            before=_no_optimizer,
            gradients=_change,
            values={"clips": False},
            without=frozenset({"optimizer", "schedule", "resume", "clipping", "gradients", "freezing", "step hook"}),
        )
    )


# ---- weights, buffers and states that are read after a step


def _vector_halved(run: Run) -> None:
    vector = parameters_to_vector(run.model.parameters())
    vector_to_parameters(vector * 0.9, run.model.parameters())


def _saved_whole(run: Run) -> Any:
    """Save the model as an object, and read it again."""
    file = io.BytesIO()
    torch.save(run.model, file)
    file.seek(0)
    return run.evaluate(torch.load(file, weights_only=False))


_PICKLED = {"class", "hook", "module hook", "batch-wide", "made", "change"}  # whose functions Python cannot save
_OPTIMIZER = {"made", "optimizer", "step hook"}
_WEIGHTS: dict[str, Any] = {
    "the sum of each weight": lambda run: [p.sum().item() for p in run.model.parameters()],
    "the norm of each .data": lambda run: [p.data.norm().item() for p in run.model.parameters()],
    "a histogram of weights": lambda run: [p.detach().histc(4, -1, 1).tolist() for p in run.model.parameters()],
    "weights as numbers of numpy": lambda run: [float(p.detach().cpu().numpy().sum()) for p in run.model.parameters()],
    "weights as lists": lambda run: [len(p.tolist()) for p in run.model.parameters()],
    "the last norm's weight": lambda run: run.model.model.norm.weight.detach().norm().item(),
    "one number of a layer": lambda run: run.layers[-1].mlp.down_proj.weight[0, 0].item(),
    "the largest eigenvalue of a weight": lambda run: torch.linalg.matrix_norm(
        run.layers[0].mlp.down_proj.weight.detach(), 2
    ).item(),
    "buffers": lambda run: [_size(x) for x in run.model.buffers()],
    "a layer's state dict": lambda run: [_size(x) for x in run.layers[-1].state_dict().values()],
    "a copy of a layer": lambda run: [_size(x) for x in copy.deepcopy(run.layers[0]).state_dict().values()],
    "a model saved as an object": _saved_whole,
    "how much weights move": lambda run: [
        (p.detach() - run.start[name]).norm().item() for name, p in run.model.named_parameters()
    ],
    "the state's values": lambda run: [_size(x) for s in run.optimizer.state.values() for x in s.values()],
    "the state's number": lambda run: len(run.optimizer.state),
    "the state of each weight": lambda run: [_size(run.optimizer.state[p]["exp_avg"]) for p in _trained(run)],
    "the state dict of the optimizer": lambda run: [
        _size(x) for s in run.optimizer.state_dict()["state"].values() for x in s.values()
    ],
    "shapes of groups": lambda run: [list(p.shape) for group in run.optimizer.param_groups for p in group["params"]],
    "numbers of groups": lambda run: [sum(p.numel() for p in g["params"]) for g in run.optimizer.param_groups],
    "norms of groups": lambda run: [p.norm().item() for g in run.optimizer.param_groups for p in g["params"]],
    "a vector of all weights, written back": _vector_halved,
}
for _name, _read in _WEIGHTS.items():
    _conflicts = {
        "parametrization",
        "sharing",
        "adapter",
        *(_OPTIMIZER if "state" in _name or "group" in _name else ()),
    }
    add(
        Trait(
            name=_name,
            kind="reading",
            may=TOLD,
            stepped=lambda run, read=_read: _say(run, read),  # type: ignore[misc]
            without=frozenset(_conflicts | {"head", "state", "tied", *(_PICKLED if "object" in _name else {"change"})}),
        )
    )


# ---- parts of the model that are called alone


def _hidden(run: Run) -> Tensor:
    return torch.linspace(-1, 1, 4 * 6 * 32, dtype=torch.float64).view(4, 6, 32)


def _ids(run: Run) -> Tensor:
    return run.batch()["input_ids"][:, :6]  # type: ignore[no-any-return]


def _in_two_pieces(run: Run) -> float:
    first = run.model(input_ids=_ids(run)[:, :3], use_cache=True)
    second = run.model(input_ids=_ids(run)[:, 3:], past_key_values=first.past_key_values)
    return second.logits.norm().item()  # type: ignore[no-any-return]


_CALLS: dict[str, Any] = {
    "the embedding": lambda run: run.model.get_input_embeddings()(_ids(run)),
    "the head": lambda run: run.model.lm_head(_hidden(run)),
    "an mlp": lambda run: run.layers[-1].mlp(_hidden(run)),
    "a projection": lambda run: run.layers[0].mlp.down_proj(torch.ones(2, 48, dtype=torch.float64)),
    "the last norm": lambda run: run.model.model.norm(_hidden(run)),
    "the base model": lambda run: run.model.model(input_ids=_ids(run)).last_hidden_state,
    "logits": lambda run: run.model(input_ids=_ids(run)).logits,
    "hidden states of a layer": lambda run: run.model(input_ids=_ids(run), output_hidden_states=True).hidden_states[1],
    "all hidden states": lambda run: sum(run.model(input_ids=_ids(run), output_hidden_states=True).hidden_states[1:]),
    "attentions": lambda run: run.model(input_ids=_ids(run), output_attentions=True).attentions[-1],
    "a row at a time": lambda run: sum(run.model(input_ids=row[None]).logits for row in _ids(run)),
    "three rows": lambda run: run.model(input_ids=_ids(run)[:3]).logits,
    "a prompt of one token": lambda run: run.model(input_ids=_ids(run)[:, :1]).logits,
    "functional_call with changed weights": lambda run: (
        torch.func.functional_call(
            run.model, {name: 0.9 * p for name, p in run.model.named_parameters()}, (), {"input_ids": _ids(run)}
        ).logits
    ),
}


def _called(run: Run, call: Any) -> None:
    was_training = run.model.training
    run.model.eval()
    with torch.no_grad():
        run.say(call(run).double().norm().item())
    run.model.train(was_training)


for _name, _call in {**_CALLS, "a sequence in two pieces": _in_two_pieces}.items():
    _eager = {"attn_implementation": "eager"} if _name == "attentions" else {}
    add(
        Trait(
            name=f"calls: {_name}",
            kind="generation",
            may=TOLD,
            config=_eager,
            event=lambda run, call=_call: _called(run, lambda run: torch.as_tensor(call(run))),  # type: ignore[misc]
            without=frozenset({"head", "rope", "tied", "phi3", "state", "batch-wide", "average", "parametrization"}),
        )
    )
