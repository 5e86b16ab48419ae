"""torch.compile under the Trainer: the runtime compiles the layers, so accelerate must not compile the model."""

from __future__ import annotations

import contextlib

from accelerate.utils import DynamoBackend, TorchDynamoPlugin

from meshwright.temporarily import temporarily

def left_to_us(plugin: TorchDynamoPlugin) -> contextlib.AbstractContextManager[None]:
    """Keep accelerate from compiling the model inside the context.

    Args:
        plugin: accelerate's TorchDynamoPlugin.
    """
    return temporarily(plugin, backend=DynamoBackend.NO)
