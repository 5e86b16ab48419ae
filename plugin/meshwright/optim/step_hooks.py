"""The order of the program's hooks of an optimizer's step and of the hooks that the call adds, and their end."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from meshwright.optim.chained import members
from meshwright.replaced_method import replace_method


class StepHooks:
    """Keeps the program's hooks of a step inside of the hooks of the call, or outside of them, whenever it adds them.

    Inside, hooks have the whole parameters and gradients that an owner steps. Outside, they have those of the model, as
    the loop has them before and after the step.

    Args:
        optimizer: the optimizer, to which the call adds its hooks between the construction of this object and the call
            of :meth:`arrange`.
        is_inside: whether all of its parameters are stepped whole.
    """

    def __init__(self, optimizer: Optimizer, *, is_inside: bool):
        self._optimizer, self._is_inside = optimizer, is_inside
        self._theirs = {*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks}
        self._ours: set[int] = set()
        self._is_called, self._depth = False, 0

    def surround(self, ends: Sequence[Callable[[], object]]) -> None:
        """Run the hooks of the call around the whole step, once, and functions in their place if the step raises.

        torch leaves out the hooks that end a step that raises. It runs all hooks a second time inside of a step that
        calls the step of the class that it is derived from, if that class has been used by itself.

        Args:
            ends: the functions, in their order.
        """
        self._ours = {*self._pre, *self._post} - self._theirs
        first = next(key for key in self._pre if key in self._ours)
        last = next(key for key in reversed(self._post) if key in self._ours)
        for hooks in (self._pre, self._post):
            for key in self._ours & hooks.keys():
                hooks[key] = functools.partial(self._run, hooks[key], begins=key == first, ends=key == last)
        step = self._optimizer.step

        def run(_: Optimizer, *args: Any, **kwargs: Any) -> object:
            self._is_called, self._depth = True, 0
            try:
                return step(*args, **kwargs)
            except BaseException:
                for end in ends:
                    end()
                raise
            finally:
                self._is_called, self._depth = False, 0

        replace_method(self._optimizer, "step", run)

    def _run(self, hook: Callable[..., Any], *args: Any, begins: bool, ends: bool) -> Any:
        if begins:
            self._depth = 1 + self._depth * self._is_called
        result = hook(*args) if self._depth <= 1 else None
        if ends:
            self._depth -= 1
        return result

    def arrange(self) -> None:
        """Put the hooks in order, now and whenever the program adds one."""
        self._sort()
        for name in ("register_step_pre_hook", "register_step_post_hook"):
            register = functools.partial(self._register, getattr(self._optimizer, name))
            setattr(self._optimizer, name, register)
        for each in members(self._optimizer):
            if each is not self._optimizer and not self._is_inside:
                each.register_step_pre_hook = functools.partial(_late_hook, type(each).__name__)  # type: ignore[method-assign]
                each.register_step_post_hook = functools.partial(_late_hook, type(each).__name__)  # type: ignore[method-assign]

    @property
    def _pre(self) -> OrderedDict[int, Any]:
        return self._optimizer._optimizer_step_pre_hooks  # type: ignore[return-value]

    @property
    def _post(self) -> OrderedDict[int, Any]:
        return self._optimizer._optimizer_step_post_hooks  # type: ignore[return-value]

    def _register(self, register: Callable[[Any], RemovableHandle], hook: Any) -> RemovableHandle:
        handle = register(hook)
        self._sort()
        return handle

    def _sort(self) -> None:
        for hooks, ours_first in ((self._pre, self._is_inside), (self._post, not self._is_inside)):
            for key in [key for key in hooks if (key in self._ours) != ours_first]:
                hooks.move_to_end(key)


def _late_hook(name: str, hook: object) -> RemovableHandle:
    raise ValueError(
        f"this {name} is a part of a distributed ChainedOptimizer and steps parts of parameters, which a hook of its "
        f"step would read as whole ones. Register the hook before to_distributed, so that {name} steps whole "
        "parameters; or register it on the chain, where it runs before or after the whole step"
    )
