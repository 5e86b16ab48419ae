"""Checks the values that ``accelerator.num_processes`` returned before ``prepare``, since schedules depend on them.

A scheduler steps once for each of the loader's batches in an optimizer step, so dp times. If a script multiplies the
lengths of its schedule by a larger number, the schedule is too long, which only shows at the end of training.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

from meshwright.errors import PlanError

_NAME = "num_processes"


def check_announced(told: Iterable[int], dp: int) -> None:
    """Raise if a schedule may have been made with a different number of ranks than dp.

    Args:
        told: the values that ``accelerator.num_processes`` has returned so far.
        dp: the number of scheduler steps per optimizer step.

    Raises:
        PlanError: if a value differs from ``dp``; the message gives both.
    """
    wrong = [count for count in told if count != dp]
    if not wrong:
        return
    raise PlanError(
        f"accelerator.num_processes was read before prepare and was {wrong[0]}, but the plan has dp={dp}: a scheduler "
        f"steps {dp} time(s) per optimizer step, so a schedule of lengths times {wrong[0]} would run at "
        f"{dp}/{wrong[0]} of its speed. Give the Accelerator the plan when it is made, so that num_processes is dp "
        "from the start:\n"
        "    from meshwright_hf.accelerate import Accelerator\n"
        "    accelerator = Accelerator(..., plan='dp2 tp2')  # or: meshwright launch --dp 2 --tp 2\n"
        "    model, optimizer, ... = accelerator.prepare(model, optimizer, ...)"
    )


def was_read_by_callers() -> bool:
    """Return whether the calling functions read ``num_processes`` before this call, or call a function that does.

    An Accelerator that was made without a plan does not record reads, so the code of the calling functions is searched,
    and the functions that they call in their own modules.
    """
    return any(_reads_before(frame) for frame in _callers())


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("meshwright_hf", "meshwright", "accelerate", "runpy"):
            yield frame
        frame = frame.f_back


def _reads_before(frame: FrameType) -> bool:
    names = {i.argval for i in dis.get_instructions(frame.f_code) if i.offset < frame.f_lasti}
    called = (f for f in _functions(frame.f_globals) if f.__name__ in names)
    return _NAME in names or any(_NAME in _names(function.__code__) for function in called)


def _functions(scope: dict[str, Any]) -> Iterator[FunctionType]:
    """Yield the functions and methods that a module defines."""
    own = [value for value in scope.values() if getattr(value, "__module__", None) == scope.get("__name__")]
    members = [member for value in own if isinstance(value, type) for member in vars(value).values()]
    yield from (value for value in [*own, *members] if isinstance(value, FunctionType))


def _names(code: CodeType) -> set[str]:
    inner = (value for value in code.co_consts if isinstance(value, CodeType))
    return set(code.co_names).union(*(_names(value) for value in inner))
