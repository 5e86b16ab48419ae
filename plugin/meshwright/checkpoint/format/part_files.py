"""The two files that each rank writes in a checkpoint, the copy that they are written from, and what another rank reads
of them.

``part-00003.safetensors`` holds the elements that rank 3 writes, as a 1-d tensor for each tensor that it has a part of.
``part-00003.json``, its index, says which elements these are, and has a digest for each chunk of them.
"""

from __future__ import annotations

import bisect
import functools
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.files.place import HeldBytes, Place
from meshwright.checkpoint.files.reading import digest, parse_json, read_exactly, read_into, reading
from meshwright.checkpoint.files.storage import storage_of
from meshwright.checkpoint.one_device.safetensors_file import MAX_HEADER, file_header, memory_of
from meshwright.errors import CheckpointError
from meshwright.layout.row_layout import StridedBlock, between, copy_blocks, numel, overlap, packed
from meshwright.outside_files import (
    LARGEST,
    MEMORY,
    anything,
    equal,
    integer,
    listed,
    record,
    require,
    row,
    shown,
    table,
    text,
)

# Bytes under one digest: a rank that needs some of them reads them all. It is a part of the format: another size needs
# another FORMAT.
CHUNK = 2**20
_NEAR = 8 * 2**20  # bytes that one request to a remote store may bring of the tensors after one
# The name of such a file; the tag, which only object stores need, keeps the files of two saves apart.
PART = re.compile(r"part-\d{5,}(-(?P<tag>[0-9a-f]{8}))?\.(safetensors|json)")


@dataclass(frozen=True, kw_only=True)
class Source:
    """The part of one tensor that a rank writes.

    Args:
        dtype: its dtype.
        values: function that returns the elements that the rank holds, in any shape.
        held: which elements of the tensor these are.
        share: those that it writes; their storage is the tensor in its file.
    """

    dtype: torch.dtype
    values: Callable[[], Tensor]
    held: list[StridedBlock]
    share: list[StridedBlock]

    def chunks(self) -> Iterator[Tensor]:
        """Yield what is written, chunk by chunk on the CPU; each chunk is valid until the next."""
        values, total = self.flat(), numel(self.share)
        step = CHUNK // self.dtype.itemsize
        staging = torch.empty(min(step, total), dtype=self.dtype, device=values.device)
        for start in range(0, total, step):
            stop = min(start + step, total)
            copy_blocks(staging, values, overlap(between(self.share, start, stop), self.held))
            yield staging[: stop - start].cpu()

    def copy_to(self, target: Tensor) -> None:
        """Copy what is written to ``target``, which is 1-d; from an accelerator, the copy may still be running."""
        values = self.flat()
        blocks = overlap(self.share, self.held)
        if not values.is_cpu:
            on_device = torch.empty_like(target, device=values.device)
            copy_blocks(on_device, values, blocks)
            target.copy_(on_device, non_blocking=True)
        else:
            copy_blocks(target, values, blocks)

    def flat(self) -> Tensor:
        """Return the elements that the rank holds, 1-d."""
        return self.values().contiguous().view(-1)


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file of a checkpoint as its manifest records it.

    Args:
        bytes: its size.
        digest: the digest of the whole file; for a safetensors file, the digest of its header.
    """

    bytes: int
    digest: str


def file_names(place: int, tag: str = "") -> tuple[str, str]:
    """Return the names of the tensor file and the index of one place."""
    stem = f"part-{place:05d}-{tag}" if tag else f"part-{place:05d}"
    return f"{stem}.safetensors", f"{stem}.json"


def tag_of(files: Mapping[str, object]) -> str:
    """Return the tag in the names of a checkpoint's files; empty if they have none."""
    found = PART.fullmatch(next(iter(files), ""))
    return (found["tag"] or "") if found is not None else ""


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What one rank writes.

    Args:
        place: the rank's place on the mesh.
        sources: what it writes of each tensor, by the keys of the tensors.
        random: function that returns the rank's random state, as JSON.
    """

    place: int
    sources: Mapping[str, Source]
    random: Callable[[], object]

    @property
    def num_bytes(self) -> int:
        """The number of bytes of tensors."""
        return sum(numel(source.share) * source.dtype.itemsize for source in self.sources.values())

    def write(self, folder: Place, on_write: Callable[[int], None], tag: str = "") -> dict[str, FileRecord]:
        """Write this rank's files, and flush them to the disk.

        Args:
            folder: the folder of the checkpoint that is being written.
            on_write: function that is called with the number of bytes after each write.
            tag: the tag in the names of the files.

        Returns:
            The records of the files by name.
        """
        name, index_name = file_names(self.place, tag)
        storage = storage_of(folder)
        ordered = self.in_order()
        forms = {key: (self.sources[key].dtype, (numel(self.sources[key].share),)) for key in ordered}
        header, starts = file_header(forms)
        tensors: dict[str, object] = {}
        size = len(header)
        with storage.new_file(folder / name) as file:
            file.write(header)
            for key in ordered:
                digests = []
                for chunk in self.sources[key].chunks():
                    memory = memory_of(chunk)
                    digests.append(digest(memory))
                    file.write(memory)
                    on_write(len(memory))
                    size += len(memory)
                blocks = [[b.whole, b.length, b.count, b.whole_stride] for b in self.sources[key].share]
                tensors[key] = {"start": starts[key], "blocks": blocks, "digests": digests}
        record = {"place": self.place, "random": self.random(), "tensors": tensors}
        index = json.dumps(record, separators=(",", ":")).encode()
        storage.write_file(folder / index_name, index)
        return {
            name: FileRecord(bytes=size, digest=digest(header)),
            index_name: FileRecord(bytes=len(index), digest=digest(index)),
        }

    def in_order(self) -> list[str]:
        """Return the keys in the order of the file: wide dtypes first, so that every tensor is aligned."""
        return sorted(self.sources, key=lambda key: -self.sources[key].dtype.itemsize)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The part of one tensor in one file: the elements of ``blocks``, from byte ``start`` on, with their digests."""

    start: int
    blocks: list[StridedBlock]
    digests: list[str]

    def chunks(self, dtype: torch.dtype) -> Iterator[tuple[int, int, str]]:
        """Yield the first element, the end and the digest of each chunk."""
        total, step = numel(self.blocks), CHUNK // dtype.itemsize
        for start, expected in zip(range(0, total, step), self.digests, strict=True):
            yield start, min(start + step, total), expected

    def has_digests(self, dtype: torch.dtype) -> bool:
        """Whether there is one digest per chunk."""
        return len(self.digests) == -(-numel(self.blocks) // (CHUNK // dtype.itemsize))


@dataclass(frozen=True, kw_only=True)
class PartIndex:
    """The index of one rank's files.

    Args:
        path: the tensor file.
        random: the rank's random state.
        pieces: what the tensor file has, by the keys of the tensors.
    """

    path: Place
    random: object
    pieces: dict[str, Piece]
    _ahead: HeldBytes = field(default_factory=HeldBytes)

    @staticmethod
    def read(folder: Place, place: int, files: Mapping[str, FileRecord]) -> PartIndex:
        """Read an index, and check it and the header of its tensor file against their digests.

        Raises:
            CheckpointError: if a file is missing or damaged; it names the file.
        """
        index = PartIndex.without_header(folder, place, files)
        check_header(index.path, files[index.path.name])
        return index

    @staticmethod
    def without_header(folder: Place, place: int, files: Mapping[str, FileRecord]) -> PartIndex:
        """Read an index, and check it against its digest.

        Raises:
            CheckpointError: if the index is missing or damaged; it names the file.
        """
        name, index_name = file_names(place, tag_of(files))
        path = folder / index_name
        entry = files[index_name]
        if entry.bytes > MEMORY:
            raise CheckpointError(f"{path} is damaged: it has {entry.bytes} bytes, which no index has")
        index = parse_json(_checked(path, entry, entry.bytes), path)
        require(index, record({"place": equal(place), "random": anything, "tensors": table(_PIECE)}), path)
        pieces = index["tensors"]
        for key, value in pieces.items():  # in place: two tables would take twice the memory
            pieces[key] = _piece(value, path, key)
        return PartIndex(path=folder / name, random=index["random"], pieces=pieces)

    @functools.cached_property
    def _starts(self) -> list[int]:
        return sorted(piece.start for piece in self.pieces.values())

    def _until(self, piece: Piece, size: int) -> int:
        """Return where a request for a piece ends: small tensors that follow it come with it."""
        near = self._starts[bisect.bisect_right(self._starts, piece.start + _NEAR) - 1]
        return max(near, piece.start + numel(piece.blocks) * size)

    def read_into(
        self, key: str, dtype: torch.dtype, target: Tensor, wanted: list[StridedBlock]
    ) -> Iterator[tuple[int, int]]:
        """Read the wanted elements of a tensor, and check their chunks against the digests.

        Args:
            key: the key of the tensor; without a piece of it here, nothing is read.
            dtype: the dtype of the tensor.
            target: 1-d storage of the elements.
            wanted: the elements that are wanted, with their positions in ``target``.

        Yields:
            The numbers of elements and of bytes of each chunk that was read.

        Raises:
            CheckpointError: if the file is damaged; it names the file and the tensor.
        """
        piece = self.pieces.get(key)
        if piece is None or not (found := overlap(wanted, piece.blocks)):
            return
        if not piece.has_digests(dtype):
            raise CheckpointError(f"{self.path} is damaged: {key} has {len(piece.digests)} digests, not one per chunk")
        size = dtype.itemsize
        staging = torch.empty(min(CHUNK // size, numel(piece.blocks)), dtype=dtype)
        staged, direct, run = memory_of(staging), memoryview(b""), None
        if target.is_cpu and target.dtype == dtype and target.is_contiguous() and len(found) == found[0].count == 1:
            run = found[0]  # its chunks are read in place: on the CPU, copying costs as much as reading
            direct = memory_of(target)[run.local * size : (run.local + run.length) * size]
        with reading(self.path, until=self._until(piece, size), ahead=self._ahead) as reader:
            for start, stop, expected in piece.chunks(dtype):
                is_direct = run is not None and run.whole <= start and stop <= run.whole + run.length
                if run is not None and is_direct:
                    memory, count = direct[(start - run.whole) * size : (stop - run.whole) * size], stop - start
                else:
                    found = overlap(wanted, between(piece.blocks, start, stop))
                    memory, count = staged[: (stop - start) * size], numel(found)
                if not count:
                    continue
                read_into(reader, piece.start + start * size, memory)
                if digest(memory) != expected:
                    raise CheckpointError(
                        f"{self.path} is damaged: {len(memory)} bytes of {key}, from byte "
                        f"{piece.start + start * size} on, are not what was saved; load another checkpoint"
                    )
                if not is_direct:
                    copy_blocks(target, staging[: stop - start].to(target.device), found)
                yield count, len(memory)


_POSITION, _COUNT = integer(0, LARGEST), integer(1, LARGEST)
_BLOCK = row(_POSITION, _COUNT, _COUNT, _POSITION)
# Each block is looked at for each chunk that is read. A tensor of a checkpoint has a few, even under uneven plans.
_PIECE = record(
    {"start": _POSITION, "blocks": listed(_BLOCK, least=1, most=2**12), "digests": listed(text("[0-9a-f]{32}"))}
)


def _piece(value: dict[str, Any], path: Place, key: str) -> Piece:
    blocks = [
        StridedBlock(0, whole, length, count, length, whole_stride)
        for whole, length, count, whole_stride in value["blocks"]
    ]
    if any(b.count > 1 and b.whole_stride < b.length for b in blocks):
        raise CheckpointError(f"{path} is damaged: runs of {shown(key)} overlap; load another checkpoint")
    return Piece(start=value["start"], blocks=packed(blocks), digests=value["digests"])


def check_header(path: Place, record: FileRecord) -> None:
    """Check the size and the header of a tensor file.

    Raises:
        CheckpointError: if the file is missing, or its size or header is not what was saved; the message names it.
    """
    with reading(path) as reader:
        length = int.from_bytes(read_exactly(reader, 0, 8), "little")
    if length > min(record.bytes - 8, MAX_HEADER):
        raise CheckpointError(f"{path} is damaged: its header does not fit into the file")
    _checked(path, record, 8 + length)


def _checked(path: Place, record: FileRecord, length: int) -> bytearray:
    """Return the first bytes of a file, after checking the file's size and the digest of these bytes."""
    with reading(path, until=length) as reader:
        size = reader.size
        content = read_exactly(reader, 0, length) if size == record.bytes else bytearray()
    if size != record.bytes:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes, and {record.bytes} were saved")
    if digest(content) != record.digest:
        raise CheckpointError(f"{path} is damaged: its first {length} bytes are not those that were saved")
    return content


class HostMemory:
    """Memory of one save at a time, which stays allocated between saves: new memory is several times slower."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Return that many bytes, pinned where CUDA is in use; what the last call returned is overwritten."""
        if len(self._bytes) != num_bytes:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # frees the old bytes before it allocates new ones
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())
        return self._bytes


class Snapshot:
    """The values of a rank's part as they are when the snapshot is made.

    Until :meth:`copy` has copied a CPU tensor, the snapshot shares its memory by torch's copy-on-write: whoever writes
    to the tensor first, also through ``.data`` or a view, writes to new memory. Tensors on other devices are copied at
    once, and so is memory that torch cannot share (of files, of other processes, of NumPy).

    Args:
        part: what the rank writes.
        memory: the memory for the copies.
    """

    def __init__(self, part: RankPart, memory: HostMemory):
        self._pending: deque[tuple[Source, Tensor]] = deque()
        self._error: Exception | None = None
        targets = _targets(part, memory)
        devices: set[torch.device] = set()
        for key, source in part.sources.items():
            values = source.flat()
            devices |= set() if values.is_cpu else {values.device}
            shared = _shared(values) if values.is_cpu else None
            if shared is None:
                source.copy_to(targets[key])
            else:
                self._pending.append((replace(source, values=partial(_same, shared)), targets[key]))
        for device in devices:
            torch.accelerator.synchronize(device)  # the copies are asynchronous
        sources = {key: _copied(source, targets[key]) for key, source in part.sources.items()}
        self._part = replace(part, sources=sources)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of tensors."""
        return self._part.num_bytes

    def copy(self) -> None:
        """Copy what is shared; an error is raised by :meth:`copied`, since the ranks must learn of it together."""
        try:
            while self._pending:  # drops its hold on each tensor as soon as it is copied
                source, target = self._pending.popleft()
                source.copy_to(target)
        except Exception as error:
            self._error = error
        finally:
            self._pending.clear()

    def copied(self) -> RankPart:
        """Return the copy.

        Raises:
            Exception: what :meth:`copy` ran into.
        """
        if self._error is not None:
            raise self._error
        assert not self._pending
        return self._part


def as_of_now(values: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a function that returns the present values of a tensor, 1-d, whatever the program writes to it later.

    They are shared with a CPU tensor, as :class:`Snapshot` does. Of other tensors they are a copy on the CPU.
    """
    present = values().contiguous().view(-1)
    shared = _shared(present) if present.is_cpu else None
    return partial(_same, present.to("cpu", copy=True) if shared is None else shared)


def _shared(values: Tensor) -> Tensor | None:
    """Return a tensor that keeps the present values of a CPU tensor; None if its memory cannot be shared."""
    try:
        return torch._lazy_clone(values)
    except RuntimeError:
        return None


def _same(values: Tensor) -> Tensor:
    return values


def _targets(part: RankPart, memory: HostMemory) -> dict[str, Tensor]:
    """The memory of each tensor's copy."""
    rest, targets = memory.take(part.num_bytes), {}
    for key in part.in_order():
        source = part.sources[key]
        size = numel(source.share) * source.dtype.itemsize
        targets[key], rest = rest[:size].view(source.dtype), rest[size:]
    return targets


def _copied(source: Source, target: Tensor) -> Source:
    return Source(dtype=source.dtype, values=partial(_same, target), held=source.share, share=source.share)
