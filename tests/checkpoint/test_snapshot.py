"""Snapshots for saves in the background: the values of one moment, whatever is written before they are copied."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.checkpoint.format.background import Background
from meshwright.checkpoint.format.part_files import HostMemory, RankPart, Snapshot, Source
from meshwright.checkpoint.one_device.safetensors_file import memory_of
from meshwright.layout.row_layout import StridedBlock


def part(values: dict[str, Tensor]) -> RankPart:
    def source(value: Tensor) -> Source:
        own = [StridedBlock(0, 0, value.numel())]
        return Source(dtype=value.dtype, values=lambda: value, held=own, share=own)

    return RankPart(place=0, sources={key: source(value) for key, value in values.items()}, random=lambda: None)


def copied(snapshot: Snapshot) -> dict[str, Tensor]:
    return {key: source.values() for key, source in snapshot.copied().sources.items()}


def test_each_snapshot_is_copied_to_the_same_memory() -> None:
    # The narrow dtypes come last, so that an odd number of them leaves the others aligned.
    values = {"a": torch.arange(3, dtype=torch.int8), "b": torch.rand(5, dtype=torch.float64), "c": torch.rand(3)}
    memory, places = HostMemory(), []
    for _ in range(2):
        snapshot = Snapshot(part(values), memory)
        expected = {key: value.clone() for key, value in values.items()}
        for value in values.values():
            value.add_(1)
        snapshot.copy()
        found = copied(snapshot)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        places.append({key: value.data_ptr() for key, value in found.items()})
    assert places[0] == places[1]
    assert len(memory.take(7)) == 7


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda x: x.add_(1),
    "through .data": lambda x: x.data.mul_(2),
    "through a view": lambda x: x[1:3].zero_(),
    "through NumPy": lambda x: x.numpy().fill(3),
    "by foreach": lambda x: torch._foreach_add_([x], 1.0),
    "through its memory": lambda x: ctypes.memset(x.data_ptr(), 0, x.nbytes),
    "out": lambda x: torch.mul(x, 2, out=x),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_before_the_copy_are_not_in_it(write: Callable[[Tensor], Any]) -> None:
    flat = torch.rand(12)
    values = {"a": flat[:8], "b": flat[8:]}  # as the slices of a bucket
    expected, address = {key: value.clone() for key, value in values.items()}, flat.data_ptr()
    snapshot = Snapshot(part(values), HostMemory())
    write(values["a"])
    written = flat.clone()
    snapshot.copy()
    assert all(torch.equal(x, expected[key]) for key, x in copied(snapshot).items())
    assert torch.equal(flat, written) and not torch.equal(flat[:8], expected["a"])
    assert flat.data_ptr() != address


def test_a_tensor_that_nobody_wrote_keeps_its_memory() -> None:
    value = torch.rand(8)
    address = value.data_ptr()
    snapshot = Snapshot(part({"a": value}), HostMemory())
    snapshot.copy()
    value.add_(1)
    assert value.data_ptr() == address


def test_memory_that_torch_does_not_own_is_copied_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(64))
    values = {
        "of numpy": torch.from_numpy(np.ones(16, dtype=np.float32)),
        "of a file": torch.from_file(str(tmp_path / "file"), shared=True, size=16),
        "of processes": torch.ones(16).share_memory_(),
    }
    expected = {key: value.clone() for key, value in values.items()}
    snapshot = Snapshot(part(values), HostMemory())
    for value in values.values():
        memory_of(value)[:] = bytes([1]) * value.nbytes  # by the address that others have too
    snapshot.copy()
    assert all(torch.equal(x, expected[key]) for key, x in copied(snapshot).items())


def test_a_step_waits_for_the_copy_and_other_writes_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    may_copy, events, copy = threading.Event(), [], Snapshot.copy

    def late(snapshot: Snapshot) -> None:
        assert may_copy.wait(60)
        copy(snapshot)
        events.append("copied")

    monkeypatch.setattr(Snapshot, "copy", late)
    expected = {name: x.clone() for name, x in model.state_dict().items()}
    extra = {"losses": [1.0]}
    mw.save_checkpoint(tmp_path / "now", model, optimizer, extra=extra, asynchronous=True)
    extra["losses"].append(2.0)
    for parameter in model.parameters():
        parameter.data.zero_()  # as a program does that evaluates averaged weights
    assert not events
    threading.Timer(0.2, may_copy.set).start()
    optimizer.step()
    events.append("stepped")
    mw.wait_for_checkpoints(model)
    assert events == ["copied", "stepped"]
    done = mw.load_checkpoint(tmp_path / "now", model, optimizer)
    assert done is not None and done.extra == {"losses": [1.0]}
    assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())


def test_a_copy_that_fails_is_raised_and_holds_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())

    def fail(source: Source, target: Tensor) -> None:
        raise MemoryError("no memory for the copy")

    monkeypatch.setattr(Source, "copy_to", fail)
    mw.save_checkpoint(tmp_path / "now", model, optimizer, asynchronous=True)
    optimizer.step()
    with pytest.raises(MemoryError, match="no memory for the copy"):
        mw.wait_for_checkpoints(torch.compile(model))  # type: ignore[arg-type]  # the model in its other form
    assert not list(tmp_path.iterdir())


def test_an_optimizer_does_not_keep_the_memory_of_a_model_that_is_gone(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    mw.save_checkpoint(tmp_path / "now", model, optimizer, asynchronous=True)
    mw.save_checkpoint(tmp_path / "now", model, optimizer, asynchronous=True)
    mw.wait_for_checkpoints(model)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    background = weakref.ref(Background.of(model))
    del model
    gc.collect()
    assert background() is None
    optimizer.step()
