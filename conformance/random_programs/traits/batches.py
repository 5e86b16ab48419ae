"""Traits of the data: padding, packing, and collators of transformers and of users."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from conformance.random_programs.trait import TOLD, Trait

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
