"""The safetensors format: reads the rows that a rank owns, and writes a file tensor by tensor.

The safetensors package is not used. It maps the file, so pages with other ranks' rows count as this process's memory.
It can write only tensors that are all in memory at once.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.files.place import Place
from meshwright.checkpoint.files.reading import parse_json, read_exactly, read_into, reading
from meshwright.checkpoint.files.storage import StoredFile, storage_of
from meshwright.errors import CheckpointError
from meshwright.layout.row_layout import StridedBlock, numel
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.outside_files import LARGEST, MEMORY, integer, record, require, row, shown, table, text, that

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_DIMS = 64  # dims of a tensor; torch itself has the same limit for most operations
MAX_HEADER = MEMORY  # bytes; the format's limit is 100 MB, but no model has as many tensors
_STAGING = 4 * 2**20  # bytes whose dtype is converted at a time

Run = tuple[int, int, int]  # first element in the file, first element in the shard, number of elements


Form = tuple[torch.dtype, tuple[int, ...]]


def num_bytes(form: Form) -> int:
    """Return the number of bytes of a tensor with this dtype and shape."""
    return math.prod(form[1]) * form[0].itemsize


@dataclass(frozen=True)
class Entry:
    """One tensor of a file, whose data begins at byte ``start``.

    A tensor of a dtype that is not read here is its bytes, and ``unreadable`` says what the file calls its dtype.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    unreadable: str = ""

    @property
    def num_bytes(self) -> int:
        return num_bytes((self.dtype, self.shape))

    @property
    def layout(self) -> TensorLayout:
        """The layout of a rank that reads all of the tensor."""
        return TensorLayout(shape=torch.Size(self.shape))

    def check_dtype(self, name: str) -> None:
        """Raise if the tensor cannot be read; the message calls it ``name``."""
        if self.unreadable:
            raise CheckpointError(
                f"{name} has the dtype {self.unreadable}; the dtypes that can be read are {', '.join(DTYPES)}"
            )


def read_header(path: Place) -> dict[str, Entry]:
    """Read the header of a safetensors file, and return the file's tensors by name.

    Raises:
        CheckpointError: if the file is truncated, inconsistent, or of another format.
    """
    with reading(path, follows_links=True) as reader:
        size = reader.size
        start = bytes(read_exactly(reader, 0, min(9, size)))
        length = int.from_bytes(start[:8], "little")
        # What begins otherwise is not read, however long its header claims to be.
        if not 2 <= length <= min(MAX_HEADER, size - 8) or start[8:] != b"{":
            raise CheckpointError(_not_safetensors(path, start, size))
        content = read_exactly(reader, 8, length)
    header = parse_json(content, path)
    require(header.pop("__metadata__", {}), table(text()), f"{path}: its '__metadata__'")
    require(header, table(_ENTRY), path)
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    expected = 8 + length + sum(entry.num_bytes for entry in entries.values())
    end = max((entry.start + entry.num_bytes for entry in entries.values()), default=8 + length)
    if not size == expected == end:
        raise CheckpointError(
            f"{path} has {size} bytes, but its header describes {max(expected, end)}: it was truncated or damaged; "
            "copy or save it again"
        )
    place = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if entry.start != place:
            raise CheckpointError(
                f"{path} is damaged: {shown(name)} begins at byte {entry.start}, but the tensor before it ends at "
                f"{place}"
            )
        place += entry.num_bytes
    return entries


def _not_safetensors(path: Place, prefix: bytes, size: int) -> str:
    if prefix[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        return is_a_pickle(path)
    return f"{path} ({size} bytes) is not a safetensors file, or was truncated in its header"


def is_a_pickle(path: Place) -> str:
    """Return why a pickle file is not read, and what to do with it."""
    return (
        f"{path} is a pickle file, which is not read because loading it could run code. Load it where you trust it and "
        "write it again with model.save_pretrained(...), which writes safetensors"
    )


def is_shape(value: object) -> bool:
    """Whether a value from JSON is the shape of a tensor that memory could hold."""
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMS
        and all(type(size) is int and 0 <= size < LARGEST for size in value)
        and math.prod(max(size, 1) for size in value) < LARGEST
    )


SHAPE = that(f"the sizes of at most {MAX_DIMS} dims", is_shape)
_ENTRY = record({"dtype": text(most=20), "shape": SHAPE, "data_offsets": row(integer(0, LARGEST), integer(0, LARGEST))})


def _entry(path: Place, name: str, value: dict[str, Any], data_start: int) -> Entry:
    dtype, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    if dtype not in DTYPES and start <= stop:  # other tools' files may have it beside what a model needs
        return Entry(torch.uint8, (stop - start,), data_start + start, unreadable=dtype)
    entry = Entry(DTYPES.get(dtype, torch.uint8), shape, data_start + start)
    if stop - start != entry.num_bytes:
        raise CheckpointError(
            f"{path} is damaged: {name!r} of shape {list(shape)} and dtype {dtype} takes {entry.num_bytes} bytes, "
            f"but its header gives it {stop - start}"
        )
    return entry


def storage(layout: TensorLayout, dtype: torch.dtype) -> Tensor:
    """Return a CPU tensor for what this rank has of a tensor; it is zero where there is padding."""
    has_padding = numel(layout.blocks()) < layout.local_numel
    return (torch.zeros if has_padding else torch.empty)(layout.local_shape, dtype=dtype)


def read_rows(
    reader: StoredFile, entry: Entry, layout: TensorLayout, dtype: torch.dtype, on_read: Callable[[int], None]
) -> Tensor:
    """Read only the bytes of this rank's shard of a tensor, and convert them to ``dtype``.

    Args:
        reader: the file.
        entry: the tensor's place in it.
        layout: which of its elements this rank has; padding becomes zero.
        on_read: function that is called with the number of bytes after each read.

    Raises:
        CheckpointError: if the file ends early (it changed since its header was read), or its dtype is not known.
    """
    entry.check_dtype(f"a tensor of {reader.path}")
    values = storage(layout, dtype)
    fill = _fill if entry.dtype == dtype else _fill_converted
    fill(values.view(-1), reader, entry, _runs(layout.blocks()), on_read)
    return values


def _fill(flat: Tensor, reader: StoredFile, entry: Entry, runs: Iterator[Run], on_read: Callable[[int], None]) -> None:
    memory, itemsize = memory_of(flat), entry.dtype.itemsize
    for source, target, count in runs:
        read_into(reader, entry.start + source * itemsize, memory[target * itemsize : (target + count) * itemsize])
        on_read(count * itemsize)


def _fill_converted(
    flat: Tensor, reader: StoredFile, entry: Entry, runs: Iterator[Run], on_read: Callable[[int], None]
) -> None:
    itemsize = entry.dtype.itemsize
    staging = torch.empty(max(1, min(_STAGING // itemsize, flat.numel())), dtype=entry.dtype)
    memory = memory_of(staging)
    first = filled = 0  # staging[:filled] will be copied to flat[first : first + filled]

    def convert() -> None:
        flat[first : first + filled].copy_(staging[:filled])
        on_read(filled * itemsize)

    for source, target, count in runs:
        while count:
            if filled == len(staging) or first + filled != target:
                convert()
                first, filled = target, 0
            part = min(count, len(staging) - filled)
            read_into(reader, entry.start + source * itemsize, memory[filled * itemsize : (filled + part) * itemsize])
            filled, source, target, count = filled + part, source + part, target + part, count - part
    convert()


def _runs(blocks: list[StridedBlock]) -> Iterator[Run]:
    """Yield the contiguous runs of a slice."""
    for b in blocks:
        for i in range(b.count):
            yield b.whole + i * b.whole_stride, b.local + i * b.local_stride, b.length


def memory_of(x: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor; the caller must keep the tensor alive."""
    num_bytes = x.numel() * x.element_size()
    return (
        memoryview((ctypes.c_char * num_bytes).from_address(x.data_ptr())).cast("B") if num_bytes else memoryview(b"")
    )


def file_header(tensors: Mapping[str, Form]) -> tuple[bytes, dict[str, int]]:
    """Return the bytes before the tensors of a file, and the byte at which each tensor starts.

    Args:
        tensors: the dtype and the shape of each tensor, in their order.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, start = {}, 0
    for name, (dtype, shape) in tensors.items():
        stop = start + num_bytes((dtype, shape))
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        starts[name], start = start, stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that every tensor starts aligned
    prefix = len(text).to_bytes(8, "little") + text
    return prefix, {name: len(prefix) + start for name, start in starts.items()}


class SafetensorsWriter:
    """Writes one file: first the names, shapes and dtypes of all tensors, then one tensor at a time in that order.

    Example::

        with SafetensorsWriter(path, {"weight": (torch.float32, (2, 3))}) as writer:
            writer.write(torch.zeros(2, 3))
    """

    def __init__(self, path: Place, tensors: Mapping[str, Form]):
        self._expected = list(tensors.values())
        header, _ = file_header(tensors)
        self._file = storage_of(path).new_file(path)
        self._file.write(header)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def write(self, tensor: Tensor) -> None:
        """Append the next tensor."""
        dtype, shape = self._expected.pop(0)
        assert tensor.dtype == dtype and tuple(tensor.shape) == shape
        tensor = tensor.detach().contiguous()
        self._file.write(memory_of(tensor))

    def close(self) -> None:
        """Sync the file to disk and close it."""
        self._file.close()
