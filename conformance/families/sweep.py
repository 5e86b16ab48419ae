"""The program that torchrun starts on two ranks: checks families, and writes the records of rank 0 as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from pathlib import Path

import torch.distributed as dist
from rich.progress import track

from conformance.families.models import DENSE
from conformance.families.parity import Record, check


def main(output: Path, families: list[str]) -> None:
    """Check families in turn and write the records to ``output``."""
    warnings.filterwarnings("ignore")
    names, records = families or sorted(DENSE), []
    is_first = False
    for name in track(names, "families", disable=not sys.stderr.isatty()):
        records.append(check(name))
        is_first = dist.get_rank() == 0
    if is_first:  # only rank 0 has compared the gradients
        output.write_text(json.dumps([dataclasses.asdict(record) for record in records]))


def read(path: Path) -> list[Record]:
    """Return the records that ``main`` wrote."""
    return [Record(**fields) for fields in json.loads(path.read_text())]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
