"""The linear layers of torchao's float8 training with the scales of the whole tensors, and their weights that are
gathered in float8.

Such a layer multiplies each operand of its three matrix multiplications by a scale, which follows from the largest
element of the operand, or of each of its rows. Where ranks have parts of an operand, they take the maximum over the
ranks before the scale is computed. An operand has two of three dims, and each dim has the axis that cuts it::

    input [tokens, in]    weight [out, in]    gradient of the output [tokens, out]

    tokens   dp and cp
    in       tp, in an output projection
    out      tp, in an input projection

torchao makes each such weight a tensor of its own class, which torch's FSDP2 casts before it gathers. Under a plan it
is a plain parameter, and ZeRO stage 3 casts it (:mod:`meshwright.optim.zero.flat_parameters`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.layout.tensor_layout import is_held, layout_of
from meshwright.mesh.axes import Axis, Mesh
from meshwright.parallel import saved_tensors as saved
from meshwright.parallel.batch.share import is_in_filler
from meshwright.parallel.collectives import maximum
from meshwright.parallel.method_chain import StepOrder
from meshwright.parallel.tensor_parallel.column_projections import LinearForward
from meshwright.roles.linear_kernel import LinearKernel, kernel_of, set_kernel

if TYPE_CHECKING:
    from torchao.float8.config import CastConfig
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_training_tensor import LinearMMConfig


Dim = Literal["tokens", "in", "out"]
ReadFloat8 = Callable[[], tuple[Tensor, Tensor]]
"""Returns a weight that was gathered in float8, and its scale."""

_MULTIPLE = 16  # of the numbers over which torch._scaled_mm sums

# The dims of an operand -> torchao's name for it.
_ROLES: dict[tuple[Dim, Dim], str] = {
    ("tokens", "in"): "input",
    ("in", "out"): "weight",
    ("tokens", "out"): "grad_output",
}


def float8_layers(model: nn.Module | Facts) -> Iterator[tuple[str, Float8Linear]]:
    """Yield the float8 layers of a model with their names, which are there only if torchao has been imported."""
    kind: type[Float8Linear] | None = getattr(sys.modules.get("torchao.float8.float8_linear"), "Float8Linear", None)
    if kind is not None:
        yield from ((name, module) for module, name in Facts.of(model).names.items() if isinstance(module, kind))


class Float8Layers:
    """The float8 layers of a model, each with the scales of the whole tensors.

    Args:
        facts: what the model shows, whose parameters have their layouts.
        mesh: this rank's place on the axes of the plan.
        reader_of: returns a function that reads a weight that ZeRO gathers in float8; None for other weights.
    """

    def __init__(self, facts: Facts, mesh: Mesh, reader_of: Callable[[nn.Parameter], ReadFloat8 | None]):
        self.model = facts.model
        modules = facts.names
        self._linear = [
            (m, name, child) for m in modules for name, child in m.named_children() if isinstance(child, nn.Linear)
        ]
        # A rank with other tokens would have to run as many passes as this one.
        self.waits_for_tokens = False
        for _, module in float8_layers(facts):
            if is_held(module.weight):
                kernel = Float8Kernel(module, mesh, reader_of(module.weight))
                set_kernel(module, kernel)
                Float8Forward(module)
                self.waits_for_tokens |= mesh.tokens.size > 1 and kernel.is_by_tensor

    def check(self) -> None:
        """Raise if a layer was converted since, which has lost the hooks of the layer in whose place it is."""
        if all(parent._modules.get(name) is child for parent, name, child in self._linear):
            return
        for name, module in float8_layers(self.model):
            if is_held(module.weight) and kernel_of(module) is None:
                raise PlanError(
                    f"{name} was converted to float8 after to_distributed, and the new layer has none of the plan's "
                    "hooks. Convert the model first: convert_to_float8_training(model), then to_distributed(model, ...)"
                )


class Float8Forward(LinearForward):
    """The ``forward`` of a float8 layer, in training and in evaluation."""

    order = StepOrder.KERNEL
    module: Float8Linear

    def __call__(self, input: Tensor) -> Tensor:
        weight = self.module.get_parameter("weight")
        if torch.is_autocast_enabled("cuda"):  # as the layer's own forward, which asks for no other device
            input = input.to(torch.get_autocast_dtype("cuda"))
        needs_weight = torch.is_grad_enabled() and weight.requires_grad
        take = partial(self.weight_gradient, weight, saved.keep(input)) if needs_weight else None
        y = self.kernel.with_graph(input, weight, self.module._parameters.get("bias"), take)
        return y.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") and not y.is_cuda else y


@dataclass(frozen=True)
class _Operand:
    """One operand of a matrix multiplication.

    Args:
        values: the elements that this rank has.
        dims: what its two dims are.
        inner: the dim along which elements are multiplied and summed, and of which a scale by rows is a maximum.
        cast: how torchao casts it.
    """

    values: Tensor
    dims: tuple[Dim, Dim]
    inner: Dim
    cast: CastConfig

    @property
    def is_by_rows(self) -> bool:
        return bool(self.cast.scaling_granularity.value == "axiswise")

    @property
    def scaled_dims(self) -> tuple[Dim, ...]:
        """The dims of which a scale is a maximum."""
        return (self.inner,) if self.is_by_rows else self.dims

    @property
    def axiswise_dim(self) -> int | None:
        """The index of the inner dim as torchao counts it; None if the whole tensor has one scale."""
        return (0, -1)[self.dims.index(self.inner)] if self.is_by_rows else None


class Float8Kernel(LinearKernel):
    """Computes what torchao's layer computes on the whole tensors.

    Args:
        module: the layer, whose weight has its layout.
        mesh: this rank's place on the axes of the plan.
        read: reads the weight, if it is gathered in float8.
    """

    is_token_wise: ClassVar[bool] = False
    casts_weight: ClassVar[bool] = False

    def __init__(self, module: Float8Linear, mesh: Mesh, read: ReadFloat8 | None = None):
        self._read = read
        self.config, self.mm_config = module.config, module.linear_mm_config
        cuts = [rows.dim for axis, rows in layout_of(module.weight).cuts if axis == "tp" and not rows.is_replicated]
        self.axes: dict[Dim, Axis] = {"tokens": mesh.tokens}
        self.axes |= {("out", "in")[dim]: mesh.tp for dim in cuts}

    @property
    def is_by_tensor(self) -> bool:
        """Whether a scale of the input is a maximum over all tokens."""
        cast = self.config.cast_config_input
        return bool(cast.scaling_type.value != "disabled" and cast.scaling_granularity.value == "tensorwise")

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor | None = None) -> Tensor:
        c = self.config
        a, b = self._with_weight(
            _Operand(_rows(x), ("tokens", "in"), "in", c.cast_config_input), weight, c.cast_config_weight
        )
        y = torch.mm(a, b).view(*x.shape[:-1], weight.shape[0])
        y = y if bias is None else y + bias
        return y if out is None else out.copy_(y)

    def input_gradient(self, gradient: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        c = self.config
        a, b = self._with_weight(
            _Operand(_rows(gradient), ("tokens", "out"), "out", c.cast_config_grad_output),
            weight,
            c.cast_config_weight_for_grad_input,
        )
        result = torch.mm(a, b.t()).view(*gradient.shape[:-1], weight.shape[1])
        return result if out is None else out.copy_(result)

    def weight_gradient(self, x: Tensor, gradient: Tensor, *, total: Tensor | None = None) -> Tensor:
        c = self.config
        cast = c.cast_config_grad_output_for_grad_weight
        a, b = self._cast(
            _Operand(_rows(gradient), ("tokens", "out"), "tokens", cast),
            _Operand(_rows(x), ("tokens", "in"), "tokens", c.cast_config_input_for_grad_weight),
            mm=self._padded if x.shape[:-1].numel() % _MULTIPLE else self.mm_config,
        )
        own = torch.mm(a.t(), b)
        return own if total is None else total.add_(own)

    def _with_weight(self, operand: _Operand, weight: Tensor, cast: CastConfig) -> list[Tensor]:
        """Return an operand and the weight, with which it is multiplied, in float8."""
        if self._read is None:
            return self._cast(operand, _Operand(weight.t(), ("in", "out"), operand.inner, cast))
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        values, scale = self._read()
        role = GemmInputRole(_ROLES["in", "out"])
        return [*self._cast(operand), Float8TrainingTensor(values.t(), scale, weight.dtype, self.mm_config, role)]

    @property
    def _padded(self) -> LinearMMConfig:
        """The config for a rank's number of tokens of which torch._scaled_mm computes no product over the tokens.

        One device may have a multiple of 16 tokens where a rank has not. torchao pads them with zeros.
        """
        return self.mm_config._replace(grad_weight=self.mm_config.grad_weight._replace(pad_inner_dim=True))

    def _cast(self, *operands: _Operand, mm: LinearMMConfig | None = None) -> list[Tensor]:
        """Return the operands in float8; in their own dtype if the recipe leaves this multiplication in it."""
        from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8
        from torchao.float8.float8_utils import amax_to_scale

        if operands[0].cast.scaling_type.value == "disabled":  # which torchao asserts to be so of both
            return [operand.values for operand in operands]
        largest = [_largest(operand) for operand in operands]
        if is_in_filler():  # of tokens that no batch of one device has here
            largest = [
                most * 0 if "tokens" in op.scaled_dims else most for op, most in zip(operands, largest, strict=True)
            ]
        for axis in dict.fromkeys(self.axes.values()):
            among = [
                i for i, operand in enumerate(operands) if any(self.axes.get(d) == axis for d in operand.scaled_dims)
            ]
            if axis.size == 1 or not among:
                continue
            together = maximum(torch.cat([largest[i].flatten() for i in among]), axis)
            parts = together.split([largest[i].numel() for i in among])
            for i, part in zip(among, parts, strict=True):
                largest[i] = part.view_as(largest[i])
        return [
            hp_tensor_and_scale_to_float8(
                operand.values,
                amax_to_scale(most, operand.cast.target_dtype, self.config.round_scales_to_power_of_2),
                operand.cast.target_dtype,
                mm or self.mm_config,
                GemmInputRole(_ROLES[operand.dims]),
                operand.axiswise_dim,
            )
            for operand, most in zip(operands, largest, strict=True)
        ]


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _largest(operand: _Operand) -> Tensor:
    """Return the largest absolute element, or that of each row, in a dtype that all backends reduce."""
    from torchao.float8.float8_utils import tensor_to_amax

    x = operand.values
    if not x.numel():  # a rank without tokens
        x = x.new_zeros([max(size, 1) for size in x.shape])
    granularity = operand.cast.scaling_granularity
    most: Tensor = tensor_to_amax(x, scaling_granularity=granularity, axiswise_dim=operand.axiswise_dim)
    return most.to(torch.promote_types(most.dtype, torch.float32))


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
def plain_weights(facts: Facts) -> Iterator[None]:
    """Make the weights of torchao's class plain parameters, the same objects; undo it if the context raises.

    Raises:
        PlanError: if torchao has made two parameters of a tied weight.
    """
    names = {id(parameter): name for name, parameter in facts.named_parameters()}
    swapped: list[tuple[nn.Parameter, nn.Parameter]] = []
    try:
        for name, layer in float8_layers(facts):
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
