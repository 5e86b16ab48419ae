"""Numbers on the device that the host reads later or checks without waiting: gathered over ranks, or conditions on a
tensor.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import OutOfVocabularyError
from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import all_gather


def is_deferred(device: torch.device) -> bool:
    """Return whether the host reads numbers from this device one step later instead of waiting for them."""
    return device.type != "cpu"


class Gathered:
    """Gathers the numbers of all ranks of an axis and starts to copy them to the host.

    Args:
        own: this rank's numbers, of the same shape on all ranks.
        axis: the axis of these ranks.
        step: the step in which the numbers were computed; used in messages.
    """

    def __init__(self, own: Tensor, axis: Axis, step: int):
        self.step = step
        self._copied = _copy_to_host(all_gather(own[None], axis))

    def numbers(self) -> Tensor:
        """Return one row per rank. On CUDA, this waits only if the device has not begun the next step."""
        return self._copied()


def read_later(x: Tensor) -> Callable[[], Any]:
    """Start to copy a tensor to the host. The returned function returns its values, one step later without a wait."""
    copied = _copy_to_host(x)
    return lambda: copied().tolist()


def _copy_to_host(x: Tensor) -> Callable[[], Tensor]:
    if not x.is_cuda:
        return lambda: x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return wait


_LONGEST = 254  # characters of an assertion's message on CUDA; torch raises for a longer one, whether it holds or not


def require(holds: Tensor, error: Callable[[], Exception]) -> None:
    """Fail unless ``holds`` is True: raise an error on the CPU, and assert on a device, as torch's kernels do.

    Args:
        holds: a boolean tensor, equal on all ranks that hold the checked tensors.
        error: a function that returns the error. On a device it is called before the outcome is known, and the error's
            text, as far as a kernel can print it, is the assertion's message: it must say there in 254 characters what
            to change.
    """
    if type(holds) is not Tensor:  # a fake tensor of a traced step
        return
    if holds.device.type == "cpu" and not torch.compiler.is_compiling():
        if not bool(holds):
            raise error()
    else:
        torch._assert_async(holds, textwrap.shorten(str(error()), _LONGEST, placeholder="..."))


def is_known_one(scalar: Tensor) -> bool:
    """Return whether a scalar is 1; False if finding out would make the host wait for a device."""
    return type(scalar) is Tensor and scalar.device.type == "cpu" and scalar.item() == 1


def require_tensor(ids: object) -> None:
    """Raise if token ids are a batch, or the list that torch's collate function makes of lists.

    Raises:
        TypeError: if they are.
    """
    if isinstance(ids, Mapping | list):
        cure = (
            "write model(**batch)"
            if isinstance(ids, Mapping)
            else 'make the batches tensors: dataset.set_format("torch"), or DataLoader(..., collate_fn=...)'
        )
        raise TypeError(f"the model got a {type(ids).__name__} in place of input_ids, which are a tensor; {cure}")


def require_words(words: Tensor, vocab_size: int, what: str, *, ignored: int | None = None) -> None:
    """Raise if a word is outside of the vocabulary. No rank would own it, so it would count as zero on all ranks.

    Args:
        words: indices into the full vocabulary.
        vocab_size: the size of the full vocabulary.
        what: the name of a word in the message: "token id" or "label".
        ignored: the one value outside of the vocabulary that is legal.

    Raises:
        TypeError: if these are no words at all, but real numbers.
    """
    if words.is_floating_point():
        raise TypeError(
            f"a {what} is an integer, but these are {str(words.dtype).removeprefix('torch.')}, so the rows of the "
            "vocabulary cannot be found; convert them in the collate function: .long()"
        )
    outside = (words < 0) | (words >= vocab_size)
    if ignored is not None:
        outside &= words != ignored

    def error() -> OutOfVocabularyError:
        # Reading the word itself would make the host wait for a device.
        found = f"{what} {words[outside][0].item()} is" if words.device.type == "cpu" else f"a {what} is"
        legal = f"0 to {vocab_size - 1}" + ("" if ignored is None else f", or {ignored} for none")
        return OutOfVocabularyError(
            f"{found} outside of the model's vocabulary of {vocab_size} words ({legal}), so no rank has a row for it. "
            "Use the model's own tokenizer, or call model.resize_token_embeddings(len(tokenizer)) before to_distributed"
        )

    require(~outside.any(), error)
