"""A short training program, on one device or under a plan, and how far two runs of it are apart."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import meshwright as mw
from meshwright.choose.given_plan import resolve_plan
from meshwright_tools.verification.float64_modules import in_float64
from support.exact import gradient_differences, relative_difference
from support.short_programs import gradients_of, weights_of
from support.summation_orders import added_in_halves

ROWS, LENGTH, STEPS = 4, 16, 2
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is trained.

    Args:
        family: the model's type.
        options: of its configuration, beside the sizes.
        packed: whether each row holds two documents.
        lora: the rank of the adapters that alone are trained; None to train all weights.
    """

    family: str = "llama"
    options: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    lora: int | None = None


_BIASES = {"attention_bias": True, "mlp_bias": True}  # so that tp shards biases too
PROGRAMS = {
    "llama": Program(options=_BIASES),
    "llama with 4 layers": Program(options={**_BIASES, "num_hidden_layers": 4}),
    # Without a cache transformers keeps the documents of a row apart, on one device too.
    "llama, packed": Program(options={**_BIASES, "use_cache": False}, packed=True),
    "llama, LoRA": Program(options=_BIASES, lora=4),
    # torch has no grouped matrix multiplication in float64, so that the experts run one after the other.
    "mixtral": Program(
        family="mixtral",
        options={"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    ),
}


@dataclass
class Numbers:
    """What a run leaves: losses and norms of its steps, and gradients and weights as one device has them."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def new_model(program: str, dtype: torch.dtype, device: torch.device | str, **options: Any) -> Any:
    """Return a model with the same random weights in every call; norms and biases have values of their own."""
    what = PROGRAMS[program]
    torch.manual_seed(0)
    config = AutoConfig.for_model(what.family, **{**SIZES, **what.options, **options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model = model.to(device, dtype).train()
    if what.lora is None:
        return model
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=what.lora, target_modules="all-linear"))
    torch.manual_seed(1)  # peft draws in the dtype and on the device of the weights, and half of the adapters are zeros
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn(parameter.shape, dtype=torch.float32))
    return model


def batches(steps: int, program: str = "llama") -> list[dict[str, Tensor]]:
    """Return global batches whose rows differ in their numbers of labels and, if packed, in where a document ends."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(steps):
        ids = torch.randint(3, 97, (ROWS, LENGTH), generator=generator)
        labels = ids.clone()
        for row in range(ROWS):
            labels[row, : 1 + 2 * row] = -100
        made.append({"input_ids": ids, "labels": labels})
        if PROGRAMS[program].packed:
            ends = torch.randint(1, LENGTH, (ROWS, 1), generator=generator)
            places = torch.arange(LENGTH).expand(ROWS, LENGTH)
            made[-1]["position_ids"] = torch.where(places < ends, places, places - ends)
    return made


def trained(plan: str | None, dtype: torch.dtype, device: str, program: str = "llama", scale: float = 1.0) -> Numbers:
    """Train under a plan, or on one device without one; every rank of the plan makes the call.

    Args:
        plan: the plan in words.
        dtype: the dtype of the weights; with float64 nothing is computed in less.
        device: "cpu" or "cuda".
        program: a name of ``PROGRAMS``.
        scale: a factor by which the last norm's output is multiplied: a planted fault if it is not 1.
    """
    found = Numbers()
    with in_float64() if dtype is torch.float64 else contextlib.nullcontext():
        model = new_model(program, dtype, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader: Any = batches(STEPS, program)
        if plan is not None:
            config = mw.ToDistributedConfig(plan=resolve_plan(plan))
            model, optimizer, loader = mw.to_distributed(model, optimizer, loader, config=config)
        if scale != 1.0:
            model.get_decoder().norm.register_forward_hook(lambda module, args, output: output * scale)
        for step, batch in enumerate(loader):
            loss = model(**{name: x.to(device) for name, x in batch.items()}).loss
            loss.backward()
            found.losses.append(loss.item())
            if step == 0:  # only rank 0 gets them
                found.gradients = _on_host(gradients_of(model, plan))
            found.norms.append(float(mw.clip_grad_norm_(model, 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        found.weights = _on_host(weights_of(model, plan))
    return found


def in_another_order(program: str, dtype: torch.dtype, device: str, seed: int) -> Numbers:
    """Return the gradients of the first step on one process whose sums are taken in a random order.

    The rows run one after the other, and products of matrices are added in two random halves.
    """
    model = new_model(program, dtype, device)
    batch = {name: x.to(device) for name, x in batches(1, program)[0].items()}
    count = (batch["labels"][:, 1:] != -100).sum()
    for row in torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed)).split(1):
        with added_in_halves(seed):
            loss = model(**{name: x[row] for name, x in batch.items()}, num_items_in_batch=count).loss
        loss.backward()
    return Numbers(gradients=_on_host(gradients_of(model, None)))


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double().cpu() for name, x in tensors.items()}


def largest_difference(actual: Numbers, expected: Numbers, *, weights: bool) -> float:
    """Return the largest difference of a loss, a norm or an element, relative to the expected tensor's largest.

    Args:
        actual: a run under a plan.
        expected: the run on one device.
        weights: whether to compare the weights after the steps too. AdamW divides by the size of a gradient, so that
            the rounding of one that is almost zero moves a weight as far as a large one.
    """
    numbers = zip(actual.losses + actual.norms, expected.losses + expected.norms, strict=True)
    found = [abs(a - b) / abs(b) for a, b in numbers]
    found += gradient_differences(actual.gradients, expected.gradients, rounding=1e-6).values()
    if weights:
        found += [relative_difference(actual.weights[name], x) for name, x in expected.weights.items()]
    return max(found) if all(value == value for value in found) else float("nan")


def relative_error(actual: Numbers, exact: Numbers) -> float:
    """Return the root mean square of the gradients' errors, relative to that of the gradients."""
    off = sum(float((actual.gradients[name] - x).square().sum()) for name, x in exact.gradients.items())
    return (off / sum(float(x.square().sum()) for x in exact.gradients.values())) ** 0.5
