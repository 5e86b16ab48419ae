"""Finds float8 layers whose numbers would differ from one device under a plan, and says what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from meshwright.distribute.rows_apart import rows_are_apart
from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.parallel.tensor_parallel.float8 import float8_layers
from meshwright.parallel.tensor_parallel.structure import DecoderStructure
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright.roles import Decoder
from meshwright.roles.blocks.experts import routed_modules
from meshwright.roles.decoder import modules_left_out

if TYPE_CHECKING:
    from torchao.float8.float8_linear import Float8Linear

_MULTIPLE = 16  # of both widths of a weight, for torch._scaled_mm
_LIBRARY = "torchao"


def check_float8(
    facts: Facts,
    plan: ParallelPlan,
    config: ToDistributedConfig,
    structure: Decoder | None,
    mixers: Mapping[str, nn.Module],
) -> None:
    """Raise if a layer of low precision would not compute what it computes on one device.

    Args:
        facts: what the model without adapters around it shows.
        plan: the plan.
        config: the options of the call.
        structure: how the plan cuts the decoder; None if the plan does not cut it.
        mixers: the modules of the layers with recurrences or convolutions over tokens, by name.

    Raises:
        PlanError: if there is such a layer; the message names it and the cure.
    """
    if plan.dims.world_size == 1:
        return
    _check_kinds(facts, plan)
    layers = dict(float8_layers(facts))
    if not layers:
        return
    first = next(iter(layers))
    if config.engine is not None:
        raise PlanError(
            f"{first} is a float8 layer, and under {config.engine} its scale would be that of this rank's tokens. "
            "Train without the engine, or without convert_to_float8_training"
        )
    if config.compile is not None:
        raise PlanError(
            f"{first} is a float8 layer, whose scales are maxima over ranks, and compile={config.compile!r} would end "
            "the graph at each of them. Leave compile out, or convert_to_float8_training"
        )
    parts = plan.dp * plan.cp
    for name, layer in layers.items():
        if layer.config.round_scales_to_power_of_2 and parts.bit_count() > 1:
            raise PlanError(
                f"{name} rounds its scales to powers of 2, and dp={plan.dp} times cp={plan.cp} is none: a rank's "
                f"gradients are {parts} times those of one device, and their elements would round to others. Use a "
                "power of 2, or write Float8LinearConfig(round_scales_to_power_of_2=False), or use 'tensorwise'"
            )
        own = layer.config
        is_cast_once = own.cast_config_weight_for_grad_input == own.cast_config_weight
        if own.enable_fsdp_float8_all_gather and plan.zero_stage == 3 and not is_cast_once:
            raise PlanError(
                f"{name} casts its weight to float8 otherwise for the gradient of its input than in forward "
                "(cast_config_weight_for_grad_input), and zero_stage=3 would gather it in float8 once for both. Write "
                "Float8LinearConfig(..., enable_fsdp_float8_all_gather=False), or the same cast for both"
            )
    for name, module, _ in routed_modules(facts):
        _keep_out(layers, {module}, name, "not every rank has tokens for each expert")
    for name, module in mixers.items():
        _keep_out(layers, {module}, name, "its documents run as rows with padding between them")
    beside = modules_left_out(facts, structure)
    _keep_out(layers, beside, "a tower", "only ranks whose rows have images or sound run it")
    if isinstance(structure, DecoderStructure):
        for name, layer in layers.items():
            whole, layout = tuple(layer.weight.shape), structure.parameters.get(f"{name}.weight")
            if layout is not None and layout.has_addends:
                raise PlanError(
                    f"{name} is a float8 layer that several ranks of tp={plan.tp} have, each with an addend of its "
                    "gradient, as of key and value heads that ranks share and of adapters. The sum of addends in "
                    "float8 is not the gradient of one device. Use a smaller tp, or keep the layer in 16 bits. "
                    + _keep(name)
                )
            part = whole if layout is None else layout.local_shape
            if layer.config.emulate or not any(size % _MULTIPLE for size in part):
                continue
            raise PlanError(
                f"{name} has a weight of {whole[0]} x {whole[1]}, of which each rank of tp={plan.tp} has {part[0]} x "
                f"{part[1]}, and float8 multiplies widths that are multiples of {_MULTIPLE}. Use a smaller tp, or keep "
                "the layer in 16 bits. " + _keep(name)
            )


def _check_kinds(facts: Facts, plan: ParallelPlan) -> None:
    """Raise if a layer or a weight of torchao computes otherwise under a plan than on one device.

    Float8 with a scale for a tensor or a row is known. Another layer may be one for training with fake quantisation,
    whose scales are of whole weights and of each token: it is tried out, unless tp cuts its weight.
    """
    known = {id(module) for _, layer in float8_layers(facts) for module in layer.modules()}
    apart: dict[str, bool] = {}
    for module, name in facts.names.items():
        own = type(module), *(type(parameter) for parameter in module.parameters(recurse=False))
        kind = next((kind for kind in own if kind.__module__.partition(".")[0] == _LIBRARY), None)
        if kind is None or id(module) in known:
            continue
        if plan.tp == 1 and kind is type(module):
            options = repr([(type(part), _options(part)) for part in module.modules()])
            if options not in apart:
                apart[options] = rows_are_apart(module)
            if apart[options]:
                known |= {id(part) for part in module.modules()}
                continue
        raise PlanError(
            f"{name} computes as {kind.__module__}.{kind.__name__}, and the plan {str(plan)!r} would compute its "
            "scales from parts of its tensors (MXFP8, NVFP4, blocks, int8, or a scale for all tokens). Use "
            "convert_to_float8_training of torchao.float8 with the recipe 'tensorwise' or 'rowwise' instead, or train "
            "in bf16"
        )


def _options(module: nn.Module) -> dict[str, object]:
    """Return what a layer was made with."""
    shapes = {name: (x.shape, x.dtype) for name, x in module.named_parameters(recurse=False)}
    return {**shapes, **{name: x for name, x in vars(module).items() if not name.startswith("_")}}


def _keep_out(layers: Mapping[str, Float8Linear], owners: set[nn.Module], owner: str, reason: str) -> None:
    inside = {module for module in owners for module in module.modules()}
    for name, layer in layers.items():
        if layer in inside:
            raise PlanError(
                f"{name} is a float8 layer in {owner}, and its scales are maxima over ranks, but {reason}. Keep it in "
                "16 bits. " + _keep(name)
            )


def _keep(name: str) -> str:
    kind = name.rpartition(".")[2]
    return f"Write convert_to_float8_training(model, module_filter_fn=lambda _, name: not name.endswith({kind!r}))"
