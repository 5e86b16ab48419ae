"""The weights of a model in training, written whole and read back in place, under any plan."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor, nn

from meshwright.checkpoint.assemble import is_first
from meshwright.checkpoint.export import gather_full
from meshwright.checkpoint.stream import StreamedFiles, stream
from meshwright.checkpoint.weight_files import WeightFiles
from meshwright.optim.runtime import runtime_of
from meshwright.parallel.layout import RowLayout, global_shape, record_of
from meshwright.parallel.outcome import on_first_rank, succeed_together

FILE = "model.safetensors"
_WHOLE = RowLayout.replicated(1, 1)


def save_weights(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write the one-device weights of a model to ``directory/model.safetensors``, one tensor in memory at a time.

    A collective call: every rank makes it, rank 0 writes. The names are the model's own, adapters included; a tied
    weight is written once. For files that ``from_pretrained`` reads whatever the model, use ``model.save_pretrained``.

    Args:
        model: what ``to_distributed`` returned.
        directory: made if need be.

    Raises:
        OSError: on rank 0, if it cannot write; a CheckpointError that says so elsewhere.

    Example::

        mw.save_weights(model, "step-100")
        mw.load_weights(model, "step-100")  # later, under another plan
    """
    runtime = runtime_of(model)
    tensors = _tensors(model)
    # Wide dtypes first, so that every tensor lies aligned in its file.
    ordered = sorted(tensors, key=lambda name: -tensors[name].element_size())
    files = {FILE: {name: (tensors[name].dtype, tuple(global_shape(tensors[name]))) for name in ordered}}
    folder = Path(directory)
    on_first_rank(lambda: folder.mkdir(parents=True, exist_ok=True))
    written = StreamedFiles(folder, files, f"writing {folder / FILE}") if is_first(runtime) else None
    stream(files, lambda name: gather_full(tensors[name], runtime), written)
    on_first_rank(lambda: written.close() if written is not None else None)


def load_weights(model: nn.Module, source: str | os.PathLike[str]) -> None:
    """Overwrite a model's weights by those of a one-device checkpoint; each rank reads its shards.

    A collective call: every rank makes it. Optimizer state stays as it is: see ``load_optimizer``.

    Args:
        model: what ``to_distributed`` returned; changed in place.
        source: a .safetensors file, an index of several, or a directory with either.

    Raises:
        CheckpointError: for a checkpoint that is unsound or not this model's; the model is not changed then.
    """
    runtime = runtime_of(model)

    def find() -> tuple[WeightFiles, dict[int, str]]:
        files = WeightFiles.open(source)
        return files, files.names_for(model)

    def read() -> None:
        for tensor in _tensors(model).values():
            if (name := names.get(id(tensor))) is not None:
                rows = record_of(tensor).layout if isinstance(tensor, nn.Parameter) else _WHOLE
                tensor.data.copy_(files.read(name, rows, runtime.tp.rank, tensor.dtype))

    files, names = succeed_together(find)
    succeed_together(read)
    for bucket in runtime.zero.sharded if runtime.zero is not None else ():
        if bucket.master is not bucket.own:
            bucket.master.copy_(bucket.own)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Each parameter and persistent buffer, by its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())
