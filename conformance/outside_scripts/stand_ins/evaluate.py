"""Stands in for the package ``evaluate``, whose metrics are downloaded: the metrics that the scripts load."""

from __future__ import annotations

from typing import Any


class Metric:
    """Accuracy and F1 of classes, over all batches since the last result."""

    def __init__(self) -> None:
        self._pairs: list[tuple[int, int]] = []

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        self._pairs += zip(_integers(predictions), _integers(references), strict=True)

    def compute(self, *, predictions: Any = None, references: Any = None) -> dict[str, float]:
        if predictions is not None:
            self.add_batch(predictions=predictions, references=references)
        pairs, self._pairs = self._pairs, []
        hits = sum(found == right for found, right in pairs)
        both = sum(found == right == 1 for found, right in pairs)
        ones = sum((found == 1) + (right == 1) for found, right in pairs)
        # The number of rows shows rows that are lost or counted twice.
        return {"accuracy": hits / len(pairs), "f1": 2 * both / ones if ones else 0.0, "rows": len(pairs)}


def load(*_: Any, **__: Any) -> Metric:
    return Metric()


def _integers(values: Any) -> list[int]:
    return [int(value) for value in values]
