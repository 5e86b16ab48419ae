"""Makes ``copy.deepcopy`` copy a distributed model: the copy has its own weights, under the same plan."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from meshwright.errors import PlanError
from meshwright.optim.attach_gradients import install_gradient_sync
from meshwright.optim.runtime import Runtime
from meshwright.parallel.dropout_streams import DropoutStreams
from meshwright.parallel.shards.reads import reading_shards


def make_copyable(part: nn.Module, model: nn.Module, runtime: Runtime) -> None:
    """Let ``copy.deepcopy`` and ``torch.optim.swa_utils.AveragedModel`` copy a distributed model.

    Args:
        part: the model, or the decoder inside the wrappers of adapters.
        model: the whole model.
        runtime: the model's runtime.
    """
    object.__setattr__(part, "__deepcopy__", _Copier(part, model, runtime))


class _Copier:
    """The ``__deepcopy__`` method of a model, as an object that is copied with the model.

    A copy has its own shards, hooks and runtime, and shares the model's axes and guard. It has no optimizer yet:
    ``to_distributed(copy, optimizer)`` adds one.
    """

    def __init__(self, part: nn.Module, model: nn.Module, runtime: Runtime):
        self.part, self.model, self.runtime = part, model, runtime

    def __call__(self, memo: dict[int, Any]) -> Any:
        if self.runtime.mesh.pp.size > 1:
            raise PlanError(
                "a model whose layers are spread over the ranks of pp cannot be copied. For an average of its weights "
                "or a frozen copy, use a plan with pp=1"
            )
        if id(self.runtime) in memo:  # inside a wrapper that is being copied
            return _reconstruct(self.part, memo)
        new = self.runtime.without_gradients()
        gradients = self.runtime.gradients
        memo[id(self.runtime)], memo[id(gradients)] = new, new.gradients
        memo[id(gradients.syncs)] = new.gradients.syncs
        if self.runtime.comparison is not None:
            memo[id(self.runtime.comparison)] = new.comparison = self.runtime.comparison.for_copy()
        if self.runtime.weights is not None:
            self.runtime.weights.release()
        for parameter in self.model.parameters():
            _copy_parameter(parameter, self.runtime, memo)
        part = _reconstruct(self.part, memo)
        model = copy.deepcopy(self.model, memo)
        new.features = copy.deepcopy(self.runtime.features, memo)
        if new.comparison is not None:
            new.comparison.look_at(model, new.features.find(DropoutStreams))
        new.weights = copy.deepcopy(self.runtime.weights, memo)
        if new.weights is not None:
            new.weights.find_places()
            new.weights.guard()
        stage = 0 if self.runtime.plan is None else self.runtime.plan.zero_stage
        with reading_shards():
            install_gradient_sync(new, model, None, zero_stage=stage, bucket_bytes=gradients.bucket_bytes)
        return part


def _copy_parameter(parameter: nn.Parameter, runtime: Runtime, memo: dict[int, Any]) -> None:
    """Put a copy of a parameter, with its layout, into the memo of a ``deepcopy``."""
    if id(parameter) in memo:
        new = memo[id(parameter)]
    elif runtime.weights is not None and runtime.weights.holds(parameter):
        # The values are copied with ``runtime.weights``; the parameter itself has no memory.
        new = nn.Parameter(runtime.weights.place_holder(parameter), requires_grad=parameter.requires_grad)
    else:
        new = copy.deepcopy(parameter, memo)
    memo[id(parameter)] = new
    new.meshwright = parameter.meshwright  # type: ignore[attr-defined]


def _reconstruct(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Copy a module as ``copy.deepcopy`` copies an object without a ``__deepcopy__``."""
    if (own := getattr(type(module), "__deepcopy__", None)) is not None:
        return own(module, memo)
    reduced: Any = module.__reduce_ex__(4)
    make, args, state = reduced[:3]
    new = make(*args)
    memo[id(module)] = new
    new.__setstate__(copy.deepcopy(state, memo))
    return new
