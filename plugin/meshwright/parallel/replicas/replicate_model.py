"""Makes the ranks of an axis hold the same model: its weights, buffers, kept tensors and optimizer state."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.facts import Facts
from meshwright.faults.memory_digest import is_plain, memory_digest
from meshwright.faults.together import texts_of_all
from meshwright.mesh.axes import Axis

_SPARE = 16  # tensors that modules may register later and that are still compared
_ODD = 0x1E3779B97F4A7C15  # so that two values that are swapped change the sum


class ModuleTensors:
    """The tensors of a model's modules that are no parameters: buffers, and other tensors that modules keep.

    Forward may register and replace buffers, and ranks may have different ones, such as a cache that is as long as the
    longest row. So a digest travels with a key of the buffer's name, shape and dtype, and equal keys are compared.

    A tensor that is no buffer is compared if its module had it when this object was made. Other tensors are what a
    pass left behind, such as the last hidden states, which belong to a rank's rows.

    Args:
        model: the model, or its facts.
        layers: the decoder layers, if each rank of a pipeline runs only some of them.
        written_apart: whether each rank writes tensors of its own in forward, as BatchNorm does under DDP. Modules of
            which a tensor was written since this object was made are then left out.
    """

    def __init__(self, model: nn.Module | Facts, layers: Iterable[nn.Module] = (), *, written_apart: bool = False):
        facts = Facts.of(model)
        self._model = facts.model
        self._versions = {module: _versions(module) for module in facts.names} if written_apart else {}
        self._kept = {
            module: kept
            for module in facts.names
            if (kept := [key for key, value in vars(module).items() if isinstance(value, Tensor)])
        }
        self._staged = {id(module) for layer in layers for module in facts.inside(layer)}
        self._numbers: dict[int, Tensor] = {}
        self.capacity = sum(1 for _ in self._in(facts.names.items())) + _SPARE

    def named(self, *, on_all_stages: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that can be compared, each once, with their names.

        Args:
            on_all_stages: whether to leave out tensors that only some stages of a pipeline use: those in layers, and
                in modules with weights.
        """
        modules = ((module, name) for name, module in self._model.named_modules())
        return self._in(modules, on_all_stages=on_all_stages)

    def _in(
        self, modules: Iterable[tuple[nn.Module, str]], *, on_all_stages: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        seen: set[int] = set()
        for module, path in modules:
            own: dict[str, object] = dict(module._buffers)
            own.update((key, vars(module).get(key)) for key in self._kept.get(module, ()))
            # Some kernels write a tensor without counting a version, so one written tensor speaks for its module.
            if self._versions and self._versions.get(module) != _versions(module):
                continue
            if not own or (on_all_stages and (id(module) in self._staged or any(True for _ in module.parameters()))):
                continue
            for key, x in own.items():
                if isinstance(x, Tensor) and id(x) not in seen and is_comparable(x):
                    seen.add(id(x))
                    yield f"{path}.{key}".lstrip("."), x

    def digests(self, device: torch.device, *, on_all_stages: bool) -> tuple[list[Tensor], dict[int, str]]:
        """Return ``capacity`` keys and as many digests, on the device, and the name of each key."""
        named = [item for item, _ in zip(self.named(on_all_stages=on_all_stages), range(self.capacity), strict=False)]
        names = {_key(name, x): name for name, x in named}
        keys = [self._number(key, device) for key in names]
        digests = [on_device(memory_digest(x), device) for _, x in named]
        nothing = [self._number(0, device)] * (self.capacity - len(named))
        return [*keys, *nothing, *digests, *nothing], names

    def _number(self, value: int, device: torch.device) -> Tensor:
        if value not in self._numbers:
            self._numbers[value] = torch.full((), value, dtype=torch.int64, device=device)
        return self._numbers[value]


def optimizer_digest(
    state: Mapping[str, object], device: torch.device, take: Callable[[Tensor], Tensor | None]
) -> tuple[Tensor | None, int]:
    """Return a digest of the tensors that an optimizer keeps on the device for a parameter, and one of the rest.

    Args:
        state: the optimizer's state of the parameter.
        device: the parameter's device.
        take: a function that returns the part of a tensor of the state that is compared; None for nothing.
    """
    total: Tensor | None = None
    rest = 0
    for index, name in enumerate(sorted(state, key=str)):
        value = state[name]
        if isinstance(value, Tensor):
            if type(value) is not Tensor or not is_comparable(value) or (part := take(value)) is None:
                continue
            if value.device == device:
                one = memory_digest(part) * (_ODD + 2 * index)
                total = one if total is None else total + one
                continue
            value = int(memory_digest(part)) if value.device.type == "cpu" else None
        if isinstance(value, int | float | str | None):
            rest = zlib.crc32(repr((name, value)).encode(), rest)
    return total, rest


def counts_digest(state: Mapping[str, object], device: torch.device) -> Tensor | int:
    """Return a digest of what an optimizer counts for a parameter, such as its steps; 0 if it counts nothing.

    A count is a single whole number. It is that of the whole parameter on each rank that has a part, while other
    numbers may be a part's own.

    Args:
        state: the optimizer's state of the parameter.
        device: the parameter's device, for which the host does not wait.
    """
    of_device: Tensor | None = None
    total = 0
    for index, name in enumerate(sorted(state, key=str)):
        value, weight = state[name], _ODD + 2 * index
        if type(value) is Tensor and value.numel() == 1 and not value.is_complex() and is_comparable(value):
            one = value.detach().reshape(())
            if one.is_floating_point():
                one = torch.where(one == one.round(), one, torch.zeros_like(one))
            whole = one.to(torch.int64)
            if value.device == device:
                of_device = whole * weight if of_device is None else of_device + whole * weight
            else:
                total += int(whole) * weight
        elif isinstance(value, int | float) and math.isfinite(value) and value == value // 1:
            total += int(value) * weight
    of_host = (total + 2**63) % 2**64 - 2**63
    return of_host if of_device is None else of_device + of_host


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """Return an integer of any device on ``device``, without a copy that makes the host wait for ``device``."""
    return x if x.device == device else torch.full((), int(x), dtype=torch.int64, device=device)


def _versions(module: nn.Module) -> list[tuple[int, int]]:
    """Return which tensors are a module's buffers, and how often each was written."""
    return [(id(x), x._version) for x in module._buffers.values() if x is not None and not x.is_inference()]


def is_comparable(x: Tensor) -> bool:
    has_values = not (x.is_meta or nn.parameter.is_lazy(x) or x.requires_grad)
    return has_values and is_plain(x) and x.numel() > 0


def _key(name: str, x: Tensor) -> int:
    text = f"{name} {tuple(x.shape)} {x.dtype}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True) or 1


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
