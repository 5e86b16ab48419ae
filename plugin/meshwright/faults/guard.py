"""The guard of a process: makes one rank's failure known to the others, and names it in errors of the backend.

The guard counts steps, makes the ranks compare what they do, ends this process when another rank has failed, and
tells the other ranks when this process fails or ends normally.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.errors import DivergenceError, PeerFailedError
from meshwright.faults import ending, interpose
from meshwright.faults.collective_log import CallTrace, describe, describe_tensors, first_difference, set_timeouts
from meshwright.faults.ending import MARGIN, SPEAKS, Deadline, end_children, end_process
from meshwright.faults.every_rank import HubExchange, Wishes, advice
from meshwright.faults.link import Link
from meshwright.faults.referee_server import Hub
from meshwright.faults.statement import Statement, what_differs
from meshwright.faults.together import on_first_rank
from meshwright.mesh.process_group import FOLLOWS, attempt_number, await_ranks, did_not_come
from meshwright.mesh.siblings import end_sibling, this_process
from meshwright.printable import tell

GRACE = 2.0  # seconds in which the program can end by its own error after another rank has failed
CLEANS_UP = 5.0  # seconds that the interpreter has to end after a program that ends because of another rank
HUB_SILENT = "does not answer: stopped, hung or unreachable"

_TIMEOUT = re.compile(r"timed? ?out", re.IGNORECASE)

_guard: Guard | None = None
_started = itertools.count()  # the guards of this process, so that the ranks of each meet under keys of its own


class Guard:
    """The guard of the ranks of one process group; see ``start_guard``."""

    def __init__(self, *, timeout: float, coordinates: str = "") -> None:
        self.timeout = timeout
        self._rank = dist.get_rank()
        self._coordinates = coordinates
        self.step = 0
        self._steps: Counter[frozenset[int]] = Counter()  # by the ranks that train the model
        self.trace = CallTrace()
        self._agreed: dict[tuple[str, tuple[int, ...]], int] = {}  # the step of the ranks' last meeting at each place
        self._world = weakref.ref(dist.group.WORLD)  # weak, so that the guard does not keep the group alive
        self._process = os.getpid()
        self.cause: str | None = None  # why another rank has failed, also after the program has left the process group
        self._failed = threading.Event()  # set when another rank has failed
        self._is_failing = False  # set when this rank has raised an error, which it reports itself
        self._follows = False  # set when the program ends because another rank has failed
        self._silent: list[Any] = []  # the processes of ranks that do not answer
        self._is_closed = False
        self.hint = ""  # a likely cause of later differences between the ranks
        self.on_failure: Callable[[str], None] | None = None  # called with what is known when a rank fails
        self._hub: Hub | None = None
        self._caught = ending.CaughtErrors()
        self._deadline = Deadline()
        self._wishes = Wishes()
        meets_at = dist.PrefixStore(
            f"meshwright-guard{attempt_number()}/{next(_started)}", dist.distributed_c10d._get_default_store()
        )
        await_ranks(meets_at, self._rank, dist.get_world_size(), timeout)
        host, port, token = on_first_rank(self._open_hub)
        try:
            self._link = Link(
                (host, port),
                {"token": token, "rank": self._rank, "name": self.name, "process": this_process()},
                timeout=timeout,
                on_beat=self._beat,
                on_notice=self._on_notice,
                on_late=self._on_late,
                has_passed=self._wishes.has_passed,
                deadline=self._deadline,
            )
        except TimeoutError as error:  # rank 0 was stopped right here
            raise did_not_come([0], self._rank, dist.get_world_size(), timeout) from error
        self._end_with_child = ending.end_with_child(self)

    def _open_hub(self) -> tuple[str, int, str]:
        self._hub = Hub.open(name=self.name, world_size=dist.get_world_size(), timeout=self.timeout)
        return self._hub.address

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        return self  # a process has only one guard

    @property
    def is_current(self) -> bool:
        """Whether the watched process group is still in use, and this is the process that joined the group."""
        is_over = self._is_closed or self._is_failing or os.getpid() != self._process
        return not is_over and dist.is_initialized() and dist.group.WORLD is self._world()

    @property
    def name(self) -> str:
        """The name of this rank in messages, with its host and its coordinates in the mesh."""
        place = ", ".join(part for part in (f"host {socket.gethostname()}", self._coordinates) if part)
        return f"rank {self._rank} ({place})"

    def set_coordinates(self, coordinates: str) -> None:
        """Name this rank's coordinates in messages from now on; the first ones of a process group stay."""
        if self.is_current and not self._coordinates:
            self._coordinates = coordinates
            self._link.tell({"kind": "name", "name": self.name})

    def begin_step(self, group: ProcessGroup | None = None) -> None:
        """Count a step, which begins with a forward pass in training.

        Args:
            group: the ranks of the model; None for all ranks.
        """
        self.step += 1
        if self.is_current:
            self._steps[frozenset(dist.get_process_group_ranks(group))] += 1
        self.trace.begin("forward")

    def meet(self, place: str, group: ProcessGroup | None, *statements: Statement) -> None:
        """Wait for the ranks of a group. All must be at the same place and have issued the same collectives.

        Args:
            place: the place in the program, e.g. "gradients".
            group: the process group; None for all ranks.
            statements: further values that must be equal on all ranks of the group, e.g. the inputs.

        Raises:
            DivergenceError: the ranks differ. The message says what each rank does, what differs in which step, and in
                which step the ranks agreed for the last time.
            PeerFailedError: a rank is gone or did not come to the meeting in time.
        """
        if not self.is_current:
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) == 1:
            return
        finding = self._compare(place, ranks, *(statement.text for statement in statements))
        if finding is not None and not (finding["together"] and self._nearly_agree(place, ranks, statements)):
            # Ranks that wait at different places do not all come here, so they cannot compare details.
            details = self._explain(place, ranks, statements) if finding["together"] else []
            raise self._diverged(ranks, finding, *details)
        self._agreed[place, ranks] = self.step
        self._caught.of_pass = ""

    def agree(self, place: str, *texts: str, group: ProcessGroup | None = None) -> bool:
        """Wait for the ranks of a group as :meth:`meet` does, and return whether they agree instead of raising.

        Args:
            place: the place in the program.
            texts: values that should be equal on all ranks.
            group: the process group; None for all ranks.

        Raises:
            DivergenceError: the ranks are at different places.
            PeerFailedError: a rank is gone or did not come to the meeting in time.
        """
        ranks = tuple(dist.get_process_group_ranks(group))
        if (finding := self._compare(place, ranks, *texts)) is not None and not finding["together"]:
            raise self._diverged(ranks, finding)
        return finding is None

    def wishes_of_all(self, wishes: Collection[str]) -> set[str] | None:
        """Return what any rank wishes at this point of the program, to which all ranks come equally often.

        A rank without wishes waits for nobody, as long as no other rank has any.

        Args:
            wishes: this rank's wishes.

        Returns:
            The wishes of all ranks, the same on each; or None if another rank had no wish and has gone on. This rank
            must then pass the same wishes the next time, when all ranks will come.
        """
        if not self.is_current:
            return set(wishes)
        if (key := self._wishes.come(bool(wishes))) is None:
            return set()
        ranks = tuple(range(dist.get_world_size()))
        self.trace.begin("the comparison of the ranks' wishes")
        finding = self._ask(key, ranks, ",".join(sorted(wishes)))
        if finding is not None and "passed" in finding:
            return None
        self._wishes.meet()
        texts = [",".join(wishes)] if finding is None else list(finding["differ"].values())
        return {wish for text in texts for wish in text.split(",") if wish}

    def _compare(self, place: str, ranks: tuple[int, ...], *texts: str) -> dict[str, Any] | None:
        self.trace.begin(f"the comparison of the ranks' {place}")
        return self._ask(place, ranks, self._text(place, ranks, *texts))

    def _text(self, place: str, ranks: tuple[int, ...], *texts: str) -> str:
        # Only steps of models that all of these ranks train, since some of them may have trained models of their own.
        step = sum(count for trained, count in self._steps.items() if trained.issuperset(ranks))
        parts = (place, f"step {step}", ", ".join(filter(None, texts)), self.trace.of(ranks).summary())
        return ", ".join(filter(None, parts))

    def _nearly_agree(self, place: str, ranks: tuple[int, ...], statements: tuple[Statement, ...]) -> bool:
        """Return whether the ranks differ only in values that are equal enough; all of them must make this call."""
        lenient = [statement for statement in statements if statement.are_close is not None]
        if not lenient:
            return False
        strict = self._text(place, ranks, *(s.text for s in statements if s.are_close is None))
        everyone = self._exchange(ranks, [strict, *(dict(statement.details()) for statement in lenient)]).values()
        return len({text for text, *_ in everyone}) == 1 and all(
            statement.holds(details[index] for _, *details in everyone) for index, statement in enumerate(lenient)
        )

    def collective(self, group: ProcessGroup, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a collective. If it is the program's own, compare it with the other ranks (see interpose.Observer)."""
        is_own = interpose.is_own()
        # A second thread (such as an asynchronous checkpoint) has its own order, and must not wait for the main thread.
        if not self.is_current or not (is_own or threading.current_thread() is threading.main_thread()):
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        self.trace.add(ranks, what := describe(operation, args, kwargs) + interpose.sent())
        if is_own or len(ranks) == 1:
            return
        key = f"collective of group {group.group_name}"
        note = f"collective {self.trace.of(ranks).count} of these ranks, step {self.step}"
        if (finding := self._ask(key, ranks, what, note=note)) is not None:
            raise self._diverged(ranks, finding)

    def send(self, group: ProcessGroup, tensors: list[Tensor], to: int, tag: int) -> None:
        """Announce one of the program's own sends to the hub."""
        if self.is_current:
            ranks = dist.get_process_group_ranks(group)
            what = describe_tensors(tensors)
            self.trace.begin(f"send of {what} to rank {ranks[to]}")
            self._link.announce({"kind": "send", "to": ranks[to], "slot": f"{group.group_name}/{tag}", "what": what})

    def receive(self, group: ProcessGroup, tensors: list[Tensor], source: int, tag: int, *, waits: bool) -> None:
        """Compare a receive of the program with the send that it belongs to."""
        if not self.is_current:
            return
        ranks = dist.get_process_group_ranks(group)
        what = describe_tensors(tensors)
        self.trace.begin(f"receive of {what} from rank {ranks[source]}")
        slot = f"{group.group_name}/{tag}"
        message = {"kind": "receive", "source": ranks[source], "slot": slot, "what": what, "waits": waits}
        if not waits or threading.current_thread() is not threading.main_thread():
            self._link.announce({**message, "waits": False})
        elif (finding := self._answer(message, (self._rank, ranks[source]))) is not None:
            raise self._diverged((self._rank, ranks[source]), finding)

    def post(self, topic: str, value: object) -> None:
        """Send rank 0 a value that JSON can hold, without waiting; see ``take_posted``."""
        if self.is_current:
            self._link.announce({"kind": "post", "topic": topic, "value": value})

    def take_posted(self, topic: str, *, patience: float) -> dict[int, Any]:
        """Return the values that the ranks have posted under a topic, by rank, and forget them; for rank 0 only.

        Args:
            topic: the topic.
            patience: the seconds to wait for the values of all ranks.
        """
        assert self._hub is not None
        return self._hub.posted.take(topic, patience)

    def exchange(self, topic: str) -> HubExchange:
        """Return what exchanges texts of all ranks beside the training, also after the process group has ended."""
        return HubExchange(
            self._link, self._rank, topic=topic, cause=lambda: self.cause, patience=max(self.timeout, CLEANS_UP)
        )

    @ending.waits_for_ranks
    def explain(self, error: RuntimeError) -> RuntimeError:
        """Return a network error with the rank and the reason added."""
        if not self.is_current or isinstance(error, PeerFailedError):
            return error
        # A connection to an ended process may break before the hub knows of the end.
        self._failed.wait(GRACE / 2)
        cause, details = self.cause, []
        waited_for = self.trace.ranks if _TIMEOUT.search(str(error)) else ()
        question = {"kind": "report", "waited_for": waited_for}
        if cause is None and (report := self._link.ask(question, patience=GRACE)) is not None:
            cause, details = report["cause"], [f"  {line}" for line in report["ranks"]]
            self._silent += report["silent"]
            if cause is None and (difference := self._first_difference(self.trace.ranks)):
                cause = f"the ranks did not issue the same collectives; {difference}"
        elif cause is None:
            cause = self._link.hub_left or f"{self._link.hub_name} {HUB_SILENT}"
        summary = str(error).splitlines()[0] if str(error) else type(error).__name__
        if cause is not None:
            details.append(f"(network error: {summary})")
        what = f"{self.name} could not finish {self.trace.doing} in step {self.step}"
        failed = PeerFailedError("\n".join([f"{what}: {cause or summary}", *details]))
        return failed if cause is None else self._caught.keep(failed)  # without a cause the ranks may go on

    def end_pass(self, error: BaseException | None) -> None:
        """Take the error, if any, with which this rank's forward pass ends, and which the program may catch."""
        if self.is_current and self._caught.see_pass(error, self.step):
            self._link.announce({"kind": "raised", "what": self._caught.of_pass})

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank ends with an exception, even if a ``finally`` has destroyed the group."""
        if self._is_closed or self._is_failing or os.getpid() != self._process:
            return
        self._is_failing = self.is_current
        self._follows = isinstance(error, PeerFailedError)
        if not self._follows:
            self._link.tell({"kind": "fail", "how": f"step {self.step}, {ending.in_short(error)}"})
            self._note(f"{self.name}: {ending.in_short(error)}")
            ending.tell_launcher(error)

    def leave_by(self, how: str, error: BaseException | None) -> None:
        """Remember that the program is ending itself because of an error, which it has caught."""
        self._follows = isinstance(error, PeerFailedError)
        if not self._is_closed and os.getpid() == self._process and not self._follows:
            self.trace.leaving = how + ("" if error is None else f" while it handled {ending.in_short(error)}")

    def end_silent(self) -> None:
        """Kill those ranks of the same launcher that do not answer, as the launcher would after half a minute."""
        if os.getpid() == self._process:
            sys.stderr.flush()
            for process in self._silent:
                end_sibling(process)

    def close(self, why: str) -> None:
        """Tell the other ranks that this rank has ended normally, and stop watching."""
        global _guard
        if _guard is self:
            _guard = None
            interpose.observe(None)
        if os.getpid() != self._process:
            return
        self._end_with_child.cancel()
        if not (self._follows or self._is_failing or self.trace.leaving):
            self._link.await_exchanges()
        how = f"{why} after step {self.step}"
        self._is_closed = True
        if self._follows or self._is_failing:
            end_children()
        if self.trace.leaving:
            how = f"step {self.step}, its program ended by {self.trace.leaving}"
            tell(f"{self.name}: {how}")
            self._link.tell({"kind": "fail", "how": how})
        else:
            self._link.tell({"kind": "leave", "how": how})
        self.end_silent()
        if self._follows:
            time.sleep(FOLLOWS)
        if self._hub is not None:
            self._hub.close(f"{self.name}: {how}")
        self._link.close()
        self._deadline.end(CLEANS_UP if self._follows else None)

    def forget_in_child(self) -> None:
        """Release the connections in a forked process, so that they still close when the parent ends."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for connection in (*self._link.sockets, *(self._hub.sockets if self._hub else ())):
            if connection.fileno() >= 0:
                os.dup2(nothing, connection.fileno(), inheritable=False)
        os.close(nothing)

    def _ask(self, key: str, ranks: tuple[int, ...], what: str, note: str = "") -> dict[str, Any] | None:
        if (error := self._caught.swallowed()) is not None:  # after which the ranks cannot go on together
            self._link.tell({"kind": "fail", "how": f"step {self.step}, went on after {ending.in_short(error)}"})
            text = f"{self.name}: {ending.text_of(error)}"
            self._note(text)
            end_process(text, self._deadline, self.end_silent, error)
        note = ", ".join(filter(None, [note, self.trace.call and f"in {self.trace.call}", self._caught.of_pass]))
        return self._answer({"kind": "ask", "key": key, "what": what, "note": note}, ranks, of_group=True)

    def _answer(
        self, message: dict[str, Any], ranks: tuple[int, ...], *, of_group: bool = False
    ) -> dict[str, Any] | None:
        """Return None if the ranks agree, else the referee's finding."""
        with interpose.waiting():
            answer = self._link.ask(message, patience=self.timeout + GRACE, ranks=ranks if of_group else None)
        if answer is None:
            self._failed.wait(GRACE / 2)
            if self.cause is None and self._link.hub_left and 0 not in ranks:
                return None  # rank 0 has ended normally, and the hub with it
            answer = {"gone": self.cause or self._link.hub_left or f"{self._link.hub_name} {HUB_SILENT}"}
        if "gone" in answer:
            self._silent += answer.get("silent", ())
            here = f"{self.name} cannot go on with {self.trace.doing} in step {self.step}"
            actions = {self.name: self.trace.doing, "the others": answer["gone"]}
            raise self._caught.keep(PeerFailedError("\n".join([f"{here}: {answer['gone']}", *advice(actions)])))
        return None if answer.get("agreed") else answer

    def _explain(self, place: str, ranks: tuple[int, ...], statements: tuple[Statement, ...]) -> list[str]:
        """Return lines that say what differs between the ranks, all of which must make this call."""
        everyone = self._exchange(ranks, [dict(statement.details()) for statement in statements])
        lines = what_differs(statements, everyone)
        is_known = (step := self._agreed.get((place, ranks))) is not None
        last = f"They agreed for the last time in step {step}." if is_known else None
        return [*lines, *filter(None, [self._first_difference(ranks), last])]

    def _first_difference(self, ranks: tuple[int, ...]) -> str | None:
        return first_difference(self._exchange(ranks, self.trace.of(ranks).recent()))

    def _exchange(self, ranks: tuple[int, ...], value: object) -> dict[str, Any]:
        """Return each rank's value, by the rank's name; an empty dict if not all ranks make this call."""
        # Each text contains the rank, since the referee returns only texts that differ.
        message = json.dumps({"rank": self._rank, "said": value})
        question = {"kind": "ask", "key": "exchange", "what": message, "note": ""}
        answer = self._link.ask(question, patience=GRACE, ranks=ranks) or {}
        answers = answer["differ"] if answer.get("together") else {}  # others may wait elsewhere
        return {name: json.loads(text)["said"] for name, text in answers.items()}

    def _diverged(self, ranks: tuple[int, ...], finding: dict[str, Any], *details: str) -> DivergenceError:
        lines = [f"ranks {list(ranks)} must do the same, but they differ:"]
        lines += [f"  {name}: {what}" for name, what in finding["differ"].items()]
        lines += advice(finding["differ"])
        return self._caught.keep(DivergenceError("\n".join([*lines, *details, *filter(None, [self.hint])])))

    def _note(self, what: str) -> None:
        """Pass on what is known of a failure; an error in doing so must not stop the failure's handling."""
        if self.on_failure is not None:
            with contextlib.suppress(Exception):
                self.on_failure(what)

    def _on_notice(self, cause: str, silent: list[Any], *, from_hub: bool) -> None:
        """End this process after another rank failed, unless it ends by its own error. Runs in the listening thread."""
        self.cause = cause
        self._silent += silent
        self._failed.set()
        self._note(cause)
        # A launcher may end this process before its program can print the cause. One rank says it at once: the hub's,
        # and rank 1 if that is the one that has failed.
        if not from_hub and self._rank == 1 and self.is_current:
            tell(cause)
        self._deadline.set(GRACE + SPEAKS + MARGIN)
        time.sleep(GRACE)
        if self.is_current:
            text = f"{self.name} ends in step {self.step} ({self.trace.doing}), because of {cause}"
            end_process(text, self._deadline, self.end_silent)
        elif self._is_failing:
            end_process("", self._deadline, self.end_silent)
        self._deadline.set(None)  # the program has gone on to another process group

    def _on_late(self, why: str) -> None:
        """End this process, for which the others have given up waiting. Runs in the listening thread."""
        if not self.is_current:
            self._deadline.set(None)
            return
        self._note(why)
        text = f"{why}, so this process ends. Its main thread is here:\n{ending.stack()}"
        end_process(text, self._deadline, self.end_silent, PeerFailedError(text))

    def _beat(self) -> dict[str, Any]:
        """Return what this rank is doing; called every second in the listening thread."""
        waits = ending.is_waiting()
        place = f", at {ending.place()}" if not waits and self.trace.age >= 1.0 else ""
        status = f"step {self.step}, {self.trace.last()}{place}"
        return {"status": status, "waits_for": self.trace.ranks if waits else ()}


def start_guard(*, timeout: float, coordinates: str = "") -> Guard | None:
    """Start and return the guard of the default process group, and set the timeout of every process group.

    This is a collective call. A second call returns the first guard. Without a process group of several ranks there is
    nothing to watch, and the result is None.

    Args:
        timeout: the seconds that a rank may keep the others waiting.
        coordinates: this rank's coordinates in its mesh, for messages, e.g. "dp=0 tp=1"; see ``set_coordinates``.

    Raises:
        PeerFailedError: if other ranks do not come within the timeout. The message names them.
    """
    global _guard
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    set_timeouts(timeout)
    if active_guard() is None:
        if _guard is None:
            ending.install(lambda: _guard)
        else:
            _guard.close("its process group ended")
        _guard = Guard(timeout=timeout, coordinates=coordinates)
        interpose.observe(_guard)
    return _guard


def active_guard() -> Guard | None:
    """Return the guard of the process group in use; None if it has none."""
    return _guard if _guard is not None and _guard.is_current else None
