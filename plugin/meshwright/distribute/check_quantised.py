"""Raises for quantised weights whose parts would not have the values of one device, and says what to write instead."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.layout.packed_weights import packed_modules
from meshwright.plan.config import ParallelPlan
from meshwright.roles.decoder import ask

_LEAST = "0.50"  # of bitsandbytes; earlier versions may transpose a packed weight, which then must be a column


def is_quantised(model: nn.Module) -> bool:
    """Return whether transformers loaded the weights packed into fewer bits."""
    return bool(getattr(model, "is_quantized", False)) or getattr(model, "hf_quantizer", None) is not None


def method_of(model: nn.Module) -> str:
    """Return the name of the method that quantised a model."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    found = getattr(model, "quantization_method", None) or getattr(config, "quant_method", None)
    return str(getattr(found, "value", found) or "quantization_config")


def finish_loading(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Run the hooks by which a quantiser would replace a model's parameters in its first forward pass.

    The parameters that such a hook makes are those that a plan places. compressed-tensors decompresses a model so.

    Args:
        model: the model, without adapters around it.
        optimizer: the optimizer, which gets the new parameters; on one device it keeps the old ones, without gradients.
    """
    own = vars(getattr(model, "hf_quantizer", None) or SimpleNamespace())
    parts = {id(value) for value in own.values() if hasattr(value, "__dict__")}
    found = []
    for hook in model._forward_pre_hooks.values():
        cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
        if any(id(value) in parts for value in (getattr(hook, "__self__", None), *cells)):
            found.append(hook)
    if not found:
        return
    before = {parameter: name for name, parameter in model.named_parameters()}
    for hook in found:
        hook(model, ())
    after = dict(model.named_parameters())
    gone = {parameter: after.get(name) for parameter, name in before.items() if after.get(name) is not parameter}
    for group in optimizer.param_groups if gone and optimizer is not None else ():
        group["params"] = [new for p in group["params"] if (new := gone.get(p, p)) is not None]


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
