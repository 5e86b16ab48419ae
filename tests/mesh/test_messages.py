"""No wait for a message between two ranks is longer than the timeout that the run set."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.checkpoint.one_device.whole_tensors import _hop
from meshwright.context.key_exchange import _start_shift
from meshwright.faults.collective_log import set_timeout
from meshwright.mesh.axes import Axis
from meshwright.pipeline.links import Expected, Format, Links
from meshwright.resharding.move import _exchange

LARGE = 2**22  # elements that no socket buffers, so that a send needs its receiver


def links(axis: Axis) -> Links:
    return Links(axis, {(0, 1): axis.group, (1, 0): axis.group}, torch.device("cpu"))


def receive(axis: Axis, format: Format | None) -> None:
    links(axis).receiver(1, [Expected("x", lambda: format)]).take("x")


def send(axis: Axis) -> None:
    own = links(axis)
    own.send((torch.zeros(LARGE),), 1)
    own.end()


WAITS: dict[str, Callable[[Axis], Any]] = {
    "a ring": lambda axis: _start_shift(torch.zeros(2), axis)(),
    "a pipeline's receive": lambda axis: receive(axis, (((2,), torch.float32),)),
    "a pipeline's announcement": lambda axis: receive(axis, None),
    "a pipeline's send": send,
    "a save": lambda axis: _hop(torch.zeros(2), 1, axis),
    "a reshard": lambda _: _exchange({}, {1: 8}, torch.device("cpu")),
}


def wait_for_a_rank_that_does_nothing(name: str) -> str:
    group = dist.group.WORLD if name == "a reshard" else dist.new_group()
    set_timeout(group, 0.5)
    if dist.get_rank() == 1:
        time.sleep(1.5)  # a group that ends early would be another error
        return ""
    try:
        WAITS[name](Axis("cp", size=2, rank=0, group=group))
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", WAITS)
def test_no_wait_is_longer_than_the_timeout(name: str, pool2: Any) -> None:
    assert "Timed out" in pool2.run(wait_for_a_rank_that_does_nothing, name)[0]
