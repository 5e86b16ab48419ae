"""The order of one device: from torch's random state or a generator, over epochs, interruptions and other loaders."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate import DataLoaderConfiguration
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler

import meshwright as mw
from meshwright_hf.accelerate import prepare
from support.accelerated import accelerator
from support.loading import Numbers, as_list, ranks_of, seen, steps
from support.models import build

SEED = 7
FAST = [Phase.explicit, Phase.generate]

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(scope="module")
def quiet() -> Any:
    """Without the warning of each loader whose last batch does not divide."""
    logger = logging.getLogger("meshwright.data.loader")
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(logging.NOTSET)


class Buckets(Sampler[list[int]]):
    """Batches in an order that is drawn where the iterator is made, since this method is no generator."""

    def __init__(self, size: int, batch_size: int):
        self.batches = [list(range(size))[i : i + batch_size] for i in range(0, size, batch_size)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter([self.batches[i] for i in torch.randperm(len(self.batches))])

    def __len__(self) -> int:
        return len(self.batches)


@dataclass(frozen=True)
class Program:
    """Epochs of training, of which some are left before their end, each with an evaluation in it.

    Args:
        size: samples.
        batch_size: of one device.
        kind: what the order is drawn from: a "generator", that the evaluation shares or not, or "torch".
        steps: of each epoch; None for all.
        options: of the training DataLoader.
    """

    size: int
    batch_size: int
    kind: str
    steps: Sequence[int | None]
    options: tuple[tuple[str, Any], ...] = ()

    def loaders(self, *, resumes: bool = False) -> tuple[DataLoader[Any], DataLoader[Any]]:
        """As the script makes them; one that resumes may be seeded otherwise where the state says the order."""
        torch.manual_seed(SEED + resumes)
        generator = None if self.kind in ("torch", "weighted", "buckets") else torch.Generator().manual_seed(SEED)
        order: dict[str, Any] = {"batch_size": self.batch_size, "shuffle": True, **dict(self.options)}
        if self.kind == "weighted":
            order |= {"sampler": WeightedRandomSampler([1.0] * self.size, self.size), "shuffle": False}
        elif self.kind == "buckets":
            order = {"batch_sampler": Buckets(self.size, self.batch_size)}
        train = DataLoader(Numbers(self.size), generator=generator, collate_fn=as_list, **order)
        shared = generator if self.kind == "shared generator" else None
        return train, DataLoader(Numbers(5), 2, generator=shared, collate_fn=as_list)


Take = Callable[[Any, int | None], list[list[int]]]


def run(program: Program, take: Take, train: Any, test: Any, first: int = 0) -> list[list[list[int]]]:
    """The batches of each epoch from the first on."""
    epochs = []
    for limit in program.steps[first:]:
        epochs.append(take(train, limit))
        take(test, None)
        torch.rand(3)  # the program draws too
    return epochs


def on_one_device(program: Program) -> list[list[list[int]]]:
    return run(program, lambda loader, limit: list(itertools.islice(loader, limit)), *program.loaders())


def on_ranks(loaders: Any, limit: int | None) -> list[list[int]]:
    return seen(steps(loaders, limit))


programs = st.builds(
    Program,
    size=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    kind=st.sampled_from(["generator", "shared generator", "torch", "weighted", "buckets"]),
    steps=st.lists(st.one_of(st.none(), st.integers(1, 6)), min_size=1, max_size=4),
    options=st.sampled_from([(), (("drop_last", False),)]),
)


def distributed(program: Program, dp: int, *, resumes: bool = False) -> tuple[Any, Any]:
    """Both loaders on each of the ranks, which are one where they share torch's random state with each other."""
    dp = dp if "generator" in program.kind else 1
    pairs = [program.loaders(resumes=resumes) for _ in range(dp)]
    made = [[ranks_of(dp, lambda loader=loader: loader)[rank] for loader in pair] for rank, pair in enumerate(pairs)]
    torch.manual_seed(SEED + resumes)
    return tuple([pair[i] for pair in made] for i in (0, 1))  # type: ignore[return-value]


@pytest.mark.quick
@settings(max_examples=40, deadline=None, phases=FAST)
@given(program=programs, dp=st.integers(1, 3))
def test_the_orders_of_one_device(program: Program, dp: int) -> None:
    """Row 37: also after epochs that were left, and with loaders and a program that draw from the same state."""
    assert run(program, on_ranks, *distributed(program, dp)) == on_one_device(program)


@settings(max_examples=40, deadline=None, phases=FAST)
@given(program=programs, dp=st.integers(1, 3), then=st.integers(1, 3), data=st.data())
def test_a_resumed_run_keeps_all_later_orders(program: Program, dp: int, then: int, data: st.DataObject) -> None:
    """Row 38: from the state alone, in another program, which has drawn other numbers."""
    expected = on_one_device(program)
    epoch = data.draw(st.integers(0, len(expected) - 1), label="interrupted in epoch")
    taken = data.draw(st.integers(0, len(expected[epoch])), label="after batches")
    train, test = distributed(program, dp)
    before = run(Program(**{**vars(program), "steps": program.steps[:epoch]}), on_ranks, train, test)
    before.append(on_ranks(train, taken) if taken else [])
    state = json.loads(json.dumps(train[0].state_dict()))
    assert len(json.dumps(state)) < 8192
    train, test = distributed(program, then, resumes=True)
    for rank, loader in enumerate(train):
        loader.load_state_dict(state)
        assert rank or loader.state_dict()["samples"] == state["samples"]
        if not taken:
            loader.set_epoch(epoch)  # a state does not say that the epoch before was left
    limit = program.steps[epoch]
    if limit is not None and limit <= taken:
        for loader in train:
            loader.set_epoch(epoch + 1)  # of the epoch that is left here, nothing more is to be read
    else:
        before[-1] += on_ranks(train, None if limit is None else limit - taken)
    on_ranks(test, None)
    torch.rand(3)
    assert before + run(program, on_ranks, train, test, epoch + 1) == expected


@pytest.mark.parametrize("kind", ["generator", "torch"])
@pytest.mark.parametrize("persists", [(True, True), (True, False), (False, True), (False, None)])
def test_workers_change_no_order(kind: str, persists: tuple[bool, bool | None]) -> None:
    """Row 39: persistent workers have the order of one device, which another setting in a resumed run leaves as it is.

    None: without workers.
    """
    before, after = (
        (("num_workers", 1), ("persistent_workers", value)) if value is not None else () for value in persists
    )
    program = Program(16, 3, kind, [None, None, None], before)
    expected = on_one_device(program)
    train, test = distributed(program, 1)
    read = [on_ranks(train, None)]
    on_ranks(test, None)
    torch.rand(3)
    read.append(on_ranks(train, 2))
    state = train[0].state_dict()
    changed = Program(16, 3, kind, [None, None, None], after)
    train, test = distributed(changed, 1, resumes=True)
    train[0].load_state_dict(state)
    read[1] += on_ranks(train, None)
    on_ranks(test, None)
    torch.rand(3)
    assert read + run(changed, on_ranks, train, test, 2) == expected


ROWS = [{"input_ids": torch.tensor([i, 1, 2]), "labels": torch.tensor([i, 1, 2])} for i in range(14)]


def script(
    entry: str, plan: dict[str, Any] | None, *, save: str | None = None, load: str | None = None
) -> list[list[int]]:
    """The rows that this rank reads in three epochs, seeded before the call; a plan of None: stock, on one device.

    Args:
        save: where to save in the second epoch, after one batch.
        load: from where to go on.
    """
    seedable = entry == "seedable"
    with accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable)) as planned:
        deferred = mw.deferred_init() if entry == "deferred" and plan else contextlib.nullcontext()
        with deferred:
            model: Any = build("llama", num_hidden_layers=1)
        torch.manual_seed(8 if load and not seedable else 3)
        optimizer = torch.optim.AdamW(model.parameters())
        loader: Any = DataLoader(ROWS, batch_size=4 // (plan or {}).get("dp", 1), shuffle=True)
        before = torch.get_rng_state()
        if plan is not None:
            config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
            if entry in ("accelerate", "seedable"):
                model, optimizer, loader = prepare(planned, model, optimizer, loader, config=config)
            else:
                loader = DataLoader(ROWS, batch_size=4, shuffle=True)
                model, optimizer, loader = mw.to_distributed(model, optimizer, loader, config=config)
        elif entry in ("accelerate", "seedable"):
            model, optimizer, loader = planned.prepare(model, optimizer, loader)
        assert torch.equal(torch.get_rng_state(), before), "the call drew from torch's random state"
        if load:
            planned.load_state(load)
            loader = planned.skip_first_batches(loader, 1)  # as scripts do for accelerate's own loaders
        epochs = []
        for epoch in range(1 if load else 0, 3):
            epochs.append([])
            for number, batch in enumerate(loader):
                model(**batch).loss.backward()
                epochs[-1].append(batch["input_ids"][:, 0].tolist())
                if save and (epoch, number) == (1, 0):
                    planned.save_state(save)
            torch.rand(2)
        return epochs


def together(ranks: list[Any]) -> list[list[list[int]]]:
    return [
        [list(itertools.chain(*batch)) for batch in zip(*epochs, strict=True)] for epochs in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize("entry", ["to_distributed", "deferred", "accelerate", "seedable"])
def test_every_entry_has_the_order_of_one_device(entry: str, pool2: Any, tmp_path: Any) -> None:
    """Row 37: a program seeded before the call, whose loader has no generator. Row 38: and one that goes on.

    One device is the plain DataLoader; stock accelerate in one process has its order too, but for
    ``use_seedable_sampler``, which has an order of its own.
    """
    expected = script(entry, None)
    if entry == "accelerate":
        assert expected == script("to_distributed", None)
    else:
        assert (expected == script("to_distributed", None)) == (entry != "seedable")
    plan = {"dp": 2}
    if entry not in ("accelerate", "seedable"):
        assert together(pool2.run(script, entry, plan)) == expected
        return
    assert together(pool2.run(script, entry, plan, save=tmp_path)) == expected
    assert together(pool2.run(script, entry, plan, load=tmp_path)) == [expected[1][1:], expected[2]]
