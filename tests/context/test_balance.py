"""The parts of a sequence: complete, in order, and of nearly the same work on every rank."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.context.region import ContextRegion
from meshwright.mesh.axes import Axis
from meshwright.optim.runtime import runtime_of
from meshwright.parallel import sequence_parts
from meshwright.parallel.sequence_parts import SequenceParts, _unevenness
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.short_programs import gradients_of

CP = (2, 4, 8)
LENGTHS = (4096, 8192, 16384, 32768)


def parts_of(cp: int, rank: int = 0) -> SequenceParts:
    return SequenceParts(Axis("cp", size=cp, rank=rank))


def work_of_documents(length: int, median: int, draw: random.Random) -> Tensor:
    """The visible pairs of each token in a row of documents with log-normal lengths; the last one is cut off."""
    found: list[Tensor] = []
    while sum(map(len, found)) < length:
        found.append(torch.arange(1, 1 + max(16, int(median * draw.lognormvariate(0, 1)))))
    return torch.cat(found)[:length]


@pytest.mark.parametrize("cp", CP)
@pytest.mark.parametrize("length", LENGTHS)
def test_plain_rows_are_even(length: int, cp: int) -> None:
    """1.02: of a row of 4,096 tokens over 8 ranks, the two chunks of each rank have the same work to the token."""
    work = torch.arange(1, length + 1)
    assert parts_of(cp).balanced(work).dealt is None and _unevenness(parts_of(cp), work) <= 1.02


@pytest.mark.parametrize("cp", CP)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("median", [100, 400, 1000, 4000])
def test_packed_rows_are_even(median: int, length: int, cp: int) -> None:
    """1.15 is what we promise for typical documents; zigzag leaves up to 3 times the mean."""
    draw = random.Random(0)
    rows = [work_of_documents(length, median, draw) for _ in range(20)]
    balanced = [_unevenness(parts_of(cp).balanced(work), work) for work in rows]
    assert max(balanced) <= 1.15
    assert all(_unevenness(parts_of(cp), x) >= y - 1e-9 for x, y in zip(rows, balanced, strict=True))
    if cp == 8 and median <= 1000:  # what the default would leave
        assert sum(_unevenness(parts_of(cp), work) for work in rows) / len(rows) > 1.3


@pytest.mark.parametrize("length", [16, 61, 130])
@pytest.mark.parametrize("cp", [1, 2, 4])
@mock.patch.object(sequence_parts, "_SMALLEST", 1)
def test_parts_hold_each_token_once(cp: int, length: int) -> None:
    work = torch.randint(1, 100, (length,), generator=torch.Generator().manual_seed(length))
    work[: length // 2] += 1000
    x = torch.arange(length, dtype=torch.float64)
    for dealt in (None, parts_of(cp).balanced(work).dealt):
        ranks = [SequenceParts(Axis("cp", size=cp, rank=rank), dealt) for rank in range(cp)]
        own = torch.stack([parts.take(x, 0, fill=-1) for parts in ranks])
        whole = ranks[0].ordered(own, 0)
        assert torch.equal(whole[:length], x) and (whole[length:] == -1).all()
        assert torch.equal(ranks[0].parted(whole, 0), own)
        for first in range(0, cp, 2):  # two neighbours, as in a hybrid of two
            if first + 2 <= cp:
                pair = ranks[0].ordered(own[first : first + 2], 0, first)
                places = torch.cat([torch.arange(run.start, run.stop) for run in ranks[0].runs(length, first, 2)])
                assert torch.equal(pair[pair >= 0], x[places[places < length]])
                assert torch.equal(ranks[0].parted(pair, 0, first, 2), own[first : first + 2])
        for parts in ranks:
            places = torch.cat([torch.arange(run.start, run.stop) for run in parts.runs(length)])
            assert torch.equal(parts.take(x, 0), x[places.clamp(max=length - 1)].masked_fill(places >= length, 0))
            assert max(run.size for run in parts.runs(length)) * 2 <= len(places) or cp == 1


def test_documents_move_chunks() -> None:
    """One long document at the end of a row of short ones: both halves of its work must be shared."""
    work = torch.cat([*(torch.arange(1, 33) for _ in range(32)), torch.arange(1, 1025)])
    parts = parts_of(2).balanced(work)
    assert _unevenness(parts_of(2), work) > 1.3
    assert parts.dealt is not None and _unevenness(parts, work) <= 1.02
    assert all(len(held) == 8 for held in parts.dealt)


# ---- in training ----------------------------------------------------------------------------------------------------


def packed(seed: int) -> dict[str, Tensor]:
    """A row of documents, another one for each seed, whose work is uneven under zigzag."""
    ids = tokens(2, 40, seed=seed)
    ends = (3, 8, 12) if seed else (20, 25, 33)
    starts = torch.tensor([0, *ends])
    places = torch.arange(40)
    positions = places - starts[torch.bucketize(places, starts, right=True) - 1]
    return {"input_ids": ids, "labels": labels_for(ids), "position_ids": positions.expand(2, -1)}


@mock.patch.object(sequence_parts, "_SMALLEST", 1)
def two_passes(plan: dict[str, Any] | None) -> tuple[dict[str, Tensor], list[Any]]:
    """The gradients of two rows of other documents, whose passes are both in flight, and how the ranks shared them."""
    with Float64():
        model: Any = build("llama").double().train()
        dealt = []
        if plan is None:
            model.config.use_cache = False
        else:
            model, _, _ = mw.to_distributed(model, plan=mw.ParallelPlan(**plan))
        losses = []
        for seed in (0, 1):
            losses.append(model(**packed(seed)).loss)
            if plan is not None:
                dealt.append(runtime_of(model).features.find(ContextRegion).parts.dealt)
        with torch.no_grad():
            of_copy = copy.deepcopy(model)(**packed(0)).loss  # while the model itself has parts of the other row
        losses.append(model.model(input_ids=packed(0)["input_ids"]).last_hidden_state.square().mean())
        sum(losses).backward()
        return gradients_of(model, plan) | {
            f"loss {step}": x.detach() for step, x in enumerate([*losses, of_copy])
        }, dealt


@functools.cache
def passes_of_one_process() -> dict[str, Tensor]:
    return two_passes(None)[0]


@pytest.mark.parametrize(
    "plan",
    [
        {"cp": 2},
        {"cp": 2, "recompute": "full"},
        {"cp": 2, "context": "ring", "recompute": "full"},
        {"cp": 2, "context": "ulysses"},
        {"cp": 4, "context": "hybrid", "ulysses": 2},
    ],
    ids=str,
)
def test_passes_of_other_documents(plan: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """1e-10 in float64: only the order of sums differs. Recompute must cut each row as its forward pass did."""
    expected = passes_of_one_process()
    results = request.getfixturevalue(f"pool{plan['cp']}").run(two_passes, plan)
    assert all(relative_difference(results[0][0][name], value) <= 1e-10 for name, value in expected.items())
    for _, (first, second) in results:
        assert (first is None) == (second is None) == (plan.get("context") == "ulysses")
        assert first is None or first != second
