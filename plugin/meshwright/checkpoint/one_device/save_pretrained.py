"""``model.save_pretrained`` of a distributed model, which streams whole weights under the model's own names into
one-device files.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint.files.place import local_path
from meshwright.checkpoint.files.reading import reading
from meshwright.checkpoint.one_device.published_form import (
    PublishedTensors,
    as_they_are,
    published_form,
    without_quantisation,
)
from meshwright.checkpoint.one_device.safetensors_file import Form, num_bytes, read_header, read_rows
from meshwright.checkpoint.one_device.streamed_files import (
    ModelReplacement,
    WeightNames,
    index_of,
    parse_bytes,
    split,
    stream,
)
from meshwright.checkpoint.one_device.whole_tensors import gather_full, gather_state
from meshwright.compiling import without_compilation
from meshwright.errors import PlanError
from meshwright.faults.every_rank import on_every_rank
from meshwright.faults.together import on_first_rank
from meshwright.layout.packed_weights import packed_modules, state_without_packed
from meshwright.layout.tensor_layout import global_shape
from meshwright.optim.runtime import Runtime, runtime_of
from meshwright.optim.state_dicts import StateDictCalls
from meshwright.parallel.method_chain import ChainStep, add_step
from meshwright.roles.adapters import wrapped

FILE = "model.safetensors"


@on_every_rank
def save_weights(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write the one-device weights of a model, for ``load_weights``; every rank must make the call.

    Rank 0 writes one file, and never holds more than one full tensor beside its own shard. Unlike
    ``model.save_pretrained``, ``save_weights`` takes any model, including adapters, and writes the model's own names. A
    tied weight is written once. Weights that bitsandbytes has quantised are left out: they do not change.

    Args:
        model: the model that ``to_distributed`` returned.
        directory: the folder, created if it does not exist; this save replaces an earlier one when it is complete.

    Raises:
        OSError: on every rank, if rank 0 cannot write.

    Example::

        mw.save_weights(model, "checkpoint")
        mw.load_weights(model, "checkpoint")
    """
    model, folder = without_compilation(model, "save_weights(model, directory)"), local_path(directory, "save_weights")
    runtime = runtime_of(model)
    runtime.compare_before_save()
    tensors = _tensors(model)
    # Wide dtypes first, so that every tensor is aligned in its file.
    ordered = sorted(tensors, key=lambda name: -tensors[name].element_size())
    files = {FILE: {name: (tensors[name].dtype, tuple(global_shape(tensors[name]))) for name in ordered}}
    replacement: ModelReplacement | None = None

    def start() -> None:
        nonlocal replacement
        replacement = ModelReplacement(folder)

    try:
        on_first_rank(start)
        gather = lambda name: gather_full(tensors[name], runtime)  # noqa: E731
        stream(files, gather, replacement, WeightNames.of(), f"writing {folder / FILE}")
    finally:
        if replacement is not None:
            replacement.close()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return each parameter and persistent buffer; a tied one under its first name only."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in state_without_packed(model).items():
        if isinstance(tensor, Tensor):
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


Call = dict[str, Any]  # the arguments of a call of ``save_pretrained``, by name


def export_with_full_weights(model: nn.Module) -> None:
    """Make ``model.save_pretrained`` write one-device weights from rank 0; every rank must then call it.

    A plain save of a transformers model is streamed: rank 0 never holds more than one full tensor beside its own
    shard, and what is published in its place. If ``state_dict`` is passed, it is written instead. With
    ``push_to_hub``, or if a published tensor is made of several of the model's, rank 0 gathers the whole model first.
    For a PEFT model it gathers only the adapters.
    """
    if getattr(model, "save_pretrained", None) is not None:
        add_step(model, _FullSave(model), "save_pretrained")


class _FullSave(ChainStep):
    """A step around a model's ``save_pretrained`` that writes whole weights."""

    def __init__(self, model: nn.Module):
        self.model = model

    def __call__(self, save_directory: str | os.PathLike[str], *args: object, **kwargs: object) -> None:
        self.save_pretrained(save_directory, *args, **kwargs)

    @on_every_rank
    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: object, **kwargs: object) -> None:
        """Save the model; every rank must make the call."""
        with without_quantisation(self.model):
            self._save(save_directory, *args, **kwargs)

    def _save(self, save_directory: str | os.PathLike[str], *args: object, **kwargs: object) -> None:
        model, save_pretrained = self.model, self.method
        local_path(save_directory, "save_pretrained")
        runtime = runtime_of(model)
        call = _bind(save_pretrained, save_directory, *args, **kwargs)
        saves_adapters = wrapped(model) is not None or getattr(model, "_hf_peft_config_loaded", False)
        if not saves_adapters and (packed := [name for name, _, _ in packed_modules(model)]):
            raise PlanError(
                f"{len(packed)} weights of {type(model).__name__} are quantised (the first is {packed[0]}.weight), and "
                "a rank may have a part of each. They do not change: keep the checkpoint that they were loaded from, "
                "and save the adapters by save_pretrained of the model that get_peft_model returned"
            )
        has_weights = on_first_rank(lambda: call.get("state_dict") is not None)
        if not has_weights:
            runtime.compare_before_save()
            if _can_stream(model) and _save_streamed(model, runtime, save_pretrained, call):
                return
            kwargs = {**kwargs, "state_dict": gather_state(model, _saved_by(model))}
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", Path(save_directory).name)
        calls = runtime.features.find(StateDictCalls) or StateDictCalls()
        with calls.reading_names():  # the method may still read names from modules' state dicts
            on_first_rank(lambda: _save_given(lambda path: save_pretrained(path, *args, **kwargs), call))


def _save_given(save: Callable[[Path], object], call: Call) -> None:
    """Run transformers' own save with whole weights, on the rank that writes."""
    replacement = ModelReplacement(Path(call["save_directory"]))
    try:
        save(replacement.path)
        replacement.commit(WeightNames.of(call.get("variant")))
    finally:
        replacement.close()


def _bind(function: Callable[..., object], *args: object, **kwargs: object) -> Call:
    """Return the arguments of a call by name, including defaults."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    rest = bound.arguments.pop("kwargs", {})
    return {**bound.arguments, **rest}


def _saved_by(model: Any) -> dict[str, Tensor]:
    """Return the tensors that ``save_pretrained`` may write; with adapters, only adapters, embedding and head."""
    state = state_without_packed(model)
    if wrapped(model) is None:
        return state
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    vocabulary = {id(p) for module in ends if module is not None for p in module.parameters()}
    return {
        name: x
        for name, x in state.items()
        if x.requires_grad or id(x) in vocabulary or "lora_" in name or name.endswith(".bias")
    }


def _can_stream(model: nn.Module) -> bool:
    """Return whether this is a plain transformers model, whose files are known."""
    kinds = {kind.__name__: kind for kind in type(model).__mro__}
    stock = getattr(kinds.get("PreTrainedModel"), "save_pretrained", None)
    if stock is None or type(model).save_pretrained is not stock:  # type: ignore[attr-defined]
        return False
    is_plain = not getattr(model, "_hf_peft_config_loaded", False) and getattr(model, "hf_quantizer", None) is None
    return is_plain and all(isinstance(x, Tensor) for x in model.state_dict(keep_vars=True).values())


@dataclass(frozen=True)
class _Saved:
    """What transformers saves of a model.

    Args:
        names: the names of the weight files.
        tensors: the names of the model's tensors that are saved, in order.
        largest: the number of bytes of the largest file.
        as_published: whether published tensors are saved in place of the model's.
    """

    names: WeightNames
    tensors: list[str]
    largest: int
    as_published: bool


def _save_streamed(model: nn.Module, runtime: Runtime, save_pretrained: Callable[..., object], call: Call) -> bool:
    """Write the weights tensor by tensor, if each published one is made of one of the model's; return whether."""
    replacement: ModelReplacement | None = None

    def start() -> Call | None:
        nonlocal replacement
        if call["push_to_hub"] or call.get("distributed_checkpoint") or not call["is_main_process"]:
            return None
        largest = parse_bytes(call["max_shard_size"])
        replacement = ModelReplacement(Path(call["save_directory"]))
        found = _save_rest(model, save_pretrained, {**call, "save_directory": replacement.path}, largest)
        return None if found is None else asdict(found)

    try:
        fields = on_first_rank(start)
        if fields is None:
            return False
        saved = _Saved(**{**fields, "names": WeightNames(**fields["names"])})
        state = model.state_dict(keep_vars=True)
        forms = {name: _form(state[name]) for name in saved.tensors}
        published = published_form(model, forms) if saved.as_published else as_they_are(forms)
        if published is None:
            return False
        files = _files(published, saved)
        count = sum(global_shape(p).numel() for p in model.parameters())
        index = index_of(files, count) if len(files) > 1 else None
        gather = _gather_published(model, state, published, runtime)
        stream(files, gather, replacement, saved.names, f"writing {call['save_directory']}", index)
        return True
    finally:
        if replacement is not None:
            replacement.close()


def _gather_published(
    model: nn.Module, state: dict[str, Any], published: dict[str, PublishedTensors], runtime: Runtime
) -> Callable[[str], Tensor | None]:
    """Return a collective that returns the published tensor of a name on the first rank."""
    gathered: set[str] = set()

    def gather(name: str) -> Tensor | None:
        tensors = published[name]
        if tensors.source not in gathered:
            gathered.add(tensors.source)
            whole = gather_full(state[tensors.source], runtime)
            if whole is not None:
                tensors.make(model, whole)
        return tensors.take(name) if runtime.mesh.is_first else None

    return gather


def _files(published: dict[str, PublishedTensors], saved: _Saved) -> dict[str, dict[str, Form]]:
    """Return the dtype and the shape of each tensor of each file."""
    forms = {name: made.forms[name] for name, made in published.items()}
    units = [unit for made in dict.fromkeys(published.values()) for unit in made.units]
    sizes = ({name: num_bytes(forms[name]) for name in unit} for unit in units)
    parts = split(saved.names.stem, sizes, saved.largest)
    # Wide dtypes first, so that every tensor is aligned in its file.
    ordered = {file: sorted(names, key=lambda name: -forms[name][0].itemsize) for file, names in parts.items()}
    return {file: {name: forms[name] for name in names} for file, names in ordered.items()}


def _save_rest(model: nn.Module, save_pretrained: Callable[..., object], call: Call, largest: int) -> _Saved | None:
    """Let transformers' own method write all files but the weights; return what these hold, None if unknown."""
    state = model.state_dict(keep_vars=True)
    written = _save_stand_ins(state, save_pretrained, call)
    if written is None:
        return None
    stem, kept = written
    names = WeightNames(stem, WeightNames.of(call.get("variant")).index)
    return _Saved(names, [n for n in state if n in kept], largest, bool(call.get("save_original_format", False)))


def _save_stand_ins(
    state: dict[str, Tensor], save_pretrained: Callable[..., object], call: Call
) -> tuple[str, set[str]] | None:
    """Let transformers' own method save a few numbers for each tensor; return its file's stem and the names in it.

    The method drops tied names and the tensors that the model excludes from its files, as ``from_pretrained`` expects.
    If a class also renames or converts a tensor by itself, the result is None.
    """
    # Each stand-in has its tensor's number of dims, all of different sizes, and its own value, to show any conversion.
    numbers = {id(x): number for number, x in enumerate(state.values())}
    stand_ins = {
        id(x): torch.full(tuple(range(1, len(global_shape(x)) + 1)), float(numbers[id(x)])) for x in state.values()
    }
    names = {name: stand_ins[id(x)] for name, x in state.items()}
    try:
        own_names = {"save_original_format": False} if "save_original_format" in call else {}
        save_pretrained(**{**call, **own_names, "state_dict": dict(names), "max_shard_size": "1TB"})
    except (RuntimeError, ValueError, TypeError):
        return None  # the method converts whole tensors; it raises any other error again in the real save
    written = list(Path(call["save_directory"]).glob("*.safetensors"))
    if len(written) != 1:
        return None
    entries = read_header(written[0])
    with reading(written[0]) as reader:
        for name, entry in entries.items():
            values = read_rows(reader, entry, entry.layout, entry.dtype, lambda _: None)
            if name not in names or not torch.equal(values, names[name]):
                return None
    written[0].unlink()
    return written[0].stem, set(entries)


def _form(x: Tensor) -> Form:
    return x.dtype, tuple(global_shape(x))
