"""Losses of the user's own, and penalties beside a loss: exact by one call or one option, and a warning without."""

from __future__ import annotations

import contextlib
import logging
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutput

import meshwright as mw
from support.exact import Float64, gradient_differences, relative_difference
from support.logs import logged
from support.models import SIZES, build, labels_for, tokens
from support.short_programs import next_words, smoothed, train

DP = {"dp": 2}
LENGTH = 12


def smoothed_loss_function(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return smoothed(logits, labels)


class Regression(nn.Module):
    """Not of transformers; returns its loss alone, the mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layer(x)[:, 0], y)


class Aligned(LlamaForCausalLM):
    """Its labels are those of the tokens themselves, as in Florence-2 and Moonshine: the loss is not to shift them."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        size = self.config.vocab_size
        loss = self.loss_function(logits, labels=None, vocab_size=size, shift_labels=labels)
        return CausalLMOutput(loss=loss, logits=logits)


class Chosen(LlamaForCausalLM):
    """Its loss leaves out labels by their values, which nothing shows before a batch runs."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        chosen = labels.masked_fill(labels % 2 == 0, -100)
        return CausalLMOutput(loss=self.loss_function(logits, chosen, self.config.vocab_size), logits=logits)


def make_batches(program: str) -> list[dict[str, Tensor]]:
    """Batches that do not divide, of rows with unlike numbers of labels."""
    if program == "rows":
        draws = torch.Generator().manual_seed(1)
        draw = lambda *shape: torch.randn(*shape, generator=draws, dtype=torch.float64)  # noqa: E731
        return [{"x": draw(n, 4), "y": draw(n)} for n in (3, 5)]
    return [{"input_ids": tokens(n, LENGTH, seed=n), "labels": labels_for(tokens(n, LENGTH, seed=n))} for n in (3, 4)]


def run(plan: dict[str, Any] | None, program: str) -> tuple[list[float], dict[str, Tensor]]:
    """Half of the losses of two batches, accumulated, and whole gradients."""

    def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
        if program == "call":
            labels = batch.pop("labels")
            loss = smoothed(model(**batch).logits, labels)
            if plan is not None:
                loss = mw.global_mean(model, loss, count=(labels[:, 1:] != -100).sum())
        else:
            output = model(**batch)
            loss = output if program == "rows" else output.loss
        return loss / 2

    torch.manual_seed(0)
    with Float64():
        model: Any = (Regression() if program == "rows" else build("llama")).double().train()
        if program == "labels":
            model.loss_function = smoothed_loss_function
        model.__class__ = {"aligned": Aligned, "chosen": Chosen}.get(program, type(model))
        over: Any = {"rows": "rows", "labels": next_words}.get(program)
        return train(model, plan, make_batches(program), loss_of=loss_of, loss_averages_over=over, gather_logits=True)


@pytest.mark.parametrize(
    ("program", "plan"),
    [
        ("call", DP),
        ("call", {**DP, "zero_stage": 1}),
        ("call", {**DP, "zero_stage": 3}),
        ("call", {"tp": 2, "sequence_parallel": True}),
        ("rows", DP),
        ("labels", {**DP, "zero_stage": 1}),
        ("labels", {**DP, "micro_batch_size": 1}),
        ("aligned", {**DP, "micro_batch_size": 1}),
        ("aligned", {"pp": 2, "micro_batch_size": 1}),
        ("chosen", DP),
    ],
    ids=str,
)
def test_a_loss_of_ones_own(program: str, plan: dict[str, Any], pool2: Any) -> None:
    """Row 17: by global_mean or loss_averages_over a loss is the mean of the global batch, in value and gradient."""
    losses, gradients = run(None, program)
    for rank in (ranks := pool2.run(run, plan, program)):
        # float64: only the order of sums differs. The mean of the ranks' means is off by more than 1e-3.
        assert rank[0] == pytest.approx(losses, rel=1e-12)
    for name, gradient in gradients.items():
        if "k_proj.bias" not in name:  # rounding only
            assert relative_difference(ranks[0][1][name], gradient) < 1e-10, name


@pytest.mark.parametrize("plan", [{**DP, "micro_batch_size": 1}, {"pp": 2, "micro_batch_size": 1}], ids=str)
def test_a_loss_that_counts_other_labels_is_an_error_with_micro_batches(plan: dict[str, Any], pool2: Any) -> None:
    """The mean needs the count of all micro-batches before the first one runs; with the wrong one it is off by 2."""
    for kind, message in pool2.run_expecting_error(run, plan, "chosen"):
        assert kind == "PlanError" and "averages over another number of labels" in message


def warnings_of(program: str, sizes: tuple[int, ...]) -> list[str]:
    """What is logged while a program trains on batches with so many rows, of which each has all its labels."""
    with logged(level=logging.WARNING) as said:
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**DP))
        batches = [{"input_ids": (ids := tokens(n, LENGTH, seed=n)), "labels": ids} for n in sizes]
        model, _, loader = mw.to_distributed(build("llama"), None, batches, config=config)
        for batch in loader:
            if program == "known":
                model(**batch).loss.backward()
                continue
            labels = batch.pop("labels")
            loss = smoothed(model(**batch).logits, labels)
            if program == "corrected":
                loss = mw.global_mean(model, loss, (labels[:, 1:] != -100).sum())
            loss.backward()
    return [message for message in said if "global_mean" in message]


@pytest.mark.parametrize(
    ("program", "sizes", "expected"),
    [("own", (4, 3, 3), 1), ("own", (4, 4), 0), ("known", (4, 3), 0), ("corrected", (4, 3), 0)],
    ids=str,
)
def test_an_uneven_batch_is_named_once(program: str, sizes: tuple[int, ...], expected: int, pool2: Any) -> None:
    """Rows 17 and 18: without the call or the option, a warning says what data parallelism makes of the loss."""
    first, second = pool2.run(warnings_of, program, sizes)
    assert len(first) == expected and not second  # one rank speaks
    if expected:
        assert "1 rows on rank 0; 2 rows on rank 1" in first[0] and "loss_averages_over='rows'" in first[0]


def scaled(plan: dict[str, Any], program: str) -> list[dict[str, Tensor]]:
    """Whole gradients after two accumulated batches, whose loss a program multiplies by a number or uses in parts."""
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), gather_logits=program == "global_mean")
    model: Any = build("llama").double().train()
    model, _, loader = mw.to_distributed(model, None, make_batches("call"), config=config)
    for index, batch in enumerate(loader):
        with mw.no_sync(model) if program == "no_sync" and index == 0 else contextlib.nullcontext():
            count = next_words(batch)
            loss = model(**batch).loss
            if program == "global_mean":
                with torch.no_grad():
                    model(**batch)  # its loss gets no gradient
                own = smoothed(model(input_ids=batch["input_ids"]).logits, batch["labels"])
                loss = mw.global_mean(model, own, count) * count / 20
            elif program == "the rank's count":
                loss = loss * count / 20
            elif program == "one rank leaves its loss out":
                loss = loss if index != dist.get_rank() else sum(0 * p.sum() for p in model.parameters())
            elif program in ("rounding", "a little more"):  # 1e-11 is allowed in float64
                loss = loss * (1 + (1e-12 if program == "rounding" else 1e-9) * dist.get_rank())
            elif program == "the rank's scaler":
                loss = torch.amp.GradScaler("cpu", init_scale=256.0 * (1 + dist.get_rank())).scale(loss)
            elif program == "twice":
                (loss / 2).backward(retain_graph=True)
            elif program == "no factor":
                loss = 2 * loss
            (loss / 2).backward()
    return mw.full_gradients(model)


SPLIT = {**DP, "micro_batch_size": 1}


@pytest.mark.parametrize(
    ("program", "plan"),
    [
        ("the rank's count", DP),
        ("the rank's count", {**DP, "zero_stage": 3}),
        ("the rank's count", SPLIT),
        ("a little more", DP),
        ("the rank's scaler", DP),
        ("the rank's count", {**SPLIT, "zero_stage": 2}),
        ("global_mean", {**DP, "zero_stage": 1}),
    ],
    ids=str,
)
def test_a_factor_of_one_ranks_rows_is_an_error(program: str, plan: dict[str, Any], pool2: Any) -> None:
    """The loss is a global mean, so the error shows each rank's factor before a gradient is reduced."""
    for kind, message in pool2.run_expecting_error(scaled, plan, program):
        assert kind == "DivergenceError" and "loss = mw.global_mean(model, (weights * losses)" in message
        assert re.search(r"gradient of loss \d+: [\d.]+ on rank 0 .*; [\d.]+ on rank 1 ", message)


@pytest.mark.parametrize("plan", [{**DP, "tp": 2}, {**SPLIT, "pp": 2}], ids=str)
def test_a_factor_of_one_ranks_rows_is_an_error_on_two_axes(plan: dict[str, Any], pool4: Any) -> None:
    """Under a pipeline backward has run inside of the call, and the factor arrives later."""
    for kind, message in pool4.run_expecting_error(scaled, plan, "the rank's count"):
        assert kind == "DivergenceError" and "gradient of loss" in message


@pytest.mark.parametrize("program", ["no factor", "no_sync", "twice", "rounding", "one rank leaves its loss out"])
@pytest.mark.parametrize("plan", [DP, {**DP, "zero_stage": 1}], ids=str)
def test_an_equal_factor_is_none_of_these(program: str, plan: dict[str, Any], pool2: Any) -> None:
    """Factors that all ranks share, and passes that accumulate."""
    pool2.run(scaled, plan, program)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_a_split_batch_has_a_second_backward_if_its_graph_is_kept(zero_stage: int) -> None:
    ids = tokens(4, LENGTH)
    with Float64():
        models = [build("llama").double() for _ in range(2)]
        plan = mw.ParallelPlan(gradient_accumulation_steps=2, zero_stage=zero_stage)
        optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1)
        models[1] = mw.to_distributed(models[1], optimizer, plan=plan)[0]
        for model in models:
            loss = model(input_ids=ids, labels=ids).loss
            (loss / 4).backward(retain_graph=True)
            (loss / 2).backward()
        expected = {name: p.grad for name, p in models[0].named_parameters()}
        assert max(gradient_differences(mw.full_gradients(models[1]), expected).values()) < 1e-9
        with pytest.raises(RuntimeError, match=r"loss.backward\(retain_graph=True\) for all but the last"):
            loss.backward()


def option_for_a_known_loss() -> str:
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(), loss_averages_over="rows")
    try:
        mw.to_distributed(build("llama"), config=config)
    except mw.PlanError as error:
        return str(error)
    return ""


def test_options_that_do_not_fit() -> None:
    assert "is exact without the option; leave it out" in option_for_a_known_loss()
    with pytest.raises(mw.PlanError, match="must be 'rows', 'labels' or a callable"):
        mw.ToDistributedConfig(loss_averages_over="tokens")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not distributed"):
        mw.global_mean(nn.Linear(2, 2), torch.ones(()), 1)
    model = mw.to_distributed(build("llama"), config=mw.ToDistributedConfig(plan=mw.ParallelPlan()))[0]
    with pytest.raises(ValueError, match=r"takes a scalar loss.*a tensor of shape \(2,\): pass loss.mean\(\)"):
        mw.global_mean(model, torch.ones(2), 1)
    assert mw.global_mean(model, loss := torch.ones(()), 3) is loss  # one process: nothing changes


def warnings_beside_the_models_loss(uses_own: bool) -> list[str]:
    """A program that passes labels, and trains on a loss that it computes from the logits."""
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2))
    model = mw.to_distributed(build("llama"), config=config)[0]
    ids = tokens(1 + dist.get_rank(), LENGTH)
    with logged() as found:
        for _ in range(2):
            outputs = model(input_ids=ids, labels=ids)
            (smoothed(outputs.logits, ids) if uses_own else outputs.loss).backward()
    return [text for text in found if "rows" in text]


@pytest.mark.parametrize("uses_own", [True, False])
def test_a_loss_beside_the_models_own_is_named(uses_own: bool, pool2: Any) -> None:
    """Row 17: the labels were passed, so the model computed a loss too, which the program left aside."""
    first, second = pool2.run(warnings_beside_the_models_loss, uses_own)
    assert len(first) == int(uses_own) and not second


def warnings_with_a_hook(plan: dict[str, Any], has_hook: bool, is_uneven: bool, keeps_graph: bool = True) -> list[str]:
    """A program that adds a loss on a layer's output, which a hook of its own keeps; or keeps it to log it."""
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
    model: Any = mw.to_distributed(build("llama"), config=config)[0]
    kept: list[Tensor] = []
    if has_hook:
        model.model.layers[0].register_forward_hook(
            lambda module, args, output: kept.append(output if keeps_graph else output.detach())
        )
    ids = tokens(1 + dist.get_rank() if is_uneven else 2, LENGTH)
    with logged() as found:
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids).loss
            (loss + sum(x.pow(2).mean() for x in kept[-1:])).backward()  # of the last micro-batch
            kept.clear()
    return [text for text in found if "hook" in text]


@pytest.mark.parametrize(
    ("plan", "has_hook", "is_uneven", "expected"),
    [
        ({"tp": 2, "sequence_parallel": True}, False, False, ""),
        ({"tp": 2}, "inputs", False, ""),  # between blocks the activations are whole
        (DP, True, True, ""),  # of this rank's rows, as is all that the model returns
        ({**DP, "micro_batch_size": 1}, True, False, "runs once for each micro-batch"),
    ],
    ids=str,
)
def test_hooks_that_see_a_part_are_named(
    plan: dict[str, Any], has_hook: bool, is_uneven: bool, expected: str, pool2: Any
) -> None:
    """Row 16: once on each rank."""
    for said in pool2.run(warnings_with_a_hook, plan, has_hook, is_uneven):
        assert len(said) == bool(expected) and all(expected in text for text in said)
    if "micro_batch_size" in plan:  # a hook that only logs is no matter
        assert not any(pool2.run(warnings_with_a_hook, plan, has_hook, is_uneven, keeps_graph=False))


def gradient_of_a_parameter(plan: dict[str, Any]) -> None:
    model = mw.to_distributed(build("llama"), config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))[0]
    ids = tokens(2, LENGTH)
    torch.autograd.grad(model(input_ids=ids, labels=ids).loss, [model.model.norm.weight])


@pytest.mark.parametrize("plan", [{"dp": 2}, {"tp": 2, "sequence_parallel": True}, {"dp": 2, "zero_stage": 2}])
def test_gradients_that_nothing_reduces_are_refused(plan: dict[str, Any], pool2: Any) -> None:
    """Row 20."""
    for _, message in pool2.run_expecting_error(gradient_of_a_parameter, plan):
        assert "torch.autograd.grad would return this rank's own gradient of model.norm.weight" in message


WHOLE = ("norm.weight", "o_proj.bias", "down_proj.bias")


def beside_the_model(family: str, plan: dict[str, Any] | None, program: str) -> dict[str, Tensor]:
    """Whole gradients of a program that computes from norms and biases, beside the model's loss."""
    model: Any = build(family).double()
    if plan is not None:
        model = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))[0]
    whole = [p for name, p in model.named_parameters() if name.endswith(WHOLE)]
    assert len({hash(p) for p in whole}) == len(whole) and whole[0].to("cpu") is whole[0]
    ids = tokens(2, LENGTH)
    for _ in range(2):
        if program == "the base model":
            hidden = model.model(input_ids=ids).last_hidden_state
            (hidden.pow(2).mean() + sum(hidden[0, 0].dot(p) for p in whole if p.shape == hidden.shape[-1:])).backward()
            continue
        loss = model(input_ids=ids, labels=ids).loss
        if program == "distances":
            loss = loss + sum(((p - 0.5) ** 2).sum() for p in whole)
        elif program == "one product":
            total = torch.zeros(()).to(whole[0])
            stacked = torch.cat([torch.stack([p, p]).T.reshape(-1) for p in whole])
            loss = loss + total.add_(torch.linalg.vector_norm(stacked) * loss).mul_(whole[0].sum())
        elif program == "in place":
            rows = torch.zeros(2, len(whole), 32).to(whole[0])
            for index, parameter in enumerate(whole):
                rows[0, index] = parameter
                rows[1, index].copy_(parameter * loss)
            loss = loss + (rows**2).sum()
        (loss + sum((p**2).sum() for p in whole).item()).backward()
    own = {name: p.grad for name, p in model.named_parameters()}
    return {name: x for name, x in (own if plan is None else mw.full_gradients(model)).items() if name.endswith(WHOLE)}


@pytest.mark.parametrize(
    ("family", "plan", "program"),
    [
        ("qwen3", {"tp": 2}, "distances"),
        ("llama", {"tp": 2, "sequence_parallel": True}, "one product"),
        ("qwen3", {"tp": 2, "sequence_parallel": True, "recompute": "full"}, "distances"),
        ("qwen3", {"tp": 2, "sequence_parallel": True}, "one product"),
        ("llama", {"tp": 2, "sequence_parallel": True}, "the base model"),
        ("llama", {"tp": 2, "sequence_parallel": True, "micro_batch_size": 1}, "distances"),
        ("llama", {"tp": 2, "sequence_parallel": True}, "in place"),
        ("llama", {"dp": 2, "zero_stage": 1}, "one product"),
    ],
    ids=str,
)
def test_a_penalty_on_norms_and_biases_counts_once(family: str, plan: dict[str, Any], program: str, pool2: Any) -> None:
    """Row 15: each rank of tp computes the whole penalty, and the parts of a norm's gradient are added up.

    float64: the sums are of 100 terms, in another order, so 1e-12 of the largest gradient. Counted once for each rank,
    the penalty alone would differ by more than 1e-2.
    """
    with Float64():
        expected = beside_the_model(family, None, program)
        without = beside_the_model(family, None, "none")
    found = pool2.run(in_float64, family, plan, program)[0]
    for name, gradient in expected.items():
        assert relative_difference(found[name], gradient) < 1e-12, name
    if program != "the base model":
        assert all(relative_difference(without[name], gradient) > 1e-2 for name, gradient in expected.items())


def in_float64(family: str, plan: dict[str, Any], program: str) -> dict[str, Tensor]:
    with Float64():
        return beside_the_model(family, plan, program)


def products_in_autocast(plan: dict[str, Any] | None) -> dict[str, Tensor]:
    """Gradients of biases that the model uses and the program multiplies, before and after it, in one autocast."""
    model: Any = build("llama")
    if plan is not None:
        model = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))[0]
    biases = {name: p for name, p in model.named_parameters() if name.endswith(("o_proj.bias", "down_proj.bias"))}
    ids, x = tokens(2, LENGTH), torch.arange(64.0).reshape(2, 32) / 64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        early = sum((x @ p).sum() for p in list(biases.values())[:2])
        loss = model(input_ids=ids, labels=ids).loss
        late = sum((x @ p).sum() for p in list(biases.values())[1:])
        (loss + early + late).backward()
    gradients = {name: p.grad for name, p in biases.items()} if plan is None else mw.full_gradients(model)
    return {name: gradients[name] for name in biases if name in gradients}


def test_a_product_with_a_bias_in_autocast(pool2: Any) -> None:
    """Autocast gives the model and the program one cast of a parameter; each has a gradient of its own.

    bfloat16 keeps 8 bits: 1e-2 of the largest gradient. Divided by 2 or counted twice, the product's would be off by
    0.5, and the model's by 1e-2 to 1e-1.
    """
    expected = products_in_autocast(None)
    found = pool2.run(products_in_autocast, {"tp": 2})[0]
    for name, gradient in expected.items():
        assert relative_difference(found[name], gradient) < 1e-2, name


def call_with_a_computed_norm() -> None:
    model = mw.to_distributed(build("llama"), config=mw.ToDistributedConfig(plan="tp2+sp"))[0]
    name = "model.layers.0.input_layernorm.weight"
    ids = tokens(2, LENGTH)
    with torch.no_grad():  # an average of weights is evaluated so
        torch.func.functional_call(model, {name: model.get_parameter(name) * 0.5}, kwargs={"input_ids": ids})
    torch.func.functional_call(model, {name: model.get_parameter(name) * 0.5}, kwargs={"input_ids": ids, "labels": ids})


def test_a_call_with_a_computed_norm_is_refused(pool2: Any) -> None:
    for _, message in pool2.run_expecting_error(call_with_a_computed_norm):
        assert "another tensor in the place of model.layers.0.input_layernorm.weight" in message


class Penalised(LlamaForCausalLM):
    """Adds a penalty to the loss in its own forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = output.loss + 1e-2 * (self.model.norm.weight**2).sum()
        return output


def train_with_an_addition(plan: dict[str, Any], program: str) -> list[str]:
    """Two passes; what is said of what the model adds to its loss."""
    torch.manual_seed(0)
    if program == "a penalty":
        model: Any = Penalised(LlamaConfig(**SIZES))
    else:
        routed = {"num_local_experts": 4, "output_router_logits": program == "a router's loss"}
        model = MixtralForCausalLM(MixtralConfig(**SIZES, **routed))
    model = mw.to_distributed(model.train(), config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))[0]
    ids = tokens(2, LENGTH, seed=dist.get_rank())
    with logged() as said:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
    return [text for text in said if "adds something to the loss" in text]


@pytest.mark.parametrize("program", ["a router's loss", "a penalty", "no router's loss"])
def test_what_a_forward_adds_to_its_loss_is_named(program: str, pool2: Any) -> None:
    """A warning from one rank under dp; with micro-batches, where it would count for each of them, an error.

    A router's loss is that of the global batch.
    """
    adds = program == "a penalty"
    assert [len(said) for said in pool2.run(train_with_an_addition, DP, program)] == [int(adds), 0]
    split = {**DP, "micro_batch_size": 1}
    if adds:
        for kind, message in pool2.run_expecting_error(train_with_an_addition, split, program):
            assert kind == "ValueError" and "would count once for each of them" in message
    else:
        assert pool2.run(train_with_an_addition, split, program) == [[], []]
