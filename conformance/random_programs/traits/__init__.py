"""All traits by their names."""

from conformance.random_programs.trait import Trait
from conformance.random_programs.traits import (
    batches,
    forwards,
    loops,
    losses,
    models,
    optimizers,
    parameters,
    passes,
    readings,
    shapes,
    weights,
)

_MODULES = (batches, forwards, loops, losses, models, optimizers, parameters, passes, readings, shapes, weights)

TRAITS: dict[str, Trait] = {trait.name: trait for module in _MODULES for trait in module.TRAITS}
assert len(TRAITS) == sum(len(module.TRAITS) for module in _MODULES), "two traits have one name"
