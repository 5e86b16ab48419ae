"""The memory that processes may use: what the kernel estimates, in a container what its limits leave at most."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.mesh import host

V1 = "memory/memory.limit_in_bytes"
LIMITED = {"memory.max": "9000\n", "memory.current": "7000\n"}
MEMINFO = "MemTotal:       100 kB\nMemFree:         10 kB\nMemAvailable:    60 kB\n"  # the files cached are 50 kB


@pytest.mark.parametrize(
    ("meminfo", "limits", "expected"),
    [
        (MEMINFO, {}, 60 * 1024),
        (MEMINFO, {"memory.max": "max\n"}, 60 * 1024),
        (MEMINFO, {"memory.max": "4096\n"}, 4096),
        (MEMINFO, {V1: "4096\n"}, 4096),
        (MEMINFO, {V1: f"{2**63 - 4096}\n"}, 60 * 1024),  # what v1 writes where there is no limit
        (MEMINFO, {**LIMITED, "memory.stat": "anon 1000\ninactive_file 2500\nactive_file 500\nfile 6000\n"}, 5000),
        (MEMINFO, {**LIMITED, "memory.stat": "inactive_file 8000\nactive_file 0\n"}, 9000),  # read a moment later
        (MEMINFO, {**LIMITED, "memory.current": "9500\n", "memory.stat": "anon 9500\n"}, 0),
        (MEMINFO, {"job/step/memory.max": "max\n", **{f"job/{name}": x for name, x in LIMITED.items()}}, 9000),
        (
            MEMINFO,
            {
                V1: "9000\n",
                "memory/memory.usage_in_bytes": "7000\n",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 2500\ntotal_active_file 500\n",
            },
            5000,
        ),
        (MEMINFO, {V1: f"{2**63 - 4096}\n", "memory/slurm/memory.limit_in_bytes": "4096\n"}, 4096),
        ("MemTotal: 100 kB\n", {"memory.max": "2048\n"}, 2048),
        ("MemTotal: 100 kB\n", {}, 7 * 512),
        (None, {}, 7 * 512),
    ],
)
def test_the_smallest_limit_counts(
    meminfo: str | None, limits: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host, "_OWN", tmp_path / "own")
    (tmp_path / "own").write_text("5:cpu,memory:/slurm/outside\n1:name=systemd:/user\n0::/job/step\n")
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 7, "SC_PAGE_SIZE": 512}.__getitem__)
    for name, text in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if meminfo is not None:
        (tmp_path / "meminfo").write_text(meminfo)
    assert host.available_memory() == expected
