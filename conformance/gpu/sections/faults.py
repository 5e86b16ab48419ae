"""Ranks that are killed, run out of memory or get a wrong label, on a device: all ranks must end and name them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from conformance.gpu.section import Check, Place, Section, attempt
from conformance.gpu.training import batches, new_model
from harness.programs import mark_fault, run_program
from meshwright.choose.given_plan import resolve_plan

_PLANS = ("dp2 zero1", "tp2+sp")
_TIMEOUT = 20.0  # seconds that a rank may be silent; a GPU needs some at its first step
_IN_TIME = _TIMEOUT + 5.0
_WHOLE = 150.0  # seconds for a program: imports, a context on the GPU, and the end
_TOO_MUCH = 1 << 50  # bytes that no device has


class Faults(Section):
    """Runs programs of two ranks, one of which fails."""

    name = "faults"
    question = "If a rank is killed, runs out of memory or gets a wrong label, do all ranks end in time and name it?"
    share = 2.0

    def run(self, place: Place) -> Iterator[Check]:
        for case in (*(Case(plan, fault) for plan in _PLANS for fault in _FAULTS), Case(_PLANS[0], _WRONG_LABEL)):
            yield from attempt(case.what, case.ended, place)


@dataclass(frozen=True)
class Fault:
    """How rank 1 fails.

    Args:
        what: in words.
        fail: makes it fail, given the batch on its device.
        words: those by which the other rank must name the reason, a regular expression.
        own: what the rank must print itself.
    """

    what: str
    fail: Callable[[dict[str, Tensor]], None]
    words: str
    own: str = ""


@dataclass(frozen=True)
class Case:
    """A program of two ranks in which rank 1 fails."""

    plan: str
    fault: Fault

    @property
    def what(self) -> str:
        return f"{self.plan}: rank 1 {self.fault.what}"

    def ended(self, place: Place) -> Check:
        """Run the program; a planted fault lets rank 0 fail instead."""
        victim = 0 if place.plants else 1
        outcomes = run_program(program, 2, self.plan, place.device, victim, self.fault.fail, timeout=_WHOLE)
        other = outcomes[0]
        named = re.search(rf"rank 1 \(host [^)]*\)[^\n]*({self.fault.words})", other.output)
        wrong = [
            *(f"rank {rank} did not end" for rank, outcome in enumerate(outcomes) if outcome.code is None),
            *(["rank 0 ended as if nothing was wrong"] if other.code == 0 else []),
            *([] if named else ["rank 0 does not name rank 1"]),
            *([] if self.fault.own in outcomes[1].output else [f"rank 1 does not say: {self.fault.own}"]),
            *([f"rank 0 ended after {other.after:.0f} s"] if other.after > _IN_TIME else []),
        ]
        if wrong:
            print("\n".join(outcome.output for outcome in outcomes))
        return Check(
            what=f"{self.what}: what is wrong on the other",
            figure=len(wrong),
            goal=0.0,
            note="; ".join(wrong),
            details={"seconds": other.after},
        )


def program(plan: str, device: str, victim: int, fail: Callable[[dict[str, Tensor]], None]) -> None:
    """Train under a plan; one rank fails in its second step."""
    model = new_model("llama", torch.float32, device)
    config = mw.ToDistributedConfig(plan=resolve_plan(plan), timeout_s=_TIMEOUT)
    model, optimizer, loader = mw.to_distributed(
        model, torch.optim.AdamW(model.parameters()), batches(4), config=config
    )
    for step, given in enumerate(loader):
        batch = {name: x.to(device) for name, x in given.items()}
        if step == 1 and dist.get_rank() == victim:
            mark_fault()
            fail(batch)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def kill(batch: dict[str, Tensor]) -> None:
    """End this process as the kernel does that lacks memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_out(batch: dict[str, Tensor]) -> None:
    """Ask the device for more memory than it has; a CPU's allocator would raise another error."""
    device = batch["labels"].device
    if device.type == "cpu":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 TiB")
    torch.empty(_TOO_MUCH, dtype=torch.uint8, device=device)


def mislabel(batch: dict[str, Tensor]) -> None:
    """Make a label a number that is no word."""
    batch["labels"][0, -1] = 10**6


_FAULTS = (
    Fault("is killed", kill, "ended abruptly"),
    Fault("runs out of memory", run_out, "OutOfMemoryError"),
)
# On a GPU the check is an assertion of a kernel, since the host must not wait for the label.
_WRONG_LABEL = Fault(
    "has a label that is no word", mislabel, "OutOfVocabularyError|device-side assert",
    "outside of the model's vocabulary of 97 words",
)  # fmt: skip
