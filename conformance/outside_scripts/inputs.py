"""The models, tokenizers and data that the scripts name, tiny and made here: nothing is downloaded.

accelerate's examples load ``bert-base-cased`` and ``nyu-mll/glue``. In a working directory that has folders of these
names, the libraries read the folders.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

from conformance.outside_scripts.catalogue import ROWS, TOKENS
from support.words import WORDS, texts, tokenizer

EVEN_ROWS = 12 * ROWS  # divisible by the rows of a step with accumulation, under every plan
_WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_WORDS = {"vocab_size": len(WORDS) + 3, "max_position_embeddings": 128, "pad_token_id": 0}
_LLAMA = {**_WIDTHS, **_WORDS, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
# Masks are drawn anew under each plan, as docs/equality.md says.
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def write_inputs(folder: Path) -> None:
    """Write the working directories ``bert`` and ``decoder``; the second has a decoder where the first has a BERT."""
    for name in ("bert", "decoder"):
        root = folder / name
        _save(LlamaForCausalLM, LlamaConfig(**_LLAMA), root / "llama")
        _save(LlamaForSequenceClassification, LlamaConfig(**_LLAMA, num_labels=1), root / "scorer")
        _save(LlamaForCausalLM, LlamaConfig(**_LLAMA), root / "HuggingFaceTB" / "SmolLM-360M")
        classifier = root / "bert-base-cased"
        if name == "bert":
            _save(BertForSequenceClassification, BertConfig(**_WIDTHS, **_WORDS, **_NO_DROPOUT), classifier)
        else:
            _save(LlamaForSequenceClassification, LlamaConfig(**_LLAMA, num_labels=2), classifier)
        _write_data(root)


def _save(kind: type[PreTrainedModel], config: Any, folder: Path) -> None:
    """Save in float64, so that the scripts train in float64: only the order of sums differs, by about 1e-15."""
    torch.manual_seed(0)
    kind(config).double().save_pretrained(folder)
    words = tokenizer()
    words.model_max_length = config.max_position_embeddings
    words.save_pretrained(folder)


def _write_data(root: Path) -> None:
    lines = texts(600)
    (root / "train.txt").write_text("\n".join(lines[:400]) + "\n")
    (root / "test.txt").write_text("\n".join(lines[400:]) + "\n")
    words = " ".join(lines[:400]).split()[: EVEN_ROWS * TOKENS]
    even = [" ".join(words[start : start + 8]) for start in range(0, len(words), 8)]
    (root / "even.txt").write_text("\n".join(even) + "\n")
    train, test = lines[:120], lines[400:460]
    for kind, rows in {"sft": _sentences, "dpo": _preferences, "kto": _judgements, "reward": _pairs}.items():
        _write_rows(root / kind, train=rows(train), test=rows(test))
    glue = root / "nyu-mll" / "glue"
    _write_rows(glue, train=_comparisons(lines[:96]), validation=_comparisons(lines[100:140]), test=[])
    _write_rows(root / "Salesforce" / "wikitext", train=_sentences(lines[:60]), validation=_sentences(lines[60:80]))
    _name_config(glue, "mrpc", ("train", "validation"))
    _name_config(root / "Salesforce" / "wikitext", "wikitext-2-v1", ("train", "validation"))


def _write_rows(folder: Path, **splits: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        if rows:
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _name_config(folder: Path, config: str, splits: tuple[str, ...]) -> None:
    """Give a folder of rows the configuration by which a script loads it."""
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")


def _sentences(lines: list[str]) -> list[dict[str, Any]]:
    return [{"text": line} for line in lines]


def _preferences(lines: list[str]) -> list[dict[str, Any]]:
    return [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in _thirds(lines)]


def _judgements(lines: list[str]) -> list[dict[str, Any]]:
    rows = enumerate(zip(lines[::2], lines[1::2], strict=True))
    return [{"prompt": prompt, "completion": said, "label": index % 3 > 0} for index, (prompt, said) in rows]


def _pairs(lines: list[str]) -> list[dict[str, Any]]:
    return [dict(zip(("chosen", "rejected"), row[1:], strict=True)) for row in _thirds(lines)]


def _thirds(lines: list[str]) -> list[tuple[str, str, str]]:
    return list(zip(lines[::3], lines[1::3], lines[2::3], strict=True))


def _comparisons(lines: list[str]) -> list[dict[str, Any]]:
    """Sentence pairs as in MRPC; every third pair is a sentence with itself."""
    return [
        {"sentence1": line, "sentence2": line if index % 3 == 0 else lines[index - 1], "label": int(index % 3 == 0)}
        | {"idx": index}
        for index, line in enumerate(lines)
    ]
