"""The errors for users: a ``ValueError`` says what to change, a ``RuntimeError`` what happened between ranks."""

from __future__ import annotations

from collections.abc import Sequence


def _shown(names: Sequence[str]) -> str:
    return "\n  ".join(names[:20]) + (f"\n  ... and {len(names) - 20} more" if len(names) > 20 else "")


class PlanError(ValueError):
    """A parallel plan that this model, this launch or this version cannot run."""


class UncoveredParameterError(PlanError):
    """A sharding plan that leaves parameters without a role."""

    def __init__(self, names: Sequence[str], source: str):
        super().__init__(
            f"{source} gives no role to {len(names)} parameter(s):\n  {_shown(names)}\n"
            "Without a role a parameter would silently stay replicated. Give these modules a role with "
            "ToDistributedConfig(sharding_plan=...) or meshwright.register_plan(model_type, plan)."
        )
        self.names = tuple(names)


class UninitialisedParameterError(PlanError):
    """Weights on the meta device that nothing initialises."""

    def __init__(self, names: Sequence[str]):
        super().__init__(
            f"{len(names)} tensor(s) are on the meta device, and nothing initialises them:\n  {_shown(names)}\n"
            "Give their modules a reset_parameters(), build the model under meshwright.deferred_init() with an "
            "initialiser for each, or pass ToDistributedConfig(weights=CHECKPOINT)"
        )
        self.names = tuple(names)


class CheckpointError(ValueError):
    """Weights on disk that cannot be read or do not belong to this model."""


class AlreadyDistributedError(ValueError):
    """A model that an earlier call or something else has already distributed."""


class OptimizerMismatchError(ValueError):
    """An optimizer that does not belong to the model, or that would update shards wrongly."""


class UnreadableTensorError(ValueError):
    """A read of a whole tensor on a rank that holds only a part of it."""


class OutOfVocabularyError(ValueError, IndexError):
    """A token id or a label outside of the vocabulary; also an IndexError, which torch raises on one device."""


class ItemCountError(ValueError):
    """A ``num_items_in_batch`` whose meaning is ambiguous."""


class DivergenceError(RuntimeError):
    """Ranks that do different things where all must do the same."""


class PeerFailedError(RuntimeError):
    """Another rank that failed, ended early or hangs, so that this one cannot go on."""


class VerificationError(RuntimeError):
    """A process of ``verify`` that raised, ended or hangs, so that there is nothing to compare."""
