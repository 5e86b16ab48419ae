"""What every kind of loss over the global batch can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from meshwright.parallel.batch.mean_over_ranks import GlobalMean

Batch = Mapping[str, Any]  # the arguments of a model's forward


class BatchLoss:
    """A model's loss, which on every rank is the loss of the global batch."""

    mean: GlobalMean

    def counts(self, batch: Batch) -> Tensor:
        """Return the number of items that this rank's loss averages over, with one number for each of its means."""
        raise NotImplementedError

    def of_output(self, batch: Batch, output: object) -> object:
        """Return ``output``, from the model's own forward, with its loss replaced by that of the global batch."""
        raise NotImplementedError

    def is_global(self) -> None:
        """Say that the loss of the output which the model returns next is already that of the global batch.

        Most losses have nothing to do: nothing averages the loss of their output.
        """
