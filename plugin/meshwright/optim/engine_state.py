"""Finds models whose weights and optimizer state a training engine holds in a form of its own."""

from __future__ import annotations

from torch import nn

from meshwright.errors import CheckpointError
from meshwright.optim.runtime import find_runtime


def check_no_engine(model: nn.Module) -> None:
    """Raise if an engine holds a model's state, since a save would contain only a part of it.

    Args:
        model: the model, or an engine around one, which Meshwright or the program itself has started.

    Raises:
        CheckpointError: if an engine holds the state; the message names the engine's own calls.
    """
    modules = list(model.modules())
    runtimes = map(find_runtime, modules)
    engine = next((runtime.engine for runtime in runtimes if runtime is not None and runtime.engine), None)
    if engine is None and _is_of_deepspeed(model, modules):
        engine = "DeepSpeed"
    if engine is not None:
        raise CheckpointError(
            f"{engine} holds this model's master weights and optimizer state in a form of its own, and a checkpoint "
            "without them could not resume the run. Call engine.save_checkpoint(folder) and "
            "engine.load_checkpoint(folder); docs/deepspeed.md says how to resume under another plan"
        )


def _is_of_deepspeed(model: nn.Module, modules: list[nn.Module]) -> bool:
    is_engine = any(kind.__module__.startswith("deepspeed.") for kind in type(model).__mro__)
    # ``parameters()`` would walk through all modules once more, while training waits for a save.
    parameters = (parameter for module in modules for parameter in module._parameters.values())
    return is_engine or any(hasattr(parameter, "ds_id") for parameter in parameters)  # partitioned by ZeRO-3
