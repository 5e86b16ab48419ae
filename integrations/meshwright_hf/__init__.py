"""Integrations of Meshwright with the Hugging Face stack; each module is imported on first use.

configs.py    ``from_pretrained(distributed_config=...)``     distributed_config.py  plans in configs of models
batches.py    a rank's batches and the global batch           callback.py            callbacks for a Trainer
datasets.py   shards of streams, packing                      trl.py                 TRL's trainers under a plan
styles.py     styles for transformers' own tp                 versions.py            the versions that are tested
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright_hf import accelerate, datasets, deepspeed, trainer, trl
    from meshwright_hf.callback import BalanceExperts, MeshwrightCallback
    from meshwright_hf.configs import register, unregister
    from meshwright_hf.distributed_config import save_plan
    from meshwright_hf.trainer import MeshwrightTrainer, MeshwrightTrainerMixin

# The module of each public name.
_HOMES = {
    "callback": ("BalanceExperts", "MeshwrightCallback"),
    "configs": ("register", "unregister"),
    "distributed_config": ("save_plan",),
    "trainer": ("MeshwrightTrainer", "MeshwrightTrainerMixin"),
}
_HOME = {name: f"meshwright_hf.{module}" for module, names in _HOMES.items() for name in names}
_MODULES = ("accelerate", "datasets", "deepspeed", "trainer", "trl")

__all__ = [
    "BalanceExperts",
    "MeshwrightCallback",
    "MeshwrightTrainer",
    "MeshwrightTrainerMixin",
    "accelerate",
    "datasets",
    "deepspeed",
    "register",
    "save_plan",
    "trainer",
    "trl",
    "unregister",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")  # importing a module makes it an attribute
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
