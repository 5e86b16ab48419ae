"""Writes the whole weights of a distributed model under the model's own names."""

from __future__ import annotations

import os

from torch import Tensor, nn

from meshwright.checkpoint.files.place import local_path
from meshwright.checkpoint.one_device.replaced_model import ModelReplacement, WeightNames
from meshwright.checkpoint.one_device.streamed_files import StreamedFiles, stream
from meshwright.checkpoint.one_device.whole_tensors import gather_full
from meshwright.compiling import without_compilation
from meshwright.faults.every_rank import on_every_rank
from meshwright.faults.together import on_first_rank
from meshwright.layout.packed_weights import state_without_packed
from meshwright.layout.tensor_layout import global_shape
from meshwright.optim.runtime import runtime_of

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

    def finish() -> None:
        assert written is not None and replacement is not None
        written.close()
        replacement.commit(WeightNames.of())

    try:
        on_first_rank(start)
        written = None
        if runtime.mesh.is_first:
            assert replacement is not None
            written = StreamedFiles(replacement.path, files, f"writing {folder / FILE}")
        stream(files, lambda name: gather_full(tensors[name], runtime), written)
        on_first_rank(finish)
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
