"""Refuses quantised and float8 weights whose parts would not have the values of one device, and says what to write
instead.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.features.decision import Decision
from meshwright.layout.packed_weights import packed_modules
from meshwright.parallel.tensor_parallel.float8 import float8_layers
from meshwright.parallel.tensor_parallel.structure import DecoderStructure
from meshwright.plan.config import ParallelPlan
from meshwright.roles.blocks.experts import routed_modules
from meshwright.roles.decoder import ask, modules_left_out

if TYPE_CHECKING:
    from torchao.float8.float8_linear import Float8Linear


_LEAST = "0.50"  # of bitsandbytes; earlier versions may transpose a packed weight, which then must be a column


def is_quantised(model: nn.Module) -> bool:
    """Return whether transformers loaded the weights packed into fewer bits."""
    return bool(getattr(model, "is_quantized", False)) or getattr(model, "hf_quantizer", None) is not None


def method_of(model: nn.Module) -> str:
    """Return the name of the method that quantised a model."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    found = getattr(model, "quantization_method", None) or getattr(config, "quant_method", None)
    return str(getattr(found, "value", found) or "quantization_config")


def finish_loading(model: nn.Module, optimizer: Optimizer | None = None) -> bool:
    """Run the hooks by which a quantiser would replace a model's parameters in its first forward pass.

    The parameters that such a hook makes are those that a plan places. compressed-tensors decompresses a model so.

    Args:
        model: the model, without adapters around it.
        optimizer: the optimizer, which gets the new parameters; on one device it keeps the old ones, without gradients.

    Returns:
        Whether there were such hooks, so that the model may have changed.
    """
    own = vars(getattr(model, "hf_quantizer", None) or SimpleNamespace())
    parts = {id(value) for value in own.values() if hasattr(value, "__dict__")}
    found = []
    for hook in model._forward_pre_hooks.values():
        cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
        if any(id(value) in parts for value in (getattr(hook, "__self__", None), *cells)):
            found.append(hook)
    if not found:
        return False
    before = {parameter: name for name, parameter in model.named_parameters()}
    for hook in found:
        hook(model, ())
    after = dict(model.named_parameters())
    gone = {parameter: after.get(name) for parameter, name in before.items() if after.get(name) is not parameter}
    for group in optimizer.param_groups if gone and optimizer is not None else ():
        group["params"] = [new for p in group["params"] if (new := gone.get(p, p)) is not None]
    return True


def is_packed(model: nn.Module | Facts) -> bool:
    """Return whether a model has weights of bitsandbytes, which a plan can cut in whole blocks."""
    return next(packed_modules(model), None) is not None


def check_quantised(facts: Facts, plan: ParallelPlan, device: torch.device) -> None:
    """Raise if a plan would change the numbers of a model's quantised weights.

    Args:
        facts: what the model shows.
        plan: the plan.
        device: the device on which the model will run.

    Raises:
        PlanError: if it would; the message names the weight, and what to write instead.
    """
    if plan.dims.world_size == 1 and not plan.has_micro_batches:
        return  # nothing is cut: stock code has whole weights and whole batches, and so the numbers of one device
    model = facts.model
    for name, parameter in facts.parameters.items() if is_quantised(model) else ():
        if is_traceable_wrapper_subclass(parameter.data):
            raise PlanError(
                f"{name} is quantised ({method_of(model)}): it is a {type(parameter.data).__name__}, whose parts are "
                "not known here. Quantise with BitsAndBytesConfig, or load the model without quantization_config"
            )
    for module, name in facts.names.items():
        weight: Any = module._parameters.get("weight")
        own = getattr(weight, "__dict__", {})
        if own.get("has_fp16_weights") and hasattr(module, "state"):
            raise PlanError(
                f"{name}.weight is quantised again in each pass (has_fp16_weights=True), with statistics of the "
                "gradients of all tokens, of which a rank has some. Load it with BitsAndBytesConfig(load_in_8bit=True)"
            )
        is_waiting = own.get("bnb_quantized") is False or "has_fp16_weights" in own
        if is_waiting and weight.is_floating_point() and own.get("quant_state") is None:
            raise PlanError(
                f"{name}.weight is not quantised yet, which bitsandbytes does when a module moves to a device, and a "
                "part of it would get other statistics. Quantise the whole first: model.to(device)"
            )
    for name, module, packing in packed_modules(facts):
        if packing.block == 1:
            if (threshold := module.state.threshold) > 0:
                raise PlanError(
                    f"{name} has llm_int8_threshold={threshold:g}: which channels are computed in 16 bits depends on "
                    "all tokens of the batch, of which a rank has some. Load the model with "
                    "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), or with load_in_4bit=True"
                )
            if plan.tp > 1 and device.type != "cpu":
                raise PlanError(
                    f"{name} is quantised to 8 bits, and on {device.type} bitsandbytes quantises each token's "
                    f"activations by their largest one, of which a rank of tp={plan.tp} may have none. Load the model "
                    "with BitsAndBytesConfig(load_in_4bit=True), or use a plan without tp, such as plan='dp2'"
                )
            continue
        version = getattr(sys.modules.get("bitsandbytes"), "__version__", _LEAST)
        if TorchVersion(version) < _LEAST:
            raise PlanError(
                f"{name} is quantised to 4 bits, and bitsandbytes {version} may read it as a column of elements, "
                f"but plans keep it as a matrix. Run pip install 'bitsandbytes>={_LEAST}'"
            )
        if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
            raise PlanError(
                f"{name} was evaluated on a CPU, where bitsandbytes has rounded its statistics to bfloat16, and it "
                "could not be trained any more. Load the model again, and distribute it before it is evaluated"
            )
    if plan.tp > 1:
        packed = {module: name for name, module, _ in packed_modules(facts)}
        for find in ("get_input_embeddings", "get_output_embeddings"):
            if (end := ask(model, find)) in packed:
                raise PlanError(
                    f"{packed[end]} is quantised, and tp={plan.tp} cuts it into parts of any number of words. Keep it: "
                    f"BitsAndBytesConfig(llm_int8_skip_modules=[{packed[end].rpartition('.')[2]!r}])"
                )


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


_MULTIPLE = 16  # of both widths of a weight, for torch._scaled_mm
_LIBRARY = "torchao"


def check_float8(decision: Decision) -> None:
    """Raise if a layer of low precision would not compute what it computes on one device.

    Args:
        decision: what the plan does to the model.

    Raises:
        PlanError: if there is such a layer; the message names it and the cure.
    """
    facts, plan, config, structure = decision.of_decoder, decision.plan, decision.config, decision.structure
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
    for name, module in decision.mixers.items():
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
