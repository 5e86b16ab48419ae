"""Tracks which ranks wait at which meeting, and finds ranks that wait for each other.

Recording a rank's arrival costs the same however many ranks the group has, since all ranks' arrivals are recorded by
one thread, beside the training of rank 0.
"""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Question(NamedTuple):
    """A rank's question whether all ranks of a group are about to do the same. The rank waits for the answer.

    Args:
        what: the text that must be equal on all ranks of the group.
        note: a remark that messages show after ``what``, and that may differ between ranks.
        since: the time of the question.
    """

    what: str
    note: str
    since: float

    @property
    def said(self) -> str:
        return f"{self.what} ({self.note})" if self.note else self.what


class Group:
    """The ranks of a process group. Equal ranks share one object, so that comparing two groups costs nothing."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.members = frozenset(ranks)


class Meeting:
    """The questions of those ranks of a group that have come to one place of the program."""

    def __init__(self, key: str, group: Group) -> None:
        self.key, self.group = key, group
        self.questions: dict[int, Question] = {}

    @property
    def is_complete(self) -> bool:
        return len(self.questions) == len(self.group.ranks)

    def absent(self) -> list[int]:
        """Return the ranks that have not come."""
        return [rank for rank in self.group.ranks if rank not in self.questions]


class Meetings:
    """All meetings at which ranks wait. A rank waits at one meeting at most."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], Group] = {}
        self._meetings: dict[tuple[str, Group], Meeting] = {}
        self._of_rank: dict[int, Meeting] = {}
        self._has_grown = False  # whether a rank has come since the last look for a circle

    def group(self, ranks: Iterable[int]) -> Group:
        """Return the group of these ranks, in this order."""
        ranks = tuple(ranks)
        if ranks not in self._groups:
            self._groups[ranks] = Group(ranks)
        return self._groups[ranks]

    def come(self, rank: int, key: str, group: Group, question: Question) -> Meeting:
        """Record that a rank waits; return its meeting."""
        self.withdraw(rank)
        meeting = self._meetings.get((key, group))
        if meeting is None:
            meeting = self._meetings[key, group] = Meeting(key, group)
        meeting.questions[rank] = question
        self._of_rank[rank] = meeting
        self._has_grown = True
        return meeting

    def of(self, rank: int) -> Meeting | None:
        """Return the meeting at which a rank waits; None if it waits at none."""
        return self._of_rank.get(rank)

    def close(self, meeting: Meeting) -> None:
        """Record that no rank waits at a meeting any more."""
        del self._meetings[meeting.key, meeting.group]
        for rank in meeting.questions:
            del self._of_rank[rank]

    def withdraw(self, rank: int) -> Question | None:
        """Record that a rank waits no more; return its question."""
        meeting = self._of_rank.pop(rank, None)
        if meeting is None:
            return None
        question = meeting.questions.pop(rank)
        if not meeting.questions:
            del self._meetings[meeting.key, meeting.group]
        return question

    def waiting_for(self, rank: int, key: str | None = None) -> list[int]:
        """Return the ranks that wait at meetings, or at those named ``key``, to which ``rank`` has to come."""
        meetings = [m for m in self._meetings.values() if rank in m.group.members and rank not in m.questions]
        meetings = [m for m in meetings if key in (None, m.key)]
        return [other for meeting in meetings for other in meeting.questions]

    def asked_before(self, time: float) -> Iterator[tuple[int, Meeting]]:
        """Yield the ranks that have waited since before ``time``, with their meetings."""
        for meeting in self._meetings.values():
            # The first to come has waited longest, so most meetings need one look.
            for rank, question in meeting.questions.items():
                if question.since >= time:
                    break
                yield rank, meeting

    def circle(self) -> list[int]:
        """Return ranks that wait for each other at different meetings; an empty list if there are none.

        The time is linear in the sizes of the groups of all meetings, and nothing if no rank has come since the last
        call, since only a rank that comes can close a circle.
        """
        if not self._has_grown:
            return []
        waits_for: dict[int | Meeting, list[int] | list[Meeting]] = {}
        for meeting in self._meetings.values():
            # Edges run between ranks and meetings only, since edges between all ranks would make the graph quadratic.
            waits_for[meeting] = [rank for rank in meeting.absent() if rank in self._of_rank]
            waits_for |= {rank: [self._of_rank[rank]] for rank in waits_for[meeting] if isinstance(rank, int)}
        try:
            graphlib.TopologicalSorter(waits_for).prepare()
        except graphlib.CycleError as error:
            return sorted({node for node in error.args[1] if isinstance(node, int)})
        self._has_grown = False
        return []
