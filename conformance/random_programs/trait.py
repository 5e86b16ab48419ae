"""What a random program may do besides the plain loop, as one small object for each habit of real scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

if TYPE_CHECKING:
    from conformance.random_programs.run import Run

Verdict = Literal[
    *("equal", "refused", "warned", "by design"),
    *("false alarm", "raw", "SILENT", "hang", "nothing compared", "illegal"),
]
EQUAL: frozenset[Verdict] = frozenset({"equal"})
TOLD: frozenset[Verdict] = frozenset({"equal", "refused"})
SPLIT = r"dp|ga|mb"  # plans that compute parts of a batch apart


@dataclass(frozen=True, kw_only=True)
class Trait:
    """A habit of real scripts: how it changes the model, the data or the loop, and which verdicts are right.

    Each function is called at one point of the program, with the ``Run`` and what belongs to that point.

    Args:
        name: the trait in words, unique.
        kind: the choice that the trait is one answer to; a program has at most one trait of each kind.
        may: the verdicts that are right for a program with this trait.
        tells: a pattern of the errors that are right for this trait, so that they name it (default: any text).
        warns: a pattern of the warning that is enough for this trait, where nothing can know that the program is wrong.
        by_design: a pattern of the plans under which the table "By design" of docs/equality.md says that such a program
            differs without a warning (default: none).
        without: names or kinds of other traits with which a program would not be valid, or has no meaning.
        place: the path of the module that the trait replaces, such as "mlp"; no other trait may change what lies there.
        is_local: whether the loss that the program prints is one of this rank's rows; it is then not compared.
        has_no_optimizer: whether the program calls ``to_distributed`` without an optimizer and steps in its own way.
        config: fields of the model's config.
        options: fields of ToDistributedConfig that the docs tell users to set for this.
        words: words that are added to the plan.
        values: settings of the plain loop that differ; see ``Run.SETTINGS``.
        example: changes an example of the dataset, given its number.
        dataset: makes the dataset of the examples (default: their list).
        loader: makes the loader from the dataset (default: a shuffled DataLoader).
        collate: makes a batch of examples.
        model: makes the model from the stock model (default: the stock model itself).
        build: changes the model, before the optimizer is made and the model is distributed.
        optimizer: makes the optimizer from the model.
        before: is called with everything built, right before the call.
        ready: is called right after the call.
        loss: computes the loss of a batch in place of ``model(**batch).loss``.
        factor: changes the loss that was computed.
        clip: clips the gradients and returns their norm, in place of ``mw.clip_grad_norm_``.
        gradients: is called between backward and the optimizer's step.
        stepped: is called after each step.
        event: is called once, after the first step.

    Example:
        Trait(name="shared mlp", kind="sharing", may=TOLD, build=lambda run: share(run, "mlp"))
    """

    name: str
    kind: str
    may: frozenset[Verdict] = EQUAL
    tells: str = ""
    warns: str = ""
    by_design: str = ""
    without: frozenset[str] = frozenset()
    place: str = ""
    is_local: bool = False
    has_no_optimizer: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    words: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    example: Callable[[dict[str, Any], int], object] | None = None
    dataset: Callable[[list[dict[str, Any]]], Any] | None = None
    loader: Callable[[Run, Any], Any] | None = None
    collate: Callable[[list[dict[str, Any]]], Any] | None = None
    model: Callable[[Any], nn.Module] | None = None
    build: Callable[[Run], object] | None = None
    optimizer: Callable[[nn.Module], Any] | None = None
    before: Callable[[Run], object] | None = None
    ready: Callable[[Run], object] | None = None
    loss: Callable[[Run, dict[str, Any]], Tensor] | None = None
    factor: Callable[[Run, dict[str, Any], Tensor], Tensor] | None = None
    clip: Callable[[Run], Any] | None = None
    gradients: Callable[[Run], object] | None = None
    stepped: Callable[[Run], object] | None = None
    event: Callable[[Run], object] | None = None

    def fits(self, other: Trait) -> bool:
        """Return whether a program may have both traits."""
        if self.kind == other.kind or _is_inside(self.place, other.place) or _is_inside(other.place, self.place):
            return False
        return not (self.without & {other.name, other.kind} or other.without & {self.name, self.kind})


def _is_inside(place: str, outer: str) -> bool:
    return bool(outer) and f"{place}.".startswith(f"{outer}.")
