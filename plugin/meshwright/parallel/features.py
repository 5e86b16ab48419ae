"""What a distributed model carries besides its weights and gradients, one object of each kind."""

from __future__ import annotations

import copy
from typing import TypeVar

T = TypeVar("T")


class Features:
    """The objects that the parts of a plan have installed on a model, found by their class.

    A part of a plan adds its object when it is installed, and whoever needs the object asks for its class. So a new
    part needs no field in the runtime, and a copied model gets a copy of each object.

    Example:
        >>> features = Features()
        >>> features.add([1, 2])
        [1, 2]
        >>> features.find(list), features.find(dict)
        ([1, 2], None)
    """

    def __init__(self) -> None:
        self._all: list[tuple[object, bool]] = []  # each with whether it is copied

    def add(self, feature: T, *, is_copied: bool = True) -> T:
        """Add an object in the place of one of the same class, if there is one, and return it.

        Args:
            feature: the object.
            is_copied: whether a copy of the model gets a copy of the object; otherwise it has none.
        """
        others = [(one, is_kept) for one, is_kept in self._all if type(one) is not type(feature)]
        self._all = [(feature, is_copied), *others]
        return feature

    def find(self, kind: type[T]) -> T | None:
        """Return the newest object of a class; None if no part of the plan has added one."""
        return next((one for one, _ in self._all if isinstance(one, kind)), None)

    def get(self, kind: type[T]) -> T:
        """Return the object of a class, which an earlier part of the plan has added."""
        feature = self.find(kind)
        assert feature is not None, f"no part of the plan has added a {kind.__name__}"
        return feature

    def __deepcopy__(self, memo: dict[int, object]) -> Features:
        new = Features()
        new._all = [(copy.deepcopy(one, memo), True) for one, is_copied in self._all if is_copied]
        return new
