"""Streams: every sample once, in the same batches, on any number of ranks and workers and across changes of both."""

from __future__ import annotations

import functools
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from meshwright.data.shards import LaneReader, ListedShards, as_source, shuffled, window_start
from meshwright.data.stream import Lane, ShardedStream, StreamRows, deal, next_batches
from meshwright.errors import PeerFailedError
from meshwright.mesh.axes import Axis


class Ranks:
    """The ranks of a group as threads, which gather over a barrier."""

    def __init__(self, size: int):
        self.size, self.calls = size, 0
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        self.calls += rank == 0
        return values

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """The results, or exceptions, of a function on every rank."""
        results: list[Any] = [None] * self.size

        def call(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def read(
    shards: Any,
    ranks: int,
    steps: int | None = None,
    state: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[list[StreamRows]], dict[str, Any]]:
    """The rows of each rank and step, and the state after them."""
    group = Ranks(ranks)

    def one(rank: int) -> tuple[list[StreamRows], dict[str, Any]]:
        axis = Axis("dp", size=ranks, rank=rank)
        stream = ShardedStream(shards, dp=axis, gather=lambda value: group.gather(rank, value), **options)
        if state is not None:
            stream.load_state_dict(state)
        return list(itertools.islice(stream, steps)), stream.state_dict()

    results = group.run(one)
    for result in results:
        if isinstance(result, Exception):
            raise result
    states = [state for _, state in results]
    assert all(state == states[0] for state in states)  # the same on every rank
    assert json.loads(json.dumps(states[0])) == states[0]
    return [rows for rows, _ in results], states[0]


def batches(rows: list[list[StreamRows]]) -> list[list[Any]]:
    """The samples of each batch that count, sorted; checks that steps are even and nobody's is empty."""
    assert len({len(of_rank) for of_rank in rows}) == 1
    found = []
    for step in zip(*rows, strict=True):
        counted = [part.samples for part in step if not part.is_blank]
        assert all(part.samples for part in step) and all(len(part.samples) == 1 for part in step if part.is_blank)
        assert max(map(len, counted)) - min(map(len, counted)) <= 1
        found.append(sorted(itertools.chain(*counted)))
        assert {part.total for part in step} == {len(found[-1])}
    return found


def make_shards(chooser: random.Random, count: int, most: int) -> list[list[int]]:
    """Shards of uneven lengths, some of them empty, that hold 0, 1, 2, ..."""
    numbers = itertools.count()
    return [list(itertools.islice(numbers, chooser.choice([0, 1, chooser.randrange(most)]))) for _ in range(count)]


@pytest.mark.quick
@pytest.mark.parametrize("case", range(60))
def test_batches_do_not_depend_on_the_mesh(case: int) -> None:
    chooser = random.Random(case)
    shards = make_shards(chooser, chooser.randrange(1, 12), 30)
    options = {
        "batch_size": chooser.randrange(1, 10),
        "lanes": chooser.randrange(1, 9),
        "shuffle": chooser.random() < 0.7,
        "buffer_size": chooser.randrange(1, 40),
        "seed": case,
    }
    total = sum(map(len, shards))
    alone = batches(read(shards, 1, **options)[0])
    assert sorted(itertools.chain(*alone)) == list(range(total))
    assert [len(batch) for batch in alone[:-1]] == [options["batch_size"]] * (len(alone) - 1)
    assert batches(read(shards, chooser.randrange(2, 7), **options)[0]) == alone


@pytest.mark.parametrize("case", range(100))
def test_mesh_changes_in_mid_epoch(case: int) -> None:
    """Chains of up to three changes of dp and batch size, with a shuffle buffer: 0 lost, 0 repeated, one order."""
    chooser = random.Random(1000 + case)
    shards = make_shards(chooser, chooser.randrange(1, 20), 40)
    options = {"lanes": chooser.randrange(1, 9), "shuffle": True, "buffer_size": chooser.randrange(2, 60), "seed": case}
    order = [row for rows in read(shards, 1, batch_size=1, **options)[0] for row in rows]
    expected = [row.samples[0] for row in order]
    seen: list[int] = []
    state = None
    for leg in range(4):
        steps = None if leg == 3 else chooser.randrange(0, 6)
        rows, state = read(
            shards, chooser.randrange(1, 6), steps, state, batch_size=chooser.randrange(1, 12), **options
        )
        for batch in batches(rows):
            assert batch == sorted(expected[len(seen) : len(seen) + len(batch)])
            seen += batch
        if state["epoch"] == 1:
            break
        assert state["samples"] == len(seen)
    assert sorted(seen) == sorted(expected) == list(range(sum(map(len, shards))))


def test_lanes_that_ran_dry_are_not_opened_again() -> None:
    _, state = read([[1], [], list(range(20))], 2, 4, batch_size=2)
    assert state["lanes"] == [None, None, [7, 0, 0]]


def test_the_state_is_small_and_points_at_the_shard() -> None:
    shards = [[(shard, i) for i in range(50)] for shard in range(512)]
    options = {"batch_size": 64, "shuffle": True, "buffer_size": 640}
    _, state = read(shards, 2, 200, **options)
    assert len(json.dumps(state)) <= 4096
    opened = []

    class Source(ListedShards):
        def open(self, shard: int, start: int) -> Iterator[Any]:
            opened.append(shard)
            return super().open(shard, start)

    resumed, _ = read(Source(shards), 1, 1, state, **options)
    assert batches(resumed)[0] == batches(read(shards, 1, 201, **options)[0])[200]
    assert len(opened) <= 3 * 32  # of the 256 that were begun before, only those in hand


@pytest.mark.parametrize("case", range(6))
def test_workers_change_in_mid_epoch(case: int) -> None:
    chooser = random.Random(case)
    shards = make_shards(chooser, 9, 20)
    options: dict[str, Any] = {"batch_size": 4, "dp": Axis("dp"), "shuffle": True, "buffer_size": 25, "lanes": 5}
    expected = [rows.samples for rows in ShardedStream(shards, **options)]
    seen, state = [], None
    for workers, steps in ((2, 3), (0, 2), (1, None)):
        stream = ShardedStream(shards, num_workers=workers, **options)
        if state is not None:
            stream.load_state_dict(state)
        seen += [rows.samples for rows in itertools.islice(stream, steps)]
        state = stream.state_dict()
        if state["epoch"] == 1:
            break
    assert seen == expected


def test_epochs_differ_and_can_be_chosen() -> None:
    shards = [list(range(20)), list(range(20, 40))]
    stream = ShardedStream(shards, batch_size=8, dp=Axis("dp"), shuffle=True, buffer_size=16)
    first, second = ([rows.samples for rows in stream] for _ in range(2))
    assert first != second
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(40))
    stream.set_epoch(0)
    assert [rows.samples for rows in stream] == first
    stream.set_epoch(0)
    next(iter(stream))
    assert [rows.samples for rows in stream] == first  # iter begins anew, whatever was read before


def test_setting_the_epoch_of_a_loaded_state_keeps_its_place() -> None:
    options: dict[str, Any] = {"batch_size": 4, "dp": Axis("dp"), "shuffle": True, "buffer_size": 16}
    shards = [list(range(20)), list(range(20, 40))]
    whole = [rows.samples for rows in ShardedStream(shards, **options)]
    first = ShardedStream(shards, **options)
    list(itertools.islice(first, 3))
    for epoch, expected in ((0, whole[3:]), (1, None)):
        resumed = ShardedStream(shards, **options)
        resumed.load_state_dict(first.state_dict())
        resumed.set_epoch(epoch)
        assert resumed.state_dict()["samples"] == (0 if epoch else 12)
        rest = [rows.samples for rows in resumed]
        assert rest == expected if expected else len(rest) == len(whole) and rest != whole


def test_drop_last_says_how_many() -> None:
    stream = ShardedStream([range(10)], batch_size=4, dp=Axis("dp"), drop_last=True)
    assert [len(rows.samples) for rows in stream] == [4, 4]
    assert stream.dropped == 2


def test_a_state_of_another_order_is_refused() -> None:
    state = ShardedStream([range(3), range(3)], batch_size=1, dp=Axis("dp")).state_dict()
    with pytest.raises(ValueError, match=r"seed=0, but this one has seed=1"):
        ShardedStream([range(3), range(3)], batch_size=1, dp=Axis("dp"), seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match=r"num_shards=2, but this one has num_shards=1"):
        ShardedStream([range(3)], batch_size=1, dp=Axis("dp")).load_state_dict(state)
    with pytest.raises(ValueError, match=r"version 7"):
        ShardedStream([range(3)], batch_size=1, dp=Axis("dp")).load_state_dict({**state, "version": 7})


def counted(size: int, reads: Iterator[int]) -> Iterator[int]:
    for number in range(size):
        next(reads)
        yield number


def failing_shard() -> Iterator[int]:
    yield from range(4)
    raise OSError("bad block")


def test_a_shard_that_cannot_be_read_fails_on_all_ranks() -> None:
    group = Ranks(3)

    def one(rank: int) -> Any:
        axis = Axis("dp", size=3, rank=rank)
        shards: Any = [range(9), failing_shard, range(9)]
        return list(ShardedStream(shards, batch_size=3, dp=axis, gather=lambda value: group.gather(rank, value)))

    errors = group.run(one)
    assert [type(error) for error in errors] == [PeerFailedError, OSError, PeerFailedError]
    assert "rank 1 of dp" in str(errors[0]) and "bad block" in str(errors[0]) and "failing_shard" in str(errors[0])


def test_ranks_that_read_from_different_places_are_told() -> None:
    group = Ranks(2)

    def one(rank: int) -> Any:
        axis = Axis("dp", size=2, rank=rank)
        gather: Any = lambda value: group.gather(rank, value)  # noqa: E731
        return list(ShardedStream([range(9)] * 2, batch_size=3, dp=axis, seed=rank, gather=gather))

    for error in group.run(one):
        assert isinstance(error, ValueError) and "rank 0" in str(error) and "'seed': 1" in str(error)


def test_what_the_ranks_say_to_each_other() -> None:
    """One gathering in eight steps once under way, since no sample has to move; each is read once."""
    group, reads = Ranks(4), itertools.count()
    shards = [functools.partial(counted, 64, reads) for _ in range(16)]

    def one(rank: int) -> int:
        axis = Axis("dp", size=4, rank=rank)
        stream = ShardedStream(shards, batch_size=8, dp=axis, gather=lambda value: group.gather(rank, value))
        return sum(1 for _ in stream)

    assert group.run(one) == [128] * 4
    assert group.calls <= 128 / 8 + 5
    assert next(reads) == 16 * 64


@pytest.mark.parametrize("window", [1, 2, 7, 40])
@pytest.mark.parametrize("taken", [0, 1, 6, 7, 8, 30])
def test_a_lane_is_taken_up_where_it_was(window: int, taken: int) -> None:
    shards = ListedShards([range(10), range(10, 10), range(10, 31)])
    whole = [sample for chunk in LaneReader(shards, 0, [0, 1, 2], window, "s").chunks(4) for sample in chunk.samples]
    assert sorted(whole) == list(range(31))
    place, base = (2, 10) if window_start(taken, window) >= 10 else (0, 0)
    rest = LaneReader(shards, 0, [0, 1, 2], window, "s", taken, place, base)
    assert [sample for chunk in rest.chunks(4) for sample in chunk.samples] == whole[taken:]


def test_a_window_reads_one_sample_for_each_that_it_gives() -> None:
    source = iter(range(100))
    given = shuffled(source, 10, "s")
    first = [next(given) for _ in range(5)]
    assert next(source) == 14  # ten held, four of the next window read; the fifth is read when asked again
    assert set(first) < set(range(10)) and first != list(range(5))


def test_a_lane_that_runs_dry_is_passed_over() -> None:
    lanes = [Lane(known=2, ended=True), Lane(known=9), Lane(taken=1, known=9)]
    assert next_batches(lanes, batch_size=3, limit=3) == [[0, 1, 0], [1, 2, 1], [2, 1, 2]]
    assert next_batches([Lane(known=2), Lane(known=9)], batch_size=3, limit=3) == [[0, 1, 0]]


def test_dealing_moves_no_more_than_it_must() -> None:
    assert deal([0, 1, 2, 0, 1, 2], 3) == [[0, 3], [1, 4], [2, 5]]
    assert deal([2, 2, 2, 2], 3) == [[2], [3], [0, 1]]
    assert deal([1], 3) == [[], [], [0]]


def test_bad_shards() -> None:
    with pytest.raises(ValueError, match=r"shard 1 of 2 is a list_iterator, which cannot be read a second time"):
        as_source([[1], iter([2])])
    with pytest.raises(ValueError, match=r"pass \[dataset\]"):
        as_source({1, 2})
    with pytest.raises(ValueError, match=r"has 0 shards"):
        as_source([])
    with pytest.raises(ValueError, match=r"lanes=0 must be at least 1"):
        ShardedStream([range(3)], batch_size=1, dp=Axis("dp"), lanes=0)
