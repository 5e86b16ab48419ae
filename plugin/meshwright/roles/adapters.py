"""Low-rank adapters (LoRA, Hu et al. 2021) on a decoder's projections, recognised by their structure.

PEFT puts a module around a projection: ``base_layer``, and by adapter's name ``lora_A`` and ``lora_B``. Around the
model it puts wrappers of one child each. The core imports none of it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from meshwright.errors import PlanError


def is_adapted(module: nn.Module) -> bool:
    """Whether this is a projection with low-rank adapters around it."""
    return all(isinstance(getattr(module, name, None), nn.Module) for name in ("base_layer", "lora_A", "lora_B"))


def projection(module: nn.Module) -> Any:
    """The projection itself, without adapters."""
    return getattr(module, "base_layer") if is_adapted(module) else module  # noqa: B009  no attribute of nn.Module


def without_wrappers(model: nn.Module) -> tuple[str, nn.Module]:
    """The model inside those that PEFT puts around it, and the prefix of its parameters' names.

    Raises:
        PlanError: for a method of PEFT other than LoRA.
    """
    for name, config in dict(getattr(model, "peft_config", None) or {}).items():
        kind = getattr(config, "peft_type", None)
        kind = str(getattr(kind, "value", kind))
        if kind != "LORA":
            raise PlanError(
                f"the adapter {name!r} is PEFT's {kind}; only LoRA can be distributed: use a LoraConfig, or merge the "
                "adapter before to_distributed"
            )
    prefix = ""
    while (children := wrapped(model)) is not None:
        name, model = children
        prefix += f"{name}."
    return prefix, model


def wrapped(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The one child of a wrapper, by name; None for a model that is none."""
    children = list(model.named_children())
    is_wrapper = hasattr(model, "peft_config") and len(children) == 1 and not model._parameters
    return children[0] if is_wrapper else None


def refuse_unloading(model: nn.Module) -> None:
    """Make the methods that take adapters out of a wrapped model raise: the hooks of sharding would go with them."""
    _refuse(
        model,
        ("merge_and_unload", "unload"),
        "adapters cannot be taken out of a model that is sharded over tp. To go on training with merged weights, "
        "call merge_adapter(); to have a plain model, call model.save_pretrained(...), which writes the adapters, "
        "and merge them into the base model in one process",
    )


def refuse_merging(model: nn.Module) -> None:
    """Make the methods that write adapters into a wrapped model's weights raise: between passes it has none."""
    _refuse(
        model,
        ("merge_adapter", "unmerge_adapter", "merge_and_unload", "unload"),
        "under ZeRO stage 3 no rank has the whole weights, so adapters cannot be merged into them. Call "
        "model.save_pretrained(...), which writes the adapters, and merge them into the base model in one process; or "
        "use ParallelPlan(zero_stage=2)",
    )


def refuse_resizing(model: nn.Module) -> None:
    """Make the method that gives a model another vocabulary raise, on the decoder and on what is around it."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PlanError(
            "resize_token_embeddings after to_distributed would make new parameters that no rank synchronises or "
            "steps; call model.resize_token_embeddings(...) before to_distributed"
        )

    for part in model.modules():
        if hasattr(part, "resize_token_embeddings"):
            object.__setattr__(part, "resize_token_embeddings", refuse)


def _refuse(model: nn.Module, methods: tuple[str, ...], message: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PlanError(message)

    while (child := wrapped(model)) is not None:
        for name in methods:
            object.__setattr__(model, name, refuse)
        model = child[1]


def check_adapters(modules: dict[str, nn.Module]) -> None:
    """Check that what is around a decoder's modules can be sharded with them.

    Raises:
        PlanError: naming the module, and what about it cannot.
    """
    for name, module in modules.items():
        kind = type(module).__name__
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            raise PlanError(
                f"{name!r} is trained beside adapters (modules_to_save), which cannot be sharded over tp; leave it out "
                "of LoraConfig.modules_to_save, or use ParallelPlan(tp=1)"
            )
        if hasattr(module, "base_layer") and not is_adapted(module):
            raise PlanError(f"{name!r} is a {kind}: of the adapters only LoRA can be sharded over tp; merge them first")
        if not is_adapted(module):
            continue
        found: Any = module
        if variants := sorted({type(v).__name__ for v in getattr(found, "lora_variant", {}).values()}):
            raise PlanError(
                f"{name!r} has the LoRA variant {', '.join(variants)} (such as DoRA), which cannot be sharded over tp; "
                "use plain LoRA, or ParallelPlan(tp=1)"
            )
        if len(getattr(found, "lora_embedding_A", ())) or not isinstance(found.base_layer, nn.Linear):
            raise PlanError(
                f"{name!r} adapts a {type(found.base_layer).__name__}; only adapters of nn.Linear projections can be "
                "sharded over tp: change LoraConfig.target_modules, or use ParallelPlan(tp=1)"
            )
