"""The days, GPU-hours and cost of training on a number of tokens."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright_plan.search.search import Search

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_HOURS_A_DAY = 24


def parse_tokens(text: str) -> int:
    """Return a number of tokens that is written with a unit.

    Args:
        text: a number, and K, M, B or T for 10**3, 10**6, 10**9 or 10**12.

    Raises:
        PlanError: it is not a number above zero, or the unit is unknown.

    Example:
        >>> parse_tokens("1.5T"), parse_tokens("300B"), parse_tokens("2_000_000")
        (1500000000000, 300000000000, 2000000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmbt]?)", text.strip().lower().replace("_", "").replace(",", ""))
    tokens = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 1 <= tokens < math.inf:
        raise PlanError(
            f"--tokens={text!r} must be a number of tokens above zero, for example 300B, 1.5T or 2000000000"
        )
    return int(tokens)


def price_of(text: str) -> float:
    """Return the price of a GPU-hour.

    Raises:
        PlanError: it is not a number above zero.

    Example:
        >>> price_of(" 2.50")
        2.5
    """
    try:
        price = float(text)
    except ValueError:
        price = 0.0
    if not 0 < price < math.inf:
        raise PlanError(f"--price={text.strip()!r} must be the price of a GPU-hour, a number above zero such as 2.5")
    return price


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The tokens of a training run, and the price of a device.

    Args:
        tokens: tokens of the whole training run.
        price: price of one device for one hour; None if unknown.

    Raises:
        PlanError: a number is not above zero.
    """

    tokens: int
    price: float | None = None

    def __post_init__(self) -> None:
        if self.price is not None and not 0 < self.price < math.inf:
            raise PlanError(f"--price={self.price} must be the price of a GPU-hour, above zero")


@dataclass(frozen=True, kw_only=True)
class Bill:
    """The steps, time and cost of a training run.

    Args:
        budget: the tokens and the price.
        gpus: number of devices.
        steps: number of optimizer steps.
        seconds: time of the run, without pauses, restarts and evaluation.
        band: relative error of ``seconds``.

    Example:
        >>> bill = Bill(budget=Budget(tokens=10**12, price=2.0), gpus=64, steps=238419, seconds=864000.0, band=0.4)
        >>> bill.days, bill.gpu_hours, bill.cost
        (10.0, 15360.0, 30720.0)
    """

    budget: Budget
    gpus: int
    steps: int
    seconds: float
    band: float

    @property
    def days(self) -> float:
        return self.seconds / 3600 / _HOURS_A_DAY

    @property
    def gpu_hours(self) -> float:
        return self.seconds / 3600 * self.gpus

    @property
    def cost(self) -> float | None:
        return None if self.budget.price is None else self.gpu_hours * self.budget.price


def bill(budget: Budget, *, gpus: int, step_tokens: int, step_seconds: float, band: float) -> Bill:
    """Return the bill of a run whose steps take as long as the estimate.

    Args:
        budget: the tokens and the price.
        gpus: number of devices.
        step_tokens: tokens per optimizer step.
        step_seconds: seconds per optimizer step.
        band: relative error of the estimate.

    Example:
        >>> bill(Budget(tokens=1000), gpus=8, step_tokens=300, step_seconds=60.0, band=0.1).steps
        4
    """
    steps = -(-budget.tokens // step_tokens)
    return Bill(budget=budget, gpus=gpus, steps=steps, seconds=steps * step_seconds, band=band)


def bill_of(found: Search, budget: Budget, *, index: int = 0) -> Bill:
    """Return the bill of a run under one of the choices of a search, by default the first."""
    return bill(
        budget,
        gpus=found.cluster.gpus,
        step_tokens=found.job.tokens,
        step_seconds=found.choices[index].time.total,
        band=found.profile.band,
    )


def bill_line(found: Bill) -> str:
    """Return the line of text about a bill.

    Example:
        >>> one = Bill(budget=Budget(tokens=10**12), gpus=64, steps=238419, seconds=864000.0, band=0.4)
        >>> bill_line(one)
        '1 T tokens in 238,419 steps: 10.0 days (7.1 to 14.0), 15,360 GPU-hours'
    """
    low, high = 1 / (1 + found.band), 1 + found.band
    words = (
        f"{tokens_text(found.budget.tokens)} tokens in {found.steps:,} steps: {days_text(found.days)} "
        f"({days_text(found.days * low, unit=False)} to {days_text(found.days * high, unit=False)}), "
        f"{found.gpu_hours:,.0f} GPU-hours"
    )
    if found.cost is None:
        return words
    return (
        f"{words}, {found.cost:,.0f} at {found.budget.price:g} per GPU-hour ({found.cost * low:,.0f} to "
        f"{found.cost * high:,.0f})"
    )


def bill_dict(found: Bill) -> dict[str, float | int | None]:
    """Return a bill as plain data."""
    return {
        "tokens": found.budget.tokens,
        "steps": found.steps,
        "days": found.days,
        "gpu_hours": found.gpu_hours,
        "price_per_gpu_hour": found.budget.price,
        "cost": found.cost,
    }


def days_text(days: float, *, unit: bool = True) -> str:
    """Return a number of days with three digits.

    Example:
        >>> days_text(3.14159), days_text(412.3, unit=False)
        ('3.1 days', '412')
    """
    return (f"{days:,.0f}" if days >= 100 else f"{days:.1f}" if days >= 0.95 else f"{days:.2g}") + " days" * unit


def tokens_text(tokens: int) -> str:
    """Return a number of tokens with a unit.

    Example:
        >>> tokens_text(1_500_000_000_000), tokens_text(268_435_456)
        ('1.5 T', '268 M')
    """
    for unit in ("t", "b", "m", "k"):
        if tokens >= _UNITS[unit]:
            return f"{tokens / _UNITS[unit]:.3g} {unit.upper()}"
    return str(tokens)
