"""Tries out whether a layer computes each token by itself, so that a rank with some of them has the numbers of all."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

_ROWS, _TOKENS = 2, 4
_ROUNDING = 1e-4  # of the largest value; sums of a few float32 products differ by 1e-6, scales of 8 bits by 1e-2


def rows_are_apart(layer: nn.Module) -> bool:
    """Return whether a linear layer or an embedding gives the same for tokens together and in parts.

    Outputs, gradients of inputs and those of weights are compared, of a copy of the layer with random values. A layer
    that cannot be tried in this way is not shown to be such a one.

    Args:
        layer: the layer; its state and the random state of the program stay as they are.
    """
    weight = layer._parameters.get("weight")
    if weight is None or weight.ndim != 2:
        return False
    devices = [weight.device] if weight.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.random.default_generator.manual_seed(0)
        for device in devices:
            torch.cuda.default_generators[device.index].manual_seed(0)
        try:
            whole = _drawn(layer)
            device = next(whole.parameters()).device
            # Of other sizes for each token, so that scales over several tokens differ from those of one.
            sizes = 4.0 ** torch.arange(_ROWS * _TOKENS, device=device).view(_ROWS, _TOKENS, 1)
            if isinstance(layer, nn.Embedding):
                x = torch.randint(len(weight), (_ROWS, _TOKENS), device=device)
            else:
                x = torch.randn(_ROWS, _TOKENS, weight.shape[1], device=device) * sizes
            results = [_run(copy.deepcopy(whole), x, 1 / sizes, dim) for dim in (None, 0, 1)]
        except Exception:  # whatever the code of another library raises for these inputs
            return False
    return all(_are_close(a, b) for parts in results[1:] for a, b in zip(results[0], parts, strict=True))


def _drawn(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer in float32, whose weights have random values if they have none."""
    new = copy.deepcopy(layer).float().train()
    if any(tensor.is_meta for tensor in (*new.parameters(), *new.buffers())):
        new = new.to_empty(device="cpu")
        for parameter in new.parameters():
            nn.init.normal_(parameter)
    return new.requires_grad_(True)


def _run(layer: nn.Module, x: Tensor, sizes: Tensor, dim: int | None) -> list[Tensor]:
    """Return the output and the gradients of the input and the weights; of one token of a dim and then the others."""
    x = x.clone().requires_grad_(x.is_floating_point())
    cuts = [slice(None)] if dim is None else [slice(1), slice(1, None)]
    outputs = []
    for cut in cuts:
        index = (slice(None),) * (dim or 0) + (cut,)
        outputs.append(layer(x[index]))
        outputs[-1].backward(sizes[index] * torch.linspace(-1, 1, outputs[-1].shape[-1], device=sizes.device))
    gradients = [tensor.grad for tensor in (x, *layer.parameters()) if tensor.grad is not None]
    return [torch.cat(outputs, dim or 0).detach(), *gradients]


def _are_close(one: Tensor, other: Tensor) -> bool:
    largest = one.abs().amax(-1, keepdim=True) if one.ndim else one.abs()
    return one.shape == other.shape and bool(((one - other).abs() <= _ROUNDING * largest).all())
