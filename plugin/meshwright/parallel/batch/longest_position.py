"""Gives modules that compute from the longest position of their input the longest position of the global batch.

Some rotary embeddings ("dynamic" NTK, "longrope") choose their frequencies by the longest position that they get, and
each rank or micro-batch has a longest position of its own. So the ranks agree on that of the batch, once per pass.
These modules get it as one more column of ``position_ids``, which is taken out of their result again.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshwright.facts import Facts
from meshwright.mesh.axes import Axis
from meshwright.parallel.batch.schema import Batch, BatchSchema
from meshwright.parallel.collectives import maximum

FAR = 2**30  # a position behind all that a model is made for


class LongestPosition:
    """The longest position of the batch of the running pass, for the modules of a model that depend on it.

    Args:
        facts: what the model shows, whose weights this rank holds already.
        dp: the axis over which the batch is split.
        is_split: whether a pass runs as several micro-batches.
    """

    def __init__(self, facts: Facts, dp: Axis, *, is_split: bool):
        self._dp = dp
        self._most: Tensor | None = None
        modules = facts.names if dp.size > 1 or is_split else ()
        found = [module for module in modules if depends_on_longest(facts, module)]
        self.is_needed = bool(found)
        for module in found:
            signature = inspect.signature(module.forward)

            def add(
                _: nn.Module,
                args: tuple[object, ...],
                kwargs: dict[str, object],
                signature: inspect.Signature = signature,
            ) -> tuple[tuple[object, ...], dict[str, object]] | None:
                given = signature.bind(*args, **kwargs)
                positions = given.arguments.get("position_ids")
                if self._most is None or not isinstance(positions, Tensor):
                    return None
                most = self._most.to(positions).expand(*positions.shape[:-1], 1)
                given.arguments["position_ids"] = torch.cat([positions, most], -1)
                return given.args, given.kwargs

            module.register_forward_pre_hook(add, with_kwargs=True)
            module.register_forward_hook(lambda *call: None if self._most is None else _without_last(call[-1]))

    def begin(self, inputs: Batch, *, is_on: bool) -> None:
        """Agree on the longest position of a pass; every data-parallel rank makes the call.

        Args:
            inputs: the inputs of the pass.
            is_on: whether all ranks run this pass, because it computes a loss or gradients.
        """
        self._most = None
        if not self.is_needed or not is_on or not (schema := BatchSchema(inputs)).has_tokens:
            return
        positions = inputs.get("position_ids")
        own = (
            positions.max()
            if isinstance(positions, Tensor)
            else schema.tokens.new_tensor(schema.tokens.shape[1] - 1, dtype=torch.long)
        )
        self._most = maximum(own, self._dp)


def _without_last(output: object) -> object:
    if isinstance(output, tuple | list):
        return type(output)(_without_last(x) for x in output)
    return output[..., :-1, :] if isinstance(output, Tensor) else output


def depends_on_longest(facts: Facts, module: nn.Module) -> bool:
    """Return whether what a module computes for a position depends on the longest position of its input.

    The module is tried on a copy: first with two positions, and then with a third that is far away.
    """
    parameters = inspect.signature(module.forward).parameters
    if "position_ids" not in parameters:
        return False
    inside = facts.inside(module)
    buffers = [x for inner in inside for x in inner._buffers.values() if x is not None and x.is_floating_point()]
    is_small = bool(buffers) and not facts.parameters_inside(module)
    if not is_small or any(type(x) is not Tensor or x.is_meta for x in buffers):
        return False
    return any(_depends(module, choice) for choice in _choices(module, parameters))


def _choices(module: nn.Module, parameters: Mapping[str, inspect.Parameter]) -> list[dict[str, object]]:
    """Return the further arguments that a module may need: the type of a layer, if its frequencies depend on it."""
    kinds = getattr(module, "layer_types", None)
    return [{"layer_type": kind} for kind in kinds] if "layer_type" in parameters and kinds else [{}]


def _depends(module: nn.Module, options: dict[str, object]) -> bool:
    device = next(module.buffers()).device
    x = torch.zeros(1, 3, 1, device=device)

    def near(*positions: int) -> list[Tensor]:
        with torch.no_grad():
            output = copy.deepcopy(module)(x, position_ids=torch.tensor([positions], device=device), **options)
        values = [x for x in (output if isinstance(output, tuple | list) else (output,)) if isinstance(x, Tensor)]
        if any(value.shape[-2] != len(positions) for value in values):
            raise ValueError("its input is not one row of positions: the places of an image's patches, for example")
        return [value[..., :2, :] for value in values]

    try:
        return any(not torch.equal(one, other) for one, other in zip(near(0, 1), near(0, 1, FAR), strict=True))
    except (TypeError, RuntimeError, IndexError, AttributeError, KeyError, ValueError):
        return False  # not a module of positions
