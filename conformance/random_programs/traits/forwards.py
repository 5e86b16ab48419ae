"""Traits of the forward pass: state that it writes, and values that it computes over all rows of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from conformance.random_programs.trait import SPLIT, TOLD, Trait

if TYPE_CHECKING:
    from conformance.random_programs.run import Run

TRAITS: list[Trait] = []
add = TRAITS.append

# With recomputation a one-device program runs these twice, which nobody means; copies would count apart.
_ONCE = frozenset({"recompute", "a copy of the model", "average", "resume", "evaluation", "load_state_dict"})


def first_of(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _after_layer(run: Run, change: Any) -> None:
    """Change the hidden states after the first layer by a hook."""
    layer = run.layers[0]

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        changed = change(module, first_of(output))
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    layer.register_forward_hook(hook)


class _BatchNormOfLast(nn.Module):
    """BatchNorm over the last dim, which is the second one in torch."""

    def __init__(self, is_affine: bool):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(32, affine=is_affine).double()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.batch_norm(hidden.transpose(1, 2)).transpose(1, 2)


def _add_batch_norm(owner: Any, name: str, is_affine: bool) -> None:
    setattr(owner, name, nn.Sequential(getattr(owner, name), _BatchNormOfLast(is_affine)))


def _step_counter(run: Run) -> None:
    layer = run.layers[0]
    layer.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    def count(module: Any, hidden: Tensor) -> Tensor:
        if module.training:
            module.steps += 1
        return hidden * (1 + 0.01 * module.steps)

    _after_layer(run, count)


def _python_counter(run: Run) -> None:
    run.layers[0].passes = 0

    def count(module: Any, hidden: Tensor) -> Tensor:
        module.passes += 1
        return hidden * (1 + 0.01 * module.passes)

    _after_layer(run, count)


def _calls_counted(run: Run) -> None:
    """Count in a list of the program, which is no attribute of the module."""
    calls: list[int] = []

    def count(module: Any, hidden: Tensor) -> Tensor:
        calls.append(1)
        return hidden * (1 + 0.01 * len(calls))

    _after_layer(run, count)


def _running_mean(run: Run) -> None:
    run.layers[0].register_buffer("mean", torch.zeros(32, dtype=torch.float64))

    def centre(module: Any, hidden: Tensor) -> Tensor:
        if module.training:
            module.mean.mul_(0.9).add_(hidden.detach().flatten(0, -2).mean(0), alpha=0.1)
        return hidden - module.mean

    _after_layer(run, centre)


def _largest_seen(run: Run) -> None:
    """Keep the largest activation so far, as observers of quantization do."""
    run.layers[0].register_buffer("largest", torch.zeros((), dtype=torch.float64))

    def observe(module: Any, hidden: Tensor) -> Tensor:
        module.largest.copy_(torch.maximum(module.largest, hidden.detach().abs().max()))
        return hidden / (1 + module.largest)

    _after_layer(run, observe)


def _write_weights(run: Run) -> None:
    """Clamp a weight in each forward pass, as quantization-aware training does."""

    def clamp(module: Any, args: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(0.99)

    run.layers[0].mlp.down_proj.register_forward_pre_hook(clamp)


def _embedding(run: Run, **options: Any) -> None:
    for name, value in options.items():
        setattr(run.model.model.embed_tokens, name, value)


for _name, _build in {
    "BatchNorm after the last norm": lambda run: _add_batch_norm(run.model.model, "norm", True),
    "BatchNorm without weights": lambda run: _add_batch_norm(run.model.model, "norm", False),
    "BatchNorm after an mlp": lambda run: _add_batch_norm(run.layers[0], "mlp", False),
    "a buffer that counts": _step_counter,
    "a number that counts": _python_counter,
    "calls that a list counts": _calls_counted,
    "a running mean": _running_mean,
    "a running maximum": _largest_seen,
    "forward writes a weight": _write_weights,
    "max_norm of the embedding": lambda run: _embedding(run, max_norm=0.1),
}.items():
    _more = {"tied"} if "max_norm" in _name else {"sharing"} if "mlp" in _name else set()
    _place = "mlp" if "mlp" in _name else ""
    _told = "sees this rank's|changes .* in each micro-batch"
    _counts = "ga|mb" if _name == "calls that a list counts" else ""  # of micro-batches, which nothing can know
    add(
        Trait(
            name=_name,
            kind="state",
            may=TOLD,
            warns=_told,
            build=_build,
            place=_place,
            by_design=_counts,
            without=_ONCE | _more,
        )
    )
add(
    Trait(
        name="scale_grad_by_freq",
        kind="state",
        may=TOLD,
        build=lambda run: _embedding(run, scale_grad_by_freq=True),
        without=frozenset({"tied"}),
    )
)


def _whole_batch(run: Run, change: Any) -> None:
    _after_layer(run, lambda module, hidden: change(hidden))


def _of_inputs(run: Run, change: Any) -> None:
    """Change what the whole model is called with."""

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"input_ids": change(kwargs["input_ids"])}

    run.model.register_forward_pre_hook(hook, with_kwargs=True)


def _of_embeddings(run: Run, change: Any) -> None:
    run.model.model.embed_tokens.register_forward_hook(lambda module, args, output: change(output))


for _name, _build in {
    "minus the mean over rows": lambda run: _whole_batch(
        run, lambda x: x - 0.5 * run.all_rows(x).mean(0, keepdim=True)
    ),
    "over the batch's largest": lambda run: _whole_batch(run, lambda x: x / (1 + run.all_rows(x).abs().max())),
    "rows mixed with the next": lambda run: _of_embeddings(run, lambda x: 0.7 * x + 0.3 * x.roll(1, 0)),
    "embeddings over their norm": lambda run: _of_embeddings(run, lambda x: x / run.all_rows(x).pow(2).mean().sqrt()),
    "inputs permuted by a hook": lambda run: _of_inputs(run, lambda ids: ids.flip(0)),
}.items():
    add(
        Trait(
            name=_name,
            kind="batch-wide",
            may=TOLD,
            warns="sees this rank's",
            by_design=SPLIT if _name in ("rows mixed with the next", "inputs permuted by a hook") else "",
            build=_build,
            without=frozenset({"generate"}),
        )
    )


# ---- hooks on modules: what they do, where, and when they are made


def _clipped(module: nn.Module, grads: Any, *rest: Any) -> Any:
    """Clip the gradient of a module's input by its norm, as a full backward hook."""
    return tuple(None if grad is None else grad / (1 + 1e3 * grad.norm()) for grad in grads)


def _halved(module: nn.Module, grads: Any, *rest: Any) -> Any:
    return tuple(None if grad is None else grad / 2 for grad in grads)


def _changed(change: Any) -> Any:
    """Return a forward hook that changes the output, which may be the first of a tuple."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        changed = change(first_of(output))
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    return hook


def _given(change: Any) -> Any:
    """Return a forward pre-hook that changes the first input."""
    return lambda module, args: (change(args[0]), *args[1:])


def _scale_hidden(module: nn.Module, args: Any, output: Any) -> None:
    output["last_hidden_state"] = output[0] * 1.5


def _over_norm(x: Tensor) -> Tensor:
    return x / (1 + x.norm(dim=-1, keepdim=True))


def _gated(x: Tensor) -> Tensor:
    return x * x.mean(-1, keepdim=True).sigmoid()


def _small(x: Tensor) -> Tensor:
    return x.clamp(-0.05, 0.05)


def _in_8_bits(x: Tensor) -> Tensor:
    step = x.detach().abs().amax(-1, keepdim=True) / 127 + 1e-9
    return x + ((x / step).round() * step - x).detach()


def _say_norm(run: Run) -> Any:
    return lambda module, args, output: run.say(first_of(output).detach().norm().item())


def _say_gradients(run: Run) -> Any:
    return lambda module, inputs, outputs: run.say([grad.norm().item() for grad in outputs if grad is not None])


_FORWARD, _BEFORE = "register_forward_hook", "register_forward_pre_hook"
_BACKWARD, _BEFORE_BACKWARD = "register_full_backward_hook", "register_full_backward_pre_hook"
_HOOKS: dict[str, tuple[str, str, Any]] = {  # what it does -> module, kind of hook, its function from the run
    "logits over their norm": ("lm_head", _FORWARD, lambda run: _changed(lambda x: 4 * _over_norm(x))),
    "a bias for each word": ("lm_head", _FORWARD, lambda run: _changed(lambda x: x + torch.linspace(0, 1, 97))),
    "inputs of the head in 8 bits": ("lm_head", _BEFORE, lambda run: _given(_in_8_bits)),
    "centred embeddings": ("model.embed_tokens", _FORWARD, lambda run: _changed(lambda x: x - x.mean(-1)[..., None])),
    "rare words replaced": ("model.embed_tokens", _BEFORE, lambda run: _given(lambda ids: ids.clamp(max=90))),
    "embeddings' gradients halved": ("model.embed_tokens", _BEFORE_BACKWARD, lambda run: _halved),
    "steering": ("model.layers.0", _FORWARD, lambda run: _changed(lambda x: x + torch.linspace(0, 0.1, 32))),
    "a layer's gradients clipped": ("model.layers.1", _BACKWARD, lambda run: _clipped),
    "a layer's gradients said": ("model.layers.1", _BACKWARD, _say_gradients),
    "a gated mlp": ("model.layers.0.mlp", _FORWARD, lambda run: _changed(_gated)),
    "an mlp's gradients clipped": ("model.layers.0.mlp", _BACKWARD, lambda run: _clipped),
    "attention over its norm": ("model.layers.1.self_attn", _FORWARD, lambda run: _changed(_over_norm)),
    "inputs of down_proj in 8 bits": ("model.layers.0.mlp.down_proj", _BEFORE, lambda run: _given(_in_8_bits)),
    "inputs of down_proj clamped": ("model.layers.0.mlp.down_proj", _BEFORE, lambda run: _given(_small)),
    "down_proj's gradients clipped": ("model.layers.0.mlp.down_proj", _BACKWARD, lambda run: _clipped),
    "queries over their norm": ("model.layers.0.self_attn.q_proj", _FORWARD, lambda run: _changed(_over_norm)),
    "the last norm said": ("model.norm", _FORWARD, _say_norm),
    "the decoder's output scaled": ("model", _FORWARD, lambda run: _scale_hidden),
}  # fmt: skip
_WHEN = {"before": "build", "after": "ready", "in step 1": "event"}
for _index, (_name, (_path, _kind, _function)) in enumerate(_HOOKS.items()):
    for _when in ("before", ("after", "in step 1")[_index % 2]):

        def _install(run: Run, path: str = _path, kind: str = _kind, function: Any = _function) -> None:
            getattr(run.model.get_submodule(path), kind)(function(run))

        _says, _reads = "said" in _name, _path == "lm_head"
        _more = {"head", "tied", "gemma2"} if _reads else {"phi3"} if "q_proj" in _path else set()
        add(
            Trait(
                name=f"hook {_when}: {_name}",
                kind="module hook",
                may=TOLD,
                tells="hook",
                warns="sees this rank's|micro-batch",
                by_design=SPLIT
                if _says or "clipped" in _name
                else "",  # an activation's gradient, and its norm, are of a rank's rows
                without=_ONCE | {"sharing", "batch-wide"} | _more,
                **{_WHEN[_when]: _install},
            )
        )
