"""Checks of what is in a tensor, without the host waiting for a device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.errors import OutOfVocabularyError


def require(holds: Tensor, error: Callable[[], Exception]) -> None:
    """Fail unless a condition holds: on the CPU by an error; on a device, as torch's own kernels do, by an assertion.

    Args:
        holds: a boolean, the same on all ranks that have the tensors it is about.
        error: makes the error; what it says must fit an assertion's message, since it is made before on a device.
    """
    if type(holds) is not Tensor:  # a fake one, of a traced step
        return
    if holds.device.type == "cpu" and not torch.compiler.is_compiling():
        if not bool(holds):
            raise error()
    else:
        torch._assert_async(holds, str(error()))


def require_words(words: Tensor, vocab_size: int, what: str, *, ignored: int | None = None) -> None:
    """Refuse words that no rank of the TP axis owns: they would count as zero on all of them.

    Args:
        words: indices into the full vocabulary.
        vocab_size: its size.
        what: they are, in the message: "token id" or "label".
        ignored: the one value outside of the vocabulary that is legal.
    """
    outside = (words < 0) | (words >= vocab_size)
    if ignored is not None:
        outside &= words != ignored

    def error() -> OutOfVocabularyError:
        # Reading the word itself would make the host wait for a device.
        found = f"{what} {words[outside][0].item()} is" if words.device.type == "cpu" else f"a {what} is"
        legal = f"0 to {vocab_size - 1}" + ("" if ignored is None else f", or {ignored} for none")
        return OutOfVocabularyError(
            f"{found} outside of the model's vocabulary of {vocab_size} words ({legal}), so no rank has its row. Use "
            "the tokenizer of this model, or build the model with as many words as the tokenizer has: "
            "model.resize_token_embeddings(len(tokenizer)), before to_distributed"
        )

    require(~outside.any(), error)
