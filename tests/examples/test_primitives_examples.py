"""The programs of examples/ that need no model: each compares itself with one process, and prints what ranks hold."""

from __future__ import annotations

import contextlib
import importlib
import io
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import WorkerPool

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pool8() -> Iterator[WorkerPool]:
    pool = WorkerPool(8)
    yield pool
    pool.close()


def printed(name: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        importlib.import_module(name).main()
    return output.getvalue()


@pytest.mark.parametrize(
    ("name", "world_size", "lines_by_rank"),
    [
        ("placements", 2, [["rows (1, 3) [[1, 2, 3]]", "columns (2, 2) [[1, 2], [4, 5]]", "Shard(3) of a tensor"]]),
        ("placements", 2, [[], ["rows (1, 3) [[4, 5, 6]]", "columns (2, 1) [[3], [6]]", "Shard(2) of a tensor"]]),
        (
            "partial_to_replicate",
            2,
            [["before (2, 3) [[1, 2, 3], [4, 5, 6]]"], ["before (2, 3) [[0, 0, 0], [0, 0, 0]]"]],
        ),
        ("partial_to_replicate", 2, [[], ["after (2, 3) [[1, 2, 3], [4, 5, 6]]"]]),
        ("shard_to_replicate", 2, [["before (1, 3) [[1, 2, 3]]"], ["after (2, 3) [[1, 2, 3], [4, 5, 6]]"]]),
        ("deferred_weights", 2, [["w1 before () True", "w0: equal", "w1.weight: equal", "w1.bias: equal"]]),
        ("data_parallel", 4, [["losses: equal to one process", "w0: equal", "w1: equal"]]),
        ("tensor_parallel", 4, [["losses: equal to one process", "w0: equal", "w1: equal"]]),
        ("pipeline", 8, [["losses: equal", "w0: equal", "w1: equal"], *[[]] * 4, ["w0 (0,) []"]]),
        (
            "examples.shard_dataloader",
            8,
            [
                [f"{kind} step {step}, loss" for kind in ("list", "dict") for step in range(4)]
                + ["equal to one process"]
            ],
        ),
        ("hybrid", 8, [["losses: equal", "w0: equal", "w1: equal"], *[[]] * 4, ["w0 (0,) []"]]),
    ],
)
def test_a_program_equals_one_process(request, name, world_size, lines_by_rank):
    pool = request.getfixturevalue(f"pool{world_size}")
    outputs = pool.run(printed, name if "." in name else f"examples.primitives.{name}")
    for output, lines in zip(outputs, lines_by_rank, strict=False):
        for line in lines:
            assert line in output


@pytest.mark.crossing
def test_torchrun_starts_a_program(preloaded_python):
    command = [preloaded_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "6"]
    command += ["-m", "examples.primitives.mesh_order"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert "rank 2: part (2, 1) [[1], [4]]" in result.stdout
    assert "rank 3: part (2, 1) [[9], [12]]" in result.stdout
    assert "whole: equal to one process" in result.stdout


@pytest.mark.crossing
def test_the_table_of_who_reads_what(preloaded_python):
    command = [preloaded_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, "-m", "examples.who_reads_what"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in result.stdout.splitlines() if "│" in line]
    table = {(row[0], row[1], row[2]): row[3:] for row in rows}
    assert len(table) == 18
    assert table["1", "False", "torch DistributedSampler"] == ["0", "0", "repeats 0"]
    assert table["3", "False", "accelerate"] == ["0 2", "1 0", "repeats 0"]
    assert table["1", "False", "meshwright"] == ["(0)", "0", "each sample once"]
    assert table["3", "False", "meshwright"] == ["0 (2)", "1 2", "each sample once"]
    assert table["3", "True", "meshwright"] == ["0", "1", "drops 2, as asked"]
    ours = [cells[2] for (_, _, name), cells in table.items() if name == "meshwright"]
    assert not any("repeats" in text or "loses" in text or "uneven" in text for text in ours)
