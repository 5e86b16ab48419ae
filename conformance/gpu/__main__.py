"""``python -m conformance.gpu``: prove and time everything on a GPU, and write one page."""

from __future__ import annotations

import datetime
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.environment import environment
from conformance.gpu.catalogue import NAMES
from conformance.gpu.page import HEAD, page, table_line
from conformance.gpu.runner import Outcome, Runner


class DeviceKind(StrEnum):
    """The kind of device to run on."""

    CPU = "cpu"
    CUDA = "cuda"


def main(
    sections: Annotated[
        list[str] | None, typer.Option(help=f"A section; may be given several times: {', '.join(NAMES)}.")
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Time for all sections; what does not fit in is left out, and said.")
    ] = 25.0,
    device: Annotated[DeviceKind, typer.Option(help="cpu runs what has a meaning there, by the same code.")] = (
        DeviceKind.CUDA
    ),
    out: Annotated[Path, typer.Option(help="The folder of page.md, figures.json and log.txt.")] = Path("runs/gpu"),
    plant: Annotated[
        bool, typer.Option("--plant", help="Plant a fault in each section, to see that it is found: all must fail.")
    ] = False,
) -> None:
    """Run the sections one after the other, each in processes of its own, and write the page.

    Exits with 0 if every section that could run passed, 1 if one failed, crashed or hung, and 2 if there is no such
    device or section.

    Examples:

        python -m conformance.gpu --out runs/h100
        python -m conformance.gpu --sections numbers --sections memory --minutes 8
        python -m conformance.gpu --device cpu
    """
    names = [name for given in sections or NAMES for name in given.split(",")]
    if unknown := [name for name in names if name not in NAMES]:
        raise typer.BadParameter(f"there is no section {unknown[0]!r}; there are {', '.join(NAMES)}")
    if device is DeviceKind.CUDA and not torch.cuda.is_available():
        raise typer.BadParameter("torch finds no CUDA device; --device cpu runs what has a meaning there")
    out.mkdir(parents=True, exist_ok=True)
    (out / "log.txt").unlink(missing_ok=True)
    runner = Runner(device=device.value, minutes=minutes, plants=plant, log=out / "log.txt")
    machine, found = _machine(device), list[Outcome]()
    print(HEAD, flush=True)
    for outcome in runner.outcomes(names):
        found.append(outcome)
        print(table_line(outcome), flush=True)
        # After each section, so that a run that is cut off leaves what it has.
        figures = {"machine": machine, "sections": [one.as_dict() for one in found]}
        (out / "figures.json").write_text(json.dumps(figures, indent=1, default=str))
        (out / "page.md").write_text(page(found, machine))
    raise typer.Exit(int(any(outcome.is_wrong for outcome in found)))


def _machine(device: DeviceKind) -> dict[str, Any]:
    facts = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **environment()}
    if device is DeviceKind.CUDA:
        gpu = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": f"{torch.cuda.device_count()} x {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB",
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return facts


if __name__ == "__main__":
    typer.run(main)
