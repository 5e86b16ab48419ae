"""The errors a user can meet: a ``ValueError`` names what to change, a ``RuntimeError`` what happened between ranks."""

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
            "Every parameter needs one, else it would silently stay replicated. Pass "
            "ToDistributedConfig(sharding_plan=...) or meshwright.register_plan(model_type, plan) "
            "with a role for these modules."
        )
        self.names = tuple(names)


class UninitialisedParameterError(PlanError):
    """Weights on the meta device that nothing says how to make."""

    def __init__(self, names: Sequence[str]):
        super().__init__(
            f"{len(names)} tensor(s) are on the meta device, and nothing initialises them:\n  {_shown(names)}\n"
            "Give their modules a reset_parameters(), build the model under meshwright.deferred_init() with an "
            "initialiser for each, or pass ToDistributedConfig(weights=CHECKPOINT)"
        )
        self.names = tuple(names)


class CheckpointError(ValueError):
    """Weights on disk that cannot be read, or that are not this model's."""


class AlreadyDistributedError(ValueError):
    """A model that something else (or an earlier call) has already distributed."""


class OptimizerMismatchError(ValueError):
    """An optimizer that does not belong to the model, or whose update is wrong on shards."""


class UnreadableTensorError(ValueError):
    """A read of a tensor of which this rank holds only a part."""


class OutOfVocabularyError(ValueError, IndexError):
    """A token id or a label that is no word of the model; an IndexError, as torch raises on one device."""


class ItemCountError(ValueError):
    """A ``num_items_in_batch`` whose meaning cannot be known."""


class DivergenceError(RuntimeError):
    """Ranks that do different things where all must do the same."""


class PeerFailedError(RuntimeError):
    """Another rank failed, ended early or hangs, and this one cannot go on."""


class VerificationError(RuntimeError):
    """A process of ``verify`` that raised, ended or hangs, so that there is nothing to compare."""
