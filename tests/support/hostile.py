"""A corpus of hostile checkpoints: what somebody writes who wants to run code, read other files or fill the memory."""

from __future__ import annotations

import base64
import functools
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.checkpoint.files.reading import digest
from meshwright.checkpoint.format.checkpoint_folders import NAME

Change = Callable[[Path], Any]
TENSORS, INDEX = "part-00000.safetensors", "part-00000.json"
MARK = "MESHWRIGHT_CODE_RAN"


class Code:
    """Its pickle runs code when it is loaded."""

    def __reduce__(self) -> Any:
        return exec, (f"import os; os.environ[{MARK!r}] = '1'",)


PICKLE = pickle.dumps(Code())


@functools.cache
def packed() -> str:
    """Return 256 MiB of zeros, compressed and written as text."""
    return base64.b85encode(zlib.compress(bytes(2**28), level=9)).decode()


def manifest_of(change: Callable[[Any], Any]) -> Change:
    """Return what changes the manifest and gives it the right digest."""

    def apply(folder: Path) -> None:
        body = json.loads((folder / NAME).read_bytes())["manifest"]
        change(body)
        seal(folder, json.dumps(body).encode())

    return apply


def to_format_1(folder: Path) -> None:
    """Turn a checkpoint into one of the first format, whose manifest has the sizes of three axes as fields."""

    def change(manifest: Any) -> None:
        assert manifest["format"] == "meshwright-checkpoint-2" and manifest.pop("ranks")
        manifest.update(format="meshwright-checkpoint-1", **manifest.pop("mesh"))

    manifest_of(change)(folder)


def seal(folder: Path, body: bytes) -> None:
    (folder / NAME).write_bytes(b'{"digest":"' + digest(body + b"}\n").encode() + b'","manifest":' + body + b"}\n")


def of_index(change: Callable[[Any], Any]) -> Change:
    """Return what changes the index, with the right digest in the manifest."""

    def apply(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_bytes())
        change(index)
        index_text(json.dumps(index).encode())(folder)

    return apply


def index_text(text: bytes) -> Change:
    def apply(folder: Path) -> None:
        (folder / INDEX).write_bytes(text)
        record = {"bytes": len(text), "digest": digest(text)}
        manifest_of(lambda manifest: manifest["files"].update({INDEX: record}))(folder)

    return apply


def replaced(name: str, make: Callable[[Path], Any]) -> Change:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return apply


def elsewhere(name: str) -> Change:
    """Return what moves a file out of the folder and links to it, so that a load that follows the link succeeds."""

    def apply(folder: Path) -> None:
        outside = folder.parent / "outside"
        outside.mkdir(exist_ok=True)
        (folder / name).rename(outside / name)
        (folder / name).symlink_to(outside / name)

    return apply


def sparse(size: int, start: bytes = b"") -> Callable[[Path], None]:
    """Return what makes a file of many bytes that takes no space on the disk."""

    def make(path: Path) -> None:
        path.write_bytes(start)
        os.truncate(path, size)

    return make


def device(path: Path) -> None:
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # the same as /dev/zero, which never ends


def safetensors(header: Any, data: int = 8, *, length: int | None = None) -> Callable[[Path], None]:
    """Return what writes a file of this header, as a text or a table."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()

    def make(path: Path) -> None:
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(data))

    return make


def tensor(*place: int, dtype: Any = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": place or (0, 8)}


def zipped_pickle(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", PICKLE)


def first(index: Any) -> Any:
    return index["tensors"]["weights/weight"]


def numpy_position(position: int) -> Change:
    """NumPy reads its next word there without looking: a large one is the end of the process."""
    return of_index(lambda i: i["random"]["numpy"].__setitem__(2, position))


MIB = 2**20
BOMB = b"[" + b"[]," * (12 * MIB) + b"[]]"  # 36 MiB, and 2.3 GiB as Python lists

# Of a folder that save_checkpoint wrote.
CHECKPOINTS: dict[str, Change] = {
    "manifest: a pickle": replaced(NAME, lambda path: path.write_bytes(PICKLE)),
    "manifest: a link to a copy": elsewhere(NAME),
    "manifest: a pipe": replaced(NAME, os.mkfifo),
    "manifest: a device": replaced(NAME, device),
    "manifest: a folder": replaced(NAME, os.mkdir),
    "manifest: a terabyte of nothing": replaced(NAME, sparse(2**40)),
    "manifest: 900 MiB of nothing": replaced(NAME, sparse(900 * MIB)),
    "manifest: 400 MiB after the right start": replaced(
        NAME, sparse(400 * MIB, b'{"digest":"' + b"0" * 32 + b'","manifest":')
    ),
    "manifest: many lists": lambda folder: seal(folder, BOMB),
    "manifest: 12 MiB of lists": lambda folder: seal(folder, b"[" + b"[]," * (4 * MIB) + b"[]]"),
    "manifest: 31 MiB of numbers": lambda folder: seal(folder, b"[" + b"1.5," * (31 * MIB // 4) + b"1]"),
    "manifest: one emoji in 64 MiB": lambda folder: seal(folder, b'"' + b"a" * (64 * MIB) + "😀".encode() + b'"'),
    "manifest: 20 MiB and an escape": lambda folder: seal(folder, b'"' + b"a" * (20 * MIB) + b'\\ud83d\\ude00"'),
    "manifest: a sparse GiB": replaced(NAME, sparse(2**30 - 1, b'{"digest":"' + b"0" * 32 + b'","manifest":')),
    "manifest: 100,000 names, the last twice": lambda folder: seal(
        folder, json.dumps(dict.fromkeys(map(str, range(100_000)))).encode()[:-1] + b', "99999": null}'
    ),
    "manifest: half a character": manifest_of(
        lambda m: m["tensors"].update({"weights/\ud800": m["tensors"].popitem()[1]})
    ),
    "manifest: a negative step": manifest_of(lambda m: m.update(step=-3)),
    "manifest: a time of 2116": manifest_of(lambda m: m.update(written=2**62)),
    "manifest: lr = inf": manifest_of(lambda m: m["optimizer"]["groups"][0]["options"].update(lr=float("inf"))),
    "manifest: lr = -1": manifest_of(lambda m: m["optimizer"]["groups"][0]["options"].update(lr=-1)),
    "manifest: lr = 1e300": manifest_of(lambda m: m["optimizer"]["groups"][0]["options"].update(lr=1e300)),
    "manifest: a beta of 1": manifest_of(
        lambda m: m["optimizer"]["groups"][0]["options"].update(betas={"tuple": [1, 0.999]})
    ),
    "manifest: a state named __class__": manifest_of(lambda m: m["optimizer"]["values"]["weight"].update(__class__=1)),
    "manifest: a state that AdamW lacks": manifest_of(lambda m: m["optimizer"]["values"]["weight"].update(what=1)),
    "manifest: deep": lambda folder: seal(folder, b"[" * 500_000 + b"]" * 500_000),
    "manifest: a name twice": lambda folder: seal(folder, b'{"step":1,"step":2}'),
    "manifest: an integer of 5000 digits": lambda folder: seal(folder, b'{"step":' + b"9" * 5000 + b"}"),
    "manifest: an integer of 4000 digits": manifest_of(lambda m: m.update(written=10**4000)),
    "manifest: bytes that are not text": lambda folder: seal(folder, b'{"step":"\xff\xfe"}'),
    "manifest: a file above": manifest_of(lambda m: m["files"].update({"../x.json": m["files"].pop(INDEX)})),
    "manifest: an absolute file": manifest_of(lambda m: m["files"].update({"/etc/passwd": m["files"].pop(INDEX)})),
    "manifest: a file with NUL": manifest_of(lambda m: m["files"].update({"a\0b": m["files"].pop(INDEX)})),
    "manifest: a million ranks": manifest_of(lambda m: m.update({"dp" if "dp" in m else "ranks": 2**20})),
    "manifest: a mesh of 100,000 axes": manifest_of(lambda m: m.update(mesh=dict.fromkeys(map(str, range(10**5)), 1))),
    "manifest: a negative size": manifest_of(lambda m: m["files"][INDEX].update(bytes=-1)),
    "manifest: a shape beyond all memory": manifest_of(
        lambda m: m["tensors"].update({"weights/weight": ["F32", [2**59]]})
    ),
    "manifest: a shape of 0 x 10^30": manifest_of(lambda m: m["tensors"].update({"weights/x": ["F32", [0, 10**30]]})),
    "manifest: a shape of a million dims": manifest_of(
        lambda m: m["tensors"].update({"weights/x": ["F32", [1] * 10**6]})
    ),
    "manifest: a list as dtype": manifest_of(lambda m: m["tensors"].update({"weights/weight": [["F32"], [3, 2]]})),
    "manifest: a tie in a circle": manifest_of(lambda m: m["ties"].update({"weights/a": "weights/a"})),
    "manifest: an option beyond its dtype": manifest_of(
        lambda m: m["optimizer"]["groups"][0]["options"].update(lr={"tensor": 10**300, "dtype": "int8", "shape": []})
    ),
    "manifest: an option of an odd dtype": manifest_of(
        lambda m: m["optimizer"]["groups"][0]["options"].update(lr={"tensor": 1, "dtype": "qint8", "shape": []})
    ),
    "manifest: a config of another name": manifest_of(lambda m: m.update(model_config={"../config.json": "{}"})),
    "manifest: deep options": manifest_of(lambda m: m["optimizer"]["groups"][0]["options"].update(lr=deep(400))),
    "manifest: one terabyte as size of an index": manifest_of(lambda m: m["files"][INDEX].update(bytes=2**40)),
    "index: a terabyte, as said": lambda folder: (
        replaced(INDEX, sparse(2**40))(folder),
        manifest_of(lambda m: m["files"][INDEX].update(bytes=2**40))(folder),
    ),
    "index: a pickle": index_text(PICKLE),
    "index: a link to a copy": elsewhere(INDEX),
    "index: a pipe": replaced(INDEX, os.mkfifo),
    "index: a device": replaced(INDEX, device),
    "index: a link to itself": replaced(INDEX, lambda path: path.symlink_to(path)),
    "index: many lists": index_text(BOMB),
    "index: deep": index_text(b"[" * 500_000),
    "index: NaN": of_index(lambda i: first(i).update(start=float("nan"))),
    "index: infinity": of_index(lambda i: first(i).update(start=float("inf"))),
    "index: an integer of 4000 digits": of_index(lambda i: first(i).update(start=10**4000)),
    "index: a negative start": of_index(lambda i: first(i).update(start=-1)),
    "index: a truth value as start": of_index(lambda i: first(i).update(start=True)),
    "index: a start beyond the file": of_index(lambda i: first(i).update(start=2**50)),
    "index: a block beyond the tensor": of_index(lambda i: first(i).update(blocks=[[0, 2**50, 1, 1]])),
    "index: 2^50 runs": of_index(lambda i: first(i).update(blocks=[[0, 1, 2**50, 1]])),
    "index: 2^38 runs of a sparse file": lambda folder: (
        os.truncate(folder / TENSORS, 2**39),
        manifest_of(lambda m: m["files"][TENSORS].update(bytes=2**39))(folder),
        manifest_of(lambda m: m["tensors"].update({"weights/weight": ["U8", [2**39]]}))(folder),
        of_index(lambda i: first(i).update(blocks=[[0, 1, 2**38, 2], [1, 1, 2**38, 2]]))(folder),
    ),
    "index: 100,000 blocks": of_index(lambda i: first(i).update(blocks=[[n, 1, 1, 0] for n in range(100_000)])),
    "index: runs that overlap": of_index(lambda i: first(i).update(blocks=[[0, 6, 6, 1]])),
    "index: texts as blocks": of_index(lambda i: first(i).update(blocks=["abcd"])),
    "index: a name twice": lambda folder: index_text(
        (folder / INDEX).read_bytes().replace(b'{"place":0', b'{"place":0,"place":0', 1)
    )(folder),
    "index: a list": index_text(b"[]"),
    "index: another part": of_index(lambda i: i.update(place=1)),
    "index: an unknown tensor": of_index(lambda i: i["tensors"].update({"../x": first(i)})),
    "random: a list": of_index(lambda i: i.update(random=[1])),
    "random: texts": of_index(lambda i: i["random"].update(torch="x")),
    "random: a short state": of_index(lambda i: i["random"].update(torch="AAAA")),
    "random: numbers for numpy": of_index(lambda i: i["random"].update(numpy=[1, 2])),
    "random: a position of 2^30": numpy_position(2**30),
    "random: a position of 700": numpy_position(700),
    "random: a negative position": numpy_position(-1),
    "random: a text as normal number": of_index(lambda i: i["random"]["python"].__setitem__(2, "x")),
    "random: gigabytes when unpacked": of_index(lambda i: i["random"].update(torch=f"{packed()} {packed()}")),
    "random: numbers for python": of_index(lambda i: i["random"].update(python=[1, 2])),
    "tensors: a pickle": replaced(TENSORS, zipped_pickle),
    "tensors: a link to a copy": elsewhere(TENSORS),
    "tensors: a pipe": replaced(TENSORS, os.mkfifo),
    "tensors: a device": replaced(TENSORS, device),
    "tensors: a terabyte of nothing": replaced(TENSORS, sparse(2**40)),
    "tensors: a huge header": replaced(TENSORS, safetensors(b"{}", length=2**63)),
}


def deep(count: int) -> Any:
    value: Any = 1
    for _ in range(count):
        value = {"list": [value]}
    return value


FILE = "model.safetensors"
INDEX_OF_FILES = "model.safetensors.index.json"


def indexed(weight_map: Any, file: str = "a.safetensors") -> Change:
    def apply(folder: Path) -> None:
        (folder / FILE).rename(folder / file)
        (folder / INDEX_OF_FILES).write_text(json.dumps({"weight_map": weight_map}))

    return apply


def header(*args: Any, **kwargs: Any) -> Change:
    return replaced(FILE, safetensors(*args, **kwargs))


# Of a folder that save_weights wrote.
WEIGHTS: dict[str, Change] = {
    "a pickle as safetensors": replaced(FILE, lambda path: path.write_bytes(PICKLE)),
    "an archive of torch.save": replaced(FILE, zipped_pickle),
    "a pickle by its usual name": lambda folder: (
        (folder / FILE).unlink(),
        (folder / "pytorch_model.bin").write_bytes(PICKLE),
    ),
    "a link to a copy": elsewhere(FILE),
    "a pipe": replaced(FILE, os.mkfifo),
    "a device": replaced(FILE, device),
    "a terabyte of nothing": replaced(FILE, sparse(2**40)),
    "a header of 2^63 bytes": header(b"{}", length=2**63),
    "a header of 99 MB of nothing": replaced(FILE, sparse(2**40, struct.pack("<Q", 99_000_000))),
    "a header longer than the file": header({"weight": tensor()}, length=10**6),
    "a header of many lists": header(b'{"x":' + BOMB + b"}"),
    "a deep header": header(b'{"x":' + b"[" * 500_000),
    "a header of a list": header(b"[]"),
    "bytes that are not text": header(b'{"\xff":1}'),
    "an integer of 5000 digits": header(b'{"weight":{"shape":[' + b"9" * 5000 + b"]}}"),
    "a shape of 10^30": header({"weight": tensor(shape=(10**30,))}),
    "a shape of 0 x 10^30": header({"weight": tensor(0, 0, shape=(0, 10**30))}, 0),
    "a product beyond 64 bits": header({"weight": tensor(0, 8, shape=(2**32, 2**32))}),
    "a negative shape": header({"weight": tensor(shape=(-2, -1))}),
    "a truth value in a shape": header({"weight": tensor(shape=(2, True))}),
    "a number with a fraction": header({"weight": tensor(shape=(2.0,))}),
    "NaN as offset": header(b'{"weight":{"dtype":"F32","shape":[2],"data_offsets":[NaN,8]}}'),
    "a list as dtype": header({"weight": tensor(dtype=["F32"])}),
    "an unknown dtype": header({"weight": tensor(dtype="F4")}),
    "a text as shape": header({"weight": tensor(shape="22")}),
    "no dtype": header({"weight": {"shape": [2], "data_offsets": [0, 8]}}),
    "three offsets": header({"weight": tensor(0, 4, 8)}),
    "offsets that overlap": header({"a": tensor(0, 8), "b": tensor(0, 8), "weight": tensor(16, 24)}, 24),
    "offsets with a hole": header({"weight": tensor(8, 16)}, 16),
    "offsets that run back": header({"weight": tensor(8, 0)}),
    "offsets beyond the file": header({"weight": tensor(2**50, 2**50 + 8)}),
    "a name twice": header(b'{"weight":1,"weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    "an index of files above": indexed({"weight": "../a.safetensors"}),
    "an index of absolute files": indexed({"weight": "/etc/passwd"}),
    "an index of names with NUL": indexed({"weight": "a\0.safetensors"}),
    "an index of the folder": indexed({"weight": "."}),
    "an index of the folder above": indexed({"weight": ".."}),
    "an index of numbers": indexed({"weight": 1}),
    "an index of lists": indexed([["weight", "a.safetensors"]]),
    "an index that is its own file": indexed({"weight": INDEX_OF_FILES}),
    "an index of a link to a copy": lambda folder: (
        indexed({"weight": "a.safetensors"})(folder),
        elsewhere("a.safetensors")(folder),
    ),
    "a deep index": lambda folder: (
        indexed({})(folder),
        (folder / INDEX_OF_FILES).write_text("[" * 500_000),
    ),
    "an index of many lists": lambda folder: (indexed({})(folder), (folder / INDEX_OF_FILES).write_bytes(BOMB)),
    "an index of a pipe": lambda folder: ((folder / FILE).unlink(), os.mkfifo(folder / INDEX_OF_FILES)),
}

OPTIMIZER = "optimizer.json"


def of_optimizer(change: Callable[[Any], Any]) -> Change:
    def apply(folder: Path) -> None:
        fields = json.loads((folder / OPTIMIZER).read_text())
        change(fields)
        (folder / OPTIMIZER).write_text(json.dumps(fields))

    return apply


# Of a folder that save_optimizer of an earlier version wrote.
OPTIMIZERS: dict[str, Change] = {
    "a pickle": replaced(OPTIMIZER, lambda path: path.write_bytes(PICKLE)),
    "a link to a copy": elsewhere(OPTIMIZER),
    "a pipe": replaced(OPTIMIZER, os.mkfifo),
    "a device": replaced(OPTIMIZER, device),
    "a terabyte of nothing": replaced(OPTIMIZER, sparse(2**40)),
    "many lists": replaced(OPTIMIZER, lambda path: path.write_bytes(BOMB)),
    "deep": replaced(OPTIMIZER, lambda path: path.write_text("[" * 500_000)),
    "a name twice": replaced(OPTIMIZER, lambda path: path.write_text('{"format":1,"format":2}')),
    "a file above": of_optimizer(lambda f: f.update(weight_map=dict.fromkeys(f["weight_map"], "../x.safetensors"))),
    "100,000 masters": of_optimizer(lambda f: f.update(masters=[str(n) for n in range(100_000)])),
    "lr = inf": of_optimizer(lambda f: f["groups"][0]["options"].update(lr=float("inf"))),
    "lr that is not a number": of_optimizer(lambda f: f["groups"][0]["options"].update(lr=float("nan"))),
    "lr as a text": of_optimizer(lambda f: f["groups"][0]["options"].update(lr="evil")),
    "a number beyond its dtype": of_optimizer(
        lambda f: f["groups"][0]["options"].update(lr={"tensor": 10**300, "dtype": "int8", "shape": []})
    ),
    "deep options": of_optimizer(lambda f: f["groups"][0]["options"].update(lr=deep(300))),
}
