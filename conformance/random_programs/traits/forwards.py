"""Traits of the forward pass: state that it writes, and values that it computes over all rows of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from conformance.random_programs.trait import TOLD, Trait

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
    "a running mean": _running_mean,
    "a running maximum": _largest_seen,
    "forward writes a weight": _write_weights,
    "max_norm of the embedding": lambda run: _embedding(run, max_norm=0.1),
}.items():
    _more = {"tied"} if "max_norm" in _name else {"sharing"} if "mlp" in _name else set()
    _told = "sees this rank's|changes .* in each micro-batch"
    add(Trait(name=_name, kind="state", may=TOLD, warns=_told, build=_build, without=_ONCE | _more))
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
            by_design=_name in ("rows mixed with the next", "inputs permuted by a hook"),
            build=_build,
            without=frozenset({"generate"}),
        )
    )
