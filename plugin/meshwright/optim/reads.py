"""What an optimizer reads to update an element: that element alone, the whole parameter, or more.

This decides on what a rank may step. An optimizer that torch does not bring is tried: copies of it step small
parameters whole, in slices, together and alone, and the results are compared.
"""

from __future__ import annotations

import copy
import enum
import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.optim.chained import members
from meshwright.optim.overrides import forget_overrides
from meshwright.optim.zero.host_copy import on_host

ELEMENTWISE = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)

_SHAPES = (24, 40), (16, 12)
_LARGE = 64, 96  # enough for an optimizer that quantises the state of large parameters, in blocks of 256 at most
# Gradients that grow and shrink, since some optimizers clip or rescale only then, and enough steps for a warm-up.
_SCALES = (1e-2, 1e-3, 1.0, 1e3, 1.0, 1e-4, 1e4, 1.0)
_LR = 1e-2  # that of a group may be 0 in the first step of a schedule
_ROUNDING = 1e-6  # of float32, where a kernel computes the ends of a slice in another way


class Reads(enum.StrEnum):
    """What the update of an element reads: gradients, weights and state of the element, or of its parameter."""

    ELEMENT = "element"
    PARAMETER = "parameter"


_found: WeakKeyDictionary[Optimizer, list[Reads | str]] = WeakKeyDictionary()


def reads_of(optimizer: Optimizer) -> list[Reads | str]:
    """Return what each group of an optimizer reads, or a text that says why that is unknown."""
    if optimizer not in _found or len(_found[optimizer]) != len(optimizer.param_groups):
        _found[optimizer] = [reads for each in members(optimizer) for reads in _reads(each)]
    return _found[optimizer]


def why_not_on_host(optimizer: Optimizer) -> str | None:
    """Return why an optimizer cannot step parameters on the host, as a trial step there ended; None if it can."""
    for each in members(optimizer):
        for group in each.param_groups:
            trial = _Trial(each, group)
            trial.device = torch.device("cpu")
            trial.options = {name: on_host(option) for name, option in trial.options.items()}
            try:
                trial._stepped([torch.ones(_SHAPES[0])], [[torch.ones(_SHAPES[0])]])
            except Exception as error:  # of any optimizer's own code
                return f"{type(error).__name__}: {error}"
    return None


def trial_step(optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, int]) -> tuple[Tensor, dict[str, Any]]:
    """Step a copy of one group of an optimizer once, on a parameter of zeros, and return its values and its state."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    (parameter,), stepped = _Trial(optimizer, group)._run([torch.zeros(shape)], [[gradient]])
    return parameter.detach().cpu(), dict(stepped.state[parameter])


def _reads(optimizer: Optimizer) -> Iterator[Reads | str]:
    if any(type(optimizer).step is known.step for known in ELEMENTWISE):
        yield from [Reads.ELEMENT] * len(optimizer.param_groups)
        return
    known: dict[str, Reads | str] = {}
    for group in optimizer.param_groups:
        options = repr({key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")})
        if options not in known:
            try:
                known[options] = _Trial(optimizer, group).reads()
            except Exception as error:  # of any optimizer's own code
                known[options] = f"a trial step ended in {type(error).__name__}: {error}"
        yield known[options]


class _Trial:
    """Steps copies of one group of an optimizer on parameters of its own.

    Args:
        optimizer: the optimizer, which stays as it is.
        group: the group, whose options the copies have.
    """

    def __init__(self, optimizer: Optimizer, group: dict[str, Any]):
        self.optimizer = optimizer
        self.options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        if isinstance(lr := self.options.get("lr"), int | float | Tensor):
            self.options["lr"] = torch.full_like(lr, _LR) if isinstance(lr, Tensor) else _LR
        kept = [dict(optimizer.state.get(p, {})) for p in group["params"][:2]]
        self.starts = [state if all(map(_is_number, state.values())) else {} for state in kept]  # before any step
        kind = next((p.device.type for p in group["params"]), "cpu")
        self.device = torch.device(kind if kind == "cuda" else "cpu")

    def reads(self) -> Reads | str:
        generator = torch.Generator().manual_seed(0)
        shapes = (*_SHAPES, _LARGE)
        values = [torch.randn(shape, generator=generator) for shape in shapes]
        # One direction with noise, so that an optimizer that estimates its distance to the optimum sees progress.
        directions = [
            torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator) for shape in shapes
        ]
        gradients = [
            [scale * (x + 0.3 * torch.randn(x.shape, generator=generator)) for x in directions] for scale in _SCALES
        ]
        (alone,) = self._stepped(values[:1], [step[:1] for step in gradients])
        if torch.equal(alone.parameter.cpu(), values[0]):
            return "its step() changes nothing, so it does not step the parameters that it has"
        if not alone.parameter.isfinite().all():
            return "its trial steps gave numbers that are not finite"
        if self._steps_slices_alike(values[0], [step[0] for step in gradients], alone):
            (large,) = self._stepped(values[2:], [step[2:] for step in gradients])
            if self._steps_slices_alike(values[2], [step[2] for step in gradients], large):
                return Reads.ELEMENT
        together = self._stepped(values[:2], [step[:2] for step in gradients])
        (other,) = self._stepped(values[1:2], [step[1:2] for step in gradients], starts=self.starts[1:])
        if all(one.is_like(another) for one, another in zip(together, (alone, other), strict=True)):
            return Reads.PARAMETER
        return "the update of a parameter changes with the other parameters that it has"

    def _steps_slices_alike(self, value: Tensor, gradients: list[Tensor], whole: _Stepped) -> bool:
        """Return whether two slices of a parameter are stepped as the whole parameter was."""
        parts: list[_Stepped] = []
        cut = 2 * value.numel() // 3 + 3  # at no border of rows or blocks
        for own in (slice(None, cut), slice(cut, None)):
            try:
                parts += self._stepped([value.flatten()[own]], [[gradient.flatten()[own]] for gradient in gradients])
            except Exception:  # of its own code, which has stepped the whole before: it refuses the slice
                return False
        if whole.has_more or not all(whole.numbers == part.numbers for part in parts):
            return False
        return whole.flattened().is_like(_Stepped.joined(parts))

    def _stepped(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Sequence[Tensor]],
        starts: Sequence[dict[str, object]] | None = None,
    ) -> list[_Stepped]:
        """Step a new copy of the optimizer with each of some gradients, and return what it has of each parameter."""
        parameters, trial = self._run(values, gradients, starts)
        return [_Stepped.of(parameter, trial) for parameter in parameters]

    def _run(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Sequence[Tensor]],
        starts: Sequence[dict[str, object]] | None = None,
    ) -> tuple[list[nn.Parameter], Optimizer]:
        """Step a new copy of the optimizer with each of some gradients, and return its parameters and the copy."""
        parameters = [nn.Parameter(value.clone().to(self.device)) for value in values]
        trial = object.__new__(type(self.optimizer))
        replaced = ("step", "zero_grad", "add_param_group", "train", "eval")  # by a scheduler, or by an earlier call
        trial.__dict__ |= {key: value for key, value in self.optimizer.__dict__.items() if key not in replaced}
        starts = copy.deepcopy(self.starts if starts is None else starts)
        trial.state = defaultdict(dict, zip(parameters, starts, strict=False))
        trial.param_groups = [{**copy.deepcopy(self.options), "params": parameters}]
        forget_overrides(trial)
        trial.defaults = copy.deepcopy(self.optimizer.defaults)
        step = inspect.unwrap(type(trial).step)  # without the hooks, which watch the program's own steps
        with torch.random.fork_rng(), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            torch.manual_seed(0)
            if callable(train := getattr(trial, "train", None)):  # schedule-free optimizers refuse to step otherwise
                train()
            for own in gradients:
                for parameter, gradient in zip(parameters, own, strict=True):
                    parameter.grad = gradient.clone().to(self.device)
                step(trial)
        return parameters, trial


@dataclass(frozen=True, kw_only=True)
class _Stepped:
    """What an optimizer has of a parameter after some steps.

    Args:
        parameter: its values.
        state: the tensors of its state.
        numbers: the numbers and texts of its state and of its group.
        has_more: whether its state has more than tensors of the parameter's shape and numbers.
    """

    parameter: Tensor
    state: dict[str, Tensor]
    numbers: dict[str, str]
    has_more: bool = False

    @staticmethod
    def of(parameter: nn.Parameter, optimizer: Optimizer) -> _Stepped:
        (group,) = optimizer.param_groups
        state = {str(key): value for key, value in optimizer.state.get(parameter, {}).items()}
        tensors = {key: x.detach() for key, x in state.items() if type(x) is Tensor and x.numel() > 1}
        others = {key: value for key, value in state.items() if key not in tensors}
        numbers = {**others, **{f"group {key}": value for key, value in group.items() if key != "params"}}
        return _Stepped(
            parameter=parameter.detach(),
            state=tensors,
            numbers={key: repr(value) for key, value in numbers.items() if _is_number(value)},
            has_more=any(x.shape != parameter.shape for x in tensors.values())
            or not all(map(_is_number, others.values())),
        )

    @staticmethod
    def joined(parts: Sequence[_Stepped]) -> _Stepped:
        names = set.intersection(*(set(part.state) for part in parts))
        return _Stepped(
            parameter=torch.cat([part.parameter for part in parts]),
            state={name: torch.cat([part.state[name].flatten() for part in parts]) for name in names},
            numbers=parts[0].numbers,
        )

    def flattened(self) -> _Stepped:
        state = {name: x.flatten() for name, x in self.state.items()}
        return _Stepped(parameter=self.parameter.flatten(), state=state, numbers=self.numbers)

    def is_like(self, other: _Stepped) -> bool:
        """Return whether both are equal up to rounding."""
        pairs = [(self.parameter, other.parameter), *((x, other.state.get(name)) for name, x in self.state.items())]
        is_same_kind = self.numbers == other.numbers and self.state.keys() == other.state.keys()
        return is_same_kind and all(
            y is not None and x.shape == y.shape and bool((x.double() - y.double()).abs().max() <= _allowed(y))
            for x, y in pairs
        )


def _is_number(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_number, value))
    return value is None or isinstance(value, str | int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _allowed(values: Tensor) -> float:
    return _ROUNDING * float(values.double().abs().max())
