"""The weights of float8 layers that ask for all-gathers in float8: ``enable_fsdp_float8_all_gather=True``.

torchao makes each such weight a tensor of its own class, which torch's FSDP2 casts before it gathers. Under a plan it
is a plain parameter, and ZeRO stage 3 casts it (:mod:`meshwright.optim.zero.float8_shard`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.parallel.tensor_parallel.float8 import float8_layers


@dataclass(frozen=True)
class WeightCast:
    """How a weight with one scale is cast to float8.

    Args:
        dtype: the dtype in float8.
        rounds_scale: whether the scale is rounded to a power of 2.
    """

    dtype: torch.dtype
    rounds_scale: bool

    def scales(self, largest: Tensor) -> Tensor:
        """Return the scales of weights from their largest absolute elements."""
        from torchao.float8.float8_utils import amax_to_scale

        scales: Tensor = amax_to_scale(largest, self.dtype, self.rounds_scale)
        return scales

    def __call__(self, values: Tensor, scale: Tensor) -> Tensor:
        """Return elements of a weight in float8."""
        from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

        cast: Tensor = hp_tensor_and_scale_to_float8(values, scale, self.dtype)._data
        return cast


def weight_casts(model: nn.Module) -> dict[int, WeightCast]:
    """Return how the weights that are gathered in float8 are cast, by the ids of the parameters."""
    configs = {id(layer.weight): layer.config for _, layer in float8_layers(model)}
    return {
        key: WeightCast(config.cast_config_weight.target_dtype, config.round_scales_to_power_of_2)
        for key, config in configs.items()
        if config.enable_fsdp_float8_all_gather
    }


@contextlib.contextmanager
def plain_weights(model: nn.Module) -> Iterator[None]:
    """Make the weights of torchao's class plain parameters, the same objects; undo it if the context raises.

    Raises:
        PlanError: if torchao has made two parameters of a tied weight.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    swapped: list[tuple[nn.Parameter, nn.Parameter]] = []
    try:
        for name, layer in float8_layers(model):
            weight = layer.weight
            inner = getattr(weight, "_tensor", None) if layer.config.enable_fsdp_float8_all_gather else None
            if inner is None:
                continue
            if (other := names.setdefault(id(inner), f"{name}.weight")) != f"{name}.weight":
                raise PlanError(
                    f"{name}.weight is tied to {other}, and enable_fsdp_float8_all_gather=True made a second parameter "
                    "of it, which an optimizer would step too. Keep the layer in 16 bits: "
                    f"convert_to_float8_training(model, module_filter_fn=lambda _, name: name != {name!r}), or write "
                    "enable_fsdp_float8_all_gather=False"
                )
            plain = nn.Parameter(inner.detach(), requires_grad=weight.requires_grad)
            plain.grad = weight.grad
            torch.utils.swap_tensors(weight, plain)
            swapped.append((weight, plain))
        yield
    except BaseException:
        for weight, original in swapped:
            torch.utils.swap_tensors(weight, original)
        raise
