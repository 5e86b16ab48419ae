"""Traits of the data: padding, packing, collators of transformers and of users, datasets and loaders."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Sampler, Subset, WeightedRandomSampler

from conformance.random_programs.trait import TOLD, Trait

if TYPE_CHECKING:
    from conformance.random_programs.run import Run

TRAITS: list[Trait] = []
add = TRAITS.append

_HEADS = frozenset({"head"})


def _pad(example: dict[str, Any], index: int, *, side: str) -> None:
    """Pad an example within its fixed length."""
    count = index % 4
    length = len(example["input_ids"])
    mask = torch.ones(length, dtype=torch.long)
    if count:
        mask[(slice(length - count, None) if side == "right" else slice(count))] = 0
    example["attention_mask"] = mask
    example["input_ids"] = example["input_ids"].masked_fill(mask == 0, 0)
    if example["labels"].ndim:
        example["labels"] = example["labels"].masked_fill(mask == 0, -100)


def _pack(example: dict[str, Any], index: int) -> None:
    """Give an example the positions of two documents, whose lengths differ from row to row."""
    length = len(example["input_ids"])
    border = 1 + index % 6
    example["position_ids"] = torch.cat([torch.arange(border), torch.arange(length - border)])


add(Trait(name="padded right", kind="batch", example=functools.partial(_pad, side="right")))
add(Trait(name="padded left", kind="batch", example=functools.partial(_pad, side="left"), without=_HEADS))
# With a cache, transformers on one device lets packed documents attend to each other.
add(Trait(name="packed", kind="batch", example=_pack, values={"uses_cache_on_one": False}, without=_HEADS))
add(
    Trait(
        name="packed, dynamic rope",
        kind="batch",
        may=TOLD,
        example=_pack,
        values={"uses_cache_on_one": False},
        config={
            "max_position_embeddings": 6,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        },
        without=_HEADS | {"family", "rope"},
    )
)


def _no_labels_in_some_rows(example: dict[str, Any], index: int) -> None:
    if index % 5 == 1:  # fewer rows than a batch has, since a batch without labels has no loss
        example["labels"] = torch.full_like(example["labels"], -100)


add(
    Trait(
        name="rows without labels",
        kind="batch",
        may=TOLD,
        example=_no_labels_in_some_rows,
        without=_HEADS | {"rows", "tail"},
    )
)


def _ragged(example: dict[str, Any], index: int) -> None:
    """Give each example its own length; a collator has to pad."""
    length = len(example["input_ids"]) - (3 * index) % 7
    for name in ("input_ids", "labels"):
        example[name] = example[name][:length]


def _to_longest(examples: list[dict[str, Any]], *, side: str, multiple: int = 1, has_mask: bool = True) -> Any:
    """Pad to the longest row of the batch, as hand-written collators do."""
    longest = max(len(example["input_ids"]) for example in examples)
    longest = -(-longest // multiple) * multiple

    def padded(row: Tensor, fill: int) -> Tensor:
        missing = longest - len(row)
        return functional.pad(row, (0, missing) if side == "right" else (missing, 0), value=fill)

    batch = {
        name: torch.stack([padded(example[name], fill) for example in examples])
        for name, fill in (("input_ids", 0), ("labels", -100))
    }
    if has_mask:
        batch["attention_mask"] = torch.stack([padded(torch.ones_like(x["input_ids"]), 0) for x in examples])
    return batch


@functools.cache
def _tokenizer(side: str) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(97)}
    fast = Tokenizer(WordLevel(words, unk_token="w1"))
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="w0", padding_side=side)


def _of_transformers(kind: str, side: str, **options: Any) -> Any:
    def collate(examples: list[dict[str, Any]]) -> Any:
        import transformers

        lists = [{name: values.tolist() for name, values in example.items()} for example in examples]
        return getattr(transformers, kind)(tokenizer=_tokenizer(side), **options)(lists)

    return collate


def _language_modeling(side: str) -> Any:
    inner = _of_transformers("DataCollatorForLanguageModeling", side, mlm=False)
    return lambda examples: inner([{"input_ids": example["input_ids"]} for example in examples])


def _sorted(examples: list[dict[str, Any]]) -> Any:
    """Sort the rows of a batch by their length."""
    return _to_longest(sorted(examples, key=lambda example: len(example["input_ids"])), side="right")


def _flattened(examples: list[dict[str, Any]]) -> Any:
    """Put all rows of the batch into one, as DataCollatorWithFlattening does."""
    labels = [torch.cat([torch.tensor([-100]), example["labels"][1:]]) for example in examples]
    return {
        "input_ids": torch.cat([example["input_ids"] for example in examples])[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(len(example["input_ids"])) for example in examples])[None],
    }


def _truncated(examples: list[dict[str, Any]]) -> Any:
    """Cut all rows to the shortest."""
    shortest = min(len(example["input_ids"]) for example in examples)
    return {name: torch.stack([example[name][:shortest] for example in examples]) for name in ("input_ids", "labels")}


def _first_row_twice(examples: list[dict[str, Any]]) -> Any:
    """Write the first row of the batch over the last, as collators do that mix rows."""
    return _to_longest([*examples[:-1], examples[0]], side="right")


for _name, _collate in {
    "longest, right": functools.partial(_to_longest, side="right"),
    "longest, left": functools.partial(_to_longest, side="left"),
    "longest, left, no mask": functools.partial(_to_longest, side="left", has_mask=False),
    "multiple of 8, right": functools.partial(_to_longest, side="right", multiple=8),
    "multiple of 8, left": functools.partial(_to_longest, side="left", multiple=8),
    "transformers' seq2seq, right": _of_transformers("DataCollatorForSeq2Seq", "right"),
    "transformers' seq2seq, left": _of_transformers("DataCollatorForSeq2Seq", "left"),
    "transformers' seq2seq, left, multiple of 8": _of_transformers(
        "DataCollatorForSeq2Seq", "left", pad_to_multiple_of=8
    ),
    "transformers' token classification, left": _of_transformers("DataCollatorForTokenClassification", "left"),
    "transformers' language modeling, right": _language_modeling("right"),
    "transformers' language modeling, left": _language_modeling("left"),
    "sorted by length": _sorted,
    "all rows in one": _flattened,
    "cut to the shortest": _truncated,
    "the first row twice": _first_row_twice,
}.items():
    _values = {"uses_cache_on_one": False} if _collate is _flattened else {}
    _more = {"rows", "accumulation", "batch-wide", "evaluation"} if _collate is _flattened else set()
    add(
        Trait(
            name=f"collator: {_name}",
            kind="collator",
            may=TOLD,
            warns="cannot pad them to that length",
            example=_ragged,
            collate=_collate,
            values=_values,
            without=frozenset({"head", "batch", *_more}),
        )
    )


# ---- collate functions whose rows depend on the other rows


def _stacked(examples: list[dict[str, Any]]) -> Any:
    return {name: torch.stack([example[name] for example in examples]) for name in ("input_ids", "labels")}


def _below_the_mean(batch: dict[str, Tensor]) -> None:
    """Leave out the labels of rows whose score is more than a deviation below the batch's mean."""
    scores = batch["input_ids"].double().mean(1)
    z = (scores - scores.mean()) / (scores.std(unbiased=False) + 1e-6)
    batch["labels"] = batch["labels"].masked_fill((z < -0.9)[:, None], -100)


def _mixed(batch: dict[str, Tensor]) -> None:
    """Take the second half of each row from the next row (CutMix)."""
    half = batch["input_ids"].shape[1] // 2
    for name in ("input_ids", "labels"):
        batch[name] = torch.cat([batch[name][:, :half], batch[name].roll(1, 0)[:, half:]], 1)


def _masked_by_first(batch: dict[str, Tensor]) -> None:
    batch["labels"] = batch["labels"].masked_fill(batch["input_ids"] > batch["input_ids"][0], -100)


def _without_common(batch: dict[str, Tensor]) -> None:
    """Leave out the labels of words that the batch has twice."""
    words, counts = batch["input_ids"].unique(return_counts=True)
    batch["labels"] = batch["labels"].masked_fill(torch.isin(batch["labels"], words[counts > 1]), -100)


def _rows_drawn(batch: dict[str, Tensor]) -> None:
    """Replace some words at random."""
    chosen = torch.rand(batch["input_ids"].shape) < 0.3
    batch["input_ids"] = torch.where(chosen, torch.randint(3, 97, chosen.shape), batch["input_ids"])


def _then(change: Any) -> Any:
    def collate(examples: list[dict[str, Any]]) -> Any:
        batch = _stacked(examples)
        change(batch)
        return batch

    return collate


class _ReadsTogether(list[Any]):
    """A dataset that reads the rows of a batch together, and mixes them."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        first = self[indices[0]]["input_ids"]
        return [
            self[i] | {"labels": self[i]["labels"].masked_fill(self[i]["input_ids"] > first, -100)} for i in indices
        ]


_ROWS = frozenset({"head", "batch", "evaluation", "rows", "tail"})
for _name, _change in {
    "rows below the mean": _below_the_mean,
    "rows mixed": _mixed,
    "masks by the first row": _masked_by_first,
    "common words left out": _without_common,
}.items():
    add(Trait(name=f"collator: {_name}", kind="collator", may=TOLD, collate=_then(_change), without=_ROWS))
add(
    Trait(
        name="collator: random words",
        kind="collator",
        may=TOLD,
        collate=_then(_rows_drawn),
        without=_ROWS | {"resume", "write", "reading", "generation"},
    )
)
add(
    Trait(
        name="rows that are read together",
        kind="collator",
        may=TOLD,
        dataset=_ReadsTogether,
        without=_ROWS | {"loader"},
    )
)


# ---- loaders


class _Stream(IterableDataset[Any]):
    """A stream of the rows."""

    def __init__(self, rows: Any):
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def _of_datasets(rows: list[Any], *, shards: int) -> Any:
    from datasets import Dataset

    stream = Dataset.from_list([{name: x.tolist() for name, x in row.items()} for row in rows])
    return stream.with_format("torch") if not shards else stream.to_iterable_dataset(shards).with_format("torch")


class _Buckets(Sampler[list[int]]):
    """Puts rows of like values into one batch."""

    def __init__(self, rows: Any, size: int):
        self.order, self.size = sorted(range(len(rows)), key=lambda i: int(rows[i]["input_ids"].sum())), size

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.order[start : start + self.size] for start in range(0, len(self.order), self.size))

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)


def _plain(run: Run, dataset: Any, **options: Any) -> Any:
    return DataLoader(dataset, **{"batch_size": run.settings["rows"], "collate_fn": run.collate, **options})


def _batches(run: Run, rows: Any, *, weights: int = 0) -> list[Any]:
    """Return ready batches, perhaps with weights of classes beside the rows."""
    size = run.settings["rows"]
    more = {"weights": torch.arange(1.0, weights + 1).double()} if weights else {}
    return [run.collate(rows[start : start + size]) | more for start in range(0, len(rows), size)]


class _Around:
    """A plain class around a loader, as prefetchers and progress bars are."""

    def __init__(self, inner: Any):
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner

    def __len__(self) -> int:
        return len(self.inner)


def _weighted(run: Run, batch: dict[str, Any]) -> Tensor:
    """Weight the words of each class, of which there are as many as rows."""
    weights = batch["weights"]
    given = {name: x for name, x in batch.items() if name != "weights"}
    logits = run.model(**{name: x for name, x in given.items() if name != "labels"}).logits[:, :-1].flatten(0, 1)
    labels = given["labels"][:, 1:].flatten()
    losses = functional.cross_entropy(logits, labels, reduction="none")
    chosen = weights[labels.clamp(min=0) % len(weights)] * (labels != -100)
    return run.global_mean((losses * chosen).sum() / chosen.sum(), chosen.sum())


_LOADED = frozenset({"collator", "batch", "tail", "rows"})
for _name, _options in {
    "a stream": {"dataset": _Stream, "loader": _plain},
    "a stream of datasets": {"dataset": functools.partial(_of_datasets, shards=1), "loader": _plain},
    "a stream of several shards": {"dataset": functools.partial(_of_datasets, shards=3), "loader": _plain},
    "a table of datasets": {"dataset": functools.partial(_of_datasets, shards=0)},
    "batches of like rows": {
        "loader": lambda run, rows: DataLoader(
            rows, batch_sampler=_Buckets(rows, run.settings["rows"]), collate_fn=run.collate
        )
    },
    "rows drawn by weights": {
        "loader": lambda run, rows: _plain(
            run, rows, sampler=WeightedRandomSampler([1.0 + i for i in range(len(rows))], len(rows))
        )
    },
    "a worker": {"loader": functools.partial(_plain, num_workers=1)},
    "drop_last": {"loader": functools.partial(_plain, drop_last=True, shuffle=True)},
    "joined datasets": {
        "dataset": lambda rows: ConcatDataset([Subset(rows, range(3)), Subset(rows, range(3, len(rows)))])
    },
    "ready batches": {"loader": lambda run, rows: DataLoader(_batches(run, rows), batch_size=None)},
    "a list of batches": {"loader": _batches},
}.items():
    add(Trait(name=f"loader: {_name}", kind="loader", may=TOLD, without=_LOADED, **_options))  # type: ignore[arg-type]
add(
    Trait(
        name="loader: ready batches with weights of classes",
        kind="loader",
        may=TOLD,
        warns="as many|weights",
        loader=lambda run, rows: DataLoader(_batches(run, rows, weights=4), batch_size=None),
        loss=_weighted,
        options={"gather_logits": True},
        is_local=True,
        without=_LOADED | {"head", "loss", "keyword", "factor", "gradients", "batch-wide"},
    )
)


def _remade(run: Run) -> None:
    """Make another loader of the dataset of the one that the call returned."""
    run.loader = _plain(run, run.loader.dataset)


def _skipped(run: Run) -> None:
    """Begin after the first batch, by accelerate's function."""
    from accelerate import skip_first_batches

    run.loader = skip_first_batches(run.loader, 1)


def _wrapped(run: Run) -> None:
    run.loader = _Around(run.loader)


for _name, _ready in {"remade": _remade, "with skipped batches": _skipped, "in a class": _wrapped}.items():
    add(
        Trait(
            name=f"the call's loader, {_name}",
            kind="loader",
            may=TOLD,
            tells="loader",
            ready=_ready,
            without=_LOADED | ({"resume"} if _ready is _skipped else set()),
        )
    )
