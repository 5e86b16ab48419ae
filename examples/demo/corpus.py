"""The corpus: the source text of the running Python's standard library, tokenized and packed.

Every machine has this text, so nothing is downloaded. The corpus is prepared once, before the training processes start,
and kept under ``cache/`` of the output folder.
"""

from __future__ import annotations

import platform
import shutil
import sysconfig
import tempfile
from itertools import chain
from pathlib import Path

import datasets
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.demo.settings import Settings

END_OF_TEXT = "<|endoftext|>"
# Installed packages are not the standard library, and its tests are mostly tables.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def corpus_folder(settings: Settings) -> Path:
    """Return the folder of the prepared corpus, which differs between Python versions."""
    files = "all" if settings.corpus_files is None else settings.corpus_files
    name = f"python-{platform.python_version()}-files-{files}"
    return settings.output / "cache" / f"{name}-vocab-{settings.vocab_size}-length-{settings.seq_length}"


def prepare_corpus(settings: Settings) -> Path:
    """Tokenize and pack the corpus, unless an earlier run has done so.

    Returns:
        The folder, for ``load_corpus``.
    """
    folder = corpus_folder(settings)
    if folder.exists():
        return folder
    datasets.disable_progress_bars()
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix="unfinished-"))
    try:
        documents = datasets.load_dataset(
            "text",
            data_files=[str(path) for path in standard_library(settings.corpus_files)],
            sample_by="document",
            encoding_errors="replace",
            split="train",
            cache_dir=str(scratch / "documents"),
        )
        tokenizer = train_tokenizer(documents, settings.vocab_size)
        rows = pack(documents, tokenizer, settings.seq_length)
        rows.save_to_disk(scratch / "rows")
        tokenizer.save(str(scratch / "rows" / "tokenizer.json"))
        # Renamed only when complete, so that an interrupted run leaves no partial corpus.
        (scratch / "rows").rename(folder)
    finally:
        shutil.rmtree(scratch)
    return folder


def load_corpus(settings: Settings) -> datasets.Dataset:
    """Return the corpus as rows of ``seq_length`` token ids under "input_ids", as torch tensors."""
    return datasets.load_from_disk(corpus_folder(settings)).with_format("torch")


def standard_library(limit: int | None = None) -> list[Path]:
    """Return the library's Python files in a fixed order; with ``limit``, only that many."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts))
    return files[:limit]


def train_tokenizer(documents: datasets.Dataset, vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer that is trained on the documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for batch in documents.iter(64) for text in batch["text"]), trainer)
    return tokenizer


def pack(documents: datasets.Dataset, tokenizer: Tokenizer, seq_length: int) -> datasets.Dataset:
    """Cut the documents, joined by END_OF_TEXT, into rows of ``seq_length`` tokens."""
    end = tokenizer.token_to_id(END_OF_TEXT)

    def cut(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer.encode_batch(batch["text"])
        ids = list(chain.from_iterable([*document.ids, end] for document in encoded))
        return {"input_ids": [ids[i : i + seq_length] for i in range(0, len(ids) - seq_length + 1, seq_length)]}

    return documents.map(cut, batched=True, batch_size=64, remove_columns=documents.column_names)
