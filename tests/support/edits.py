"""Random edits of a checkpoint's files by a hand that knows the format: every digest is made right afterwards."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshwright.checkpoint.files.reading import digest
from meshwright.checkpoint.format.checkpoint_folders import NAME
from meshwright.checkpoint.format.checkpoint_folders import OPTIMIZER_NAME as OPTIMIZER
from meshwright.checkpoint.sealed import NAME as SEAL
from support.hostile import INDEX, TENSORS

Path_ = tuple[str | int, ...]

# Values that are wrong in most places: of other types, beyond every range, or of a form that C code would trust.
ODD: list[Any] = [
    None, True, False, "", "x", "\ud800", "a\0b", "../x", "__class__", "9" * 200, [],
    [[]], {}, {"a": 1}, [1, 2], [None] * 3,
    0, -1, -3, 1, 2**31, 2**32, 2**53 + 1, 2**60, 2**62, 2**63, 2**64, 10**39, 10**4200, 1e18, 0.5, -0.5, 1e300, -1e300,
    float("inf"), float("-inf"), float("nan"), {"tensor": 1e300, "dtype": "float32", "shape": []}, {"list": [[]]},
    {"tensor": 1, "dtype": "float32", "shape": [1, 1, 1]}, {"tensor": "1", "dtype": "int8", "shape": []}, 700, 625,
]  # fmt: skip


def places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Yield the path of every value in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:8]) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def edited(value: Any, draw: random.Random) -> tuple[Any, Path_, str]:
    """Return a copy with one edit, its place and what was done."""
    value = copy.deepcopy(value)
    all_places = [path for path in places(value) if path]
    # Deep tables have most of the places: first a field of the file, then a place in it.
    field = draw.choice(sorted({path[0] for path in all_places}, key=str))
    path = draw.choice([path for path in all_places if path[0] == field])
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    key, old = path[-1], parent[path[-1]]
    kind = draw.choice(["odd"] * 6 + ["near", "near", "remove", "rename", "twice", "more"])
    if kind == "near" and type(old) in (int, float):
        new = draw.choice([old + 1, old - 1, -old - 1, float(old), str(old), old * 2**20, [old]])
    elif kind == "more" and isinstance(old, list):
        new = [*old, *(old[-1:] or [0])] if draw.random() < 0.5 else old[:-1]
    elif kind == "more" and isinstance(old, dict):
        new = {**old, draw.choice(["__class__", "what", "", "\ud800", "a" * 9999]): draw.choice([*ODD, *old.values()])}
    elif kind == "remove":
        del parent[key]
        return value, path, kind
    elif kind == "rename" and isinstance(parent, dict):
        new_key = draw.choice([f"{key}x", "__init__", "", f"{key}"[:-1], "../" + str(key), "\udfff"])
        parent[new_key] = parent.pop(key)
        return value, path, f"rename to {new_key!r}"
    else:
        new = draw.choice(ODD)
    parent[key] = new
    return value, path, f"{kind}: {str(old)[:40]} -> {ascii(new)[:60] if new != 10**4200 else '10^4200'}"


def text_of(value: Any) -> bytes:
    # json.dumps refuses integers of more than 4,300 digits, as a hostile hand does not.
    return json.dumps(value).encode()


def write_manifest(folder: Path, manifest: Any, name: str = NAME, member: str = "manifest") -> None:
    body = text_of(manifest) + b"}\n"
    (folder / name).write_bytes(b'{"digest":"' + digest(body).encode() + b'","' + member.encode() + b'":' + body)


def _with_record(folder: Path, name: str, content: bytes, checked: bytes) -> None:
    """Write a file of a checkpoint, and its record to the manifest."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / NAME).read_bytes())["manifest"]
    manifest["files"][name] = {"bytes": len(content), "digest": digest(checked)}
    write_manifest(folder, manifest)


def edit_manifest(folder: Path, draw: random.Random) -> tuple[str, Path_, str]:
    manifest, path, what = edited(json.loads((folder / NAME).read_bytes())["manifest"], draw)
    write_manifest(folder, manifest)
    return NAME, path, what


def edit_index(folder: Path, draw: random.Random) -> tuple[str, Path_, str]:
    index, path, what = edited(json.loads((folder / INDEX).read_bytes()), draw)
    text = text_of(index)
    _with_record(folder, INDEX, text, text)
    return INDEX, path, what


def _edit_header(path: Path, draw: random.Random) -> tuple[bytes, int, Path_, str]:
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, place, what = edited(json.loads(content[8 : 8 + length]), draw)
    text = text_of(header)
    return struct.pack("<Q", len(text)) + text + content[8 + length :], 8 + len(text), place, what


def edit_part(folder: Path, draw: random.Random) -> tuple[str, Path_, str]:
    content, checked, path, what = _edit_header(folder / TENSORS, draw)
    _with_record(folder, TENSORS, content, content[:checked])
    return TENSORS, path, what


def edit_header(name: str) -> Callable[[Path, random.Random], tuple[str, Path_, str]]:
    def edit(folder: Path, draw: random.Random) -> tuple[str, Path_, str]:
        found = sorted(folder.glob(name))[0]
        content, _, path, what = _edit_header(found, draw)
        found.write_bytes(content)
        return found.name, path, what

    return edit


def edit_optimizer(folder: Path, draw: random.Random) -> tuple[str, Path_, str]:
    fields, path, what = edited(json.loads((folder / OPTIMIZER).read_bytes()), draw)
    (folder / OPTIMIZER).write_bytes(text_of(fields))
    return OPTIMIZER, path, what


def edit_seal(folder: Path, draw: random.Random) -> tuple[str, Path_, str]:
    seal, path, what = edited(json.loads((folder / SEAL).read_bytes())["seal"], draw)
    write_manifest(folder, seal, SEAL, "seal")
    return SEAL, path, what
