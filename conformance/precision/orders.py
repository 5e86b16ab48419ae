"""The program that torchrun starts on two ranks: trains in bfloat16, and writes the places of plans as JSON."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.summation_orders import (
    FAULTS,
    PLANS,
    Place,
    adds_in_halves,
    alone,
    cells,
    distances,
    farthest,
    orders,
    place_among,
    planned,
)


def main(output: Path, number: int) -> None:
    """Compare each plan, and each fault, with ``number`` orders of summation, and write their places to ``output``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    base, of_kind = functools.cache(alone), functools.cache(orders)

    def places(kind: str, plan: dict[str, Any], fault: str | None, text: int) -> dict[str, Place]:
        others, expected = of_kind(kind, text, number, adds_in_halves(plan)), base(kind, text)
        found = [planned(kind, plan, fault, text)]
        dist.broadcast_object_list(found, 0)  # rank 0 has the whole tensors, and all ranks decide the same
        return place_among(distances(found[0], expected, kind), others)

    asked: list[tuple[str, str, dict[str, Any], str | None]] = []
    asked += [(kind, name, PLANS[name], None) for kind, name in cells()]
    asked += [(kind, name, plan, fault) for name, (kind, plan, fault) in FAULTS.items()]
    records = []
    for kind, name, plan, fault in asked:
        found, outside = farthest(functools.partial(places, kind, plan, fault))
        records.append((kind, name, name in FAULTS, outside, {what: asdict(place) for what, place in found.items()}))
        if dist.get_rank() == 0:
            print(*records[-1], flush=True)
            output.write_text(json.dumps(records))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
