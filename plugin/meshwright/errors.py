"""The errors a user can meet; every one is a ``ValueError`` that names what to change."""

from __future__ import annotations

from collections.abc import Sequence


class PlanError(ValueError):
    """A parallel plan that this model, this launch or this version cannot run."""


class UncoveredParameterError(PlanError):
    """A sharding plan that leaves parameters without a role."""

    def __init__(self, names: Sequence[str], source: str):
        shown = "\n  ".join(names[:20]) + (f"\n  ... and {len(names) - 20} more" if len(names) > 20 else "")
        super().__init__(
            f"{source} gives no role to {len(names)} parameter(s):\n  {shown}\n"
            "Every parameter needs one, else it would silently stay replicated. Pass "
            "ToDistributedConfig(sharding_plan=...) or meshwright.register_plan(model_type, plan) "
            "with a role for these modules."
        )
        self.names = tuple(names)


class UninitialisedParameterError(PlanError):
    """Weights that do not exist yet, and that nothing says how to make."""


class CheckpointError(ValueError):
    """Weights on disk that cannot be read, or that are not this model's."""


class AlreadyDistributedError(ValueError):
    """A model that something else (or an earlier call) has already distributed."""


class OptimizerMismatchError(ValueError):
    """An optimizer that does not belong to the model, or whose update is wrong on shards."""


class UnreadableTensorError(ValueError):
    """A read of a tensor of which this rank holds only a part."""
