"""Checkpoints that earlier versions wrote load under any plan, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from typer.testing import CliRunner

import meshwright as mw
from meshwright.checkpoint.format.checkpoint_folders import FORMAT
from meshwright.checkpoint.sealed import check_seal
from meshwright_tools.cli import app
from support import corpus, optimizer_files
from support.corpus import PLANS, Program, plan_of, ranks_of, values
from support.hostile import manifest_of

ARCHIVES = {
    f"{archive.parent.name}/{archive.name.partition('.')[0]}": archive
    for archive in corpus.FOLDER.glob("format_*/*.tar.xz")
}


@pytest.fixture(scope="module")
def pools(pool2: Any, pool4: Any) -> dict[int, Any]:
    return {2: pool2, 4: pool4}


def load(name: str, source: str, folder: Path, scratch: Path) -> None:
    """Load a checkpoint of the corpus under a plan, and compare all that it has with what it must give."""
    program = Program(name)
    lacks_loader = not (plan_of(name) and plan_of(source))
    others = {**program.others(), **({"loader": None} if lacks_loader else {})}
    loaded = mw.load_checkpoint(
        folder, program.model, program.optimizer, ignore=["loader"] if lacks_loader else [], **others
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    # Rank 1 of tp2 has other tasks than rank 1 of dp2: a rank gets its own state back on the mesh of the save only.
    saved, present = ([plan_of(each).get(axis, 1) for axis in ("pp", "dp", "tp")] for each in (source, name))
    drawn = corpus.next_draws()
    assert drawn == corpus.set_random_state(rank if saved == present else 0)
    assert loaded is not None and (loaded.step, loaded.extra) == (corpus.STEP, corpus.EXTRA)
    assert [group["lr"] for group in program.optimizer.param_groups] == corpus.RATES
    assert program.scheduler.last_epoch == 1 and program.scaler.get_scale() == corpus.SCALE
    if not lacks_loader:
        assert program.loader.state_dict()["samples"] == 4
    if plan_of(name) and plan_of(source):
        assert program.streams().state_dict() == corpus.STREAMS
    found, manifest = program.contents(scratch)
    if rank:
        return
    state = {f"state/{n}/{key}" for n in manifest["shapes"] for key in ("exp_avg", "exp_avg_sq")}
    masters = {f"master/{n}" for n in manifest["shapes"]} if "zero" in name and name.endswith("bf16") else set()
    weights = {f"weights/{n}" for n in ("lm_head.weight", *dict(program.model.named_parameters()))}
    assert found.keys() == weights | state | masters
    for key, value in found.items():
        first = key.replace("lm_head", "model.embed_tokens")
        assert torch.equal(value.float(), values(first, value.shape)), key
    assert all(state["step"]["tensor"] == corpus.STEP for state in manifest["values"].values())


# A third of the pairs has each checkpoint and each plan.
PAIRS = [
    pytest.param(source, target, marks=[pytest.mark.crossing] if (i + j) % 3 else [])
    for i, source in enumerate(sorted(ARCHIVES))
    for j, target in enumerate(PLANS)
]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_checkpoint_of_the_corpus_loads(source: str, target: str, pools: dict[int, Any], tmp_path: Path) -> None:
    folder = corpus.unpacked(ARCHIVES[source], tmp_path)
    name = target + "_bf16" * source.endswith("bf16")
    if plan_of(name):
        pools[ranks_of(name)].run(load, name, folder.name, folder, tmp_path / "state")
    else:
        load(name, folder.name, folder, tmp_path / "state")


@pytest.mark.parametrize("source", ARCHIVES)
def test_every_checkpoint_of_the_corpus_is_whole_and_exports(source: str, tmp_path: Path) -> None:
    folder = corpus.unpacked(ARCHIVES[source], tmp_path)
    inspected = CliRunner().invoke(app, ["inspect", str(folder)])
    assert inspected.exit_code == 0 and "WHOLE" in inspected.output
    plan = plan_of(folder.name)
    assert all(f"{axis} {plan[axis]}" in inspected.output for axis in ("pp", "dp", "tp") if axis in plan)
    assert CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "out")]).exit_code == 0
    for name, value in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(value.float(), values(f"weights/{name}", value.shape))


def load_optimizer(name: str, folder: Path, scratch: Path) -> None:
    program = Program(name)
    mw.load_optimizer(program.model, program.optimizer, folder)
    assert [group["lr"] for group in program.optimizer.param_groups] == corpus.RATES
    mw.save_optimizer(program.model, program.optimizer, scratch)
    manifest, found = optimizer_files.contents(scratch)
    assert {f"state/{n}/{key}" for n in manifest["shapes"] for key in ("exp_avg", "exp_avg_sq")} <= found.keys()
    for key, value in found.items():
        assert torch.equal(value.float(), values(key, value.shape)), key
    assert all(state["step"]["tensor"] == corpus.STEP for state in manifest["values"].values())


def test_whole_tensors_of_an_optimizer_load(pools: dict[int, Any], tmp_path: Path) -> None:
    one, half = (
        corpus.unpacked(corpus.FOLDER / "optimizer_1" / f"{name}.tar.xz", tmp_path)
        for name in ("one", "dp2_zero1_bf16")
    )
    load_optimizer("one", one, tmp_path / "a")
    pools[2].run(load_optimizer, "tp2", one, tmp_path / "b")
    pools[4].run(load_optimizer, "dp2_tp2_zero3_bf16", half, tmp_path / "c")
    mw.save_optimizer(*((program := Program("one")).model, program.optimizer), one)  # which removes the older form
    assert not [path.name for path in one.iterdir() if path.name.startswith("optimizer-")]


def test_a_seal_of_the_first_form_holds(tmp_path: Path) -> None:
    folder = corpus.unpacked(corpus.FOLDER / "seal_1" / "sealed.tar.xz", tmp_path)
    check_seal(folder)
    (folder / "inner" / "b.json").write_text("[]")
    with pytest.raises(mw.CheckpointError, match=r"b\.json is damaged"):
        check_seal(folder)


def test_an_axis_of_another_version_is_data(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    mw.save_checkpoint(tmp_path / "a", model, None)
    manifest_of(lambda manifest: manifest.update(mesh={"dp": 1, "ep": 2}))(tmp_path / "a")
    saved = model.weight.detach().clone()
    model.weight.data.zero_()
    mw.load_checkpoint(tmp_path / "a", model, None)
    assert torch.equal(model.weight, saved)
    assert "1 rank(s): ep 2" in CliRunner().invoke(app, ["inspect", str(tmp_path / "a")]).output


def test_the_corpus_has_every_older_format() -> None:
    newest = int(FORMAT.rpartition("-")[2])
    assert set(ARCHIVES) == {f"format_{older}/{name}" for older in range(1, newest) for name in corpus.SAVED}
