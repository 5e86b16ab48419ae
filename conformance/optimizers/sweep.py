"""The program that torchrun starts on two ranks: checks optimizers, and writes the records of rank 0 as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path

from transformers.training_args import OptimizerNames

from conformance.optimizers.check import Record, check


def main(output: Path, names: list[str]) -> None:
    """Check optimizers in turn and write the records to ``output``."""
    warnings.filterwarnings("ignore")
    records = []
    for name in names or [each.value for each in OptimizerNames]:
        records.append(check(name))
        if os.environ["RANK"] == "0":  # which has the whole weights
            print(f"{name:28} {records[-1].reads:10} {records[-1].missing or records[-1].cells}", flush=True)
            output.write_text(json.dumps([dataclasses.asdict(record) for record in records]))


def read(path: Path) -> list[Record]:
    """Return the records that ``main`` wrote."""
    return [Record(**fields) for fields in json.loads(path.read_text())]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
