"""Refuses hooks that a wrapper of a model adds for one call, where the modules inside get a part of the call's batch.

Such a hook has what the wrapper made of the whole rows, as PEFT's aLoRA counts the tokens from where an adapter begins.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from meshwright.errors import PlanError
from meshwright.mesh.axes import Axis
from meshwright.parallel.batch.schema import BatchSchema
from meshwright.parallel.foreign_hooks import origin
from meshwright.parallel.forward.split_forward import count_micro_batches
from meshwright.parallel.method_chain import BatchStep, ChainStep, StepOrder
from meshwright.plan.config import ParallelPlan
from meshwright.temporarily import temporarily


class WrapperCall(ChainStep):
    """A step of a wrapper's forward that notes which hooks there are before the wrapper adds its own.

    Args:
        wrapper: the wrapper.
    """

    order = StepOrder.CALL_HOOKS

    def __init__(self, wrapper: nn.Module) -> None:
        self.library = _library(type(wrapper).__module__)
        self.first, self.is_running = RemovableHandle.next_id, False

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.first = RemovableHandle.next_id  # the numbers of hooks ascend
        with temporarily(self, is_running=True):
            return self.method(*args, **kwargs)


class RefusesCallHooks(BatchStep):
    """A step of the model inside of wrappers that looks for hooks of this call.

    Args:
        model: the model.
        call: the step of the outermost wrapper.
        plan: the plan, which has cp or micro-batches.
        dp: the axis over which the batch is already split.
    """

    order = StepOrder.CALL_HOOKS

    def __init__(self, model: nn.Module, call: WrapperCall, plan: ParallelPlan, dp: Axis):
        super().__init__(model)
        self.call, self.plan, self.dp = call, plan, dp
        self.modules = list(model.named_modules())

    def __call__(self, *args: object, **kwargs: object) -> object:
        for name, module in self.modules:
            hooks = module._forward_pre_hooks
            last = next(reversed(hooks), -1)
            if last >= self.call.first and self._is_of_call(hooks[last]):
                self._check(name, hooks[last], self.batch_of(args, kwargs))
                break
        return self.method(*args, **kwargs)

    def _is_of_call(self, hook: object) -> bool:
        """Return whether a hook is of one call: outside of the wrapper's forward, as in its generate, its own alone."""
        library = _library(origin(hook))
        return library == self.call.library or (self.call.is_running and library != "meshwright")

    def _check(self, name: str, hook: object, batch: dict[str, object]) -> None:
        schema = BatchSchema(batch)
        trains = self.model.training and torch.is_grad_enabled() and schema.targets is not None
        count = count_micro_batches(self.plan, schema.rows, self.dp) if trains else 1
        if self.plan.cp == 1 and count == 1:
            return
        part, cure = f"cp={self.plan.cp} gives it some tokens of each row", "cp=1"
        if self.plan.cp == 1:
            part = f"a pass has one of {count} micro-batches"
            cure = "gradient_accumulation_steps=1, micro_batch_size=None"
        raise PlanError(
            f"{name} has a hook for this call alone ({origin(hook)}), made for the whole rows of the batch, as aLoRA's "
            f"is, but {part}, so it would act on other tokens than on one device. Use ParallelPlan({cure})"
        )


def _library(name: str) -> str:
    return name.partition(".")[0]
