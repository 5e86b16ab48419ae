"""Find a model's config.json: a file, a folder, a Hub model in the local cache, or a type of transformers."""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import os
import re
import tempfile
from pathlib import Path

from meshwright.errors import PlanError

_ID = re.compile(r"[\w.-]+/[\w.-]+")
_TYPE = re.compile(r"\w+(-\w+)*")  # as that of a config's field model_type


def config_path(source: str | os.PathLike[str]) -> Path:
    """Return the path of a model's config.json. Nothing is downloaded.

    Args:
        source: the file, a folder that holds it, the id of a model on the Hugging Face Hub whose config is in the local
            cache, or a model type of transformers, such as "qwen3", whose default config is written to a new folder.

    Raises:
        PlanError: ``source`` is none of these.
    """
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path
    name = os.fspath(source)
    if _TYPE.fullmatch(name) and (written := _default_config(name)) is not None:
        return written
    if not _ID.fullmatch(name) or path.suffix == ".json":
        raise PlanError(
            f"{path}: no such file; give a config.json, a directory that holds one, the whole id of a model of the "
            "Hugging Face Hub, such as Qwen/Qwen3-8B, or a model type of transformers, such as qwen3"
        )
    cached = _in_cache(name)
    if cached is not None:
        return cached
    raise PlanError(
        f"{name}: no such file, and if it is a model of the Hugging Face Hub, its config.json is not in the cache "
        f"({_cache()}). This command downloads nothing; fetch the config, a few kB, with: hf download {name} "
        "config.json"
    )


@functools.cache
def _default_config(name: str) -> Path | None:
    """Write the default config of a model type into a folder of this process; None if transformers has no such type."""
    if importlib.util.find_spec("transformers") is None:
        return None
    # Imported by name, since the core must not depend on transformers.
    transformers = importlib.import_module("transformers")
    if name not in transformers.CONFIG_MAPPING:
        return None
    folder = tempfile.TemporaryDirectory(prefix="meshwright-config-")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / name / "config.json"  # the model is called as its folder
    path.parent.mkdir()
    transformers.AutoConfig.for_model(name).to_json_file(path, use_diff=False)
    return path


def _in_cache(name: str) -> Path | None:
    """Return the newest cached config of a Hub id: that of the branch main, otherwise the last that was written."""
    folder = _cache() / f"models--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    if main.is_file():
        path = folder / "snapshots" / main.read_text().strip() / "config.json"
        if path.is_file():
            return path
    paths = sorted(folder.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime)
    return paths[-1] if paths else None


def _cache() -> Path:
    """Return the folder of the Hub's cache, as huggingface_hub finds it."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if cache:
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"
