"""The end of a process group, and the next one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from harness.programs import run_program
from meshwright.errors import PlanError
from meshwright.mesh.process_group import start_process_group, world_size

SCRIPT = """
import atexit
import torch
import torch.distributed as dist
from meshwright.mesh.process_group import start_process_group

{before}
dist.init_process_group("{backend}", store=dist.HashStore(), rank=0, world_size=1)
atexit.register(lambda: print("still in the group" if dist.is_initialized() else "left"))
{own}
for _ in range(2):
    start_process_group(torch.device("cpu"), 10.0)
"""
FAKE = "from torch.testing._internal.distributed.fake_pg import FakeStore"


@pytest.mark.parametrize(
    ("before", "backend", "own", "printed"),
    [
        ("", "gloo", "", "left"),  # accelerate never leaves its group, unless the script calls end_training()
        ("", "gloo", "atexit.register(dist.destroy_process_group)", "left"),
        (FAKE, "fake", "", "still in the group"),  # only gloo has threads that may abort
    ],
)
def test_the_scripts_own_gloo_group_ends_before_the_interpreter(
    before: str, backend: str, own: str, printed: str
) -> None:
    script = SCRIPT.format(before=before, backend=backend, own=own)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.split("\n")[0] == printed
    assert "Error" not in ended.stderr


def groups_one_after_another() -> None:
    for _ in range(8):
        start_process_group(torch.device("cpu"), 10.0)
        dist.all_reduce(ones := torch.ones(1))
        assert ones == 2
        dist.destroy_process_group()


def test_a_group_may_follow_a_group() -> None:
    """The launcher's store still has the addresses of the group before, which nobody may read."""
    for outcome in run_program(groups_one_after_another, 2):
        assert outcome.code == 0, outcome


def test_a_number_of_the_environment_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(PlanError, match=r"WORLD_SIZE='two' in the environment is not a number.*unset it"):
        world_size()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(PlanError, match=r"RANK=2 in the environment must be below WORLD_SIZE=2: ranks count from 0"):
        start_process_group(torch.device("cpu"), 5.0)
