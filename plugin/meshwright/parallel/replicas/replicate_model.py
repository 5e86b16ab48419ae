"""Make the ranks of an axis hold the same model: compare what they built, then broadcast the first rank's tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.faults.together import texts_of_all
from meshwright.mesh.axes import Axis

BROADCAST_BYTES = 128 * 2**20


def describe_tensors(model: nn.Module) -> list[str]:
    """Return one line per parameter and buffer, with everything that replicas must share except the values."""
    parameters = (
        f"parameter {name} {tuple(p.shape)} {p.dtype}, {'trainable' if p.requires_grad else 'frozen'}"
        for name, p in model.named_parameters()
    )
    return [*parameters, *(f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers())]


def check_agreement(problem: str | None, lines: list[str], axis: Axis) -> None:
    """Raise on every rank of the axis if any rank has a problem, or if the ranks' lines differ.

    Raises:
        ValueError: if so; the message gives the problem or the first line that differs, and the ranks.
    """
    if axis.size == 1:
        if problem is not None:
            raise ValueError(problem)
        return
    digest = hashlib.sha256(repr((problem, lines)).encode()).hexdigest()
    digests = texts_of_all(digest, axis.group)
    if problem is None and len(set(digests)) == 1:
        return
    everyone = [json.loads(text) for text in texts_of_all(json.dumps([problem, lines]), axis.group)]
    problems = [text for text, _ in everyone]
    if any(problems):
        raise ValueError(problems[0] if len(set(problems)) == 1 else _by_rank(problems, axis))
    for values in zip_longest(*(theirs for _, theirs in everyone), fillvalue="nothing more"):
        if len(set(values)) > 1:
            raise ValueError(
                f"the ranks did not build the same model; the first difference: {_by_rank(values, axis)}. Build the "
                "same model, and pass the same arguments, on every rank"
            )


def broadcast_tensors(tensors: Iterable[Tensor], axis: Axis) -> None:
    """Broadcast the first rank's values in place, in groups of tensors of one dtype and at most 128 MiB.

    A larger tensor is sent alone, without a copy. All tensors are sent as bytes, since gloo refuses int16 and
    float8, which torch's ``_broadcast_coalesced`` would send unchanged.
    """
    if axis.size == 1:
        return
    with torch.no_grad():
        for group in _groups([t for t in tensors if t.numel()]):
            if len(group) == 1 and group[0].is_contiguous():
                _broadcast(group[0].detach().view(-1), axis)
                continue
            flat = torch.cat([t.detach().reshape(-1).view(torch.uint8) for t in group])
            _broadcast(flat, axis)
            for tensor, received in zip(group, flat.split([t.nbytes for t in group]), strict=True):
                tensor.detach().copy_(received.view(tensor.dtype).view(tensor.shape))


def _groups(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        group: list[Tensor] = []
        for tensor in (t for t in tensors if t.dtype is dtype):
            if group and sum(t.nbytes for t in group) + tensor.nbytes > BROADCAST_BYTES:
                yield group
                group = []
            group.append(tensor)
        yield group


def _broadcast(flat: Tensor, axis: Axis) -> None:
    dist.broadcast(flat.view(torch.uint8), group=axis.group, group_src=0)


def _by_rank(values: Iterable[str | None], axis: Axis) -> str:
    """Return the ranks' values as text, with one entry for all ranks that have the same value."""
    assert axis.group is not None
    ranks: dict[str | None, list[int]] = {}
    for rank, value in zip(dist.get_process_group_ranks(axis.group), values, strict=True):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(
        f"rank(s) {', '.join(map(str, where))}: {'no problem' if value is None else value}"
        for value, where in ranks.items()
    )
