"""Replaces attributes and methods of objects: for the time of a context, or so that the new method looks like the old
one.

Other libraries take methods apart: they read ``module.forward.__func__``, or inspect the signature. So what replaces a
method is a bound method itself. It has no ``__wrapped__``, by which accelerate's ``unwrap_model`` would go past it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any


@contextlib.contextmanager
def temporarily(owner: object, **values: object) -> Iterator[None]:
    """Give attributes of an object these values inside the context, and those of before after it.

    Example:
        >>> with temporarily(sync, _paused=True):  # doctest: +SKIP
        ...     loss.backward()
    """
    own = vars(owner)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        own.update(before)
        for name in values.keys() - before.keys():
            del own[name]  # the class's value counts again


# The attribute of a new function with the function itself and what it replaced. ``functools.wraps`` copies it to other
# functions. A table of this module would keep the object alive, which the replaced function may hold.
_REPLACED = "_meshwright_replaced"


def replace_method(owner: object, name: str, function: Callable[..., Any]) -> None:
    """Give an object a method of its own, with the name, the text and the signature of the one that it has.

    Args:
        owner: the object.
        name: the name of the method, which the object has.
        function: the function of the new method, made for this call; it takes the object first.

    Example:
        >>> class Greeter:
        ...     def greet(self, name: str) -> str:
        ...         return f"hello {name}"
        >>> greeter = Greeter()
        >>> replace_method(greeter, "greet", lambda self, *args: Greeter.greet(self, *args).upper())
        >>> greeter.greet("you"), list(inspect.signature(greeter.greet).parameters)
        ('HELLO YOU', ['name'])
    """
    method = getattr(owner, name)
    is_own = getattr(method, "__self__", None) is owner and hasattr(method, "__func__")
    replaced = method.__func__ if is_own else method  # a function that the program has set, or of another object
    functools.update_wrapper(function, replaced)
    del function.__wrapped__  # type: ignore[attr-defined]
    with contextlib.suppress(ValueError):  # a builtin has no signature
        signature = inspect.signature(replaced)
        if not is_own:
            first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            own = [x for x in signature.parameters.values() if x.name != "self"]
            signature = signature.replace(parameters=[first, *own])
        vars(function)["__signature__"] = signature
    vars(function)[_REPLACED] = function, replaced
    object.__setattr__(owner, name, MethodType(function, owner))


def without_replacements(owner: object, name: str) -> Callable[..., Any]:
    """Return the function of a method of an object below all that :func:`replace_method` put in its place.

    It is that of the class, unless the program has given the object one of its own.
    """
    method = getattr(owner, name)
    function = getattr(method, "__func__", method)
    while (found := getattr(function, "__dict__", {}).get(_REPLACED)) is not None and found[0] is function:
        function = getattr(found[1], "__func__", found[1])
    return function  # type: ignore[no-any-return]
