"""What another package has put in place: a forward is exact, or an error if it leaves out the loss function; parts of
layers are exact."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama import modeling_llama

import meshwright as mw
from meshwright.errors import PlanError
from support.exact import Float64
from support.models import build, labels_for, tokens
from support.tiers import crossings
from support.whole_runs import assert_equals_one_process, train_whole


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


def model_with(forward: Any) -> Any:
    forward.__module__ = "kernels_of_others"
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


def test_a_forward_with_the_loss_function_is_exact() -> None:
    with Float64():
        expected = build("llama").double()(**BATCH).loss
        loss = mw.to_distributed(model_with(calling_the_function), plan=PLAN)[0](**BATCH).loss
        model: Any = build("llama").double()
        model.forward = functools.partial(model.forward)
        wrapped = mw.to_distributed(model, plan=PLAN)[0](**BATCH).loss
    for found in (loss, wrapped):
        assert abs(found.item() - expected.item()) <= 1e-12  # only the order of the sum over the micro-batches differs


def refused_on_class() -> None:
    """As Liger does it: for the class, in its own package, and only in training."""

    def forward(self: Any, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        if self.training:
            return fused(self, input_ids, labels, **options)
        logits = self.lm_head(self.model(input_ids, **options).last_hidden_state)
        return CausalLMOutput(loss=self.loss_function(logits=logits, labels=labels, vocab_size=97), logits=logits)

    forward.__module__ = "liger_kernel.transformers.model.llama"
    with mock.patch.object(modeling_llama.LlamaForCausalLM, "forward", forward):
        model = mw.to_distributed(build("llama").double().train(), plan="dp2")[0]
        model(**BATCH)


def test_the_fused_loss_of_liger_is_refused_with_its_own_option(pool2: Any) -> None:
    for kind, said in pool2.run_expecting_error(refused_on_class):
        assert kind == "PlanError" and "liger_kernel.transformers.model.llama.forward" in said
        assert "apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)" in said


class SiluMul(torch.autograd.Function):
    """The middle of an MLP with a backward of its own, as kernels have it."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        sigmoid = gate.sigmoid()
        return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid


class RmsNorm(torch.autograd.Function):
    """A norm that reads the weight of its module, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x * scale, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normal, weight, scale = ctx.saved_tensors
        own = grad * weight
        of_x = scale * (own - normal * (own * normal).mean(-1, keepdim=True))
        return of_x, (grad * normal).flatten(0, -2).sum(0), None


def with_kernels(model: Any) -> Any:
    """The model with norms and MLPs as ``apply_liger_kernel_to_llama(model=model)`` leaves them."""
    for module in model.modules():
        if isinstance(module, modeling_llama.LlamaRMSNorm):
            module.forward = MethodType(lambda own, x: RmsNorm.apply(x, own.weight, own.variance_epsilon), module)
        elif isinstance(module, modeling_llama.LlamaMLP):
            module.forward = MethodType(
                lambda own, x: own.down_proj(SiluMul.apply(own.gate_proj(x), own.up_proj(x))), module
            )
    return model


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotary embeddings in place of the modeling module's, which both halves of a head enter at once."""
    cos, sin = (x.unsqueeze(unsqueeze_dim).chunk(2, -1)[0] for x in (cos, sin))

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    return rotate(q), rotate(k)


def batches() -> list[dict[str, Tensor]]:
    return [{"input_ids": (ids := tokens(2, 12, seed=seed)), "labels": labels_for(ids)} for seed in range(4)]


def train(plan: dict[str, Any] | None, has_kernels: bool) -> dict[str, Tensor]:
    with Float64(), mock.patch.object(modeling_llama, "apply_rotary_pos_emb", rotated):
        model = build("llama").double()
        return train_whole(with_kernels(model) if has_kernels else model, plan, batches)


@pytest.mark.parametrize(
    "plan",
    crossings(
        [{"tp": 2, "sequence_parallel": True}, {"tp": 2}, {"dp": 2, "zero_stage": 3},
         {"pp": 2, "gradient_accumulation_steps": 2}, {"cp": 2}],
        but=[{"tp": 2, "sequence_parallel": True}],
    ),
    ids=str,
)  # fmt: skip
def test_parts_that_another_package_computes_are_exact(plan: dict[str, Any], pool2: Any) -> None:
    """1e-10 (the runs' own): the formulas differ from those of transformers by rounding in float64."""
    assert_equals_one_process(pool2.run(train, plan, True), train(None, False))
