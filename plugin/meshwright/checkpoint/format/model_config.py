"""The configuration files of a transformers model, by duck typing: the core does not import transformers."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from meshwright.checkpoint.format.manifest import CONFIG_NAMES
from meshwright.roles.adapters import wrapped

logger = logging.getLogger(__name__)


def model_config(model: nn.Module) -> Callable[[], dict[str, str] | None]:
    """Return a function that returns the texts of a model's ``config.json`` and ``generation_config.json``, by name.

    The texts are of the present values, also if a thread calls the function later. They are None if there are none.
    A model in PEFT's wrappers has none: its names are those of the wrappers, and ``from_pretrained`` would find no
    weight of its config.
    """
    configs: dict[str, Any] = {}
    for name in CONFIG_NAMES if wrapped(model) is None else ():
        config = getattr(model, name.removesuffix(".json"), None)
        if callable(getattr(config, "to_json_string", None)):
            try:
                configs[name] = copy.deepcopy(config)
            except Exception as error:  # of whatever the program has put on it, a lock for example
                logger.warning("the checkpoint has no %s, since it cannot be copied: %s", name, error)
    architecture = type(model).__name__

    def texts() -> dict[str, str] | None:
        found = {}
        for name, config in configs.items():
            try:
                fields = json.loads(config.to_json_string())
            except (TypeError, ValueError) as error:
                logger.warning("the checkpoint has no %s, since it is not JSON: %s", name, error)
                continue
            found[name] = fields
        if "config.json" in found:
            found["config.json"]["architectures"] = [architecture]  # as save_pretrained does
        return {name: _text(fields) for name, fields in found.items()} or None

    return texts


def with_dtype(text: str, dtype: str) -> str:
    """Return a ``config.json`` for weights of a dtype."""
    fields: dict[str, object] = json.loads(text)
    fields.pop("torch_dtype", None)  # its name before transformers 5
    return _text({**fields, "dtype": dtype})


def ties_weights(text: str) -> bool:
    """Whether ``from_pretrained`` ties the weights of a model with this ``config.json``."""
    fields = json.loads(text)
    parts = [fields, fields.get("text_config")]
    return any(isinstance(part, dict) and part.get("tie_word_embeddings") is True for part in parts)


def _text(fields: dict[str, object]) -> str:
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"
