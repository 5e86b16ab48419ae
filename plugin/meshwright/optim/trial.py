"""Copies of an optimizer that step small parameters, to see what it keeps and whether parts of its list can step alone.

A copy shares nothing that a step writes with the optimizer that it copies: neither numbers, tensors and lists that the
optimizer keeps, nor an optimizer inside of it.

Some optimizers, as those of bitsandbytes, keep options for single parameters outside of their groups. bitsandbytes has
one manager for all optimizers of a process, as ``optimizer.mng``, which knows parameters by identity or by their place
in the groups. Both change where a rank steps something else in a parameter's place, as a copy does.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections import defaultdict
from collections.abc import Sequence
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.optim.chained import members
from meshwright.optim.zero.segments import on_host
from meshwright.random_states import RandomStates

# The attribute of an optimizer with what it was like when it was checked. A table of a module would keep it alive: its
# ``step``, which a program may replace, holds it.
CHECKED = "_meshwright_checked"
_MOST = 32  # entries of a dim, since what a parameter's update reads of others does not depend on their sizes
_SCALES = (1.0, 1e3, 1e-3)  # of the gradients, since some optimizers clip by all of them, where these are large

_found: WeakKeyDictionary[Optimizer, tuple[list[int], str | None]] = WeakKeyDictionary()


class Trial:
    """A copy of an optimizer, with small parameters in the place of some of its own.

    Args:
        optimizer: the optimizer, which stays as it is.
        values: for each of its groups, the values of the new parameters by their place in the group.
        on_host: whether the copy steps on the host; otherwise where the optimizer does.
    """

    def __init__(self, optimizer: Optimizer, values: Sequence[dict[int, Tensor]], *, on_host: bool = False):
        kind = next((p.device.type for group in optimizer.param_groups for p in group["params"]), "cpu")
        self.device = torch.device(kind if kind == "cuda" and not on_host else "cpu")
        self._on_host = on_host
        self._memo: dict[int, Any] = {}  # by the id of what is copied; None for what the copy has not
        self.parameters: list[nn.Parameter] = []
        for group, chosen in zip(optimizer.param_groups, values, strict=True):
            for place, parameter in enumerate(group["params"]):
                self._memo[id(parameter)] = None
                if place in chosen:
                    self.parameters.append(nn.Parameter(chosen[place].clone().to(self.device)))
                    self._memo[id(parameter)] = self.parameters[-1]
        self.optimizer: Optimizer = self._copied(optimizer)
        self.has_drawn = False  # random numbers, which would be others for the parameters of another list

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Step the copy with a gradient for each of its parameters, without hooks."""
        # Without the hooks, which are the program's or watch its own steps.
        step = inspect.unwrap(type(self.optimizer).step)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone().to(self.device)
        before = RandomStates(self.optimizer)
        try:
            with torch.random.fork_rng(), torch.no_grad(), torch.compiler.set_stance("force_eager"):
                if callable(train := getattr(self.optimizer, "train", None)):  # schedule-free ones need it
                    train()
                step(self.optimizer)
                self.has_drawn |= not before.are_unchanged
        finally:
            before.restore()

    def numbers(self) -> dict[str, str]:
        """Return the numbers and texts of the groups that have parameters, and of the optimizer itself."""
        groups = [(index, group) for index, group in enumerate(self.optimizer.param_groups) if group["params"]]
        found = {f"{key} of group {index}": value for index, group in groups for key, value in group.items()}
        found |= {key: value for key, value in vars(self.optimizer).items() if key not in ("state", "param_groups")}
        return {key: repr(value) for key, value in found.items() if _is_number(value)}

    def _copied(self, value: Any) -> Any:
        """Return a copy of what a step may write, with the new parameters; and other objects as they are."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, Optimizer):
            return self._copy_of_optimizer(value)
        if isinstance(value, MethodType) and id(value.__self__) in self._memo:
            return MethodType(value.__func__, self._memo[id(value.__self__)])
        new: Any = value
        if isinstance(value, torch.Generator):
            new = torch.Generator(value.device)
            new.set_state(value.get_state())
        elif type(value) is Tensor:
            new = on_host(value.detach().clone()) if self._on_host else value.detach().clone()
        elif isinstance(value, random.Random):
            new = copy.deepcopy(value)
        elif isinstance(value, dict):
            new = self._memo[id(value)] = copy.copy(value)
            new.clear()
            new.update(
                (self._copied(key), self._copied(x)) for key, x in value.items() if not self._is_left_out(key, x)
            )
        elif isinstance(value, list):
            new = self._memo[id(value)] = []
            new.extend(self._copied(x) for x in value if not self._is_left_out(x))
        elif type(value) is tuple:
            return tuple(self._copied(x) for x in value)
        if new is not value:
            self._memo[id(value)] = new
        return new

    def _is_left_out(self, *values: object) -> bool:
        return any(id(value) in self._memo and self._memo[id(value)] is None for value in values)

    def _copy_of_optimizer(self, optimizer: Optimizer) -> Optimizer:
        new: Optimizer = object.__new__(type(optimizer))
        self._memo[id(optimizer)] = new
        own = vars(optimizer)
        if "state" in own and id(own["state"]) not in self._memo:
            started = [
                (self._memo.get(id(p)), state) for p, state in optimizer.state.items() if isinstance(state, dict)
            ]
            self._memo[id(own["state"])] = defaultdict(
                dict,
                {
                    p: self._copied(state)
                    for p, state in started
                    if p is not None and all(map(_is_number, state.values()))
                },
            )
        # A scheduler has replaced methods, or an earlier call.
        replaced = ("step", "zero_grad", "add_param_group", "train", "eval", CHECKED)
        new.__dict__ |= {key: self._copied(value) for key, value in own.items() if key not in replaced}
        for group in new.param_groups:
            if "lr" in group and not group["lr"]:  # in the first step of a schedule
                group["lr"] = self._copied(group.get("initial_lr", group["lr"]))
        forget_overrides(new)
        return new


def trial_step(optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, int]) -> tuple[Tensor, dict[str, Any]]:
    """Step a copy of one group of an optimizer once, on a parameter of zeros, and return its values and its state."""
    trial = Trial(optimizer, [{0: torch.zeros(shape)} if each is group else {} for each in optimizer.param_groups])
    trial.step([torch.randn(shape, generator=torch.Generator().manual_seed(0))])
    (parameter,) = trial.parameters
    return parameter.detach().cpu(), dict(trial.optimizer.state[parameter])


def why_not_on_host(optimizer: Optimizer) -> str | None:
    """Return why an optimizer cannot step parameters on the host, as a trial step there ended; None if it can."""
    for each in members(optimizer):
        values = [{0: torch.ones(24, 40)} if group["params"] else {} for group in each.param_groups]
        try:
            Trial(each, values, on_host=True).step([value for chosen in values for value in chosen.values()])
        except Exception as error:  # of any optimizer's own code
            return f"{type(error).__name__}: {error}"
    return None


def why_not_apart(optimizer: Optimizer) -> str | None:
    """Return why the parameters of an optimizer cannot be stepped apart, each whole; None if a trial shows nothing.

    Copies of the optimizer step three small parameters of each group together, and then the first with each of the
    others, as owners do. Each of these has every second of the groups with one parameter.
    """
    counts = [len(group["params"]) for group in optimizer.param_groups]
    if optimizer not in _found or _found[optimizer][0] != counts:
        _found[optimizer] = counts, _difference_apart(optimizer)
    return _found[optimizer][1]


def _difference_apart(optimizer: Optimizer) -> str | None:
    # In 64 bits first, since what an update reads of other parameters may be less than a bit of a 32-bit weight.
    for dtype in (torch.float64, torch.float32):
        generator = torch.Generator().manual_seed(0)
        starts = [
            {place: _small(group["params"][place], generator, dtype) for place in _chosen(len(group["params"]))}
            for group in optimizer.param_groups
        ]
        gradients = [
            [
                {i: scale * torch.randn(x.shape, generator=generator, dtype=dtype) for i, x in of.items()}
                for of in starts
            ]
            for scale in _SCALES
        ]
        try:
            together = _stepped(optimizer, starts, gradients)
        except Exception:  # of any optimizer's own code, which may refuse 64 bits or small parameters
            continue
        return _idle(together, starts) or _difference(optimizer, together, starts, gradients)
    return None


def _chosen(count: int) -> list[int]:
    """Return the places in a group of the parameters that are tried: the first, the second and the last."""
    return sorted({0, 1, count - 1} & set(range(count)))


def _small(parameter: nn.Parameter, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return random values for a small parameter with as many dims."""
    return torch.randn([min(size, _MOST) for size in parameter.shape], generator=generator, dtype=dtype)


def _stepped(
    optimizer: Optimizer, starts: Sequence[dict[int, Tensor]], gradients: Sequence[Sequence[dict[int, Tensor]]]
) -> Trial:
    """Return a trial that has stepped parameters of these values with these gradients of each step."""
    trial = Trial(optimizer, starts)
    for of_step in gradients:
        trial.step([of_group[i] for of_group, start in zip(of_step, starts, strict=True) for i in start])
    return trial


def _idle(trial: Trial, starts: Sequence[dict[int, Tensor]]) -> str | None:
    values = [x for of_group in starts for x in of_group.values()]
    is_idle = all(torch.equal(p.detach().cpu(), x) for p, x in zip(trial.parameters, values, strict=True))
    has_rates = all(group.get("lr", 1) for group in trial.optimizer.param_groups)
    if is_idle and has_rates and not any(map(len, trial.optimizer.state.values())):
        return "its step() changes nothing, so it does not step the parameters that it has"
    return None


def _difference(
    optimizer: Optimizer,
    together: Trial,
    starts: Sequence[dict[int, Tensor]],
    gradients: Sequence[Sequence[dict[int, Tensor]]],
) -> str | None:
    """Return what is different if some of the parameters are stepped without the others."""
    if together.has_drawn:
        return "its step() draws random numbers, which would be others for the parameters of each rank"
    stepped = iter(together.parameters)
    expected = [{i: next(stepped) for i in of_group} for of_group in starts]
    single = [index for index, of_group in enumerate(starts) if len(of_group) == 1]
    for is_second in (True, False):
        half = [{i: x for i, x in of_group.items() if i == 0 or (i == 1) == is_second} for of_group in starts]
        for index in single[is_second::2] if len(single) > 1 else ():
            half[index] = {}
        try:
            apart = _stepped(optimizer, half, gradients)
        except Exception as error:  # of any optimizer's own code
            return f"a step of a part of its parameters ended in {type(error).__name__}: {error}"
        of_all = [expected[index][i] for index, of_group in enumerate(half) for i in of_group]
        pairs = zip(of_all, apart.parameters, strict=True)
        if not all(torch.equal(p.nan_to_num(), own.nan_to_num()) for p, own in pairs):
            return "the update of a parameter changes with the other parameters that it has"
        if differ := sorted(name for name, _ in apart.numbers().items() - together.numbers().items()):
            return f"{differ[0]} changes with the parameters that it has"
    return None


def _is_number(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_number, value))
    return value is None or isinstance(value, str | int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def follow_overrides(optimizer: Optimizer, parameter: nn.Parameter, stepped: nn.Parameter) -> None:
    """Give what is stepped in a parameter's place the parameter's own options."""
    manager: Any = getattr(optimizer, "mng", None)
    if not hasattr(manager, "pid2config"):
        return
    manager.index2config.clear()  # of places in the groups, which have changed
    of_modules = {id(getattr(module, name)): config for module, name, config in manager.module_weight_config_triple}
    config = {**of_modules.get(id(parameter), {}), **manager.pid2config.get(id(parameter), {})}
    manager.pid2config.pop(id(stepped), None)  # of a parameter that is gone, whose identity is used again
    if config:
        manager.pid2config[id(stepped)] = config


def forget_overrides(optimizer: Optimizer) -> None:
    """Give a copy of an optimizer a manager of its own, without options of single parameters."""
    manager: Any = getattr(optimizer, "mng", None)
    if hasattr(manager, "pid2config"):
        manager = optimizer.__dict__["mng"] = copy.copy(manager)
        manager.pid2config, manager.index2config, manager.module_weight_config_triple = {}, {}, []
