"""``meshwright doctor``: reports what is installed and what works on this machine."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import PlanError
from meshwright.mesh.host import core_count
from meshwright_hf.launch import job
from meshwright_hf.versions import TESTED, installed, place, tested_requirement

PATIENCE = 10.0  # seconds for two ranks on this machine to meet over gloo
SMALL_SHARED_MEMORY = 256 * 2**20  # bytes; a container's default of 64 MiB is too little for loader workers

Status = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Args:
        topic: the subject of the check.
        status: "problem" if training would fail on this machine; "note" for information.
        text: the finding and, unless the status is "ok", its consequence or the remedy.
    """

    topic: str
    status: Status
    text: str


def examine() -> list[Finding]:
    """Return the findings of all checks of this machine; changes nothing and sends nothing to other machines."""
    return [finding for look in _LOOKS for finding in look()]


def has_problem(findings: list[Finding]) -> bool:
    """Return whether training would fail on this machine."""
    return any(finding.status == "problem" for finding in findings)


def as_text(findings: list[Finding]) -> str:
    """Return the findings as lines of text, with the number of problems and warnings at the end."""
    marks = {"ok": "ok     ", "note": "-      ", "warning": "warning", "problem": "PROBLEM"}
    width = max(len(finding.topic) for finding in findings)
    lines = [f"{marks[finding.status]}  {finding.topic:{width}}  {finding.text}" for finding in findings]
    counts = {status: sum(f.status == status for f in findings) for status in ("problem", "warning")}
    return "\n".join(
        [*lines, "", ", ".join(f"{count} {status}{'s' * (count != 1)}" for status, count in counts.items())]
    )


def as_dict(findings: list[Finding]) -> dict[str, Any]:
    """Return the findings, the installed versions and the tested ranges as a dict for JSON."""
    return {
        "problem": has_problem(findings),
        "findings": [asdict(finding) for finding in findings],
        "installed": {"python": platform.python_version(), **{name: installed(name) for name in TESTED}},
        "tested": {name: {"oldest": range_.oldest, "newest": range_.newest} for name, range_ in TESTED.items()},
    }


def _packages() -> Iterator[Finding]:
    yield Finding(topic="python", status="ok", text=f"{platform.python_version()} ({sys.executable})")
    for package, tested in TESTED.items():
        version = installed(package)
        if version is None:
            status: Status = "problem" if package == "torch" else "note"
            text = f"not installed; needed for {tested.purpose}"
        else:
            where = place(package, version)
            text = f"{version}; tested: {tested}"
            status = "ok" if where == "tested" else "warning"
            if where == "older" and tested.supported:
                status, text = "problem", f"{version} is older than {tested.oldest}: {tested.purpose} may not work"
            elif where != "tested":
                cure = f"pip install {tested_requirement(package)}"
                text = f"{version} is {where} than the tested versions, {tested}: {cure}"
        yield Finding(topic=package, status=status, text=text)


def _gpus() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count()
    if count:
        names = {torch.cuda.get_device_name(index) for index in range(count)}
        text = f"{count} x {', '.join(sorted(names))}, CUDA {torch.version.cuda}"
        yield Finding(topic="GPUs", status="ok", text=text)
        if dist.is_nccl_available():
            version = ".".join(str(part) for part in torch.cuda.nccl.version())
            yield Finding(topic="NCCL", status="ok", text=version)
        else:
            text = "this build of torch has no NCCL, so several GPUs cannot communicate; install a CUDA build"
            yield Finding(topic="NCCL", status="problem", text=text)
    elif Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
        text = (
            f"there is an NVIDIA driver, but torch {torch.__version__} finds no GPU; install a CUDA build that fits it"
        )
        yield Finding(topic="GPUs", status="problem", text=text)
    else:
        yield Finding(topic="GPUs", status="note", text="none: training runs on CPU, with gloo")


def _gloo() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        text = "this build of torch has no gloo: CPU tensors cannot be communicated"
        yield Finding(topic="gloo", status="problem", text=text)
        return
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    error = _try_gloo()
    if error is None:
        text = "two ranks on this machine meet and all-reduce" + (f", over {interface}" if interface else "")
        yield Finding(topic="gloo", status="ok", text=text)
    else:
        advice = "is it an interface of this machine?" if interface else "try GLOO_SOCKET_IFNAME=lo"
        text = f"two ranks on this machine do not meet (GLOO_SOCKET_IFNAME={interface}; {advice}): {error}"
        yield Finding(topic="gloo", status="problem", text=text)


def _try_gloo() -> str | None:
    """Return the error of an all-reduce between two ranks, run as threads of this process; None if it works."""
    import torch
    import torch.distributed as dist

    store, patience = dist.HashStore(), timedelta(seconds=PATIENCE)
    errors: list[str] = []

    def add(rank: int) -> None:
        try:
            tensor = torch.ones(1)
            group: Any = dist.ProcessGroupGloo(store, rank, 2, patience)
            group.allreduce([tensor]).wait()
            if tensor.item() != 2:
                errors.append(f"1 + 1 was {tensor.item()}")
        except RuntimeError as error:
            errors.append(str(error).splitlines()[0])

    threads = [threading.Thread(target=add, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    if any(thread.is_alive() for thread in threads):
        errors.append(f"no answer in {2 * PATIENCE:g} s")
    return errors[0] if errors else None


def _network() -> Iterator[Finding]:
    try:
        job.check_port(29500)
        yield Finding(topic="port 29500", status="ok", text="free; several machines meet there by default")
    except PlanError:
        text = "in use; for several machines pass --main_process_port (one machine takes a free port)"
        yield Finding(topic="port 29500", status="warning", text=text)
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        text = f"{name} does not resolve: gloo needs GLOO_SOCKET_IFNAME, which meshwright launch sets"
        yield Finding(topic="host name", status="note", text=text)
        return
    local = address.startswith("127.")
    text = f"{name} is {address}"
    if local:
        text += ": between machines gloo needs GLOO_SOCKET_IFNAME, which meshwright launch sets"
    yield Finding(topic="host name", status="note" if local else "ok", text=text)


def _resources() -> Iterator[Finding]:
    cores = core_count()
    threads = os.environ.get("OMP_NUM_THREADS")
    text = f"{cores}; OMP_NUM_THREADS={threads or 'unset: meshwright launch divides the cores'}"
    yield Finding(topic="cores", status="ok", text=text)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding(topic="memory", status="ok", text=f"{memory / 2**30:.1f} GiB")
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        small = size < SMALL_SHARED_MEMORY
        advice = ": too little for workers of a DataLoader and for NCCL; in a container: docker run --shm-size=8g"
        text = f"{size / 2**30:.2g} GiB" + advice * small
        yield Finding(topic="shared memory", status="warning" if small else "ok", text=text)
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler:
        yield Finding(topic="compiler", status="ok", text=compiler)
    else:
        text = "none: torch.compile and the operators that DeepSpeed builds do not work"
        yield Finding(topic="compiler", status="note", text=text)


_LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (_packages, _gpus, _gloo, _network, _resources)
