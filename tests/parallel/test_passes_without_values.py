"""A pass without values: on meta tensors as on fake ones, and what it must not touch or leave behind."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.logging_tensor import LoggingTensorMode, capture_logs
from torch.utils._pytree import TreeSpec

from conformance.families.models import build
from meshwright.context.record import record_context
from meshwright.errors import PlanError
from meshwright.parallel.fake_passes import fake_pass
from meshwright.parallel.fake_passes.fake_pass import MetaMode, run_without_values
from meshwright.parallel.fake_passes.known_values import KnownValues
from meshwright.parallel.losses.observed import observe_loss
from meshwright.parallel.tensor_parallel.structure import outline
from meshwright.pipeline.layer_order import record_order

# Attention alone, experts whose numbers of tokens are lists (no meta kernel), recurrences, and scores of positions.
TYPES = ["llama", "jetmoe", "bloom", "bert", "falcon_h1", "deepseek_v3"]


def recorded(model: nn.Module) -> list[str]:
    """Return what passes without values show of a model, or why they cannot."""
    decoder = outline(model, instead="ParallelPlan()")
    names = {module: name for name, module in model.named_modules()}
    found = []
    for record in (lambda: record_order(decoder), lambda: record_context(decoder)):
        try:
            found.append(repr(plain(record(), names)))
        except PlanError as error:
            found.append(str(error).replace("FakeTensor", "Tensor"))
    return [*found, repr(observe_loss(model))]


def plain(value: Any, names: dict[nn.Module, str]) -> Any:
    """Return a record without objects of one model and one pass."""
    if isinstance(value, nn.Module):
        return names[value]
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, dict):
        return [(plain(key, names), plain(x, names)) for key, x in value.items()]
    if isinstance(value, list | tuple):
        return [plain(x, names) for x in value]
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    if not is_dataclass(value) or isinstance(value, TreeSpec | type):
        return value
    return [(field.name, plain(getattr(value, field.name), names)) for field in fields(value)]


def only_fake(run: Any, *args: Any, **options: Any) -> Any:
    if isinstance(args[1], MetaMode):
        raise NotImplementedError
    return run(*args, **options)


def without_values() -> Iterator[Tensor]:
    """Yield the tensors without values that are alive."""
    gc.collect()
    for x in gc.get_objects():
        if issubclass(type(x), Tensor) and (isinstance(x, FakeTensor) or x.is_meta):
            yield x


def test_both_ways_record_the_same_and_leave_nothing() -> None:
    """A library's cache that kept a tensor of a pass would hand it to the program's own passes."""
    before = {id(x) for x in without_values()}
    run = fake_pass._run
    for name in TYPES:
        model = build(name)
        found = recorded(model)
        with mock.patch.object(fake_pass, "_run", lambda *args, **options: only_fake(run, *args, **options)):
            assert found == recorded(model)
        del model, found
    assert [x.shape for x in without_values() if id(x) not in before] == []


class Program(nn.Module):
    """A model that does what a pass without values must survive."""

    table = torch.ones(8, 4)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.norm = nn.Identity()
        self.register_buffer("count", torch.zeros(()))
        self.seen: list[object] = []

    def forward(self, input_ids: Tensor) -> Tensor:
        self.seen.append(self.weight.device.type)
        self.count.add_(1)
        self.table.mul_(2)
        assert int(input_ids.max()) == 0 and torch.zeros(1, device="cpu").device == self.weight.device
        assert (torch.arange(3) * 1).dtype == torch.int64 and (torch.arange(3) * 1.0).dtype == torch.float32
        hidden = self.norm(self.table[input_ids].to(self.weight) @ self.weight)
        self.seen.append(hidden.dtype)
        return hidden * torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_tensors_with_values_are_read_and_not_written() -> None:
    model = Program()
    kept: list[Tensor] = []  # by a hook of the program, outside of the model, where nothing would put it back
    model.norm.register_forward_hook(lambda _, __, output: kept.append(output))
    output = run_without_values(model, rows=2, length=3, instead="none")
    assert not kept and len(model.norm._forward_hooks) == 1
    assert output.shape == (2, 3, 4) and output.is_meta and output.requires_grad
    assert model.seen == ["meta", torch.float32] and model.count == 0 and bool((model.table == 1).all())
    assert not model.weight.is_meta


def test_autocast_casts() -> None:
    model = Program()
    with torch.autocast("cpu", torch.bfloat16):
        run_without_values(model, rows=2, length=3, instead="none")
    assert model.seen == ["cpu", torch.bfloat16]


def test_known_values_are_a_list_without_an_operation() -> None:
    """A model that sees images lists the tokens of each row, where an operation for each of them took seconds."""
    own = FakeTensor.tolist
    batch = {"ids": torch.tensor([[1, 0, 2], [3, 4, 5]])}
    with FakeTensorMode(allow_non_fake_inputs=True), KnownValues(batch) as known:
        ids = known.batch["ids"]
        ids[0] += 1
        copied, unknown = copy.deepcopy(ids), torch.randn(2)
        with LoggingTensorMode(), capture_logs() as operations:
            assert ids.tolist() == copied.tolist() == [[2, 1, 3], [3, 4, 5]]
        assert not operations
        assert unknown.tolist() == [0.0, 0.0]
    assert FakeTensor.tolist is own
