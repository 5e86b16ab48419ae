"""States of a planned Accelerator: whole or not at all, checked, and imported from accelerate's own class."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from test_accelerate import difference, reference
from typer.testing import CliRunner

import meshwright as mw
from meshwright.checkpoint.sealed import check_seal
from meshwright_tools.cli import app
from support.accelerated import ACCUMULATION, Run, Script, accelerator, exact, resume_script, run_script
from support.kills import counted, endings, fingerprint, try_faults

PLAN = {"dp": 2, "zero_stage": 1}


class Counter:
    """An object of the user's, for ``register_for_checkpointing``."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def named_states(directory: Path) -> list[Any]:
    """Automatic names, a limit, an object and a hook of the user's; the newest whole one is loaded."""
    project = ProjectConfiguration(
        project_dir=str(directory), automatic_checkpoint_naming=True, total_limit=2, save_on_each_node=True
    )
    with accelerator(project_config=project) as accelerate:
        Script(accelerate, PLAN, torch.float32, windows=2)
        counter = Counter()
        accelerate.register_for_checkpointing(counter)
        seen = []

        def hook(models: Any, weights: Any, folder: str) -> None:
            seen.append(Path(folder).name)
            if accelerate.is_main_process:
                Path(folder, "hooked.txt").write_text("by a hook")

        accelerate.register_save_state_pre_hook(hook)
        for count in range(3):
            counter.count = count
            seen.append(Path(accelerate.save_state()).name)
        names = sorted(path.name for path in (directory / "checkpoints").iterdir())
        check_seal(directory / "checkpoints" / "checkpoint_2")
        with contextlib.redirect_stderr(io.StringIO()) as shown:
            accelerate.load_state()
        newest = counter.count
        dist.barrier()
        if dist.get_rank() == 0:
            (directory / "checkpoints" / "checkpoint_2" / "hooked.txt").unlink()
        dist.barrier()
        accelerate.load_state()
        with pytest.raises(mw.CheckpointError, match=r"hooked\.txt is missing"):
            accelerate.load_state(directory / "checkpoints" / "checkpoint_2")
        lines = [line for line in shown.getvalue().splitlines() if "loaded" in line]
        return [seen, names, newest, counter.count, lines]


def test_names_limits_objects_and_hooks(pool2: Any, tmp_path: Path) -> None:
    line = f"meshwright: loaded {tmp_path / 'checkpoints' / 'checkpoint_2'}, saved under dp2 zero1"
    for rank, (seen, names, newest, other, lines) in enumerate(pool2.run(named_states, tmp_path)):
        assert lines == ([line] if rank == 0 else [])
        assert seen == [f"checkpoint_{number}" for number in (0, 0, 1, 1, 2, 2)]
        assert names == ["checkpoint_1", "checkpoint_2"] and (newest, other) == (2, 1)
    # The command takes the newest whole one: checkpoint_2 has lost a file.
    found = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert found.exit_code == 0 and "2 checkpoints: checkpoint_1, checkpoint_2" in found.output
    for shown in (
        f"\n{tmp_path / 'checkpoints' / 'checkpoint_1'}\n",
        "of accelerate, sealed",
        "dp2 zero1",
        "WHOLE: all ",
    ):
        assert shown in found.output, shown
    assert CliRunner().invoke(app, ["inspect", str(tmp_path / "checkpoints" / "checkpoint_2")]).exit_code == 1
    found = CliRunner().invoke(app, ["export", str(tmp_path), str(tmp_path / "out")])
    assert found.exit_code == 2 and "meshwright.load_weights(model, " in found.output


def damaged_states(directory: Path) -> int:
    with accelerator(gradient_accumulation_steps=ACCUMULATION) as accelerate:
        Script(accelerate, PLAN, torch.float32, windows=2).train(save_after=1, directory=str(directory / "a"))
        files = [path.relative_to(directory / "a") for path in sorted((directory / "a").rglob("*")) if path.is_file()]
        tried, first = 0, dist.get_rank() == 0
        for file in files:
            for damage in ("removed", "flipped"):
                dist.barrier()
                path = directory / "a" / file
                content = bytearray(path.read_bytes())
                dist.barrier()
                if first:
                    changed = bytes([*content[:-9], content[-9] ^ 1, *content[-8:]])
                    path.unlink() if damage == "removed" else path.write_bytes(changed)
                dist.barrier()
                with pytest.raises(mw.CheckpointError, match=file.name.replace(".", r"\.")):
                    accelerate.load_state(str(directory / "a"))
                dist.barrier()
                if first:
                    path.write_bytes(content)
                tried += 1
        dist.barrier()
        accelerate.load_state(str(directory / "a"))
        with pytest.raises(mw.CheckpointError, match="holds something else than a checkpoint"):
            accelerate.save_state(str(directory))
        return tried


def test_every_damage_is_named(pool2: Any, tmp_path: Path) -> None:
    tried = pool2.run(damaged_states, tmp_path)
    print(f"{tried[0]} damages, {tried[0]} named")
    assert tried[0] == tried[1] >= 16


def test_a_state_of_accelerates_own_class_comes_with_its_optimizer(pool2: Any, tmp_path: Path) -> None:
    """accelerate keeps no position in the data: the script skips what the saved run had read."""
    expected = reference(torch.float64, 1)
    run_script(None, torch.float64, save_after=7, directory=str(tmp_path))
    resumed = pool2.run(resume_stock, {"tp": 2}, tmp_path)[0]
    rest = Run(expected.losses[14:], expected.norms[7:], expected.rates[7:])
    assert difference(resumed, rest) <= 1e-10
    for kind, message in pool2.run_expecting_error(resume_script, {"dp": 2}, torch.float64, str(tmp_path)):
        assert kind == "CheckpointError" and "on 1 process(es)" in message and "dp=2" in message


def resume_stock(plan: dict[str, Any], directory: Path) -> Run:
    with exact(torch.float64), accelerator(gradient_accumulation_steps=ACCUMULATION) as accelerate:
        script = Script(accelerate, plan, torch.float64, off_by=1.0)
        accelerate.load_state(directory)
        script.loader = accelerate.skip_first_batches(script.loader, 14)
        return script.train()


def fail_at_each_step(folder: Path, kind: str, rank: int, every: int, replaces: bool) -> tuple[int, list[str]]:
    """Save over an older state, or save another one beside it, after which the older one goes."""
    project = ProjectConfiguration(project_dir=str(folder.parent), automatic_checkpoint_naming=True, total_limit=1)
    with accelerator(project_config=None if replaces else project) as accelerate:
        script = Script(accelerate, PLAN, torch.float32, windows=2)
        script.train()
        values = [parameter.detach().clone() for parameter in script.model.parameters()]

        def save(number: int) -> None:
            with torch.no_grad():
                for parameter, value in zip(script.model.parameters(), values, strict=True):
                    parameter.copy_(value + number)
            is_taken = number == 1 and (folder / "checkpoint_1").exists()  # by a save that was killed afterwards
            dist.barrier()
            accelerate.project_configuration.iteration = number + is_taken
            accelerate.save_state(str(folder / "state") if replaces else None)

        def find() -> dict[str, str]:
            accelerate.load_state(str(folder / "state") if replaces else None)
            return fingerprint(folder / "state" if replaces else sorted(folder.glob("checkpoint_*"))[-1])

        save(1)
        new = find()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        dist.barrier()
        save(0)
        expected = [find(), new]
        assert expected[0] != new
        return try_faults(
            folder=folder,
            kind=kind,
            rank=rank,
            every=every,
            save=lambda: save(1),
            find=find,
            expected=expected,
            names={"state"} if replaces else {"checkpoint_N"},
        )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "replaces", "every"), endings(("kill", True)))
def test_a_save_that_ends_early(kind: str, replaces: bool, every: int, pool2: Any, tmp_path: Path) -> None:
    """A load finds the old state or the new one, bitwise, and the next save leaves nothing else."""
    for rank in (0, 1):
        folder = tmp_path / str(rank) / "checkpoints"
        results = pool2.run(fail_at_each_step, folder, kind, rank, every, replaces, timeout=900)
        counted(results, f"accelerate, {kind}, rank {rank}, {'over' if replaces else 'beside'}")
