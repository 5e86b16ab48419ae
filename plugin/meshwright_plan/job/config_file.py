"""Find and read a model's config: a file, a folder, a Hub model in the local cache, or a type of transformers."""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import PlanError
from meshwright.outside_files import OddFileError, holding, listed, number, problem_of, read_json, shown, text
from meshwright.printable import printable

_ID = re.compile(r"[\w.-]+/[\w.-]+")
_TYPE = re.compile(r"\w+(-\w+)*")  # as that of a config's field model_type

# No model has larger sizes, and what takes time or memory for each layer or expert would not end.
LAYERS, _EXPERTS, WIDTH = 1024, 2**16, 2**40
_COUNTED = re.compile("(?P<layers>(?:^|_)layers?$)|(?P<experts>(?:^|_)experts$)")


class WrongConfigError(PlanError):
    """Raised if a field of a config has a value that no model can have."""


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


def read_config(source: Any) -> tuple[Mapping[str, Any], str]:
    """Return the fields of a model's config, and the model's name in one printable line.

    Args:
        source: a config as a dict, a config object (anything with ``to_dict``), or what :func:`config_path` takes.

    Raises:
        PlanError: the file cannot be read.
        WrongConfigError: a field has a value that no model has.
    """
    if isinstance(source, Mapping):
        _check(source, name := printable(source.get("_name_or_path") or source.get("model_type") or "model"))
        return source, name
    if hasattr(source, "to_dict"):
        config = source.to_dict()
        attention = getattr(source, "_attn_implementation", None)  # to_dict omits this field
        return read_config({**config, "_attn_implementation": attention} if attention else config)
    path = config_path(source)
    try:
        config = read_json(path, takes_last=True)  # as from_pretrained reads it
    except (OddFileError, OSError) as error:
        raise WrongConfigError(f"{path}: not a JSON file of a model's config ({error})") from None
    if not isinstance(config, dict):
        raise WrongConfigError(f"{path}: a config is a JSON object, not a {type(config).__name__}")
    _check(config, str(path))
    return config, printable(_label(source, path))


_FORM = holding(
    {
        "model_type": text(most=200),
        "layer_types": listed(text(most=200), most=LAYERS),
        "architectures": listed(text(most=200)),
        "max_position_embeddings": number(0, WIDTH),
        "n_positions": number(0, WIDTH),
        "num_labels": number(0, WIDTH),
    }
)


def _check(config: Mapping[str, Any], name: str) -> None:
    """Raise if a field that the planner reads has another type, or there are more layers or experts than any model has.

    Raises:
        WrongConfigError: the message names the field.
    """
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
    if (wrong := problem_of(lists, _FORM)) is not None:
        raise WrongConfigError(f"{name}: {wrong}; correct the config")
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check(value, name)
        elif (counted := _COUNTED.search(str(key))) and type(value) is int:
            most = LAYERS if counted["layers"] else _EXPERTS
            if value > most:
                raise WrongConfigError(f"{name}: {key}={shown(value)} is more than {most}; correct the config")


def _label(source: Any, path: Path) -> str:
    """Return the name of a model whose config was read: that of its folder, or of its Hub id."""
    if path.name != "config.json":
        return path.stem
    return path.absolute().parent.name if Path(source).exists() else str(source).rpartition("/")[2]
