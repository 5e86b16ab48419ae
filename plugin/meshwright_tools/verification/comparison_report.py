"""The result of ``verify``: what was compared, by kinds of parameters, and how far the two programs differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from meshwright.errors import PlanError
from meshwright.roles import Role, ShardingPlan, plan_for
from meshwright.roles.adapters import without_wrappers
from meshwright.roles.sharding_plan import BlockPart

_NORMS = frozenset({Role.HEAD_NORM, Role.Q_NORM, Role.K_NORM, Role.INNER_NORM, Role.NORM, Role.FINAL_NORM})


def kinds_of(model: nn.Module, sharding_plan: ShardingPlan | None) -> dict[str, str]:
    """Return the kind of each parameter of a model, by its name.

    Args:
        model: the one-device model.
        sharding_plan: the roles of the modules; None for the registered or inferred plan.
    """
    prefix, decoder = without_wrappers(model)
    try:
        plan = sharding_plan or plan_for(decoder)
    except PlanError:  # a plan without tp can still run the model
        plan = ShardingPlan(roles={})
    modules = dict(model.named_modules())
    found = {}
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        role = plan.role_of(owner.removeprefix(prefix)) or plan.role_of(name.removeprefix(prefix))
        found[name] = _kind(role, modules[owner], is_bias=last == "bias", ndim=parameter.ndim)
    return found


def _kind(role: Role | None, owner: nn.Module, *, is_bias: bool, ndim: int) -> str:
    part = None if role is None else role.part
    if part in (BlockPart.COLUMN, BlockPart.INNER):
        return f"gradients: {'biases of ' if is_bias else ''}column projections"
    if part is BlockPart.ROW:
        return f"gradients: {'biases of ' if is_bias else ''}row projections"
    if role is Role.HEAD:
        return "gradients: head"
    if role is Role.EMBEDDING or isinstance(owner, nn.Embedding):
        return "gradients: embeddings"
    if role in _NORMS or "norm" in type(owner).__name__.lower():
        return "gradients: norms"
    return "gradients: other vectors" if ndim == 1 else "gradients: other matrices"


# Both programs do the same operations in float64. Only the order of sums differs, which causes errors of 1e-16 per
# addition, and about 1e-13 in a gradient of a model of this size. A term that is left out or counted twice causes
# 1e-6 or more.
TOLERANCE = 1e-9

KINDS = (
    "outputs of modules, in evaluation",
    "logits, in evaluation",
    "loss",
    "gradient norm",
    "gradients: embeddings",
    "gradients: norms",
    "gradients: column projections",
    "gradients: biases of column projections",
    "gradients: row projections",
    "gradients: biases of row projections",
    "gradients: head",
    "gradients: other matrices",
    "gradients: other vectors",
    "weights after the steps",
)


@dataclass(frozen=True)
class Difference:
    """How far one quantity of the distributed program differs from the same quantity on one device.

    Args:
        kind: one of KINDS.
        name: the module or parameter; empty for a quantity of the whole model.
        where: the batch or the step.
        value: the largest difference of an element, relative to the largest element on one device.
    """

    kind: str
    name: str
    where: str
    value: float

    @property
    def is_equal(self) -> bool:
        return self.value <= TOLERANCE  # false for NaN


@dataclass(frozen=True)
class ComparedRow:
    """The largest difference of one kind.

    Args:
        checked: the number of quantities of that kind that were compared.
        differing: the number of them that are not equal.
        worst: the largest difference; for outputs of modules, which run one after the other, the first that differs.
    """

    checked: int
    differing: int
    worst: Difference


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of ``verify``; ``print(report)`` shows it as a table.

    Args:
        model: the model in words.
        plan: the plan in words.
        processes: the number of processes that the plan ran on.
        rows: the largest difference of each kind.
        seconds: the seconds that the comparison took.
        notes: sentences to print below the table.

    Example:
        >>> row = ComparedRow(1, 0, Difference("loss", "", "step 1", 1e-15))
        >>> Report(model="Llama", plan="tp2", processes=2, rows=(row,), seconds=1.0).ok
        True
    """

    model: str
    plan: str
    processes: int
    rows: tuple[ComparedRow, ...]
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything that was compared is equal."""
        return not any(row.differing for row in self.rows)

    @property
    def worst(self) -> dict[str, Difference]:
        """The largest difference of each kind."""
        return {row.worst.kind: row.worst for row in self.rows}

    @property
    def suspect(self) -> Difference | None:
        """Where to look first: the first module whose output differs, else the gradient that differs most."""
        wrong = [row.worst for row in self.rows if row.differing]
        for prefix in ("outputs", "gradients", "weights", ""):
            found = [one for one in wrong if one.kind.startswith(prefix)]
            if found:
                return max(found, key=lambda one: one.value if one.value == one.value else float("inf"))
        return None

    def as_dict(self) -> dict[str, object]:
        """Return the whole report in JSON's types."""
        suspect = self.suspect
        return {
            "ok": self.ok,
            "model": self.model,
            "plan": self.plan,
            "processes": self.processes,
            "tolerance": TOLERANCE,
            "seconds": round(self.seconds, 1),
            "notes": list(self.notes),
            "suspect": suspect and dataclasses.asdict(suspect),
            "kinds": [
                {**dataclasses.asdict(r.worst), "checked": r.checked, "differing": r.differing} for r in self.rows
            ],
        }

    def __str__(self) -> str:
        header = ("compared with one process, in float64", "number", "differ", "largest", "where")
        cells = [header, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
        table = ["  ".join(_aligned(line, widths)).rstrip() for line in cells]
        title = f"{self.model} under {self.plan}, {self.processes} process(es)"
        return "\n".join([title, "", *table, "", self._verdict(), *self.notes])

    def _verdict(self) -> str:
        seconds = f"{self.seconds:.0f} s"
        if self.ok:
            return f"EQUAL: no difference is above {TOLERANCE:g} of the tensor's largest value. ({seconds})"
        suspect = self.suspect
        assert suspect is not None
        name = suspect.name or f"the {suspect.kind}"
        return (
            f"DIFFERENT: look at {name} first ({suspect.kind}, {suspect.where}: {suspect.value:.1e}). The plan's "
            f"numbers differ from those of one device. ({seconds})"
        )


def summarise(differences: Iterable[Difference]) -> tuple[ComparedRow, ...]:
    """Return a row for each kind that was compared, in the order of KINDS."""
    by_kind: dict[str, list[Difference]] = {}
    for one in differences:
        by_kind.setdefault(one.kind, []).append(one)
    return tuple(_row(by_kind[kind]) for kind in KINDS if kind in by_kind)


def _row(group: list[Difference]) -> ComparedRow:
    wrong = [one for one in group if not one.is_equal]
    is_ordered = group[0].kind.startswith("outputs")
    worst = wrong[0] if wrong and is_ordered else max(group, key=lambda one: (one.value != one.value, one.value))
    return ComparedRow(len(group), len(wrong), worst)


def _cells(row: ComparedRow) -> tuple[str, ...]:
    worst = row.worst
    where = f"{worst.name} ({worst.where})" if worst.name else worst.where
    return worst.kind, str(row.checked), str(row.differing), f"{worst.value:.1e}", where


def _aligned(line: tuple[str, ...], widths: list[int]) -> list[str]:
    return [cell.rjust(w) if 0 < i < 4 else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
