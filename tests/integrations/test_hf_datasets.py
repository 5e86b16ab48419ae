"""Streams and packing over real Hugging Face datasets, with real processes and real workers."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node

from meshwright.data.packing import PackedDataset, PackedShards, Packing
from meshwright.data.stream import ShardedStream
from meshwright.errors import PeerFailedError
from meshwright.mesh.axes import Axis
from meshwright_hf.datasets import TokenCollator, TokenRows, dataset_shards, pack_dataset, unsplit
from support.tiers import crossing

SHUFFLED = {"shuffle": True, "buffer_size": 24, "lanes": 6, "seed": 5}


def numbers(count: int = 100, shards: int = 7) -> IterableDataset:
    return Dataset.from_dict({"i": list(range(count))}).to_iterable_dataset(num_shards=shards)


def doubled(row: dict[str, Any]) -> dict[str, Any]:
    return {"i": row["i"], "twice": 2 * row["i"]}


def from_files(folder: str) -> IterableDataset:
    files = sorted(map(str, Path(folder).glob("*.jsonl")))
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True)


def world() -> Axis:
    return Axis("dp", size=dist.get_world_size(), rank=dist.get_rank(), group=dist.group.WORLD)


def read(
    dataset: Any, axis: Axis, steps: int | None = None, state: Any = None, **options: Any
) -> tuple[list[list[int]], dict[str, Any]]:
    stream = ShardedStream(dataset, dp=axis, **{**SHUFFLED, **options})
    if state is not None:
        stream.load_state_dict(state)
    rows = itertools.islice(stream, steps)
    return [[] if part.is_blank else [int(row["i"]) for row in part.samples] for part in rows], stream.state_dict()


def read_on_ranks(folder: str | None, steps: int | None, state: Any, workers: int, batch_size: int) -> Any:
    dataset = numbers() if folder is None else from_files(folder)
    return read(dataset, world(), steps, state, batch_size=batch_size, num_workers=workers)


def merged(of_ranks: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(itertools.chain(*step)) for step in zip(*of_ranks, strict=True)]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    chosen = iter(range(100))
    for shard, count in enumerate([30, 1, 0, 25, 44]):
        lines = [json.dumps({"i": next(chosen), "text": "x"}) for _ in range(count)]
        (tmp_path / f"{shard}.jsonl").write_text("".join(line + "\n" for line in lines))
    return str(tmp_path)


@pytest.mark.parametrize("kind", ["memory", crossing("files")])
def test_ranks_and_workers_change_in_mid_epoch(kind: str, folder: str, pool2: Any, pool4: Any) -> None:
    """4 ranks of 0 workers, then 2 of 2, then 1 of 3: the batches of one process."""
    source = folder if kind == "files" else None
    alone = Axis("dp")
    dataset = numbers() if source is None else from_files(source)
    expected = [sorted(batch) for batch in read(dataset, alone, batch_size=6)[0]]
    assert sorted(itertools.chain(*expected)) == list(range(100))

    on_four = pool4.run(read_on_ranks, source, 5, None, 0, 6)
    assert len({json.dumps(state) for _, state in on_four}) == 1
    on_two = pool2.run(read_on_ranks, source, 4, on_four[0][1], 2, 6)
    rest, _ = read(dataset, alone, None, on_two[0][1], batch_size=6, num_workers=3)
    batches = merged([rows for rows, _ in on_four]) + merged([rows for rows, _ in on_two]) + [*map(sorted, rest)]
    assert batches == expected


def test_more_ranks_than_shards(pool4: Any) -> None:
    of_ranks = pool4.run(one_shard)
    assert sorted(itertools.chain(*itertools.chain(*of_ranks))) == list(range(10))
    assert [[len(step) for step in rank] for rank in of_ranks] == [[1, 1, 0], [1, 1, 1]] * 2


def one_shard() -> list[list[int]]:
    return read(numbers(10, shards=1), world(), batch_size=4)[0]


@pytest.mark.parametrize("form", ["plain", "torch", "map", "map torch", "filter"])
def test_rows_are_those_of_the_dataset(form: str) -> None:
    dataset = numbers(40, shards=3)
    if "map" in form:
        dataset = dataset.map(doubled)
    if form == "filter":
        dataset = dataset.filter(lambda row: row["i"] % 3 == 0)
    if "torch" in form:
        dataset = dataset.with_format("torch")
    source = dataset_shards(dataset)
    rows = [row for shard in range(source.num_shards) for row in source.open(shard, 0)]
    assert rows == list(dataset)
    assert [type(value) for value in rows[0].values()] == [type(value) for value in next(iter(dataset)).values()]
    assert list(source.open(1, 2)) == list(source.open(1, 0))[2:]


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_a_row_does_not_carry_the_rows_read_with_it(form: str) -> None:
    rows = Dataset.from_dict({"input_ids": [[1] * 100] * 64}).to_iterable_dataset().with_format(form)
    row = next(dataset_shards(rows).open(0, 0))
    assert len(pickle.dumps(row)) < 2 * 8 * 100
    assert getattr(row["input_ids"], "base", None) is None


def test_a_split_dataset_is_told_and_can_be_put_together() -> None:
    split = split_dataset_by_node(numbers(), rank=1, world_size=4)
    with pytest.raises(ValueError, match=r"split by node already \(rank 1 of 4\)"):
        ShardedStream(split, batch_size=2, dp=Axis("dp"))
    rows, _ = read(unsplit(split), Axis("dp"), batch_size=2)
    assert sorted(itertools.chain(*rows)) == list(range(100))
    assert split._distributed is not None
    with pytest.raises(ValueError, match=r"a split Dataset no longer has the rows"):
        unsplit(Dataset.from_dict({"i": [1]}))  # type: ignore[arg-type]


def test_the_shuffle_of_datasets_is_refused() -> None:
    shuffled = numbers().shuffle(seed=3, buffer_size=20)
    for dataset in (shuffled, shuffled.map(doubled), datasets.concatenate_datasets([numbers(), shuffled])):
        with pytest.raises(ValueError, match=r"shuffle=True, seed and buffer_size"):
            dataset_shards(dataset)


def failing(row: dict[str, Any]) -> dict[str, Any]:
    if row["i"] == 30:
        raise OSError("cannot tokenise 30")
    return row


def read_failing() -> str:
    try:
        read(numbers(100, shards=4).map(failing), world(), batch_size=4, num_workers=1, shuffle=False)
    except (PeerFailedError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_worker_that_fails_is_an_error_on_all_ranks(pool2: Any) -> None:
    first, second = pool2.run(read_failing)
    assert first.startswith("PeerFailedError: rank 1 of dp") and "cannot tokenise 30" in first
    assert second.startswith("OSError") and "cannot tokenise 30" in second


def documents(count: int = 60) -> Dataset:
    chosen = itertools.count(1)
    texts = [list(itertools.islice(chosen, 1 + 7 * i % 23)) for i in range(count)]
    return Dataset.from_dict(
        {"text": ["x"] * count, "input_ids": texts, "attention_mask": [[1] * len(t) for t in texts]}
    )


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tokenised_dataset_is_packed(streamed: bool) -> None:
    texts = documents()
    expected = sorted(itertools.chain(*texts["input_ids"]))
    packed = pack_dataset(texts.to_iterable_dataset(num_shards=4) if streamed else texts, Packing(32))
    if isinstance(packed, PackedShards):
        stream = ShardedStream(packed, batch_size=4, dp=Axis("dp"), num_workers=2, shuffle=True, buffer_size=8)
        rows = [row for batch in stream for row in batch.samples]
    else:
        assert isinstance(packed, PackedDataset)
        rows = [packed[number] for number in range(len(packed))]
    assert sorted(token for row in rows for token in row["input_ids"].tolist() if token) == expected
    assert {tuple(row) for row in rows} == {("input_ids", "labels", "position_ids")}


def test_a_shuffled_selection_is_packed_by_its_own_lengths() -> None:
    texts = documents().shuffle(seed=1).select(range(20))
    packed = pack_dataset(texts, Packing(32))
    found = sorted(token for number in range(len(packed)) for token in packed[number]["input_ids"].tolist() if token)
    assert found == sorted(itertools.chain(*texts["input_ids"]))


def test_packing_wants_tokens() -> None:
    with pytest.raises(ValueError, match=r"no column 'input_ids' but \['i'\]"):
        pack_dataset(Dataset.from_dict({"i": [1]}), Packing(8))


def test_token_columns_are_padded() -> None:
    samples = [
        {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "text": "a"},
        {"input_ids": [8], "labels": [8], "text": "b"},
    ]
    batch = TokenCollator(pad_token_id=9, multiple_of=2)(samples)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[5, 6, 7, 9], [8, 9, 9, 9]],
        "labels": [[5, 6, 7, -100], [8, -100, -100, -100]],
        "attention_mask": [[1, 1, 1, 0], [1, 0, 0, 0]],
    }
    given = TokenCollator()([{"input_ids": torch.tensor([1, 2]), "attention_mask": [1, 0]}])
    assert given["attention_mask"].tolist() == [[1, 0]]
    with pytest.raises(ValueError, match=r"no 'input_ids' but \['text'\]"):
        TokenCollator()([{"text": "a"}])


def test_token_rows_are_those_of_the_dataset() -> None:
    lists = [[5, 6, 7], [], [8], [9] * 20] * 50
    dataset = datasets.Dataset.from_dict({"input_ids": lists, "labels": lists, "text": ["x"] * 200})
    dataset = dataset.shuffle(seed=1).select(range(3, 150))  # an indices mapping over several chunks
    rows = TokenRows(datasets.concatenate_datasets([dataset, dataset]))
    wanted = [0, 146, 147, 5, 5, 293]
    expected = [{name: dataset[i % 147][name] for name in ("input_ids", "labels")} for i in wanted]
    read = [{name: x.tolist() for name, x in row.items()} for row in rows.__getitems__(wanted)]
    assert read == expected and len(rows) == 294
    batch = TokenCollator()(rows.__getitems__([0, 1]))
    assert torch.equal(batch["input_ids"], TokenCollator()([dataset[0], dataset[1]])["input_ids"])
    with pytest.raises(ValueError, match="no column 'input_ids'"):
        TokenRows(dataset.select_columns(["text"]))
