"""The configuration files of a transformers model, by duck typing: the core does not import transformers."""

from __future__ import annotations

import json
import logging
from typing import Any

from torch import nn

from meshwright.checkpoint.manifest import CONFIG_NAMES
from meshwright.roles.adapters import wrapped

logger = logging.getLogger(__name__)


def model_config(model: nn.Module) -> dict[str, str] | None:
    """Return the texts of a model's ``config.json`` and ``generation_config.json``, by name; None if it has none.

    A model in PEFT's wrappers has none: its names are those of the wrappers, and ``from_pretrained`` would find no
    weight of its config.
    """
    if wrapped(model) is not None:
        return None
    found = {}
    for name in CONFIG_NAMES:
        config: Any = getattr(model, name.removesuffix(".json"), None)
        if callable(getattr(config, "to_json_string", None)):
            try:
                fields = json.loads(config.to_json_string())
            except (TypeError, ValueError) as error:
                logger.warning("the checkpoint has no %s, since it is not JSON: %s", name, error)
                continue
            found[name] = fields
    if "config.json" in found:
        found["config.json"]["architectures"] = [type(model).__name__]  # as save_pretrained does
    return {name: _text(fields) for name, fields in found.items()} or None


def with_dtype(text: str, dtype: str) -> str:
    """Return a ``config.json`` for weights of a dtype."""
    fields: dict[str, Any] = json.loads(text)
    fields.pop("torch_dtype", None)  # its name before transformers 5
    return _text({**fields, "dtype": dtype})


def ties_weights(text: str) -> bool:
    """Whether ``from_pretrained`` ties the weights of a model with this ``config.json``."""
    fields = json.loads(text)
    parts = [fields, fields.get("text_config")]
    return any(isinstance(part, dict) and part.get("tie_word_embeddings") is True for part in parts)


def _text(fields: dict[str, Any]) -> str:
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"
