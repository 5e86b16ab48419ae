"""``to_distributed`` moves storage: lists, hooks, attributes and optimizers made before it stay valid."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from harness import WorkerError
from meshwright.parallel.shards.stand_in import own_shape
from support.exact import Float64
from support.logs import logged
from support.models import build
from support.short_programs import ZERO, Plan, batches, distribute, weights_of, worst

pytestmark = pytest.mark.quick

TP2, SP = {"tp": 2}, {"tp": 2, "sequence_parallel": True}
DP2 = {"dp": 2}

# Each program is one of one device; a plan adds the call of to_distributed and nothing else.


def clip_a_list_made_before(plan: Plan) -> dict[str, Tensor]:
    with Float64():
        model = build("llama").double()
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        model, optimizer, loader = distribute(plan, model, optimizer, batches(3))
        for batch in loader:
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(model, plan)


def two_optimizers_one_of_them_passed(plan: Plan) -> dict[str, Tensor]:
    with Float64():
        model = build("llama").double()
        second = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=1e-1)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.ndim > 1], lr=1e-2)
        model, optimizer, loader = distribute(plan, model, optimizer, batches(3))
        for batch in loader:
            model(**batch).loss.backward()
            for one in (optimizer, second):
                one.step()
                one.zero_grad()
    return weights_of(model, plan)


def hooks_and_attributes_made_before(plan: Plan) -> dict[str, Tensor]:
    """A forward pass that is kept, so that a node of autograd knows the whole shape, and a gradient of it."""
    with Float64():
        model = build("llama").double()
        kept = model(**batches(1)[0]).loss
        kept.backward(retain_graph=True)
        for name, parameter in model.named_parameters():
            parameter.no_decay = "down_proj" in name  # type: ignore[attr-defined]
            parameter.register_hook(lambda grad: grad * 0.5)
        model, _, loader = distribute(plan, model, None, batches(3))
        groups = [
            {"params": [p for p in model.parameters() if p.no_decay], "weight_decay": 0.0},
            {"params": [p for p in model.parameters() if not p.no_decay], "weight_decay": 0.5},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del kept
    return weights_of(model, plan)


PROGRAMS = {
    program.__name__: program
    for program in (clip_a_list_made_before, two_optimizers_one_of_them_passed, hooks_and_attributes_made_before)
}
EQUAL = [
    ("clip_a_list_made_before", DP2),
    *(("two_optimizers_one_of_them_passed", plan) for plan in (TP2, SP, DP2, ZERO[0])),
    *(("hooks_and_attributes_made_before", plan) for plan in (TP2, SP, DP2)),
]


@pytest.mark.parametrize(("program", "plan"), EQUAL, ids=str)
def test_what_was_made_before_works_on(program: str, plan: dict[str, Any], pool2: Any) -> None:
    """Rows 2, 3 and 4. 1e-9 in float64: the plans differ in the order of sums only."""
    assert worst(pool2.run(PROGRAMS[program], plan)[0], PROGRAMS[program](None)) < 1e-9


@pytest.mark.parametrize("plan", [TP2, SP], ids=str)
def test_clipping_a_list_of_shards_is_an_error(plan: dict[str, Any], pool2: Any) -> None:
    """Row 1: the objects of the list are the model's, so torch's function is told that they are shards."""
    with pytest.raises(WorkerError, match=r"clip with meshwright\.clip_grad_norm_\(model, max_norm\)"):
        pool2.run(clip_a_list_made_before, plan)


def build_without_memory(plan: dict[str, Any]) -> list[Any]:
    """Parameters on the meta device, tied, one of them frozen: what holds for each after the call."""
    with mw.deferred_init():
        model = build("llama", tie_word_embeddings=True)
    before = dict(model.named_parameters(remove_duplicate=False))
    heard = []
    for name, parameter in model.named_parameters():
        parameter.tag = name  # type: ignore[attr-defined]
        parameter.requires_grad_("norm" not in name)
        if parameter.requires_grad:
            parameter.register_hook(lambda grad, name=name: heard.append(name))
    shapes = {name: p.shape for name, p in before.items()}
    model, _, loader = distribute(plan, model, None, batches(1))
    for batch in loader:
        model(**batch).loss.backward()
    after = dict(model.named_parameters(remove_duplicate=False))
    return [
        all(after[name] is parameter and not parameter.is_meta for name, parameter in before.items()),
        all(p.tag == name and p.requires_grad == ("norm" not in name) for name, p in model.named_parameters()),
        sorted(heard) == sorted(n for n, p in model.named_parameters() if p.requires_grad),
        all(p.shape == shapes[n] for n, p in before.items()),
        "tp" not in plan or any(own_shape(p) != shapes[n] for n, p in before.items()),
        not any(hasattr(p, "_meshwright_recipe") for p in after.values()),  # which would keep the whole tape alive
    ]


@pytest.mark.parametrize("plan", [SP, DP2, ZERO[2]], ids=str)
def test_parameters_without_memory_keep_their_identity(plan: dict[str, Any], pool2: Any) -> None:
    """Rows 1 to 4 for a model on the meta device, whose parameters cannot be given memory."""
    assert all(pool2.run(build_without_memory, plan)[0])


@pytest.mark.parametrize("plan", ZERO[1:], ids=str)
def test_a_second_optimizer_under_zero_is_named(plan: dict[str, Any], pool2: Any) -> None:
    """Row 2: its parameters are in parts, which it would never reach."""
    with pytest.raises(WorkerError, match=r"OptimizerMismatchError: this AdamW was not distributed with the model"):
        pool2.run(two_optimizers_one_of_them_passed, plan)


def step_in_a_hook(plan: Plan) -> dict[str, Tensor]:
    """The optimizer-in-backward of torch's tutorial."""
    with Float64():
        model = build("llama").double()
        model, _, loader = distribute(plan, model, None, batches(3))
        optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

        def step(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)
        for batch in loader:
            model(**batch).loss.backward()
    return weights_of(model, plan)


def test_a_step_inside_backward(pool2: Any) -> None:
    """Row 19: the hook sees the reduced gradient, so the step is that of one device."""
    expected = step_in_a_hook(None)
    for plan in (DP2, TP2, SP):
        assert worst(pool2.run(step_in_a_hook, plan)[0], expected) < 1e-9
    with pytest.raises(WorkerError, match=r"OptimizerMismatchError: this AdamW was not distributed with the model"):
        pool2.run(step_in_a_hook, ZERO[2])


def step_by_hand_in_a_hook(plan: Plan, kind: str) -> dict[str, Tensor]:
    """SGD in a hook of each gradient, without an optimizer."""
    with Float64():
        model: Any = build("llama").double()
        model, _, loader = distribute(plan, model, None, batches(3))

        def step(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None

        for parameter in model.parameters():
            if kind == "accumulated":
                parameter.register_post_accumulate_grad_hook(step)
            else:
                parameter.register_hook(lambda grad, p=parameter: p.data.add_(grad, alpha=-0.1).sign() * 0)
        for batch in loader:
            model(**batch).loss.backward()
    return weights_of(model, plan)


def test_a_step_by_hand_inside_backward(pool2: Any) -> None:
    """Row 19: by hooks of either kind, also where a rank has a part of the gradient."""
    for kind in ("accumulated", "arriving"):
        expected = step_by_hand_in_a_hook(None, kind)
        for plan in (DP2, SP, ZERO[2]):
            assert worst(pool2.run(step_by_hand_in_a_hook, plan, kind)[0], expected) < 1e-9


def warnings_of_a_stranger(is_wrapped: bool) -> list[str]:
    """A soft prompt that is no part of the model, in an optimizer of its own."""
    with logged(level=logging.WARNING) as said:
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**DP2))
        model: Any = build("llama")
        prompt: Any = nn.Embedding(2, model.config.hidden_size)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = mw.to_distributed(model, optimizer, batches(3), config=config)
        prompt = mw.DataParallel(prompt) if is_wrapped else prompt
        own = torch.optim.AdamW(prompt.parameters())
        for batch in loader:
            embeds = model.get_input_embeddings()(batch["input_ids"]) + prompt(batch["input_ids"] % 2)
            model(inputs_embeds=embeds, labels=batch["labels"]).loss.backward()
            for one in (own, optimizer):
                one.step()
                one.zero_grad()
    return [text for text in said if "in no distributed model" in text]


def test_two_parameters_of_one_memory_are_named() -> None:
    """ZeRO gives each a memory of its own, if they share elements. Without it they stay one, and cannot be saved so."""
    models: Any = [build("llama") for _ in range(3)]
    for model in models:
        first, last = (layer.mlp.down_proj for layer in model.model.layers)
        last.bias.data = first.bias.data
    both = torch.stack([first.bias.data, first.bias.data + 1], dim=-1)
    first.bias.data, last.bias.data = both.unbind(-1)  # views of one memory that share no element
    expected = first.bias.tolist(), last.bias.tolist()
    mw.to_distributed(models[2], plan=mw.ParallelPlan(zero_stage=1))
    assert (first.bias.tolist(), last.bias.tolist()) == expected
    with pytest.raises(
        mw.PlanError, match=r"0.mlp.down_proj.bias and .*1.mlp.down_proj.bias are two parameters of one"
    ):
        mw.to_distributed(models[0], plan=mw.ParallelPlan(zero_stage=1))
    model = mw.to_distributed(models[1], plan=mw.ParallelPlan())[0]
    with pytest.raises(mw.UnreadableTensorError, match=r"state = meshwright.full_state_dict\(model\)"):
        torch.save(model, io.BytesIO())


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_trained_parameter_outside_of_the_model_is_named(is_wrapped: bool, pool2: Any) -> None:
    """Row 22: unless it is distributed by itself."""
    for said in pool2.run(warnings_of_a_stranger, is_wrapped):
        assert bool(said) is not is_wrapped  # each model says it; those of other tests may not be collected yet
        assert is_wrapped or "the first has shape [2, 32]" in said[0]
