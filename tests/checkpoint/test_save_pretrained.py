"""``save_pretrained`` of a distributed model: the files of stock transformers, one full tensor at a time."""

from __future__ import annotations

import json
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import meshwright as mw
from meshwright.checkpoint.one_device import whole_tensors
from meshwright.checkpoint.one_device.safetensors_file import SafetensorsWriter
from support.construction import PLANS, assert_equal, distribute, make
from support.quantised_files import FORMS, write_quantised


def saved(family: str, plan: dict[str, Any], path: Path, options: dict[str, Any], overrides: dict[str, Any]) -> None:
    distribute(make(family, how="deferred", **overrides), **plan).save_pretrained(path, **options)


@pytest.mark.quick
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}, {"variant": "fp32"}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_saved_files_are_those_of_stock(family: str, options: dict[str, Any], pool2: Any, tmp_path: Path) -> None:
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    pool2.run(saved, family, PLANS["tp2+sp"], ours, options, {})
    model = make(family)
    model.save_pretrained(stock, **options)
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in stock.iterdir())
    for path in stock.glob("*.json"):
        assert json.loads((ours / path.name).read_text()) == json.loads(path.read_text()), path.name
    for path in stock.glob("*.safetensors"):
        assert_equal(load_file(ours / path.name), load_file(path))  # read by the reference implementation
    again, report = AutoModelForCausalLM.from_pretrained(ours, variant=options.get("variant"), output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_equal(again.state_dict(), model.state_dict())


def test_ties_are_saved_once_and_an_older_save_is_replaced(pool2: Any, tmp_path: Path) -> None:
    overrides = {"tie_word_embeddings": True}
    pool2.run(saved, "llama", {"tp": 2}, tmp_path, {}, {})
    for options in ({"max_shard_size": "20KB"}, {}):
        pool2.run(saved, "llama", {"tp": 2}, tmp_path, options, overrides)
        assert (tmp_path / "model.safetensors").exists() == (not options)
        assert bool(list(tmp_path.glob("model-*"))) == bool(options)
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert_equal(again.state_dict(), make("llama", **overrides).state_dict())
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert not list(tmp_path.glob(".saving-*"))


def saved_dequantised(form: str, plan: str, folder: Path, streams: bool) -> dict[str, Tensor]:
    """Load quantised files into plain weights, change these, save them, and return them whole."""
    model: Any = FORMS[form][0].from_pretrained(folder, dtype=torch.bfloat16)
    model = mw.to_distributed(model, plan=plan)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    whole = mw.full_state_dict(model)
    model.save_pretrained(folder / "out", **({} if streams else {"state_dict": whole}))
    return whole


# On one device transformers 5.23 loses the experts of the first, the scales of the second, and refuses the third.
@pytest.mark.parametrize(
    ("form", "plan", "streams"), [("mxfp4", "tp2", True), ("fp8", "dp2 zero3", False), ("fp8, experts", "tp2", True)]
)
def test_what_was_dequantised_is_saved_as_it_is_read(
    form: str, plan: str, streams: bool, pool2: Any, tmp_path: Path
) -> None:
    model_class = write_quantised(form, tmp_path)
    whole = pool2.run(saved_dequantised, form, plan, tmp_path, streams)[0]
    again, report = model_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_equal(again.state_dict(), whole)


def saved_too_late(path: Path) -> None:
    model = distribute(make(), tp=2)
    with mock.patch.object(torch.distributed, "is_initialized", lambda: False):  # as after accelerator.end_training()
        model.save_pretrained(path)


def test_a_save_after_the_process_group_is_gone_is_an_error(pool2: Any, tmp_path: Path) -> None:
    for kind, message in pool2.run_expecting_error(saved_too_late, tmp_path):
        assert kind == "CheckpointError"
        assert "save before accelerator.end_training()" in message


def saved_with_state_dict(path: Path) -> None:
    model = distribute(make(), tp=2)
    state = mw.full_state_dict(model)
    model.save_pretrained(path, state_dict={name: value + 1 for name, value in state.items()} or None)


def test_a_state_dict_of_the_users_is_what_is_saved(pool2: Any, tmp_path: Path) -> None:
    pool2.run(saved_with_state_dict, tmp_path)
    expected = {name: value + 1 for name, value in make().state_dict().items()}
    assert_equal(load_file(tmp_path / "model.safetensors"), expected)


def save_on_a_full_disk(path: Path) -> None:
    if torch.distributed.get_rank() == 0:
        SafetensorsWriter.write = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    distribute(make(), tp=2).save_pretrained(path)


def test_a_full_disk_is_an_error_on_every_rank(pool2: Any, tmp_path: Path) -> None:
    pool2.run(saved, "llama", {"tp": 2}, tmp_path, {}, {})
    before = (tmp_path / "model.safetensors").read_bytes()
    errors = pool2.run_expecting_error(save_on_a_full_disk, tmp_path)
    pool2.close()  # a worker is left with a broken writer
    assert [kind for kind, _ in errors] == ["OSError", "OSError"]
    assert all("No space left" in message for _, message in errors)
    assert (tmp_path / "model.safetensors").read_bytes() == before and not list(tmp_path.glob(".saving-*"))


def save_under_a_file(path: Path) -> None:
    distribute(make(), tp=2).save_pretrained(path)


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(pool2: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    errors = pool2.run_expecting_error(save_under_a_file, tmp_path / "file")
    assert [kind for kind, _ in errors] == ["FileExistsError", "FileExistsError"]


def largest_allocation_while_saving(path: Path, chunk: int) -> tuple[int, int]:
    """The most memory that is alive at once through this process's full tensors, and the largest of them, in bytes."""
    whole_tensors._CHUNK = chunk
    model = distribute(make("llama", hidden_size=64, vocab_size=1001), tp=2)
    alive: dict[int, int] = {}
    peak = 0
    original = torch.empty

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal peak
        tensor = original(*args, **kwargs)
        storage = tensor.untyped_storage()
        alive[id(tensor)] = 0 if tensor.is_meta else storage.nbytes()
        peak = max(peak, sum(alive.values()))
        weakref.finalize(tensor, alive.pop, id(tensor))
        return tensor

    whole_tensors.torch.empty = counted
    try:
        model.save_pretrained(path)
    finally:
        whole_tensors.torch.empty = original
    return peak, max(p.meshwright.shape.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("chunk", [1000, 4 * 2**20])
def test_saving_holds_one_full_tensor_at_a_time(chunk: int, pool2: Any, tmp_path: Path) -> None:
    (peak, largest), (others, _) = pool2.run(largest_allocation_while_saving, tmp_path, chunk)
    assert largest <= peak <= largest + 2**16 and others <= 2**16
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_equal(again.state_dict(), make("llama", hidden_size=64, vocab_size=1001).state_dict())


def saved_in_another_form(path: Path) -> None:
    """A model that transformers saves in another form than its own, as it does for legacy layouts."""
    from transformers import modeling_utils

    original = modeling_utils.revert_weight_conversion
    modeling_utils.revert_weight_conversion = lambda model, state: {
        name: value.T.contiguous() if name == "lm_head.weight" else value for name, value in state.items()
    }
    try:
        distribute(make(), tp=2).save_pretrained(path)
    finally:
        modeling_utils.revert_weight_conversion = original


def test_a_conversion_by_the_stock_method_is_kept(pool2: Any, tmp_path: Path) -> None:
    pool2.run(saved_in_another_form, tmp_path)
    expected = make().state_dict()
    assert_equal(
        load_file(tmp_path / "model.safetensors"), {**expected, "lm_head.weight": expected["lm_head.weight"].T}
    )
    assert not list(tmp_path.glob(".saving-*"))


def slow_save(path: Path) -> None:
    """Rank 0 writes for longer than the timeout, a tensor at a time; the other row has nothing to send."""
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2), timeout_s=2.0)
    model, _, _ = mw.to_distributed(make("llama"), config=config)
    write = SafetensorsWriter.write

    written = []

    def slowly(self: SafetensorsWriter, tensor: Tensor) -> None:
        time.sleep(0.1)
        write(self, tensor)
        written.append(tensor)

    with mock.patch.object(SafetensorsWriter, "write", slowly):
        model.save_pretrained(path)
    assert dist.get_rank() > 0 or len(written) * 0.1 > config.timeout_s


def test_a_save_may_take_longer_than_the_timeout(pool2: Any, tmp_path: Path) -> None:
    pool2.run(slow_save, tmp_path)
    assert_equal(load_file(tmp_path / "model.safetensors"), make("llama").state_dict())
