"""The settings of ``meshwright plan`` that may have several values, and how they are read from the command line."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar, get_args

from meshwright.errors import PlanError

Number = TypeVar("Number", int, float)
_MENUS = ("gpu", "precision")  # settings of which a page has menus
_MOST_ANSWERS = 6  # of a page of at most 1 MB


def numbers(option: str, text: str | None, kind: type[Number]) -> tuple[Number, ...]:
    """Return the numbers of an option with one value or several, separated by commas.

    Raises:
        PlanError: a value is not a number above zero, or is given twice.

    Example:
        >>> numbers("--gpus", "64,128", int)
        (64, 128)
    """
    if text is None:
        return ()
    found = []
    for word in text.split(","):
        try:
            value = kind(word.strip().replace("_", ""))
        except ValueError:
            value = kind(0)
        if not 0 < value < float("inf"):
            what = "a positive integer" if kind is int else "a number above zero"
            thousands = word.strip().lower().removesuffix("k")
            if kind is int and thousands.isdecimal() and thousands != word.strip():
                what += f"; write {option} {int(thousands) * 1024}"
            raise PlanError(f"{option}={word.strip()!r} must be {what}, or several with commas: {option} 64,128,256")
        found.append(value)
    if len(set(found)) < len(found):
        raise PlanError(f"{option}={text} gives a value twice; write each once")
    return tuple(found)


def names(option: str, text: str | None, read: Callable[[str], str]) -> tuple[str, ...]:
    """Return the names of an option with one value or several, separated by commas.

    Args:
        option: the option.
        text: its value; None if it was not given.
        read: a function that returns the full name of a word, or raises a PlanError.

    Raises:
        PlanError: a name is unknown, or is given twice.

    Example:
        >>> names("--precision", "bf16, FP8", precision_of)
        ('bf16', 'fp8')
    """
    found = () if text is None else tuple(read(word.strip()) for word in text.split(","))
    if len(set(found)) < len(found):
        raise PlanError(f"{option}={text} gives {max(found, key=found.count)} twice; write each once")
    return found


def precision_of(text: str) -> str:
    """Return the name of a precision.

    Raises:
        PlanError: it is unknown.
    """
    from meshwright_plan.job.candidate import Precision  # imported here so that --help is fast

    if text.lower() not in (known := get_args(Precision)):
        raise PlanError(f"--precision={text!r} is not known; write {', '.join(known)}, or several with commas")
    return text.lower()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that may have several values, one of them at a time; on a page, several GPUs and precisions.

    Args:
        gpu: names of devices in the catalogue; none for the profile's device, a data sheet's, or the default.
        precision: dtypes of the layers' matrix multiplications.
        gpus: numbers of devices; none for 8, or as many as the profile measured.
        seq_len: tokens per sequence.
        global_batch: sequences per step.
        interconnect: Gb/s from one device to other nodes; none for the device's usual network.
    """

    gpu: tuple[str, ...]
    precision: tuple[str, ...]
    gpus: tuple[int, ...]
    seq_len: tuple[int, ...]
    global_batch: tuple[int, ...]
    interconnect: tuple[float, ...]

    @property
    def swept(self) -> str | None:
        """The setting that has several values; None if none has."""
        several = [name for name, values in vars(self).items() if len(values) > 1]
        if len(several) > 1:
            options = " and ".join(f"--{name.replace('_', '-')}" for name in several)
            raise PlanError(
                f"{options} have several values, but a table compares one setting; give one value of the other"
            )
        return several[0] if several else None

    @property
    def is_of_page(self) -> bool:
        """Whether no setting has several values but those of which a page has menus.

        Raises:
            PlanError: a page would have too many answers.
        """
        count = max(1, len(self.gpu)) * len(self.precision)
        if count > _MOST_ANSWERS:
            raise PlanError(
                f"--html: {len(self.gpu)} GPU types x {len(self.precision)} precisions are {count} answers, and a page "
                f"has at most {_MOST_ANSWERS}; leave some out"
            )
        return all(name in _MENUS for name, values in vars(self).items() if len(values) > 1)

    def of_page(self) -> Iterator[Settings]:
        """Yield the settings with each GPU and each precision, those of the start first."""
        for gpu, precision in itertools.product(self.gpu or (None,), self.precision):
            yield dataclasses.replace(self, gpu=(gpu,) if gpu else (), precision=(precision,))

    def at(self, name: str, value: object) -> Settings:
        """Return the settings with one value of a setting."""
        return dataclasses.replace(self, **{name: (value,)})  # type: ignore[arg-type]
