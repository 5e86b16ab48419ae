"""The statement of a rank at a meeting, and the report of differences between the ranks' statements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

SHOWN = 5  # differences that a message lists


@dataclass(frozen=True, kw_only=True)
class Statement:
    """The values that must be equal on all ranks of a meeting.

    Args:
        text: a summary of all values, compared at each meeting.
        details: a function that returns the values by subject; called on every rank once the texts differ.
        advice: why a difference matters and what to write instead, for the message.
        are_close: if the texts may differ although nothing is wrong, a function that is called once they do. It gets
            the values of a subject on the ranks that have one, and returns whether these are equal enough.
    """

    text: str
    details: Callable[[], Mapping[str, str]] = dict
    advice: str = ""
    are_close: Callable[[Sequence[str]], bool] | None = None

    def holds(self, reports: Iterable[Mapping[str, str]]) -> bool:
        """Return whether the ranks' details are equal enough, for a statement with ``are_close``."""
        assert self.are_close is not None
        values: dict[str, list[str]] = {}
        for details in reports:
            for subject, value in details.items():
                values.setdefault(subject, []).append(value)
        return all(map(self.are_close, values.values()))


def what_differs(statements: Sequence[Statement], reports: Mapping[str, Sequence[Mapping[str, str]]]) -> list[str]:
    """Return the lines of a message about statements that differ, each with its advice.

    Args:
        statements: the statements of a meeting.
        reports: the details of each of them, by the rank's name.
    """
    lines: list[str] = []
    for index, statement in enumerate(statements):
        if found := differences({name: theirs[index] for name, theirs in reports.items()}):
            lines += [*found, *([statement.advice] if statement.advice else [])]
    return lines


def differences(reports: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a line for each subject on which the ranks differ.

    Args:
        reports: the details of each rank, by the rank's name.
    """
    subjects = dict.fromkeys(subject for details in reports.values() for subject in details)
    lines = []
    for subject in subjects:
        ranks: dict[str, list[str]] = {}
        for name, details in reports.items():
            ranks.setdefault(details.get(subject, "nothing"), []).append(name)
        if len(ranks) > 1:
            lines.append(f"{subject}: " + "; ".join(f"{value} on {', '.join(names)}" for value, names in ranks.items()))
    more = len(lines) - SHOWN
    return lines[:SHOWN] + ([f"... and {more} more"] if more > 0 else [])
