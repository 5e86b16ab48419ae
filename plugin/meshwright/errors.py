"""The errors for users. A ``ValueError`` says what to change; a ``RuntimeError`` says what went wrong between ranks.

Errors in arguments are subclasses of ``ValueError``, which every rank raises before anything is changed. Failures
between ranks at run time are ``RuntimeError``s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from meshwright.printable import printable_lines

# The packages of the wheel. Their frames, classes and warnings are not the program's.
PACKAGES = ("meshwright", "meshwright_plan", "meshwright_tools", "meshwright_hf")


def _shown(names: Sequence[str]) -> str:
    return "\n  ".join(names[:20]) + (f"\n  ... and {len(names) - 20} more" if len(names) > 20 else "")


class _Printable(ValueError):
    """An error whose message may have names from files, which are shown on terminals and in logs."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class PlanError(_Printable):
    """Raised if this model, this launch or this version cannot run a parallel plan."""


class UncoveredParameterError(PlanError):
    """Raised if a sharding plan leaves parameters without a role."""

    def __init__(
        self,
        names: Sequence[str],
        source: str,
        why: str = "a parameter would silently stay replicated",
        aliases: Mapping[str, str] = MappingProxyType({}),
    ):
        shown = [f"{name} (the same parameter as {aliases[name]})" if name in aliases else name for name in names]
        super().__init__(
            f"{source} gives no role to {len(names)} parameter(s):\n  {_shown(shown)}\n"
            f"Without a role {why}. Give these modules a role with "
            "ToDistributedConfig(sharding_plan=...) or meshwright.register_plan(model_type, plan)."
        )
        self.names = tuple(names)


class UninitialisedParameterError(PlanError):
    """Raised if nothing initialises some weights on the meta device."""

    def __init__(self, names: Sequence[str]):
        super().__init__(
            f"{len(names)} tensor(s) are on the meta device, and nothing initialises them:\n  {_shown(names)}\n"
            "Give their modules a reset_parameters(), build the model under meshwright.deferred_init() with an "
            "initialiser for each, or pass ToDistributedConfig(weights=CHECKPOINT)"
        )
        self.names = tuple(names)


class CheckpointError(_Printable):
    """Raised if weights on disk cannot be read or do not belong to the model."""


class AlreadyDistributedError(ValueError):
    """Raised if an earlier call or another library has already distributed the model."""


class OptimizerMismatchError(ValueError):
    """Raised if an optimizer does not belong to the model, or would update shards wrongly."""


class UnreadableTensorError(ValueError):
    """Raised if a whole tensor is read on a rank that holds only a part of it."""


class OutOfVocabularyError(ValueError, IndexError):
    """Raised if a token id or a label is outside of the vocabulary; an IndexError too, like torch's on one device."""


class ItemCountError(ValueError):
    """Raised if the meaning of a ``num_items_in_batch`` is ambiguous."""


class DivergenceError(RuntimeError):
    """Raised if ranks do different things where all must do the same."""


class PeerFailedError(RuntimeError):
    """Raised if this rank cannot continue because another rank failed, ended early or hangs."""


class LoaderError(Exception):
    """Raised if a dataset, a collate function or a reader fails; also an instance of the class that it raised.

    The message says which rows of which dataset were read. The error that was raised is the cause.
    """

    text = ""

    def __str__(self) -> str:
        return self.text or super().__str__()


class VerificationError(RuntimeError):
    """Raised if a process of ``verify`` raised, ended or hangs, so that there are no results to compare."""


class RemoteError(OSError):
    """Raised if a store of checkpoints does not answer or refuses, which says nothing about what is there."""
