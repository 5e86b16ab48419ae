"""Low-rank adapters (LoRA, Hu et al. 2021) on a decoder's projections, recognised by their structure.

PEFT wraps a projection in a module that holds the projection as ``base_layer`` and the adapters, by name, in ``lora_A``
and ``lora_B``. PEFT wraps the model in modules of its own. ``meshwright`` does not import PEFT.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from meshwright.errors import PlanError
from meshwright.facts import Facts, fact
from meshwright.temporarily import replace_method


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a projection with low-rank adapters."""
    return all(isinstance(getattr(module, name, None), nn.Module) for name in ("base_layer", "lora_A", "lora_B"))


def projection(module: nn.Module) -> nn.Module:
    """Return the projection itself, without its adapters. Those of experts are around each other, one per parameter."""
    while is_adapted(module):
        module = module.base_layer  # type: ignore[assignment]
    return module


def without_wrappers(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the prefix that PEFT's wrappers add to parameter names, and the model inside the wrappers."""
    prefix = ""
    while (children := wrapped(model)) is not None:
        name, model = children
        prefix += f"{name}."
    return prefix, model


@fact
def decoder_of(facts: Facts) -> Facts:
    """Return what a model shows inside of PEFT's wrappers."""
    decoder = without_wrappers(facts.model)[1]
    return facts if decoder is facts.model else facts.part(decoder)


def wrapped(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the name and module of what a PEFT wrapper is around; None if ``model`` is not a wrapper.

    Beside it a wrapper may have an encoder of prompts, or parameters or buffers that the adapters of all layers share.
    """
    if not hasattr(model, "peft_config") or model._parameters:
        return None
    modules = {name: child for name, child in model.named_children() if not isinstance(child, nn.ParameterDict)}
    children = {name: child for name, child in modules.items() if any(True for _ in child.parameters())}
    name = "base_model" if "base_model" in children else next(iter(children)) if len(children) == 1 else None
    return None if name is None else (name, children[name])


_UNLOADING = ("merge_and_unload", "unload")
_MERGING = ("merge_adapter", "unmerge_adapter", *_UNLOADING)


def close_changes(facts: Facts, *, axes: Sequence[str], is_gathered: bool, is_packed: bool) -> None:
    """Make the methods raise that would change or remove what a distributed model has in parts, or its hooks.

    Args:
        facts: what the model shows, in PEFT's wrappers if it has any.
        axes: the axes over which the model's weights are cut.
        is_gathered: whether the weights are gathered for each layer, as under ZeRO stage 3.
        is_packed: whether there are quantised weights, which PEFT would quantise again, with other statistics.
    """
    alone = "model.save_pretrained(...), which writes the adapters, and merge them into the base model in one process"
    messages: dict[str, str] = {}
    if axes:
        messages |= dict.fromkeys(
            _UNLOADING,
            f"adapters cannot be removed from a model that is cut over {' and '.join(axes)}. To continue training with "
            f"merged weights, call merge_adapter(). To get a plain model, call {alone}",
        )
    if is_gathered:
        why = "under ZeRO stage 3 no rank has the whole weights, so adapters cannot be merged into them"
        messages |= dict.fromkeys(_MERGING, f"{why}. Call {alone}; or use ParallelPlan(zero_stage=2)")
    if is_packed:
        why = "merging adapters into quantised weights would quantise these again, each rank its part"
        messages |= dict.fromkeys(_MERGING, f"{why}. Call {alone}")
    part = facts.model
    while messages and (child := wrapped(part)) is not None:
        for name, message in messages.items():
            if hasattr(part, name):
                _close(part, name, message)
        part = child[1]
    for part in facts.names:
        if hasattr(part, "resize_token_embeddings"):
            _close(
                part,
                "resize_token_embeddings",
                "resize_token_embeddings after to_distributed would make new parameters that no rank synchronises or "
                "steps; call model.resize_token_embeddings(...) before to_distributed",
            )


def _close(part: nn.Module, name: str, message: str) -> None:
    def closed(*_: object, **__: object) -> None:
        raise PlanError(message)

    replace_method(part, name, closed)


def check_methods(model: nn.Module, axes: list[str], has_micro_batches: bool) -> None:
    """Raise if a plan cuts what adapters of another method than LoRA compute with; no other is known in parts.

    Args:
        model: the model, in PEFT's wrappers if it has any.
        axes: the axes of the plan that cut weights, layers or tokens; without any, each rank has the whole model.
        has_micro_batches: whether the plan cuts a rank's rows, after the prompts' tokens are put before them.

    Raises:
        PlanError: if an adapter uses another method of PEFT.
    """
    for name, config in dict(getattr(model, "peft_config", None) or {}).items():
        kind = getattr(config, "peft_type", None)
        kind = str(getattr(kind, "value", kind))
        adds_tokens = bool(getattr(config, "is_prompt_learning", False))
        cut = axes + ["micro-batches"] * (has_micro_batches and adds_tokens)
        if kind != "LORA" and cut:
            raise PlanError(
                f"the adapter {name!r} uses PEFT's {kind}, and the plan's {' and '.join(cut)} would cut what it "
                "computes with. Use ParallelPlan(dp=..., zero_stage=...) alone, or a LoraConfig"
            )


def check_adapters(modules: dict[str, nn.Module]) -> None:
    """Check that the adapters on a decoder's modules can be sharded over tp.

    Raises:
        PlanError: if an adapter cannot be sharded; the message gives the module and the reason.
    """
    for name, module in modules.items():
        kind = type(module).__name__
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            raise PlanError(
                f"{name!r} is trained beside adapters (modules_to_save), but such a module cannot be sharded over tp; "
                "leave it out of LoraConfig.modules_to_save, or use ParallelPlan(tp=1)"
            )
        if hasattr(module, "base_layer") and not is_adapted(module):
            raise PlanError(
                f"{name!r} is a {kind}, but only LoRA adapters can be sharded over tp; merge "
                "it, model = model.merge_and_unload(), or use ParallelPlan(tp=1)"
            )
        if not is_adapted(module):
            continue
        if variants := sorted({type(v).__name__ for v in getattr(module, "lora_variant", {}).values()}):
            raise PlanError(
                f"{name!r} has the LoRA variant {', '.join(variants)}, and variants such as DoRA cannot be sharded "
                "over tp; use plain LoRA, or ParallelPlan(tp=1)"
            )
        if len(getattr(module, "lora_embedding_A", ())) or not isinstance(module.base_layer, nn.Linear):
            raise PlanError(
                f"{name!r} adapts a {type(module.base_layer).__name__}; only adapters of nn.Linear projections can be "
                "sharded over tp: change LoraConfig.target_modules, or use ParallelPlan(tp=1)"
            )
