"""The cores that a process may use: those of its affinity, and of its container's quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.mesh import host

V1 = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),  # one and a half
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, None),
        ({V1[0]: "300000\n", V1[1]: "100000\n"}, 3),
        ({V1[0]: "-1\n", V1[1]: "100000\n"}, None),
        ({V1[0]: "300000\n"}, None),
        ({"cpu.max": "200000\n"}, None),
        ({}, None),
    ],
)
def test_a_quota_of_cores(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host.container_cores(tmp_path) == expected


def test_the_smallest_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert host.core_count() == 8
    (tmp_path / "cpu.max").write_text("300000 100000")
    assert host.core_count() == 3
    (tmp_path / "cpu.max").write_text("6400000 100000")
    assert host.core_count() == 8
