"""Fit the coefficients of a cluster from a few measured runs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.published_runs.other_runtimes import OtherModel
from benchmarks.published_runs.table import Run
from meshwright_plan.machine.hardware import Coefficients

Array = NDArray[np.float64]

NAMES = tuple(field.name for field in dataclasses.fields(Coefficients))
# Standard deviation of the logarithm of each coefficient around its prior.
WIDTHS: Mapping[str, float] = {
    "matmul": 0.2,
    "matmul_8bit": 0.12,
    "saturation": 0.7,
    "attention": 0.5,
    "elementwise": 0.4,
    "launch": 0.7,
    "fast_link": 0.4,
    "slow_link": 0.4,
    "latency": 0.7,
    "overlap": 0.4,
    "optimizer": 0.5,
    "step": 1.0,
    "straggler": 0.6,
}
_AT_MOST = {"overlap": 0.98, "matmul": 1.1, "matmul_8bit": 1.2, "attention": 0.95}
NOISE = 0.04  # relative scatter of a measured run around any step model of this kind
# Relative scatter of times that are bound by launches or latency. If a kernel or message is too short to saturate the
# hardware, its time depends both on its size and on which kernel or protocol the library picks.
_SMALL = 0.15
_BOUND = [NAMES.index("launch"), NAMES.index("latency")]
_BELIEF = 4  # number of runs that the prior value of the scatter counts as
_STEP = 1e-3
_TOLERANCE = 1e-4
_POOL = 120  # largest number of runs from which calibration runs are chosen


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Fitted coefficients and their uncertainty.

    Args:
        coefficients: the most probable coefficients.
        covariance: covariance of their logarithms, in the order of ``NAMES``.
        noise: relative scatter of the runs around the fit.
        rows: number of runs that were used.
        freedom: degrees of freedom of ``noise``.
    """

    coefficients: Coefficients
    covariance: Array
    noise: float
    rows: int
    freedom: float = float(_BELIEF)

    def deviation(self, run: Run) -> float:
        """Return the relative standard deviation of the estimate for one run."""
        slope = _slope(run, self.coefficients)
        small = _SMALL * float(slope[_BOUND].sum())
        return float(np.sqrt(slope @ self.covariance @ slope + self.noise**2 + small**2))


def estimate(run: Run, coefficients: Coefficients) -> float:
    """Return the estimated seconds of one step of a run."""
    return OtherModel(run.shape, run.cluster, coefficients).step(run.plan, run.job).total


def fit(
    runs: Sequence[Run],
    prior: Coefficients | None = None,
    *,
    widths: Mapping[str, float] = WIDTHS,
    noise: float = NOISE,
    iterations: int = 12,
) -> Fit:
    """Return the coefficients that reproduce measured step times and stay as close to their prior as possible.

    They are the mode of a Gaussian posterior over the logarithms of the coefficients, found by damped Gauss-Newton
    steps. Errors are relative, and a run that disagrees with all others counts less (Huber's weights).

    Args:
        runs: measured runs; those without a step time are ignored.
        prior: the expected coefficients before any run.
        widths: name -> standard deviation of the coefficient's logarithm; a missing coefficient is not fitted.
        noise: relative scatter of a run around the model.
        iterations: largest number of Gauss-Newton steps.

    Example:
        >>> fit([]).rows
        0
    """
    prior = prior or Coefficients()
    timed = [run for run in runs if run.seconds]
    free = [name for name in NAMES if widths.get(name, 0.0) > 0]
    base = {name: getattr(prior, name) for name in NAMES}
    centre = np.log([base[name] for name in free])
    top = np.log([_AT_MOST.get(name, np.inf) for name in free])
    scale = np.array([widths[name] for name in free])
    measured = np.log([run.seconds or 1.0 for run in timed])

    def at(point: Array) -> Coefficients:
        return Coefficients(**{**base, **{name: float(v) for name, v in zip(free, np.exp(point), strict=True)}})

    def residual(point: Array) -> Array:
        coefficients = at(point)
        return np.log([estimate(run, coefficients) for run in timed]) - measured

    def loss(point: Array, error: Array) -> float:
        bound = 2 * noise
        size = np.abs(error)
        huber = np.where(size <= bound, size**2, bound * (2 * size - bound)) / noise**2
        return float(huber.sum() + (((point - centre) / scale) ** 2).sum())

    point, damping = centre.copy(), 1e-2
    error = residual(point)
    value = loss(point, error)
    hessian = np.diag(1 / scale**2)
    for _ in range(iterations if timed else 0):
        jacobian = np.stack([(residual(point + _STEP * unit) - error) / _STEP for unit in np.eye(len(free))], axis=1)
        weight = 1 / noise**2 / np.maximum(1.0, np.abs(error) / (2 * noise))
        hessian = jacobian.T @ (weight[:, None] * jacobian) + np.diag(1 / scale**2)
        slope = jacobian.T @ (weight * error) + (point - centre) / scale**2
        before = value
        for _ in range(6):
            trial = np.minimum(point - np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), slope), top)
            trial_error = residual(trial)
            trial_value = loss(trial, trial_error)
            if trial_value < value:
                point, error, value, damping = trial, trial_error, trial_value, damping / 5
                break
            damping *= 5
        if before - value < _TOLERANCE * before:
            break

    # Each fitted coefficient takes degrees of freedom from the estimate of the scatter.
    data = hessian - np.diag(1 / scale**2)
    freedom = _BELIEF + len(timed) - float(np.trace(np.linalg.solve(hessian, data)))
    spread = float(np.sqrt((np.sum(error**2) + _BELIEF * noise**2) / freedom))
    # If the runs scatter more than assumed, they also determine the coefficients less well.
    hessian = data * min(1.0, (noise / spread) ** 2) + np.diag(1 / scale**2)
    covariance = np.zeros((len(NAMES), len(NAMES)))
    where = [NAMES.index(name) for name in free]
    covariance[np.ix_(where, where)] = np.linalg.inv(hessian)
    return Fit(coefficients=at(point), covariance=covariance, noise=spread, rows=len(timed), freedom=freedom)


def choose(runs: Sequence[Run], count: int, prior: Coefficients | None = None, *, seed: int = 0) -> list[Run]:
    """Return the runs whose measurement makes the estimates of all runs least uncertain.

    The choice depends on the configurations of the runs, never on their times. Each chosen run is the one that most
    lowers the mean variance of all estimates, given the runs already chosen (a greedy I-optimal design).

    Args:
        runs: the runs to choose from.
        count: number of runs to choose.
        prior: the coefficients before any run.
        seed: seed of the random half of the runs from which the choice is made.
    """
    prior = prior or Coefficients()
    timed = [run for run in runs if run.seconds]
    size = min(len(timed), _POOL, max(3 * count, (len(timed) + 1) // 2))
    pool = random.Random(seed).sample(timed, size)
    slopes = np.stack([_slope(run, prior) for run in pool]) if pool else np.zeros((0, len(NAMES)))
    covariance = np.diag([WIDTHS.get(name, 0.0) ** 2 for name in NAMES])
    chosen: list[int] = []
    for _ in range(min(count, len(pool))):
        shared = slopes @ covariance @ slopes.T
        gain = (shared**2).sum(axis=0) / (np.diag(shared) + NOISE**2)
        gain[chosen] = -1.0
        best = int(np.argmax(gain))
        chosen.append(best)
        direction = covariance @ slopes[best]
        covariance = covariance - np.outer(direction, direction) / (slopes[best] @ direction + NOISE**2)
    return [pool[index] for index in chosen]


@lru_cache(maxsize=4096)  # different folds and seeds use the same runs
def _slope(run: Run, coefficients: Coefficients) -> Array:
    """Return the derivatives of the logarithm of a run's time with respect to the logarithms of the coefficients."""
    base = {name: getattr(coefficients, name) for name in NAMES}
    seconds = estimate(run, coefficients)
    nudged = (Coefficients(**{**base, name: base[name] * (1 + _STEP)}) for name in NAMES)
    return np.array([(estimate(run, other) / seconds - 1) / _STEP for other in nudged])
