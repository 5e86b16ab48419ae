"""Weights from safetensors files: every rank reads its own rows, and a bad checkpoint is an error by name."""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import meshwright as mw
from meshwright.checkpoint.files.reading import reading
from meshwright.checkpoint.one_device import safetensors_file
from meshwright.checkpoint.one_device.safetensors_file import read_header, read_rows
from meshwright.checkpoint.one_device.weight_files import WeightFiles
from meshwright.layout.row_layout import RowLayout
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.parallel.shards.stand_in import own_nbytes
from support.construction import HOWS, PLANS, assert_equal, distribute, make, write_checkpoint
from support.models import tokens
from support.tiers import crossings


def loaded(path: Path, how: str, plan: dict[str, Any], dtype: torch.dtype, **overrides: Any) -> dict[str, Tensor]:
    model = distribute(make(how=how, **overrides).to(dtype), weights=path, **plan)
    assert all(not t.is_meta for t in (*model.parameters(), *model.buffers()))
    ids = tokens(4, 12)
    assert model(input_ids=ids, labels=ids).loss.isfinite()
    return mw.full_state_dict(model)


@pytest.mark.parametrize(
    ("kind", "how"),
    crossings(
        itertools.product(["single", "index", "directory"], HOWS),
        but=[("single", "real"), ("index", "deferred"), ("directory", "meta")],
    ),
)
def test_weights_from_a_checkpoint(kind: str, how: str, pool2: Any, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, kind)
    assert len(list(tmp_path.glob("*.safetensors"))) == (1 if kind != "index" else len(list(tmp_path.glob("model-*"))))
    for plan in ("tp2+sp", "dp2+zero1"):
        weights = pool2.run(loaded, path, how, PLANS[plan], torch.float32)[0]
        assert_equal(weights, make(seed=77).state_dict())


def test_a_list_of_files_is_what_its_index_is(tmp_path: Path) -> None:
    index = write_checkpoint(tmp_path, "index")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert WeightFiles.open(files).entries == WeightFiles.open(index).entries
    assert WeightFiles.open(files[:1]).entries == read_header_with_path(files[0])
    with pytest.raises(mw.CheckpointError, match=r"both hold .*; name one of them"):
        WeightFiles.open([*files, files[0]])
    with pytest.raises(mw.CheckpointError, match="an empty list of files"):
        WeightFiles.open([])


def read_header_with_path(file: Path) -> dict[str, Any]:
    return {name: (file, entry) for name, entry in read_header(file).items()}


@pytest.mark.parametrize(
    ("on_disk", "in_memory"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_the_dtype_is_converted(on_disk: torch.dtype, in_memory: torch.dtype, pool2: Any, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "directory", dtype=on_disk)
    weights = pool2.run(loaded, path, "meta", {"tp": 2}, in_memory)[0]
    assert_equal(weights, make(seed=77).to(on_disk).to(in_memory).state_dict())


def test_a_tied_model_needs_no_head_in_the_checkpoint(pool2: Any, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "single", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(path)
    weights = pool2.run(loaded, path, "deferred", {"tp": 2}, torch.float32, tie_word_embeddings=True)[0]
    assert_equal(weights, make(seed=77, tie_word_embeddings=True).state_dict())


def bytes_read(path: Path) -> tuple[int, int]:
    def count() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 4000}
    model = make(how="meta", **sizes)
    before = count()
    model = distribute(model, tp=2, weights=path)
    return count() - before, sum(map(own_nbytes, model.parameters()))


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="counts the bytes by Linux's own account")
def test_a_rank_reads_its_own_bytes_only(pool2: Any, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "single", hidden_size=256, intermediate_size=512, vocab_size=4000)
    for read, shard in pool2.run(bytes_read, path):
        assert shard <= read <= 1.02 * shard
        assert 1.5 * read < path.stat().st_size


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("staging", [8, 60, 10**6])
def test_rows_of_any_dim(
    dim: int, dtype: torch.dtype, staging: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "_STAGING", staging)
    full = torch.randn(7, 6, 5, dtype=torch.float32)
    save_file({"other": torch.ones(3), "x": full, "scalar": torch.tensor(2.0)}, tmp_path / "f.safetensors")
    entries = read_header(tmp_path / "f.safetensors")
    size = full.shape[dim]
    fused = RowLayout(dim, size, (((0, 2), (3, 4)), ((2, 3), (4, size))))
    with reading(tmp_path / "f.safetensors") as file:
        for rows in (RowLayout.padded(size, 2, dim), fused, RowLayout.replicated(size, 2, dim)):
            for rank in (0, 1):
                counts: list[int] = []
                layout = TensorLayout(shape=full.shape, cuts=(("tp", rows),), place={"tp": rank})
                shard = read_rows(file, entries["x"], layout, dtype, counts.append)
                assert torch.equal(shard, rows.take(full, rank).to(dtype))
                assert sum(counts) == rows.real_rows(rank) * full.numel() // size * 4
        scalar = read_rows(file, entries["scalar"], entries["scalar"].layout, dtype, counts.append)
        assert scalar.shape == () and scalar.item() == 2


def test_unexpected_tensors_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_checkpoint(tmp_path, "single")
    of_a_strange_dtype(path, "model.spare")
    with caplog.at_level(logging.WARNING):
        distribute(make(how="meta"), weights=path)
    assert "1 tensor(s) that the model lacks: model.spare" in caplog.text


def published_otherwise(path: Path, head: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The weights from files without the base model's prefix, and errors of files with a tied head of other values."""
    weights = mw.full_state_dict(distribute(make(how="meta"), tp=2, weights=path))
    tied = distribute(make(how="deferred", tie_word_embeddings=True), tp=2)
    messages = []
    for call in (
        lambda: mw.load_weights(tied, head),
        lambda: distribute(make(how="meta", tie_word_embeddings=True), tp=2, weights=head),
    ):
        with pytest.raises(mw.CheckpointError) as caught:
            call()
        messages.append(str(caught.value))
    return weights, messages


def test_published_files_keep_what_they_have(pool2: Any, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "head").mkdir()
    bare, head = write_checkpoint(tmp_path / "bare", "single"), write_checkpoint(tmp_path / "head", "single")
    save_file({name.removeprefix("model."): value for name, value in load_file(bare).items()}, bare)
    ranks = pool2.run(published_otherwise, bare, head)
    assert_equal(ranks[0][0], make(seed=77).state_dict())
    for message in (message for _, messages in ranks for message in messages):
        assert "lm_head.weight with other values than model.embed_tokens.weight" in message


def without(path: Path, *names: str) -> None:
    save_file({name: value for name, value in load_file(path).items() if name not in names}, path)


def reshape(path: Path) -> None:
    save_file({**load_file(path), "model.norm.weight": torch.ones(3)}, path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def of_a_strange_dtype(path: Path, name: str = "model.norm.weight") -> None:
    """Write a tensor as one of 4 bits, a dtype of safetensors that torch has only in pairs."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    size = len(data)
    entries[name] = {"dtype": "F4", "shape": [16], "data_offsets": [size, size + 8]}
    if name == "model.norm.weight":
        entries["model.old"] = {
            "dtype": "U8",
            "shape": [128],
            "data_offsets": json.loads(content[8 : 8 + length])[name]["data_offsets"],
        }
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data + bytes(8))


def overwrite(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None  # type: ignore[func-returns-value]


def pickled(path: Path) -> None:
    torch.save({"a": torch.ones(1)}, path)


def as_bin(path: Path) -> None:
    path.rename(path.with_name("pytorch_model.bin"))


def index_of(weight_map: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.unlink()
        (path.parent / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


def header(**entry: Any) -> bytes:
    text = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


BAD_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (
        lambda path: without(path, "model.norm.weight", "lm_head.weight"),
        r"lacks 2 parameter\(s\):\s+model.norm.weight\s+lm_head.weight",
    ),
    "another shape": (reshape, r"model.norm.weight: \[3\] in the checkpoint, \[32\] in the model"),
    "truncated": (truncate, r"bytes, but its header describes \d+: it was truncated"),
    "truncated header": (lambda path: path.write_bytes(path.read_bytes()[:50]) and None, r"truncated in its header"),
    "empty": (overwrite(b""), r"\(0 bytes\) is not a safetensors file"),
    "text": (overwrite(b"hello, this is not a checkpoint"), r"is not a safetensors file"),
    "header that is no JSON": (overwrite((9).to_bytes(8, "little") + b"not json!"), r"is not a safetensors file"),
    "offsets": (overwrite(header(data_offsets=[0, 4])), r"damaged: 'x' .* takes 8 bytes, but its header gives it 4"),
    "negative shape": (overwrite(header(shape=[-2])), r"is damaged: 'x'\['shape'\] is a list"),
    "strange dtype": (of_a_strange_dtype, r"model.norm.weight: F4 in the checkpoint, a dtype that cannot be read here"),
    "a pickle inside": (pickled, r"model.safetensors is a pickle file"),
    "a bare pickle inside": (overwrite(pickle.dumps({"a": [1] * 99})), r"model.safetensors is a pickle file"),
    "pytorch_model.bin": (as_bin, r"pytorch_model.bin looks like a pickle file.*save_pretrained"),
    "nothing": (lambda path: path.unlink(), r"has no .safetensors file; it holds: .*config.json"),
    "an index of a lost file": (index_of({"a": "gone.safetensors"}), r"files that do not exist: gone.safetensors"),
    "an index that leaves": (index_of({"a": "../x.safetensors"}), r"outside its own folder: ../x.safetensors"),
    "an index without a map": (index_of(None), r"its 'weight_map'"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_checkpoint_is_named_and_changes_nothing(name: str, tmp_path: Path) -> None:
    damage, pattern = BAD_FILES[name]
    path = write_checkpoint(tmp_path, "single")
    damage(path)
    model = make(how="meta")
    parameters = list(model.parameters())
    with pytest.raises(mw.CheckpointError, match=re.compile(pattern, re.DOTALL)):
        distribute(model, weights=tmp_path)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def load_where_only_rank_0_has_it(path: Path) -> None:
    torch.manual_seed(0)
    distribute(make(how="meta"), tp=2, weights=path if torch.distributed.get_rank() == 0 else path / "elsewhere")


def test_a_file_that_one_rank_lacks_fails_on_every_rank(pool2: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "single")
    errors = pool2.run_expecting_error(load_where_only_rank_0_has_it, tmp_path)
    assert [kind for kind, _ in errors] == ["CheckpointError"] * 2
    assert "rank 1 failed" in errors[0][1] and "there is no checkpoint at" in errors[1][1]


def fail_while_reading(path: Path) -> None:
    if torch.distributed.get_rank() == 1:
        safetensors_file.read_into = lambda *_: (_ for _ in ()).throw(OSError("the disk is gone"))
    model = make(how="meta")
    try:
        distribute(model, tp=2, weights=path)
    finally:
        assert all(p.is_meta for p in model.parameters())


def test_a_read_that_fails_on_one_rank_fails_on_every_rank(pool2: Any, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "single")
    errors = pool2.run_expecting_error(fail_while_reading, path)
    assert [kind for kind, _ in errors] == ["CheckpointError"] * 2 and "rank 1 failed" in errors[0][1]
    assert "cannot read" in errors[1][1] and errors[1][1].endswith("model.safetensors: the disk is gone")
    pool2.close()  # a worker is left with a broken reader


def loaded_on_one_rank(path: Path) -> None:
    distribute(make(), tp=2, weights=path if torch.distributed.get_rank() == 0 else None)


def test_ranks_that_name_other_weights(pool2: Any, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "single")
    for kind, message in pool2.run_expecting_error(loaded_on_one_rank, path):
        assert kind == "PlanError" and "or passed another ToDistributedConfig.weights" in message
