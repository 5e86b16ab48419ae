"""TRL's names, with its trainers under a plan: change the import from ``trl`` to ``meshwright_hf.trl``."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from transformers import Trainer

from meshwright_hf.trainer import MeshwrightTrainerMixin


def __getattr__(name: str) -> Any:
    """Return a name of TRL; a class of trainers gets the mixin, and is a subclass of TRL's."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(importlib.import_module("trl"), name)
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise ImportError(f"{__name__}.{name} needs TRL: pip install trl") from None
    except AttributeError:
        raise AttributeError(
            f"trl has no {name}. For a trainer elsewhere, such as in trl.experimental, put the mixin first among the "
            f"base classes: class Planned{name}(meshwright_hf.MeshwrightTrainerMixin, {name}): ..."
        ) from None
    if inspect.isclass(found) and issubclass(found, Trainer):
        about = {"__module__": __name__, "__doc__": f"TRL's {name} under a plan; see MeshwrightTrainerMixin."}
        found = type(name, (MeshwrightTrainerMixin, found), about)
    globals()[name] = found  # so that pickle and isinstance find the same class
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(importlib.import_module("trl"))})
