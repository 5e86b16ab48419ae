"""The versions of torch, the Hugging Face packages and DeepSpeed that Meshwright is tested with."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from dataclasses import dataclass
from importlib import metadata

from meshwright.errors import PACKAGES
from meshwright.faults.equal_errors import is_first_to_say


@dataclass(frozen=True, kw_only=True)
class Range:
    """The tested range of versions of a package; both ends are tested.

    Args:
        oldest: the oldest tested version; older versions are known or expected to fail.
        newest: the newest tested version; versions that begin with these numbers count as tested.
        purpose: the part of Meshwright that does not work without the package.
        supported: whether older versions are known to fail; if False, they are only untested.
    """

    oldest: str
    newest: str
    purpose: str
    supported: bool = False

    def __str__(self) -> str:
        return self.oldest if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


# `make test-oldest` tests the oldest torch, transformers and accelerate, `make test-newest` the newest torch and
# transformers; constraints.txt pins the newest of the rest.
TESTED = {
    "torch": Range(oldest="2.11", newest="2.14", purpose="everything", supported=True),
    "transformers": Range(oldest="5.17", newest="5.24", purpose="its models and the Trainer", supported=True),
    "accelerate": Range(oldest="1.15", newest="1.15", purpose="meshwright launch, the Trainer", supported=True),
    "datasets": Range(oldest="5.2", newest="5.2", purpose="its datasets as input"),
    "deepspeed": Range(oldest="0.19", newest="0.19", purpose="DeepSpeed's ZeRO"),
    "peft": Range(oldest="0.21", newest="0.21", purpose="adapters"),
    "trl": Range(oldest="1.16", newest="1.16", purpose="its trainers"),
}

_LIBRARIES = {*PACKAGES, *TESTED}


SAID_VARIABLE = "MESHWRIGHT_UNTESTED"  # what meshwright launch has said for the processes that it starts


class UntestedVersionWarning(UserWarning):
    """Warns of a package version that Meshwright is not tested with."""


def installed(package: str) -> str | None:
    """Return the version of a package without importing it; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def place(package: str, version: str) -> str:
    """Return "older" or "newer" for a version outside the tested range, otherwise "tested".

    Example:
        >>> place("torch", "2.10.1"), place("torch", "2.13.0+cpu"), place("torch", "3.0")
        ('older', 'tested', 'newer')
    """
    tested = TESTED[package]
    if numbers_of(version) < numbers_of(tested.oldest):
        return "older"
    newest = numbers_of(tested.newest)
    return "newer" if numbers_of(version)[: len(newest)] > newest else "tested"


@functools.cache
def warn_outside_range() -> None:
    """Warn once per process of packages outside their tested ranges, at the line of the user's program.

    The processes of ``meshwright launch`` do not repeat what it has said.
    """
    text = outside_range()
    if text and text != os.environ.get(SAID_VARIABLE) and is_first_to_say(text):
        warnings.warn(text, UntestedVersionWarning, stacklevel=_stacklevel_of_the_program())


def outside_range() -> str | None:
    """Return a sentence about the installed packages outside their tested ranges; None if there are none."""
    found = {package: version for package in TESTED if (version := installed(package))}
    outside = [
        f"{package} {version} ({place(package, version)} than the tested {TESTED[package]})"
        for package, version in found.items()
        if place(package, version) != "tested"
    ]
    if not outside:
        return None
    tested = " ".join(tested_requirement(package) for package in found if place(package, found[package]) != "tested")
    return (
        f"Meshwright is not tested with {', '.join(outside)}; results may differ from those of one device. "
        f"For tested versions: pip install {tested}"
    )


def tested_requirement(package: str) -> str:
    """Return what pip installs to get the newest tested version.

    Example:
        >>> tested_requirement("accelerate")
        "'accelerate==1.15.*'"
    """
    return f"'{package}=={TESTED[package].newest}.*'"


def _stacklevel_of_the_program() -> int:
    """Return the stack level, seen from the caller, of the innermost line outside of Meshwright and these packages."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    return level


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, for example (2, 13, 0) for 2.13.0+cpu."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
