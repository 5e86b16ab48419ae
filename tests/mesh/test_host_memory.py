"""The memory that processes may use: what the kernel estimates, in a container its limit at most."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.mesh import host_memory

V1 = "memory/memory.limit_in_bytes"
MEMINFO = "MemTotal:       100 kB\nMemFree:         10 kB\nMemAvailable:    60 kB\n"  # the files cached are 50 kB


@pytest.mark.parametrize(
    ("meminfo", "limits", "expected"),
    [
        (MEMINFO, {}, 60 * 1024),
        (MEMINFO, {"memory.max": "max\n"}, 60 * 1024),
        (MEMINFO, {"memory.max": "4096\n"}, 4096),
        (MEMINFO, {V1: "4096\n"}, 4096),
        (MEMINFO, {V1: f"{2**63 - 4096}\n"}, 60 * 1024),  # what v1 writes where there is no limit
        ("MemTotal: 100 kB\n", {"memory.max": "2048\n"}, 2048),
        ("MemTotal: 100 kB\n", {}, 7 * 512),
        (None, {}, 7 * 512),
    ],
)
def test_the_smallest_limit_counts(
    meminfo: str | None, limits: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 7, "SC_PAGE_SIZE": 512}.__getitem__)
    (tmp_path / "memory").mkdir()
    for name, text in limits.items():
        (tmp_path / name).write_text(text)
    if meminfo is not None:
        (tmp_path / "meminfo").write_text(meminfo)
    assert host_memory.available_memory() == expected
