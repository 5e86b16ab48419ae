"""Says in an error of the user's dataset or collate function which rows were read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch.utils.data import Dataset

from meshwright.errors import DivergenceError, LoaderError, PeerFailedError


@contextmanager
def reading(where: Callable[[], str]) -> Iterator[None]:
    """Raise an error of the block again, as an error of the same class that says what was read.

    Args:
        where: a function that returns what the block reads.

    Raises:
        LoaderError: the block failed. The error is also an instance of the class of the error that was raised.
    """
    try:
        yield
    except (LoaderError, DivergenceError, PeerFailedError):
        raise
    except Exception as error:
        raise located(error, where()) from error


def located(error: Exception, where: str) -> Exception:
    """Return an error of the same class whose message says what was read when the error was raised."""
    kind = type(error)
    try:
        namespace = {"__module__": kind.__module__, "__str__": LoaderError.__str__}
        made = type(kind.__name__, (kind, LoaderError), namespace)
        found: LoaderError = made.__new__(made, *error.args)
        found.args = error.args
        found.__dict__.update({name: value for name, value in vars(error).items() if name != "__notes__"})
    except Exception:  # a class that cannot have subclasses, or whose objects need other arguments
        found = LoaderError(*error.args)
    place = ", ".join([where, *getattr(error, "__notes__", ())])
    found.text = f"{place} could not be read: {kind.__name__}" + (f": {error}" if str(error) else "")
    return found


def name_of(dataset: object) -> str:
    """Return the class of a dataset and, if it says so, the files from which it was made."""
    files = files_of(dataset)
    return f"the {type(dataset).__name__}" + (f" of {', '.join(files[:3])}" if files else "")


def files_of(dataset: object) -> list[str]:
    """Return the files of a dataset of ``datasets``: those in its cache, or that its function of a stream reads."""
    if cached := getattr(dataset, "cache_files", None):
        return [entry["filename"] for entry in cached]
    stage = getattr(dataset, "_ex_iterable", None)
    while (inner := getattr(stage, "ex_iterable", None)) is not None:
        stage = inner
    for value in getattr(stage, "kwargs", {}).values():
        if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
            return value
    return []


def first_failing(dataset: Dataset[object], indices: Iterable[int]) -> int | None:
    """Return the first index whose row cannot be read alone; None if all rows can."""
    for index in indices:
        try:
            dataset[index]
        except Exception:
            return index
    return None
