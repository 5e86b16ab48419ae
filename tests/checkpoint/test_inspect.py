"""``meshwright inspect``: what a checkpoint holds, and every kind of damage by file, tensor and byte."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import meshwright as mw
from meshwright.checkpoint.files.reading import digest
from meshwright.checkpoint.format import part_files
from meshwright.checkpoint.format.checkpoint_folders import NAME, Manifest
from meshwright.checkpoint.format.load_weights import miscovered
from meshwright.checkpoint.format.part_files import FileRecord, file_names
from meshwright.layout.row_layout import StridedBlock
from meshwright_tools.cli import app

TENSORS, INDEX = file_names(0)


class Odd(nn.Module):
    """Tensors of every shape and dtype that a model can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.weight = nn.Parameter(torch.randn(40, 30))
        self.low = nn.Parameter(torch.randn(5, 3, 2).bfloat16(), requires_grad=False)
        self.tied = self.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(7))


def odd_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_files, "CHUNK", 1024)  # so that small tensors have several
        model, optimizer = odd_model()
        parent = tmp_path_factory.mktemp("runs")
        for step in (9, 10):
            mw.save_checkpoint(parent / f"step-{step}", model, optimizer, step=step, extra={"note": step})
        yield parent


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved / "step-10", tmp_path / "step-10")
    return tmp_path / "step-10"


def inspect(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def report(*arguments: Any) -> tuple[int, Any]:
    result = inspect(*arguments, "--json")
    return result.exit_code, json.loads(result.stdout)


def test_a_whole_checkpoint_is_described(folder: Path) -> None:
    result = inspect(folder)
    assert result.exit_code == 0
    assert "WHOLE: all 14,483 bytes" in result.stdout and "AdamW (exp_avg, exp_avg_sq, step)" in result.stdout
    code, found = report(folder)
    assert (code, found["is_whole"], found["damages"]) == (0, True, [])
    assert (found["step"], found["mesh"], found["plan"]) == (10, {"pp": 1, "dp": 1, "tp": 1}, None)
    assert found["versions"]["torch"] == version("torch")
    weights = found["components"]["weights"]
    assert weights == {
        "tensors": 6,
        "elements": 1 + 0 + 1200 + 30 + 3 + 1,
        "dtypes": ["bfloat16", "bool", "float32", "int64"],
        "bytes": 4 + 4800 + 60 + 3 + 8,
        "other_names": 1,
    }
    assert found["components"]["extra"] == {"note": 10}
    assert found["components"]["random"] == ["numpy", "python", "torch"]
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert found["files"] == sizes and found["bytes_on_disk"] == sum(sizes.values())
    assert found["bytes_read"] == found["unique_bytes"] == sizes[TENSORS] - header_bytes(folder)


def header_bytes(folder: Path) -> int:
    return 8 + int.from_bytes((folder / TENSORS).read_bytes()[:8], "little")


def piece(folder: Path, key: str) -> Any:
    return json.loads((folder / INDEX).read_text())["tensors"][key]


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


def reseal(folder: Path) -> None:
    """Give the manifest the digests of the files as they are, as if a faulty writer had written them."""
    manifest = Manifest.read(folder)
    header = (folder / TENSORS).read_bytes()[: header_bytes(folder)]
    index = (folder / INDEX).read_bytes()
    manifest.files[TENSORS] = FileRecord(bytes=(folder / TENSORS).stat().st_size, digest=digest(header))
    manifest.files[INDEX] = FileRecord(bytes=len(index), digest=digest(index))
    (folder / NAME).unlink()
    manifest.write(folder / NAME)


def change_index(folder: Path, change: Callable[[Any], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["tensors"])
    (folder / INDEX).write_text(json.dumps(index))
    reseal(folder)


def flip_two_chunks(folder: Path) -> None:
    start = piece(folder, "weights/weight")["start"]
    flip(folder / TENSORS, start + 1030)
    flip(folder / TENSORS, start + 2050)
    flip(folder / TENSORS, piece(folder, "weights/mask")["start"])


def cut_off(folder: Path) -> None:
    os.truncate(folder / TENSORS, piece(folder, "weights/mask")["start"])


def rename_in_header(folder: Path) -> None:
    content = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(content.replace(b'"weights/mask"', b'"weights/task"', 1))
    reseal(folder)


def retype_in_header(folder: Path) -> None:
    content = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(content.replace(b'"dtype":"BF16"', b'"dtype":"F16" ', 1))
    reseal(folder)


def write_twice(tensors: Any) -> None:
    tensors["weights/weight"]["blocks"] = [[0, 600, 1, 600], [599, 600, 1, 600]]


def lose_a_digest(tensors: Any) -> None:
    tensors["weights/weight"]["digests"].pop()


def go_beyond(tensors: Any) -> None:
    tensors["weights/weight"]["blocks"] = [[1, 1200, 1, 1200]]


def forget_optimizer_tensor(folder: Path) -> None:
    manifest = Manifest.read(folder)
    del manifest.tensors["state/scale/exp_avg"]
    (folder / NAME).unlink()
    manifest.write(folder / NAME)


# damage, (file, tensor, what the problem says) of all that must be found
DAMAGES: dict[str, tuple[Callable[[Path], Any], list[tuple[str, str | None, str]]]] = {
    "flipped bits": (
        flip_two_chunks,
        [
            (TENSORS, "weights/weight", "weights/weight is not what was saved"),
            (TENSORS, "weights/mask", "weights/mask is not what was saved"),
        ],
    ),
    "cut off": (
        cut_off,
        [(TENSORS, None, "bytes, and"), (TENSORS, "weights/mask", "weights/mask is cut off")],
    ),
    "manifest": (lambda folder: flip(folder / NAME, 500), [(NAME, None, "it is not what was saved")]),
    "no manifest": (lambda folder: (folder / NAME).unlink(), [(NAME, None, "No such file")]),
    "index": (lambda folder: flip(folder / INDEX, 500), [(INDEX, None, "are not those that were saved")]),
    "no index": (lambda folder: (folder / INDEX).unlink(), [(INDEX, None, "No such file")]),
    "header": (lambda folder: flip(folder / TENSORS, 20), [(TENSORS, None, "are not those that were saved")]),
    "no tensors": (lambda folder: (folder / TENSORS).unlink(), [(TENSORS, None, "No such file")]),
    "foreign file": (
        lambda folder: (folder / "notes.txt").touch(),
        [("notes.txt", None, "not a file of a checkpoint")],
    ),
    "foreign part": (
        lambda folder: (folder / "part-00001.json").touch(),
        [("part-00001.json", None, "not a file of this checkpoint")],
    ),
    "other name in header": (
        rename_in_header,
        [
            (TENSORS, "weights/mask", "in its index, but not in its header"),
            (TENSORS, "weights/task", "has weights/task, which checkpoint.json does not list"),
        ],
    ),
    "other dtype in header": (retype_in_header, [(TENSORS, "weights/low", "float16 from byte")]),
    "written twice": (
        lambda folder: change_index(folder, write_twice),
        [(NAME, "weights/weight", "element 599 is in more than one place")],
    ),
    "beyond the end": (
        lambda folder: change_index(folder, go_beyond),
        [(NAME, "weights/weight", "1201 elements or more, not 1200")],
    ),
    "lost digest": (
        lambda folder: change_index(folder, lose_a_digest),
        [(TENSORS, "weights/weight", "has 4 digests of weights/weight")],
    ),
    "optimizer": (
        forget_optimizer_tensor,
        [
            (NAME, "state/scale/exp_avg", "lists no tensor state/scale/exp_avg"),
            (TENSORS, "state/scale/exp_avg", "which checkpoint.json does not list"),
        ],
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_every_damage_is_found_by_name(kind: str, folder: Path) -> None:
    damage, expected = DAMAGES[kind]
    damage(folder)
    code, found = report(folder)
    assert (code, found["is_whole"]) == (1, False)
    named = [(entry["file"], entry["tensor"]) for entry in found["damages"]]
    assert sorted(named, key=str) == sorted([(file, tensor) for file, tensor, _ in expected], key=str)
    for file, tensor, text in expected:
        problems = [d["problem"] for d in found["damages"] if (d["file"], d["tensor"]) == (file, tensor)]
        assert text in problems[0] and str(folder) not in problems[0]
    text = inspect(folder)
    assert text.exit_code == 1 and "DAMAGED" in text.stdout and "WHOLE" not in text.stdout
    assert all(f"{entry['file']}: {entry['problem']}" in text.stdout for entry in found["damages"])


def test_the_place_of_a_damage_is_the_chunks_of_its_bytes(folder: Path) -> None:
    start = piece(folder, "weights/weight")["start"]
    flip_two_chunks(folder)
    _, found = report(folder)
    (weight,) = (entry for entry in found["damages"] if entry["tensor"] == "weights/weight")
    assert (weight["byte"], weight["bytes"]) == (start + 1024, 2048)  # the second and the third chunk, as one
    assert f"(byte {start + 1024} to {start + 3071})" in inspect(folder).stdout


def test_without_check_no_tensor_is_read(folder: Path) -> None:
    flip_two_chunks(folder)
    code, found = report(folder, "--no-check")
    assert (code, found["is_whole"], found["bytes_read"], found["damages"]) == (0, None, None, [])
    assert "The tensors were not read (--no-check)" in inspect(folder, "--no-check").stdout
    (folder / INDEX).unlink()
    assert report(folder, "--no-check")[0] == 1


def test_a_folder_of_checkpoints_is_listed_and_its_newest_whole_one_shown(saved: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(saved, runs)
    (runs / "notes").mkdir()
    code, found = report(runs, "--no-check")
    assert (code, found["folder"], found["step"]) == (0, str(runs / "step-10"), 10)
    assert [(row["name"], row["step"], row["problem"]) for row in found["checkpoints"]] == [
        ("step-9", 9, None),
        ("step-10", 10, None),
    ]
    os.truncate(runs / "step-10" / TENSORS, 100)
    code, found = report(runs, "--no-check")
    assert (code, found["step"]) == (0, 9)
    assert found["checkpoints"][1]["problem"] == f"{TENSORS} is missing or has another size"
    (runs / "step-9" / NAME).unlink()
    result = inspect(runs)
    assert result.exit_code == 1 and "none of these checkpoints is whole" in result.stdout
    assert report(runs)[1]["is_whole"] is False


@pytest.mark.parametrize("kind", ["nothing", "file", "empty"])
def test_what_is_no_checkpoint_is_an_error_of_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / kind
    if kind == "file":
        path.touch()
    elif kind == "empty":
        path.mkdir()
    result = inspect(path)
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr.count("\n") == 1 and str(path) in result.stderr


@pytest.mark.parametrize("kind", ["deep", "pipe", "link", "whole"])
def test_the_state_of_a_trainer_may_be_anything(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    (folder / "trainer_state.json").write_text('{"global_step": 5}')
    if kind == "deep":
        (folder / "trainer_state.json").write_text("[" * 200_000)
    elif kind == "pipe":
        os.mkfifo(folder / "meshwright_progress.json")
    elif kind == "link":  # as in the cache of the Hub
        (folder / "trainer_state.json").rename(tmp_path / "blob")
        (folder / "trainer_state.json").symlink_to(tmp_path / "blob")
    code, found = report(folder, "--no-check")
    assert (code, found["step"]) == (0, None if kind == "deep" else 5)


@pytest.mark.parametrize("fields", [{"shown_steps": 5, "plan": [1]}, {"shown_steps": [], "plan": "dp2"}])
def test_fields_of_other_kinds_are_not_known(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint_5"
    folder.mkdir()
    (folder / "meshwright.json").write_text(json.dumps(fields))
    code, found = report(folder)
    assert code == 1 and found["step"] is None and found["plan"] is None
    assert "not distributed, or not known" in inspect(folder).stdout


@pytest.mark.parametrize(
    ("blocks", "problem"),
    [
        ([StridedBlock(0, 0, 12)], None),
        ([StridedBlock(0, 0, 2, 3, 2, 4), StridedBlock(6, 2, 2, 3, 2, 4)], None),  # two halves of the columns
        ([StridedBlock(0, 4, 8), StridedBlock(8, 0, 4)], None),
        ([StridedBlock(0, 0, 2, 3, 2, 4), StridedBlock(6, 2, 1, 3, 1, 4)], "element 3 is in no file"),
        ([StridedBlock(0, 0, 2, 3, 2, 4), StridedBlock(6, 1, 2, 3, 2, 4)], "element 1 is in more than one place"),
        (
            [StridedBlock(0, 0, 5), StridedBlock(5, 4, 7)],
            "element 4 is in more than one place",
        ),  # the right number, and a gap
        ([StridedBlock(0, 1, 11), StridedBlock(11, 11, 1)], "element 0 is in no file"),
        ([StridedBlock(0, 0, 11)], "element 11 is in no file"),
        ([StridedBlock(0, 0, 12), StridedBlock(12, 12, 1)], "the files have 13 elements or more, not 12"),
        ([], "element 0 is in no file"),
    ],
)
def test_coverage_is_exact(blocks: list[StridedBlock], problem: str | None) -> None:
    assert miscovered(blocks, 12) == problem
    assert miscovered([], 0) is None
