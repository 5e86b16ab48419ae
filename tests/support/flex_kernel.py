"""FlexAttention on the CPU with gradients, by torch's own plain formula of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch.nn.attention import flex_attention


@contextlib.contextmanager
def plain_formula() -> Iterator[None]:
    """Let torch compute FlexAttention without its compiler, and lift its check that forbids gradients on the CPU."""
    stance = torch.compiler.set_stance("force_eager")
    with stance, mock.patch.object(flex_attention, "_validate_device", lambda *_: None):
        yield
