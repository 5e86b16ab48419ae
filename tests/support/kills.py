"""Kills of one rank, and full disks, at each step of a save, in ranks that live on."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.faults.together import texts_of_all
from support.faulty_disk import FaultyDisk, KilledRank
from support.tiers import crossing, nightly

# Every how many steps of a save the tests of `make test-all` fail; `make kills` fails every one.
STRIDE = int(os.environ.get("MESHWRIGHT_FAULT_STRIDE", "6"))
FEW = 17  # the stride of what `make test` tries

_NUMBERED = re.compile(r"-[0-9a-f]{8}(?=-\d{5}-of-)")  # what a save adds to names that an older one has
_AUTOMATIC = re.compile(r"checkpoint_\d+")
_RANDOM_NAMES = re.compile(rb"(model|part-\d{5})-[0-9a-f]{8}")
_TIME = re.compile(rb'^{"digest":"[0-9a-f]{32}"|"written": [0-9]+')  # of a manifest


def endings(*few: tuple[str, bool]) -> list[Any]:
    """Return the cases of a test of saves that end early: how they end, whether over an older save, and the stride.

    Args:
        few: the cases of which few steps fail, unless ``make kills`` has set the stride.
    """
    crossed = [(kind, not replaces) for kind, replaces in few]  # a sample: the rest is nightly
    cases = []
    for kind in ("kill", "full"):
        for replaces in (False, True):
            is_few = (kind, replaces) in few and "MESHWRIGHT_FAULT_STRIDE" not in os.environ
            name = f"{kind}-{'over' if replaces else 'beside'} an older one-{'some' if is_few else 'many'} steps"
            case = kind, replaces, FEW if is_few else STRIDE
            tier = pytest.param if is_few else crossing if (kind, replaces) in crossed else nightly
            cases.append(tier(*case, id=name))
    return cases


def fingerprint(folder: Path) -> dict[str, str]:
    """The digest of each file, by its name; random names are left out, and so is the seal, which has the time."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in ("meshwright_seal.json", ".meshwright_seal.json.new"):
            name = _RANDOM_NAMES.sub(rb"\1-X", path.relative_to(folder).as_posix().encode()).decode()
            found[name] = hashlib.sha256(_TIME.sub(b"", _RANDOM_NAMES.sub(rb"\1-X", path.read_bytes()))).hexdigest()
    return found


def plain_names(folder: Path) -> set[str]:
    """The names in a folder, without what is random in them and without accelerate's numbers."""
    found = (_AUTOMATIC.sub("checkpoint_N", _NUMBERED.sub("", path.name)) for path in folder.iterdir())
    return {_RANDOM_NAMES.sub(rb"\1-X", name.encode()).decode() for name in found}


def try_faults(
    *,
    folder: Path,
    kind: str,
    rank: int,
    every: int,
    save: Callable[[], object],
    find: Callable[[], dict[str, str]],
    expected: list[dict[str, str]],
    names: set[str],
    added: str = "",
) -> tuple[int, list[str]]:
    """Make one rank's disk fail at each step of a save, and look at what a load finds; every rank calls this.

    Args:
        folder: the folder that is saved to; it is brought back to its content before each point.
        kind: ``"kill"`` or ``"full"``.
        rank: the rank whose disk fails.
        every: 1 for all steps, more to leave steps out.
        save: saves to the folder.
        find: returns the fingerprint of what a load finds to be whole.
        expected: the fingerprints of the old save and of the new one.
        names: the names in ``folder`` after a save that succeeds.
        added: a file that the program adds to a save once it is whole.

    Returns:
        The number of points, and what went wrong.
    """
    before, problems, points, step = folder.with_name("before"), [], 0, 0
    own, synced = dist.get_rank() == rank, folder.with_name("synced")
    if dist.get_rank() == 0:
        shutil.copytree(folder, before)
    dist.barrier()
    while True:
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
            shutil.copytree(before, folder)
            synced.write_text("")
        dist.barrier()
        disk, error = FaultyDisk(step if own else None, kind, KilledRank, synced), None
        with disk.active():
            try:
                save()
            except Exception as raised:  # a rank may find that the files of a killed rank end early
                error = str(raised) or "killed"
        said = [json.loads(text) for text in texts_of_all(json.dumps([error, disk.steps, disk.log[-1:]]))]
        where = f"{kind} of rank {rank} at step {step}: {said[rank][2]}"
        if said[rank][1] <= step:
            return points, problems
        points += 1
        # The last rank to fail may be alone with it: a step after the last that all ranks wait for.
        if kind == "full" and len({bool(error) for error, _, _ in said}) > 1:
            problems.append(f"{where}: not all ranks raise: {said}")
        try:
            found = {name: value for name, value in find().items() if name != added}
            if found not in [{name: value for name, value in one.items() if name != added} for one in expected]:
                problems.append(f"{where}: what is found is neither the old nor the new one")
            dist.barrier()
            save()
            dist.barrier()  # rank 0 may still be removing its hidden folder
            if find() != expected[1]:
                problems.append(f"{where}: the next save is not what it should be")
            if (left := plain_names(folder)) != names:
                problems.append(f"{where}: leftovers {sorted(left ^ names)}")
        except Exception as raised:
            problems.append(f"{where}: {type(raised).__name__}: {raised}")
        dist.barrier()
        step += every


def counted(results: list[Any], what: str) -> None:
    """Print the number of points, and fail with what went wrong."""
    (points, problems), *_ = results
    print(f"{what}: {points} points, {points - len(problems)} held")
    wrong = [f"on rank {rank}: {text}" for rank, (_, texts) in enumerate(results) for text in texts]
    assert points and not wrong, "\n".join(wrong)
