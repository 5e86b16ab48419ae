"""A forward that another package has put in place is exact, or an error if it leaves out the loss function."""

from __future__ import annotations

import contextlib
import functools
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.faults.memory_digest import has_values
from support.exact import Float64
from support.models import build, labels_for, tokens


def fused(self: Any, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **options: Any) -> Any:
    """Head and loss in one, as kernels for GPUs compute them: from the weight, without the loss function."""
    hidden = self.model(input_ids, **options).last_hidden_state
    assert labels is not None
    logits = F.linear(hidden[:, :-1], self.lm_head.weight)
    return CausalLMOutput(loss=F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))


def calling_the_function(self: Any, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> Any:
    logits = self.lm_head(self.model(input_ids).last_hidden_state)
    loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
    return CausalLMOutput(loss=loss, logits=logits)


def model_with(forward: Any, home: str = "kernels_of_others") -> Any:
    forward.__module__ = home
    model: Any = build("llama").double()
    model.forward = MethodType(forward, model)
    return model


def failing(self: Any, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> Any:
    return self.lm_head(input_ids)


BATCH = {"input_ids": tokens(4, 9), "labels": labels_for(tokens(4, 9))}
PLAN = mw.ParallelPlan(micro_batch_size=1)


@pytest.mark.parametrize(
    ("forward", "what"),
    [(fused, "without calling the model's loss function"), (failing, "failed before it called .*RuntimeError")],
)
def test_a_forward_without_the_loss_function_is_refused(forward: Any, what: str) -> None:
    model = mw.to_distributed(model_with(forward), plan=PLAN)[0]
    with pytest.raises(PlanError, match=rf"kernels_of_others\.{forward.__name__}.*{what}.*self\.loss_function"):
        model(**BATCH)


def step_with_liger(place: str, plan: dict[str, Any]) -> float:
    """Return the loss of a model with a fused loss that Liger has put into its class, or into the model itself."""
    home = "liger_kernel.transformers.model.llama"
    kind: Any = LlamaForCausalLM
    fused.__module__ = home
    with Float64(), mock.patch.object(kind, "forward", fused) if place == "class" else contextlib.nullcontext():
        model = build("llama").double() if place == "class" else model_with(fused, home)
        return mw.to_distributed(model, plan=mw.ParallelPlan(**plan))[0](**BATCH).loss.item()


@pytest.mark.parametrize(("place", "plan"), [("instance", {"dp": 2}), ("instance", {"tp": 2}), ("class", {"tp": 2})])
def test_ligers_fused_loss_is_refused_on_all_ranks(place: str, plan: dict[str, Any], pool2: Any) -> None:
    cure = "apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)"
    if place == "class":  # the forward counts as the model's own there, and reads a part of the head's weight
        cure = "model.lm_head(hidden)"
    for _, message in pool2.run_expecting_error(step_with_liger, place, plan):
        assert cure in message, message


def with_kernels(self: Any, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **options: Any) -> Any:
    if not has_values(input_ids):
        raise RuntimeError("a kernel cannot read the pointers of tensors without values")
    return fused(self, input_ids, labels, **options)


def in_training(self: Any, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **options: Any) -> Any:
    return fused(self, input_ids, labels) if self.training else self.loss_function(labels=labels, **options)


def step_as_liger_patches_classes(forward: Any) -> None:
    """As ``apply_liger_kernel_to_llama()`` does it."""
    forward.__module__ = "liger_kernel.transformers.model.llama"
    kind: Any = LlamaForCausalLM
    with mock.patch.object(kind, "forward", forward):
        mw.to_distributed(build("llama").double().train(), plan="dp2")[0](**BATCH)


@pytest.mark.parametrize("forward", [with_kernels, in_training])
def test_a_patched_class_whose_loss_a_pass_does_not_show_is_refused(forward: Any, pool2: Any) -> None:
    """Before, the mean of the ranks' means was taken for the mean of the batch where no option described the loss."""
    for kind, said in pool2.run_expecting_error(step_as_liger_patches_classes, forward):
        assert kind == "PlanError" and "apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)" in said, said


def test_a_formula_in_the_class_is_observed_and_exact(pool2: Any) -> None:
    with Float64():
        expected = build("llama").double()(**BATCH).loss.item()
    # Only the order of the sum over the rows differs.
    assert all(abs(x - expected) <= 1e-12 for x in pool2.run(step_with_liger, "class", {"dp": 2}))


def test_a_forward_with_the_loss_function_is_exact() -> None:
    with Float64():
        expected = build("llama").double()(**BATCH).loss
        loss = mw.to_distributed(model_with(calling_the_function), plan=PLAN)[0](**BATCH).loss
        model: Any = build("llama").double()
        model.forward = functools.partial(model.forward)
        wrapped = mw.to_distributed(model, plan=PLAN)[0](**BATCH).loss
    for found in (loss, wrapped):
        assert abs(found.item() - expected.item()) <= 1e-12  # only the order of the sum over the micro-batches differs
