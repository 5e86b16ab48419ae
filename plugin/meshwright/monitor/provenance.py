"""Where a run comes from: its command, its code's revision, its versions and its settings, for the log."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from meshwright.plan.config import ToDistributedConfig
from meshwright.printable import hidden_in, without_secrets

_PATIENCE = 5.0  # seconds for git, which may be slow on a network's file system
_PACKAGES = ("meshwright", "torch", "transformers", "accelerate", "trl", "peft", "deepspeed")
_SHOWN_ELSEWHERE = {"plan", "logging_dir", "max_steps"}


def provenance(config: ToDistributedConfig, optimizer: Optimizer | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the record of a start says about the program.

    Args:
        config: the options of the call; those that differ from their defaults are settings.
        optimizer: the optimizer, whose class and defaults are settings.
        settings: further settings of the caller, such as the Trainer's arguments.
    """
    defaults = ToDistributedConfig()
    options = {
        option.name: getattr(config, option.name)
        for option in dataclasses.fields(config)
        if option.name not in _SHOWN_ELSEWHERE and getattr(config, option.name) != getattr(defaults, option.name)
    }
    of_optimizer = {} if optimizer is None else {"optimizer": type(optimizer).__name__, **optimizer.defaults}
    found = {**options, **{name: x for name, x in of_optimizer.items() if x is not None}, **settings}
    return {
        "command": shlex.join(without_secrets(sys.argv)),
        "revision": git_revision(Path(sys.argv[0]).parent if sys.argv[0] else Path()),
        "versions": _versions(),
        "settings": {
            name: x if isinstance(x := hidden_in(name, each), bool | int | float | str) else str(x)
            for name, each in found.items()
        },
    }


def git_revision(folder: Path) -> str | None:
    """Return the commit of a folder's repository, with "-dirty" if files differ; None without git or a repository."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    """Return the versions of the packages that the program has imported."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _PACKAGES:
        if name in sys.modules:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:  # a folder on the path instead of an installed package
                continue
    return found
