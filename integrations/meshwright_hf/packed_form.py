"""Gives a model the form of its quantised checkpoint before any weight is read, so that a plan can cut it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.distribute.check_quantised import method_of
from meshwright.errors import PlanError


def give_packed_form(model: nn.Module, quantizer: Any) -> None:
    """Pack the weights on the meta device that bitsandbytes has quantised in the checkpoint.

    Args:
        model: the model, on the meta device, with the modules of its quantisation.
        quantizer: transformers' ``HfQuantizer``.

    Raises:
        PlanError: if the checkpoint is not quantised, or by another library.
    """
    method = method_of(model)
    if method != "bitsandbytes" or not quantizer.pre_quantized:
        why = (
            "has weights that bitsandbytes would quantise as they are loaded, whole"
            if method == "bitsandbytes"
            else f"is quantised by {method}, and each rank would need the whole of it"
        )
        raise PlanError(
            f"the checkpoint {why}, but with distributed_config and under deferred_init a rank reads its part alone. "
            "Load it whole on each rank, model = from_pretrained(path), and then call to_distributed(model, optimizer, "
            "loader, plan=...); or write a checkpoint that is quantised, once and in one process: "
            "from_pretrained(..., quantization_config=BitsAndBytesConfig(...)).save_pretrained(...)"
        )
    import bitsandbytes

    # The library keeps the codes of second statistics on the device of its first call, for all models of the process.
    bitsandbytes.functional.name2qmap.setdefault("dynamic", bitsandbytes.functional.create_dynamic_map())
    module: Any
    for module in model.modules():
        weight: Any = module._parameters.get("weight")
        if isinstance(weight, bitsandbytes.nn.Int8Params | bitsandbytes.nn.Params4bit) and module.bias is not None:
            module.bias.requires_grad_()  # as after a whole load
        if isinstance(weight, bitsandbytes.nn.Int8Params):
            weight.SCB = torch.empty(module.out_features, device="meta")
        elif isinstance(weight, bitsandbytes.nn.Params4bit):
            values = torch.empty(module.out_features, module.in_features, device="meta")
            weight.data, state = bitsandbytes.functional.quantize_4bit(
                values,
                blocksize=weight.blocksize,
                compress_statistics=weight.compress_statistics,
                quant_type=weight.quant_type,
                quant_storage=weight.quant_storage,
            )
            if state.nested:
                state.offset = torch.zeros(())  # saves read its value
            weight.quant_state = module.quant_state = state
            weight.bnb_quantized = True


def rules_without(quantizer: Any, rules: list[Any]) -> list[Any]:
    """Return transformers' rules from a checkpoint's tensors to a model's, without those of the quantisation."""

    def is_of_quantizer(rule: Any) -> bool:
        return any(getattr(each, "hf_quantizer", None) is quantizer for each in getattr(rule, "operations", ()))

    return rules if quantizer is None else [rule for rule in rules if not is_of_quantizer(rule)]
