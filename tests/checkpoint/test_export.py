"""``meshwright export``, and ``load_weights`` and ``ToDistributedConfig(weights=)`` from a checkpoint folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_inspect import NAME, TENSORS, Odd, flip, odd_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

import meshwright as mw
from meshwright.checkpoint.files import disk
from meshwright.checkpoint.format import part_files
from meshwright.checkpoint.format.checkpoint_folders import Manifest
from meshwright.checkpoint.format.load_weights import CheckpointWeights
from meshwright_tools.checkpoints.export_checkpoint import export_checkpoint
from meshwright_tools.cli import app
from support.construction import assert_equal, distribute, make
from support.models import build
from support.tiers import crossing

TIED = {"tie_word_embeddings": True}
FULL = {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 3}


def export(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def save(model: Any, folder: Path) -> Path:
    return mw.save_checkpoint(folder, model, None, step=5)


def save_distributed(family: str, folder: Path, plan: dict[str, Any], dtype: torch.dtype, overrides: Any) -> None:
    save(distribute(make(family, **overrides).to(dtype), **plan), folder)


def exported(folder: Path) -> dict[str, Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.mark.parametrize(
    ("family", "dtype", "overrides"),
    [("llama", torch.float32, TIED), crossing("gemma2", torch.bfloat16, {}), ("phi3", torch.bfloat16, {})],
    ids=["llama-tied", "gemma2-bf16", "phi3-bf16"],
)
def test_from_pretrained_gives_the_weights_bitwise(
    family: str, dtype: torch.dtype, overrides: dict[str, Any], pool4: Any, tmp_path: Path
) -> None:
    pool4.run(save_distributed, family, tmp_path / "ck", FULL, dtype, overrides)
    expected = make(family, **overrides).to(dtype)
    assert len(list((tmp_path / "ck").glob("*.safetensors"))) == 4
    for name, options in (("one", ()), ("several", ("--max-shard-size", "20KB"))):
        result = export(tmp_path / "ck", tmp_path / name, *options)
        assert result.exit_code == 0 and "step 5" in result.stdout
        assert (tmp_path / name / "model.safetensors").exists() == (name == "one")
        assert (tmp_path / name / "model.safetensors.index.json").exists() == (name == "several")
        again, report = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert type(again) is type(expected)
        assert_equal(again.state_dict(), expected.state_dict())
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == expected.config.tie_word_embeddings
        assert again.generation_config.to_dict() == expected.generation_config.to_dict()
    assert ("lm_head.weight" in exported(tmp_path / "one")) == (not expected.config.tie_word_embeddings)
    stock = tmp_path / "stock"
    expected.save_pretrained(stock, max_shard_size="20KB")
    assert sorted(p.name for p in stock.iterdir()) == sorted(p.name for p in (tmp_path / "several").iterdir())
    for file in ("config.json", "model.safetensors.index.json"):
        ours, theirs = (json.loads((folder / file).read_text()) for folder in (tmp_path / "several", stock))
        assert ours == theirs


def test_a_dtype_is_that_of_torch_and_the_config_says_it(tmp_path: Path) -> None:
    model = build("llama")
    save(model, tmp_path / "ck")
    assert export(tmp_path / "ck", tmp_path / "out", "--dtype", "bfloat16").exit_code == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    assert_equal(again.state_dict(), model.bfloat16().state_dict())


def test_weights_of_several_dtypes_are_loaded_without_rounding(tmp_path: Path) -> None:
    model = build("llama").bfloat16()
    model.model.norm.weight = torch.nn.Parameter(torch.full((32,), 1.0001))
    save(model, tmp_path / "ck")
    export_checkpoint(tmp_path / "ck", tmp_path / "out")
    assert_equal(exported(tmp_path / "out"), dict(model.state_dict()))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_equal(again.state_dict(), {name: x.float() for name, x in model.state_dict().items()})


def test_odd_tensors_keep_their_shapes_and_dtypes(tmp_path: Path) -> None:
    model, optimizer = odd_model()
    mw.save_checkpoint(tmp_path / "ck", model, optimizer)
    export_checkpoint(tmp_path / "ck", tmp_path / "out", max_shard_size=100)
    assert_equal(exported(tmp_path / "out"), dict(model.state_dict()))  # both names: no config says that one is enough
    assert not (tmp_path / "out" / "config.json").exists()
    export_checkpoint(tmp_path / "ck", tmp_path / "half", dtype=torch.float16)
    half = exported(tmp_path / "half")
    assert {half[name].dtype for name in ("scale", "weight", "low")} == {torch.float16}
    assert (half["mask"].dtype, half["count"].item()) == (torch.bool, 7)
    for folder in ("ck", "out"):
        other = Odd()
        mw.load_weights(other, tmp_path / folder)
        assert_equal(dict(other.state_dict()), dict(model.state_dict()))


def test_adapters_are_exported_under_the_names_of_the_model(tmp_path: Path) -> None:
    def adapted(seed: int) -> Any:
        return get_peft_model(build("llama", seed=seed), LoraConfig(r=2, init_lora_weights=False))

    model = adapted(0)
    save(model, tmp_path / "ck")
    export_checkpoint(tmp_path / "ck", tmp_path / "out")
    assert_equal(exported(tmp_path / "out"), dict(model.state_dict()))
    assert any(".base_layer." in name for name in model.state_dict())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]  # from_pretrained must fail
    other = adapted(1)
    mw.load_weights(other, tmp_path / "out")
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    save(build("llama"), tmp_path / "ck")
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    read = CheckpointWeights.read

    def reading(self: Any, *arguments: Any) -> Tensor:
        nonlocal most
        value = read(self, *arguments)
        most = max(most, 1 + sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(value))
        return value

    with mock.patch.object(CheckpointWeights, "read", reading):
        export_checkpoint(tmp_path / "ck", tmp_path / "out")
    assert most == 1 and len(alive) > 20


# Atomicity, and what is refused


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A checkpoint of other weights than those of an earlier export, which has several files."""
    save(build("llama", seed=1), tmp_path / "old")
    save(build("llama", seed=2), tmp_path / "runs" / "step-5")
    export_checkpoint(tmp_path / "old", tmp_path / "out", max_shard_size="20KB")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_overwrite_leaves_nothing_stale(ready: Path) -> None:
    before = contents(ready / "out")
    result = export(ready / "runs", ready / "out")  # a folder of checkpoints: the newest
    assert result.exit_code == 2 and "is not empty; name another folder, or pass --overwrite" in result.stderr
    assert contents(ready / "out") == before
    (ready / "out" / "tokenizer.json").touch()
    assert export(ready / "runs", ready / "out", "--overwrite").exit_code == 0
    assert sorted(contents(ready / "out")) == ["config.json", "generation_config.json", "model.safetensors"]
    assert_equal(exported(ready / "out"), dict(build("llama", seed=2).state_dict()))
    assert sorted(path.name for path in ready.iterdir()) == ["old", "out", "runs"]


STEPS = ["write_file", "sync_folder", "rename"]


@pytest.mark.parametrize("step", STEPS)
def test_a_failure_leaves_the_old_export_whole(step: str, ready: Path) -> None:
    before = contents(ready / "out")
    real, calls = getattr(disk, step), 0
    while True:
        calls += 1
        left = calls

        def fail(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(28, "No space left on device")
            return real(*arguments)

        with mock.patch.object(disk, step, fail):
            result = export(ready / "runs", ready / "out", "--overwrite")
        if left > 0:
            break
        assert result.exit_code == 1 and "No space left on device" in result.stderr
        if contents(ready / "out") != before:  # only the new one, and whole
            assert step == "sync_folder"
            assert_equal(exported(ready / "out"), dict(build("llama", seed=2).state_dict()))
            shutil.rmtree(ready / "out")
            export_checkpoint(ready / "old", ready / "out", max_shard_size="20KB")
        assert {path.name for path in ready.iterdir() if not path.name.startswith(".")} == {"old", "out", "runs"}
    assert calls > 2 and result.exit_code == 0
    assert sorted(path.name for path in ready.iterdir()) == ["old", "out", "runs"]  # leftovers are removed


def test_a_damaged_checkpoint_is_not_exported(ready: Path) -> None:
    flip(ready / "runs" / "step-5" / TENSORS, -1)
    result = export(ready / "runs" / "step-5", ready / "new")
    assert result.exit_code == 2 and f"{TENSORS} is damaged" in result.stderr
    assert not (ready / "new").exists()


@pytest.mark.parametrize(
    ("checkpoint", "out", "options", "message"),
    [
        ("nothing", "new", (), "there is no checkpoint in"),
        ("out", "new", (), "there is no checkpoint in"),
        ("runs", "runs/step-5", ("--overwrite",), "are one folder, or one is inside the other"),
        ("runs", "runs/step-5/out", (), "are one folder, or one is inside the other"),
        ("runs", "runs", ("--overwrite",), "are one folder, or one is inside the other"),
        ("runs", "old", ("--overwrite",), "holds something else than a model's files"),
        ("runs", "file", ("--overwrite",), "is a file; name a folder"),
        ("runs", "new", ("--max-shard-size", "much"), "must be a number of bytes, or text with a unit"),
        ("runs", "new", ("--dtype", "int8"), "'int8' is not one of"),
    ],
)
def test_bad_arguments(checkpoint: str, out: str, options: tuple[str, ...], message: str, ready: Path) -> None:
    (ready / "file").touch()
    before = sorted(str(path) for path in ready.rglob("*"))
    result = export(ready / checkpoint, ready / out, *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert sorted(str(path) for path in ready.rglob("*")) == before


def change_config(folder: Path, value: Any) -> None:
    manifest = dataclasses.replace(Manifest.read(folder), model_config=value)
    (folder / NAME).unlink()
    manifest.write(folder / NAME)


@pytest.mark.parametrize("value", [{"../config.json": "{}"}, {"config.json": {}}, "{}", []], ids=str)
def test_a_config_of_a_wrong_type_or_name_is_an_error(value: Any, ready: Path) -> None:
    change_config(ready / "old", None)
    assert Manifest.read(ready / "old").model_config is None
    change_config(ready / "old", value)
    with pytest.raises(mw.CheckpointError, match=r"is damaged: 'model_config'.* (must be|has unknown fields)"):
        Manifest.read(ready / "old")


# Reading weights from a checkpoint


def loads(folder: Path, plan: dict[str, Any], dtype: torch.dtype, how: str) -> dict[str, Tensor]:
    model = make(how="real" if how == "load_weights" else how, seed=3, **TIED).to(dtype)
    model = distribute(model, weights=None if how == "load_weights" else folder, **plan)
    if how == "load_weights":
        mw.load_weights(model, folder)
    return mw.full_state_dict(model)


@pytest.mark.parametrize("how", ["load_weights", "real", "meta"])
def test_weights_come_from_the_newest_whole_checkpoint_of_a_folder(how: str, pool4: Any, tmp_path: Path) -> None:
    plan = {"dp": 2, "tp": 2, "zero_stage": 1}
    for step, seed in ((1, 11), (2, 12), (3, 13)):
        save(make(seed=seed, **TIED), tmp_path / f"step-{step}")
    (tmp_path / "step-3" / NAME).unlink()
    expected = make(seed=12, **TIED).state_dict()
    assert_equal(pool4.run(loads, tmp_path, plan, torch.float32, how)[0], expected)
    assert_equal(pool4.run(loads, tmp_path / "step-2", FULL, torch.float32, how)[0], expected)
    other = {name: x.bfloat16() for name, x in expected.items()}
    assert_equal(pool4.run(loads, tmp_path / "step-2", plan, torch.bfloat16, how)[0], other)


def test_a_rank_reads_its_own_chunks_only(pool2: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 8192}
    save(make(**sizes), tmp_path / "ck")
    for read, total in pool2.run(bytes_read, tmp_path / "ck", sizes):
        assert 0.4 * total < read < 0.7 * total


def bytes_read(folder: Path, sizes: dict[str, int]) -> tuple[int, int]:
    model = distribute(make(**sizes), tp=2)
    count = 0
    real = part_files.read_into

    def counted(reader: Any, offset: int, memory: memoryview) -> None:
        nonlocal count
        count += len(memory)
        real(reader, offset, memory)

    with mock.patch.object(part_files, "read_into", counted):
        mw.load_weights(model, folder)
    return count, (folder / TENSORS).stat().st_size


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped": (lambda folder: flip(folder / TENSORS, -1), "is damaged: .* are not what was saved"),
    "no part": (lambda folder: (folder / TENSORS).unlink(), "is not whole: 1 file"),
    "no manifest": (lambda folder: (folder / NAME).unlink(), "cannot read .*checkpoint.json"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_checkpoint_is_an_error(kind: str, tmp_path: Path) -> None:
    save(build("llama"), tmp_path / "ck")
    damage, message = BAD[kind]
    damage(tmp_path / "ck")
    with pytest.raises(mw.CheckpointError, match=message):
        mw.load_weights(build("llama"), tmp_path / "ck")


@pytest.mark.parametrize(
    "value", [torch.ones(3, dtype=torch.complex64), torch.eye(3).to_sparse()], ids=["complex", "sparse"]
)
def test_a_tensor_that_no_file_can_hold_is_named(value: Tensor, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("odd", value)
    with pytest.raises(mw.CheckpointError, match=r"odd of the model's state_dict is .* persistent=False"):
        save(model, tmp_path / "ck")
    assert not (tmp_path / "ck").exists()


def test_a_save_goes_through_a_link_and_later_saves_work(tmp_path: Path) -> None:
    model = build("llama")
    save(model, tmp_path / "runs" / "step-5")
    (tmp_path / "runs" / "last").symlink_to("step-5")
    for name in ("last", "last", "step-6"):
        save(model, tmp_path / "runs" / name)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["last", "step-5", "step-6"]
    assert (tmp_path / "runs" / "last").is_symlink()


def test_a_checkpoint_with_a_foreign_file_is_read_and_never_removed(tmp_path: Path) -> None:
    run = build("llama", seed=6)
    for step in (5, 6):
        save(run, tmp_path / f"step-{step}")
    (tmp_path / "step-6" / "notes.txt").touch()
    model = build("llama")
    mw.load_weights(model, tmp_path)
    assert_equal(dict(model.state_dict()), dict(run.state_dict()))
    mw.save_checkpoint(tmp_path / "step-7", run, None, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-6", "step-7"]
    with pytest.raises(mw.CheckpointError, match="holds something else than a checkpoint"):
        mw.save_checkpoint(tmp_path / "step-6", model, None)


def test_another_model_is_an_error(tmp_path: Path) -> None:
    save(build("llama"), tmp_path / "ck")
    with pytest.raises(mw.CheckpointError, match=r"(?s)have another shape.*\[48, 32\] in the checkpoint, \[64, 32\]"):
        mw.load_weights(build("llama", intermediate_size=64), tmp_path / "ck")
