"""The rules by which the hub knows which ranks are alive, which rank waits at which meeting, and what failed first.

They use no sockets or clocks. One referee serves all ranks (see referee_server.py). Each call takes a rank's message
and the time, and returns the messages to send to ranks.

Recording a rank's arrival costs the same however many ranks the group has, since all ranks' arrivals are recorded by
one thread, beside the training of rank 0.
"""

from __future__ import annotations

import graphlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


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
    def text(self) -> str:
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


AGREED: dict[str, Any] = {"agreed": True}
WISH = "wish "  # the beginning of the keys of meetings to which ranks come only if one of them wishes something
HICCUP = 3.0  # seconds without a heartbeat after which a report mentions them; heartbeats come every second


class Post(NamedTuple):
    """A message to ranks: the answer to their question, or a notice of a failure."""

    ranks: tuple[int, ...]
    channel: Literal["answer", "notice"]
    body: dict[str, Any]


@dataclass
class Member:
    """The referee's knowledge of one rank."""

    name: str
    heard: float
    status: str = "starting"
    waits_for: tuple[int, ...] = ()  # the ranks of the collective in which it waits
    waits_since: float | None = None  # None if it runs code of the program
    process: object = None  # identifies the rank's process (see siblings.py)
    gone: str | None = None  # how the rank ended
    is_silent: bool = False


@dataclass
class Mailbox:
    """The announced sends and receives of one pair of ranks, group and tag, in order."""

    sent: deque[str] = field(default_factory=deque)
    expected: deque[tuple[str, bool]] = field(default_factory=deque)  # the tensors, and whether the receiver waits


class Referee:
    """Compares what the ranks do, and tells the other ranks when a rank is gone.

    Args:
        timeout: the seconds after which a silent rank counts as hung, and a question as unanswered.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.first_cause: str | None = None
        self._members: dict[int, Member] = {}
        self._gone: set[int] = set()
        self._raised: dict[int, str] = {}  # what the programs of ranks have caught of their last forward pass
        self._meetings = Meetings()
        self._mail: defaultdict[tuple[int, int, str], Mailbox] = defaultdict(Mailbox)

    def join(self, rank: int, name: str, now: float, process: object = None) -> None:
        """Record that a rank has connected. Messages call the rank ``name``."""
        self._members[rank] = Member(name, now, process=process)
        self._gone.discard(rank)

    def rename(self, rank: int, name: str) -> None:
        """Call a rank ``name`` from now on."""
        self._members[rank].name = name

    def beat(self, rank: int, status: str, now: float, waits_for: Iterable[int] = ()) -> None:
        """Record that a rank is alive, what it is doing, and the ranks of the collective in which it waits."""
        member = self._members[rank]
        member.heard, member.status, member.waits_for, member.is_silent = now, status, tuple(waits_for), False
        member.waits_since = (member.waits_since or now) if member.waits_for else None

    def group(self, ranks: Iterable[int]) -> Group:
        """Return the group of these ranks, for :meth:`ask`."""
        return self._meetings.group(ranks)

    def ask(self, rank: int, key: str, group: Group, what: str, note: str, now: float) -> list[Post]:
        """Record that a rank waits for its group. The answer is sent when all ranks wait, or when one cannot come.

        Args:
            rank: the rank that asks.
            key: the name of the meeting, the same on all ranks of the group.
            group: the group of the ranks that meet.
            what: the text that must be equal on all ranks of the group.
            note: a remark that messages show after ``what``, and that may differ between ranks.
            now: the time.
        """
        if self._gone and (gone := [r for r in group.ranks if r in self._gone]):
            return self._refuse([rank], self._how_gone(gone))
        meeting = self._meetings.come(rank, key, group, Question(what, note, now))
        if not meeting.is_complete:
            is_first = key.startswith(WISH) and len(meeting.questions) == 1
            return [Post(tuple(meeting.absent()), "notice", {"wish": key})] if is_first else []
        self._meetings.close(meeting)
        if all(question.what == what for question in meeting.questions.values()):
            for other in group.ranks if self._raised else ():
                self._raised.pop(other, None)
            return [Post(group.ranks, "answer", AGREED)]
        return self._differ({r: meeting.questions[r].text for r in group.ranks}, together=True)

    def raised(self, rank: int, what: str) -> list[Post]:
        """Record what a rank's program may catch of its forward pass, which the others run too, or wait in."""
        self._raised[rank] = what
        return []

    def passed(self, rank: int, key: str) -> list[Post]:
        """Record that a rank was past a meeting when it heard of the wish; those who wait there go on."""
        return self._passed_by(self._meetings.waiting_for(rank, key))

    def _passed_by(self, ranks: Iterable[int]) -> list[Post]:
        ranks = tuple(ranks)
        for rank in ranks:
            self._meetings.withdraw(rank)
        return [Post(ranks, "answer", {"passed": True})] if ranks else []

    def send(self, rank: int, to: int, slot: str, what: str) -> list[Post]:
        """Record that a rank is about to send. The rank gets no answer. ``slot`` is a text with the group and tag."""
        self._mail[rank, to, slot].sent.append(what)
        return self._match(rank, to, slot)

    def receive(self, rank: int, source: int, slot: str, what: str, *, waits: bool, now: float) -> list[Post]:
        """Record that a rank is about to receive and, if ``waits``, waits for the comparison with the send."""
        self._mail[source, rank, slot].expected.append((what, waits))
        if waits:
            pair = self._meetings.group((rank, source))
            self._meetings.come(rank, f"receive from {source}", pair, Question(what, "", now))
        posts = self._match(source, rank, slot)
        if not posts and waits and source in self._gone:
            return self._refuse([rank], self._how_gone([source]))
        return posts

    def leave(self, rank: int, how: str) -> list[Post]:
        """Record that a rank's program ended normally, which is an error only if another rank still waits for it."""
        return self._go(rank, how, notice=None)

    def fail(self, rank: int, how: str) -> list[Post]:
        """Record that a rank ends with an exception; all others must end too."""
        return self._go(rank, how, notice="failed")

    def lose(self, rank: int) -> list[Post]:
        """Record that a rank's connection closed; if it has not left or failed, its process was killed or crashed."""
        if rank not in self._members or rank in self._gone:
            return []
        status = self._members[rank].status
        how = f"its process ended abruptly (killed, crashed, or os._exit), last seen: {status}"
        return self._go(rank, how, notice="failed")

    def tick(self, now: float) -> list[Post]:
        """Return messages about ranks that wait for each other, or that were silent or late for the whole timeout."""
        posts: list[Post] = []
        while circle := self._meetings.circle():
            if wishing := [r for r in circle if (at := self._meetings.of(r)) and at.key.startswith(WISH)]:
                posts += self._passed_by(wishing)
                continue
            asked = {rank: question.text for rank in circle if (question := self._meetings.withdraw(rank))}
            posts += self._differ(asked, together=False)
        posts += self._left_alone(now)
        for rank, member in self._members.items():
            if member.gone is None and not member.is_silent and now - member.heard > self.timeout:
                member.is_silent = True
                age = f"{now - member.heard:.0f} s"
                how = f"stopped, hung or cut off: no heartbeat for {age}, last: {member.status}"
                posts += self._tell_others(rank, how)
        late = list(self._meetings.asked_before(now - self.timeout))
        texts = {meeting: self._who_did_not_come(meeting, now) for _, meeting in late}
        absent = {rank for meeting in texts for rank in meeting.absent()}
        ends = self._end_late(absent) if absent else []
        for rank, meeting in late:
            self._meetings.withdraw(rank)
            posts.append(Post((rank,), "answer", {"gone": texts[meeting], "silent": self._quiet(now)}))
        return posts + ends

    def _left_alone(self, now: float) -> list[Post]:
        """Return messages about ranks that have raised in a pass in which others wait for them all the time."""
        posts: list[Post] = []
        for rank, what in list(self._raised.items()):
            if (meeting := self._meetings.of(rank)) is None:
                continue
            for other in meeting.absent():
                since = self._members[other].waits_since if other in self._members else None
                if other in self._raised or since is None:
                    continue
                if now - max(since, meeting.questions[rank].since) > HICCUP:
                    del self._raised[rank]
                    posts += self._tell_others(rank, what)
                    posts += self._refuse([rank], f"{self._members[rank].name}: {what}")
                    break
        return posts

    def report(self, rank: int, now: float, waited_for: Iterable[int] = ()) -> list[Post]:
        """Answer a rank with the first cause of failure, if known, and what every rank is doing.

        Args:
            rank: the rank that asks.
            now: the time.
            waited_for: the ranks of a collective that has not ended within the timeout.
        """
        ends = self._end_late(waited_for, by={rank})
        lines = [self._describe(rank, now) for rank in sorted(self._members)]
        quiet = [
            f"{member.name} has sent no heartbeat for {now - member.heard:.1f} s; last: {member.status}"
            for member in self._members.values()
            if member.gone is None and now - member.heard > HICCUP
        ]
        cause = self.first_cause or ("\n".join(quiet) or None)
        return [Post((rank,), "answer", {"cause": cause, "ranks": lines, "silent": self._quiet(now)}), *ends]

    def _end_late(self, awaited: Iterable[int], by: Set[int] = frozenset()) -> list[Post]:
        """Return what ends all ranks, if ``awaited`` or those for whom they wait run code of the program all the time.

        Such a rank is not told by an answer, since it does not ask; and it may never end by itself.
        """
        if self.first_cause is not None:
            return []  # everyone knows already, and ends
        ends: list[Post] = []
        late = self._awaited_in_the_end(awaited, by)
        for rank in late:
            member = self._members[rank]
            how = f"kept other ranks waiting for {self.timeout:g} s: {member.status}"
            self.first_cause = self.first_cause or f"{member.name}: {how}"
            ends.append(Post((rank,), "notice", {"late": f"{member.name} {how}"}))
        others = [rank for rank, member in self._members.items() if member.gone is None and rank not in late]
        # The late ranks, of which rank 0 may be one, end at once, so they come last.
        return [*self._notice(others), *ends] if ends else []

    def _awaited_in_the_end(self, ranks: Iterable[int], by: Set[int]) -> list[int]:
        """Return those of some ranks, and of the ranks for which these wait, that wait for nobody and are alive."""
        found, seen, rest = [], set(by), list(ranks)
        while rest:
            rank = rest.pop()
            member = self._members.get(rank)
            if rank in seen or member is None or member.gone is not None or member.is_silent:
                continue
            seen.add(rank)
            meeting = self._meetings.of(rank)
            waits_for = meeting.absent() if meeting is not None else member.waits_for
            rest += waits_for
            if not waits_for:
                found.append(rank)
        return sorted(found)

    def _go(self, rank: int, how: str, *, notice: str | None) -> list[Post]:
        member = self._members[rank]
        if member.gone is not None:
            return []
        member.gone = how
        self._gone.add(rank)
        self._meetings.withdraw(rank)
        posts = []
        if waiting := self._meetings.waiting_for(rank):
            posts += self._refuse(waiting, self._how_gone([rank]))
        if notice is not None:
            posts += self._tell_others(rank, how)
        return posts

    def _tell_others(self, rank: int, how: str) -> list[Post]:
        text = f"{self._members[rank].name}: {how}"
        self.first_cause = self.first_cause or text
        return self._notice(r for r, member in self._members.items() if r != rank and member.gone is None)

    def _notice(self, ranks: Iterable[int]) -> list[Post]:
        silent = self._silent(lambda member: member.is_silent)
        return [Post(tuple(ranks), "notice", {"failed": self.first_cause, "silent": silent})]

    def _quiet(self, now: float) -> list[Any]:
        return self._silent(lambda member: now - member.heard > HICCUP)

    def _silent(self, is_silent: Callable[[Member], bool]) -> list[Any]:
        """Return the processes of the ranks that do not answer."""
        return [member.process for member in self._members.values() if member.gone is None and is_silent(member)]

    def _differ(self, texts: dict[int, str], *, together: bool) -> list[Post]:
        """Return the answers to ranks that differ. ``together`` says whether they wait at the same meeting."""
        named = {self._members[rank].name: what for rank, what in sorted(texts.items())}
        return [Post(tuple(texts), "answer", {"differ": named, "together": together})]

    def _refuse(self, ranks: list[int], text: str) -> list[Post]:
        for rank in ranks:
            self._meetings.withdraw(rank)
        return [Post(tuple(ranks), "answer", {"gone": text})]

    def _match(self, source: int, to: int, slot: str) -> list[Post]:
        """Compare the sends of a pair with its receives, in order."""
        mail = self._mail[source, to, slot]
        posts: list[Post] = []
        while mail.sent and mail.expected:
            sent, (expected, waits) = mail.sent.popleft(), mail.expected.popleft()
            if waits:
                self._meetings.withdraw(to)
            if sent == expected:
                posts += [Post((to,), "answer", AGREED)] if waits else []
                continue
            actions = {source: f"sends {sent}", to: f"receives {expected}"}
            named = {self._members[rank].name: what for rank, what in sorted(actions.items())}
            posts += [Post((to,), "answer", {"differ": named, "together": True})] if waits else []
            lines = "".join(f"\n  {self._members[r].name}: {what}" for r, what in actions.items())
            self.first_cause = self.first_cause or f"a send and its receive differ:{lines}"
            posts += self._notice(r for r in actions if r != to or not waits)
        return posts

    def _who_did_not_come(self, meeting: Meeting, now: float) -> str:
        lines = "\n".join(f"  {self._describe(rank, now)}" for rank in meeting.absent())
        return f"waited {self.timeout:g} s for ranks that did not come:\n{lines}"

    def _how_gone(self, ranks: Iterable[int]) -> str:
        # If a rank left because another rank failed, the other rank's failure is the cause.
        return self.first_cause or "\n".join(f"{self._members[r].name}: {self._members[r].gone}" for r in ranks)

    def _describe(self, rank: int, now: float) -> str:
        member = self._members.get(rank)
        if member is None:
            return f"rank {rank}: never seen"
        if member.gone is not None:
            return f"{member.name}: {member.gone}"
        age = now - member.heard
        silence = f"no heartbeat for {age:.0f} s, last: " if age > HICCUP else ""
        return f"{member.name}: {silence}{member.status}"
