"""torch.compile under the Trainer: the runtime compiles the layers, so accelerate must not compile the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from accelerate.utils import DynamoBackend, TorchDynamoPlugin


@contextlib.contextmanager
def left_to_us(plugin: TorchDynamoPlugin) -> Iterator[None]:
    """Keep accelerate from compiling the model inside the context.

    Args:
        plugin: accelerate's TorchDynamoPlugin.
    """
    before, plugin.backend = plugin.backend, DynamoBackend.NO
    try:
        yield
    finally:
        plugin.backend = before
