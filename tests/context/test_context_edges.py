"""What context parallelism must not get wrong besides the numbers of a plain step.

Tolerance 1e-10 in float64 unless a test says otherwise: only the order of sums differs, about 1e-16 a sum.
"""

from __future__ import annotations

import copy
import itertools
import logging
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
)

import meshwright as mw
from conformance.families.models import build as build_family
from conformance.families.one_device import largest_difference
from harness.pool import WorkerError
from meshwright.context import attention
from meshwright.context.attend import as_autocast
from meshwright.context.record import record_context
from meshwright.roles import find_decoder
from support.contexts import METHODS, batch, distributed
from support.exact import Float64, relative_difference
from support.models import SIZES, build, tokens
from support.short_programs import gradients_of
from support.traffic import Traffic

# ---- documents ------------------------------------------------------------------------------------------------------


def logits_of_two_packings(method: str) -> tuple[Tensor, Tensor]:
    """The logits of a packed row, and of the row with another second document of three."""
    with Float64():
        model = distributed(METHODS[method]).double().eval()
        ids = tokens(1, 24)
        other = ids.clone()
        other[:, 7:15] = tokens(1, 8, seed=9)
        positions = torch.cat([torch.arange(7), torch.arange(8), torch.arange(9)])[None]
        return tuple(model(input_ids=x, position_ids=positions).logits for x in (ids, other))  # type: ignore[return-value]


@pytest.mark.parametrize("method", METHODS)
def test_documents_do_not_see_each_other(method: str, pool2: Any) -> None:
    one, other = pool2.run(logits_of_two_packings, method)[0]
    assert torch.equal(one[:, :7], other[:, :7]) and torch.equal(one[:, 15:], other[:, 15:])
    assert not torch.equal(one[:, 7:15], other[:, 7:15])


# ---- heads ----------------------------------------------------------------------------------------------------------


def difference_of_gpt2(method: str) -> float:
    plan = mw.ParallelPlan(**METHODS[method])
    return largest_difference(partial(build_family, "gpt2"), lambda _: plan, "plain")


@pytest.mark.parametrize("method", METHODS)
def test_tokens_that_are_joined_before_the_head(method: str, pool2: Any) -> None:
    """GPT-2 gives the result of its last norm the shape of the whole row, of which the head takes this rank's part."""
    assert pool2.run(difference_of_gpt2, method)[0] <= 1e-10


# ---- positions that depend on the whole row -------------------------------------------------------------------------


FACTORS = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0], "original_max_position_embeddings": 16}


def long_rope(plan: dict[str, Any] | None, kind: str) -> Tensor:
    """The loss of a row longer than the model's first length, where the rotary frequencies depend on the length."""
    with Float64():
        rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0, **(FACTORS if kind == "longrope" else {})}
        model = build("llama", max_position_embeddings=16, rope_parameters=rope).double()
        if plan is not None:
            model = mw.to_distributed(model, plan=mw.ParallelPlan(**plan))[0]
        return model(**batch(length=41)).loss.detach()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_frequencies_are_those_of_the_whole_row(kind: str, pool2: Any) -> None:
    expected = long_rope(None, kind)
    assert all(abs(loss - expected) <= 1e-10 for loss in pool2.run(long_rope, {"cp": 2}, kind))


# ---- half precision -------------------------------------------------------------------------------------------------


def autocast_gradients(plan: dict[str, Any] | None, family: str) -> dict[str, Tensor]:
    model: Any = build(family)
    if plan is not None:
        model = mw.to_distributed(model, plan=mw.ParallelPlan(**plan))[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**batch()).loss
    loss.backward()
    return {"loss": loss.detach()} | gradients_of(model, plan)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("method", METHODS)
def test_autocast(method: str, family: str, pool2: Any) -> None:
    """Rotary embeddings and norms make queries and keys float32 under autocast, while values are bfloat16."""
    expected, found = autocast_gradients(None, family), pool2.run(autocast_gradients, METHODS[method], family)[0]
    assert abs(found["loss"] - expected["loss"]) <= 0.01 * expected["loss"]
    largest = max(value.abs().max() for name, value in expected.items() if name != "loss")
    # bfloat16 has 8 bits, and each gradient passes some ten roundings. That of the keys' bias is nothing else.
    assert max((found[name] - value).abs().max() / largest for name, value in expected.items()) <= 0.1


def half_exchanged(method: str, family: str, implementation: str) -> tuple[list[Tensor], list[int]]:
    """Logits under autocast if keys are sent as they are, and in autocast's dtype, and the bytes of both."""
    model = distributed({"cp": 2, "context": method}, family, attn_implementation=implementation).eval()
    logits, sent = [], []
    no_kernel = mock.patch.object(attention, "has_flash", lambda *_: False)  # takes 16 bits alone, and rounds elsewhere
    for cast in (lambda x: x, as_autocast):
        with mock.patch.object(attention, "as_autocast", cast), no_kernel, Traffic() as traffic, torch.no_grad():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model.model(batch()["input_ids"])  # the kernels' first calls
                traffic.bytes.clear()
                logits.append(model.model(batch()["input_ids"]).last_hidden_state)
            kind = "all_gather" if method == "gather" else "reduce_scatter"  # counted as all-to-alls
            sent.append(traffic.bytes[kind])
    return logits, sent


@pytest.mark.parametrize(("family", "implementation"), [("llama", "sdpa"), ("llama", "eager"), ("gemma2", "eager")])
@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_autocast_sends_half_the_bytes(method: str, family: str, implementation: str, pool2: Any) -> None:
    """The stock functions round to bfloat16 in their matrix products anyway, so no bit of the result changes."""
    for (before, after), (all_bytes, half) in pool2.run(half_exchanged, method, family, implementation):
        assert torch.equal(before, after)
        width, key_width = SIZES["hidden_size"], SIZES["hidden_size"] // 8 * SIZES["num_key_value_heads"]
        rows = 2 * 8  # two rows of 13 tokens, padded to 16 on two ranks
        sent = 2 * rows * 2 * key_width if method == "gather" else rows * (width + 2 * key_width)
        assert all_bytes - half == SIZES["num_hidden_layers"] * sent * (4 - 2)


# ---- losses ---------------------------------------------------------------------------------------------------------


def gradients_of_other_losses(plan: dict[str, Any] | None, kind: str) -> dict[str, Tensor]:
    with Float64():
        torch.manual_seed(0)
        heads = {"classes": AutoModelForSequenceClassification, "tags": AutoModelForTokenClassification}
        if kind in heads:
            model: Any = (
                heads[kind].from_config(LlamaConfig(**SIZES, num_labels=3, classifier_dropout=0.0)).double().train()
            )
        else:
            model = build("llama").double()
        if plan is not None:
            model = mw.to_distributed(model, plan=mw.ParallelPlan(**plan))[0]
        inputs: dict[str, Any] = batch()
        labels = inputs["labels"]
        if kind == "classes":
            loss = model(input_ids=inputs["input_ids"], labels=torch.tensor([0, 2])).loss
        elif kind == "tags":
            loss = model(input_ids=inputs["input_ids"], labels=labels.clamp(-100, 2)).loss
        elif kind == "own":
            logits = model(input_ids=inputs["input_ids"]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        elif kind == "base model":
            loss = model.model(input_ids=inputs["input_ids"]).last_hidden_state.square().mean()
        elif kind == "items":
            loss = model(**inputs, num_items_in_batch=int((labels[:, 1:] != -100).sum())).loss
        else:
            assert kind.startswith("embeddings")
            embedded = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
            given = embedded * 2 if "computed" in kind else embedded
            if "own loss" in kind:
                loss = model(inputs_embeds=given).logits.square().mean()
            else:
                loss = model(inputs_embeds=given, labels=labels).loss
        loss.backward()
        found = {"loss": loss.detach()}
        if kind.startswith("embeddings"):
            found["inputs"] = embedded.grad
        return found | gradients_of(model, plan)


EMBEDDINGS = ["embeddings", "embeddings, own loss", "embeddings, computed", "embeddings, computed, own loss"]


@pytest.mark.parametrize("kind", ["classes", "tags", "own", "base model", "items", *EMBEDDINGS])
def test_other_losses_equal_one_process(kind: str, pool2: Any) -> None:
    expected, found = gradients_of_other_losses(None, kind), pool2.run(gradients_of_other_losses, {"cp": 2}, kind)
    assert found[0].keys() == expected.keys()
    largest = max(value.abs().max() for value in expected.values())
    assert max((found[0][name] - value).abs().max() / largest for name, value in expected.items()) <= 1e-10
    for result in found:
        for name in result.keys() & {"loss", "inputs"}:
            assert relative_difference(result[name], expected[name]) <= 1e-10


def with_kernels_on_one_rank(method: str) -> tuple[int, dict[str, Tensor]]:
    on_first = mock.patch.object(attention, "has_flash", lambda *_: dist.get_rank() == 0)
    with on_first, mock.patch.object(attention, "flash_attention", wraps=attention.flash_attention) as kernels:
        found = gradients_of_other_losses(METHODS[method], "own")
    return kernels.call_count, found


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_ranks_with_and_without_flash_kernels_share_collectives(method: str, pool2: Any) -> None:
    (calls, found), (no_calls, _) = pool2.run(with_kernels_on_one_rank, method)
    expected = gradients_of_other_losses(None, "own")
    largest = max(value.abs().max() for value in expected.values())
    assert calls > 0 == no_calls and found.keys() == expected.keys()
    assert max((found[name] - value).abs().max() / largest for name, value in expected.items()) <= 1e-10


def second_derivative(plan: dict[str, Any]) -> str:
    """What a gradient with a graph says, which would lack what passed the collectives."""
    model = distributed(plan, attn_implementation="eager")
    embedded = model.get_input_embeddings()(tokens(2, 13)).detach().requires_grad_()
    loss = model(inputs_embeds=embedded).logits.square().mean()
    try:
        torch.autograd.grad(loss, embedded, create_graph=True)
    except mw.UnreadableTensorError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("method", METHODS)
def test_second_derivatives_are_refused(method: str, pool2: Any) -> None:
    assert all("cp=1" in said for said in pool2.run(second_derivative, METHODS[method]))


def warnings_of_a_hook(module: str) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("meshwright.parallel.forward.user_hooks")
    logger.addHandler(handler)
    try:
        model = distributed()
        model(**batch()).loss.backward()
        assert not said
        hooked = model.get_submodule(module)
        is_last = module == "model.norm"
        (hooked.register_full_backward_hook if is_last else hooked.register_forward_hook)(lambda *_: None)
        model(**batch()).loss.backward()
    finally:
        logger.removeHandler(handler)
    return said


@pytest.mark.parametrize("module", ["model", "model.layers.1", "model.layers.0.mlp.up_proj", "model.norm", "lm_head"])
def test_hooks_that_see_some_tokens_are_warned_of(module: str, pool2: Any) -> None:
    for said in pool2.run(warnings_of_a_hook, module):
        sees = "a backward hook on model.norm (" if module == "model.norm" else f"a forward hook on {module} sees this"
        assert len(said) == 1 and sees in said[0]


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def save(folder: str) -> dict[str, Tensor]:
    model: Any = build("gemma2")
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, _ = mw.to_distributed(model, optimizer, plan=mw.ParallelPlan(cp=2, zero_stage=1))
    model(**batch()).loss.backward()
    optimizer.step()
    mw.save_checkpoint(f"{folder}/run", model, optimizer, step=1)
    model.save_pretrained(f"{folder}/model")
    return mw.full_state_dict(model)


def load(folder: str, plan: dict[str, Any]) -> dict[str, Tensor]:
    model: Any = build("gemma2", seed=5)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, _ = mw.to_distributed(model, optimizer, plan=mw.ParallelPlan(**plan))
    mw.load_checkpoint(f"{folder}/run", model, optimizer)
    return mw.full_state_dict(model)


def test_checkpoints_fit_other_plans(pool2: Any, tmp_path: Path) -> None:
    expected = pool2.run(save, str(tmp_path))[0]
    for plan in ({"cp": 2, "context": "ring"}, {"tp": 2}, {"dp": 2, "zero_stage": 3}):
        loaded = pool2.run(load, str(tmp_path), plan)[0]
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(stock[name], value) for name, value in expected.items())


# ---- what cannot run ------------------------------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    said: dict[str, str] = {}

    def record(name: str, call: Any) -> None:
        try:
            call()
        except ValueError as error:
            said[name] = f"{type(error).__name__}: {error}"
        else:
            said[name] = "no error"

    def plan(family: str = "llama", traits: Any = None, **fields: Any) -> Any:
        return mw.to_distributed(build(family, **(traits or {})), plan=mw.ParallelPlan(**{"cp": 2, **fields}))

    odd = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}
    record("heads", lambda: plan(traits=odd, context="ulysses"))
    engine = mw.ToDistributedConfig(plan=mw.ParallelPlan(cp=2), engine="DeepSpeed")
    record("an engine", lambda: mw.to_distributed(build("llama"), config=engine))
    flex = build("llama", attn_implementation="flex_attention")
    record("flex attention", lambda: mw.to_distributed(flex, plan=mw.ParallelPlan(cp=2, context="ring")))
    model = distributed()
    ids = batch()["input_ids"]
    model(**batch()).loss.backward()
    record("generate", lambda: model.generate(ids, max_new_tokens=2))
    record("cache", lambda: model(**batch(), use_cache=True))
    record("a mask of its own", lambda: model(**batch(), attention_mask=torch.ones(2, 1, 13, 13)))
    record("the last logits", lambda: model(**batch(), logits_to_keep=1))
    record("hidden states", lambda: model(**batch(), output_hidden_states=True))
    record("a router's logits", lambda: model(**batch(), output_router_logits=True))
    record("attention maps", lambda: model(**batch(), output_attentions=True))
    record("logits", lambda: model(**batch()).logits.sum())
    record("torch's clipping", lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    record("a tuple", lambda: model(**batch(), return_dict=False))
    return said


WORDS = {
    "heads": "context='gather' or 'ring'",
    "an engine": "use cp=1",
    "flex attention": "Use context='gather' or 'ulysses'",
    "generate": "save_pretrained",
    "cache": "use_cache",
    "a mask of its own": "position_ids",
    "the last logits": "logits_to_keep",
    "hidden states": "turn the option off",
    "a router's logits": "output_router_logits=True cannot be used under ParallelPlan.cp=2",  # no router here
    "attention maps": "turn the option off",
    "logits": "gather_logits=True",
    "torch's clipping": "no error",  # whole gradients on every rank
    "a tuple": "return_dict",
}


def test_what_cannot_run_is_an_error_on_every_rank(pool2: Any) -> None:
    for said in pool2.run(refusals):
        assert {name: said[name] for name, word in WORDS.items() if word not in said[name]} == {}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"cp": 2, "context": "rings"}, "'ring'"),
        ({"cp": 4, "context": "hybrid"}, "a divisor of cp"),
        ({"cp": 4, "context": "hybrid", "ulysses": 3}, "a divisor of cp"),
        ({"cp": 4, "context": "hybrid", "ulysses": 4}, "between 1 and cp"),
        ({"cp": 4, "context": "ring", "ulysses": 2}, "leave it out"),
        ({"ulysses": 2}, "leave it out"),
    ],
)
def test_plans_that_cannot_be_run(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(mw.PlanError, match=word):
        mw.ParallelPlan(**fields)


def other_tokens_on_one_rank() -> None:
    distributed()(**batch(seed=dist.get_rank()))


def test_another_batch_on_one_rank_is_named(pool2: Any) -> None:
    with pytest.raises(WorkerError, match="compute parts of one model for the same tokens"):
        pool2.run(other_tokens_on_one_rank)


def copied() -> tuple[Tensor, Tensor]:
    model = distributed().eval()
    twin = copy.deepcopy(model)
    plain = build("llama").eval()
    plain.config = model.config  # a config that two models share stays that of a plain model
    with torch.no_grad():
        return model(**batch()).logits - twin(**batch()).logits, plain(**batch()).logits - model(**batch()).logits


def test_copies_and_models_beside_it(pool2: Any) -> None:
    for of_copy, of_plain in pool2.run(copied):
        assert of_copy.abs().max() == 0 and of_plain.abs().max() < 1e-5  # float32


def test_an_attention_that_chooses_its_tokens_by_projections_of_its_own_is_refused() -> None:
    """As MiniMax M3's indexer does, which ended in an error of torch about an index once a row had two blocks."""
    model = build("llama")
    model.model.layers[1].self_attn.indexer = nn.Sequential(nn.Linear(32, 4), nn.Linear(32, 4))
    with pytest.raises(mw.PlanError, match=r"layers.1.self_attn.indexer \(Sequential\) has projections of its own"):
        record_context(find_decoder(model))


def first_layers_moved() -> list[str]:
    found = []
    for plan in ("tp2+sp", "cp2"):
        model: Any = mw.to_distributed(build("llama"), plan=plan)[0]
        model.model.layers.insert(0, model.model.layers.pop(1))
        with pytest.raises(mw.errors.PlanError) as raised:
            model(**batch())
        found.append(str(raised.value))
    return found


def test_another_first_layer_than_at_the_call_is_named(pool2: Any) -> None:
    """The tokens are cut before the first layer; under cp it had them whole, under sp the sizes did not fit."""
    for said in itertools.chain(*pool2.run(first_layers_moved)):
        assert said.startswith("model.layers has another layer at its start") and "before to_distributed" in said
