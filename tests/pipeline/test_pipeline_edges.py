"""What a pipeline must not get wrong besides the numbers: memory, randomness, faults, and what it cannot run."""

from __future__ import annotations

import copy
import functools
import itertools
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM

import meshwright as mw
from conformance.families.models import build as build_family
from harness.pool import WorkerError
from meshwright.context.region import ContextRegion
from meshwright.layout.tensor_layout import layout_of
from meshwright.optim.elementwise import check_elementwise
from meshwright.optim.runtime import runtime_of
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright.pipeline.links import Links
from support.exact import Float64
from support.models import build, labels_for, tokens
from support.parity import pool_for
from support.short_programs import gradients_of
from support.tiers import crossing

PLAN = {"pp": 2, "gradient_accumulation_steps": 2}


def distributed(plan: dict[str, Any] | None = None, family: str = "llama", **traits: Any) -> Any:
    model = build(family, num_hidden_layers=4, **traits)
    return mw.to_distributed(model, plan=mw.ParallelPlan(**(plan or PLAN)))[0].train()


def parts_of_others(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters of other stages."""
    return [p for p in model.parameters() if not layout_of(p).is_held]


def batch(rows: int = 4, length: int = 10, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = tokens(rows, length, seed=seed)
    return {"input_ids": ids, "labels": labels_for(ids)}


def held_bytes(family: str, plan: dict[str, Any]) -> tuple[int, int]:
    """The bytes of this rank's weights and of its optimizer's state."""
    model: Any = build(family, num_hidden_layers=4)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, _ = mw.to_distributed(model, optimizer, plan=mw.ParallelPlan(**plan))
    model(**batch()).loss.backward()
    optimizer.step()
    with reading_shards():
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        state = [x for values in dict.values(optimizer.state) for x in values.values() if x.ndim]
        return sum(storages.values()), sum(x.untyped_storage().nbytes() for x in state)


@pytest.mark.parametrize("plan", [PLAN, {**PLAN, "schedule": "zbv"}], ids=["1f1b", "zbv"])
def test_a_rank_holds_its_stages_only(plan: dict[str, Any], pool2: Any) -> None:
    whole = build("llama", num_hidden_layers=4)
    layer = 4 * sum(p.numel() for p in whole.model.layers[0].parameters())
    embedding, head = 4 * whole.model.embed_tokens.weight.numel(), 4 * (whole.lm_head.weight.numel() + 32)
    outside = [embedding, head] if plan["pp"] == 2 and "schedule" not in plan else [embedding + head, 0]
    for (weights, state), own in zip(pool2.run(held_bytes, "llama", plan), outside, strict=True):
        assert weights <= 1.02 * (2 * layer + own)
        assert state <= 1.02 * 2 * (2 * layer + own)


def dropout_masks(plan: dict[str, Any]) -> tuple[list[float], list[torch.Tensor]]:
    """Two losses on the same batch, and what a hook of each layer draws, where each rank draws for itself."""
    model = build("llama", num_hidden_layers=4, attention_dropout=0.3).train()
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), draws="rank")
    model = mw.to_distributed(model, config=config)[0]
    drawn: list[torch.Tensor] = []
    held = {id(p) for p in model.parameters() if layout_of(p).is_held}
    for layer in model.model.layers:
        if all(id(p) in held for p in layer.parameters()):
            layer.self_attn.register_forward_hook(lambda *_: drawn.append(torch.rand(4)))
    losses = [model(**batch()).loss.item() for _ in range(2)]
    return losses, drawn


@pytest.mark.parametrize(
    "plan", [PLAN, {**PLAN, "recompute": "full"}, crossing({**PLAN, "cp": 2})], ids=["kept", "recomputed", "cp2"]
)
def test_no_two_stages_draw_the_same_masks(plan: dict[str, Any], request: pytest.FixtureRequest) -> None:
    results = pool_for(plan, request).run(dropout_masks, plan)
    losses, _ = results[0]
    assert losses[0] != losses[1] and all(own == losses for own, _ in results)
    for (_, first), (_, second) in itertools.combinations(results, 2):
        assert not any(torch.equal(a, b) for a in first for b in second)
        if "recompute" not in plan:
            assert len(first) == len(second) == 2 * 2 * 2  # 2 layers, 2 micro-batches, 2 passes


def gradients_under(plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    with Float64():
        torch.manual_seed(7)
        model = build("llama", num_hidden_layers=4, attention_dropout=0.3).double().train()
        model = mw.to_distributed(model, plan=mw.ParallelPlan(**plan))[0]
        model(**batch()).loss.backward()
        return mw.full_gradients(model)


@pytest.mark.parametrize("plan", [PLAN, crossing({**PLAN, "cp": 2})], ids=["pp2", "pp2 x cp2"])
def test_recomputation_replays_the_masks(plan: dict[str, Any], request: pytest.FixtureRequest) -> None:
    pool = pool_for(plan, request)
    kept, recomputed = (pool.run(gradients_under, {**plan, "recompute": kind})[0] for kind in ("none", "full"))
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)  # the same operations on the same numbers


def under_autocast() -> list[tuple[float, float]]:
    """Losses, and those of one device, of inputs whose activations have other dtypes."""
    model, plain = distributed(), build("llama", num_hidden_layers=4).train()
    plain.config.use_cache = False
    embeddings = torch.randn(4, 10, 32, generator=torch.Generator().manual_seed(5))
    inputs = [batch()]
    for dtype in (torch.bfloat16, torch.float32):
        inputs.append({"inputs_embeds": embeddings.to(dtype), "labels": batch()["labels"]})
    found = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for one in inputs:
            loss = model(**one).loss
            loss.backward()
            found.append((loss.item(), plain(**one).loss.item()))
    model(**batch()).loss.backward()  # without autocast
    return found


def test_autocast_and_inputs_change_the_dtype_that_crosses_the_stages(pool2: Any) -> None:
    for found in pool2.run(under_autocast):
        for loss, expected in found:
            # bfloat16 has 8 bits, and rows of two micro-batches are summed in another order: half a unit in 2**-8.
            assert abs(loss - expected) <= 2**-9 * expected, found


def cast_to_own(layer: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Give a layer its floating-point inputs in the dtype of its weights."""
    dtype = next(layer.parameters()).dtype

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return tree_map(cast, (args, kwargs))


def partly_in_half(plan: dict[str, Any] | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two losses and the gradients of a model whose first two layers are in float32 and the others in bfloat16."""
    model: Any = build("llama", num_hidden_layers=4).train()
    for layer in model.model.layers[2:].to(torch.bfloat16):
        layer.register_forward_pre_hook(cast_to_own, with_kwargs=True)
    if plan is not None:
        model = mw.to_distributed(model, plan=mw.ParallelPlan(**plan))[0]
    losses = []
    for _ in range(2):  # the second batch crosses boundaries whose dtypes are known
        loss = model(**batch()).loss
        loss.backward()
        losses.append(loss.item())
    if plan is not None:
        return losses, mw.full_gradients(model)
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("schedule", ["1f1b", crossing("zbv")])
def test_stages_may_hand_over_different_dtypes(schedule: str, request: pytest.FixtureRequest) -> None:
    plan = {"pp": 2 if schedule == "zbv" else 4, "schedule": schedule, "gradient_accumulation_steps": 2}
    results = request.getfixturevalue(f"pool{plan['pp']}").run(partly_in_half, plan)
    expected_losses, expected = partly_in_half(None)
    for losses, _ in results:
        assert losses == pytest.approx(expected_losses, rel=2**-8)
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        # bfloat16 has 8 bits, and its matrix products differ in the last one between micro-batches and whole batches.
        assert (results[0][1][name] - gradient).abs().max() <= 2**-6 * largest, name


def tied_and_given_embeddings(plan: dict[str, Any] | None) -> Any:
    """The gradient of a tied weight in bfloat16; only the last stage has one, as a sum in float32. None on rank 1."""
    model: Any = build("qwen3", num_hidden_layers=4, tie_word_embeddings=True).to(torch.bfloat16).train()
    if plan is not None:
        model = mw.to_distributed(model, plan=mw.ParallelPlan(**plan))[0]
    embeddings = torch.randn(4, 10, 32, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    model(inputs_embeds=embeddings, labels=batch()["labels"]).loss.backward()
    if plan is not None:
        return mw.full_gradients(model).get("model.embed_tokens.weight")
    return model.model.embed_tokens.weight.grad


def test_a_tied_weight_without_a_gradient_on_its_first_stage(pool2: Any) -> None:
    expected = tied_and_given_embeddings(None)
    found = pool2.run(tied_and_given_embeddings, PLAN)[0]
    # bfloat16 has 8 bits; the sum over two micro-batches is rounded to them.
    assert (found - expected).abs().max() <= 2**-6 * expected.abs().max()


def with_its_own_loss(plan: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """Whole results of a model whose forward averages over the labels; every data-parallel rank has others."""
    with Float64():
        model: Any = build_family("bart", decoder_layers=4)
        data: Any = [batch()]
        if plan is not None:
            config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), loss_averages_over="labels")
            model, _, data = mw.to_distributed(model, None, data, config=config)
        (rows,) = data
        loss = model(**rows).loss
        loss.backward()
        found = {"loss": loss.detach()} | gradients_of(model, plan)
        with torch.no_grad():
            found["evaluation"] = model.eval()(**rows).loss
        return found


@pytest.mark.parametrize("more", [{"dp": 2}, {"cp": 2}], ids=str)
def test_a_loss_that_the_model_computes_itself(more: dict[str, Any], pool4: Any) -> None:
    expected, results = with_its_own_loss(None), pool4.run(with_its_own_loss, {**PLAN, **more})
    assert results[0].keys() == expected.keys()
    gradients = [x for name, x in expected.items() if name not in ("loss", "evaluation")]
    largest = max(x.abs().max() for x in gradients)
    # Only the order of sums differs, by about 1e-16 per sum.
    off = {name: ((results[0][name] - x).abs().max() / largest).item() for name, x in expected.items()}
    assert max(off.values()) <= 1e-10, off
    assert all(found[name] == results[0][name] for found in results for name in ("loss", "evaluation"))


def refusals() -> dict[str, str]:
    """The message of each thing that a pipeline cannot run; the model must be usable after each."""
    said: dict[str, str] = {}

    def record(name: str, call: Any) -> None:
        try:
            call()
        except ValueError as error:
            said[name] = f"{type(error).__name__}: {error}"
        else:
            said[name] = "no error"

    def plan(**fields: Any) -> Any:
        model = build("llama", num_hidden_layers=4)
        return mw.to_distributed(model, torch.optim.AdamW(model.parameters()), plan=mw.ParallelPlan(**fields))

    uneven: Any = build("llama", num_hidden_layers=4)
    uneven.model.embed_tokens.scale_grad_by_freq = True
    record("frequencies", lambda: mw.to_distributed(uneven, plan="pp2"))
    factored = torch.optim.Adafactor(build("llama").parameters())
    record("optimizer", lambda: check_elementwise(factored, is_trusted=False, plan=mw.ParallelPlan(pp=2)))
    record("more stages than layers", lambda: plan(pp=2, schedule="interleaved", chunks=3))
    record("stages that do not add up", lambda: plan(pp=2, stages=(1, 2)))
    engine = mw.ToDistributedConfig(plan=mw.ParallelPlan(pp=2), engine="DeepSpeed")
    record("deepspeed", lambda: mw.to_distributed(build("llama", num_hidden_layers=4), config=engine))
    model = distributed({"pp": 2, "schedule": "interleaved", "gradient_accumulation_steps": 2})
    model(**batch()).loss.backward()
    ids = batch()["input_ids"]
    record("own loss", lambda: model(input_ids=ids))
    record("hidden states", lambda: model(**batch(), output_hidden_states=True))
    record("cache", lambda: model(**batch(), use_cache=True))
    record("generate", lambda: model.generate(ids, max_new_tokens=2))
    record("copy", lambda: copy.deepcopy(model))
    record("base model", lambda: model.model(input_ids=ids))
    record("logits", lambda: model(**batch()).logits.sum())
    runtime_of(model).logits.in_training = True
    record("loss on logits", lambda: model(**batch()).logits.sum().backward())
    record("loss in eval mode", lambda: model.eval()(input_ids=ids).logits.sum().backward())
    model.train()
    runtime_of(model).logits.in_training = False
    record("state dict", model.state_dict)
    record("optimizer's state dict", plan(pp=2)[1].state_dict)
    record("torch's clipping", lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    with torch.autocast("cpu", dtype=torch.float16):
        record("float16", lambda: model(**batch()))
    record("read of another stage", lambda: parts_of_others(model)[0].norm())
    late = torch.optim.SGD(model.parameters(), lr=0.1)  # not passed to the call
    model(**batch()).loss.backward()
    late.param_groups[0]["lr"] = None
    with pytest.raises(TypeError):
        late.step()
    record("read after a step that raised", lambda: parts_of_others(model)[0].norm())
    split = distributed({**PLAN, "schedule": "zb-h1"})
    split.gradient_checkpointing_enable()
    record("checkpointing", lambda: split(**batch()))
    reentrant = distributed(PLAN)
    reentrant.gradient_checkpointing_enable({"use_reentrant": True})
    record("reentrant", lambda: reentrant(**batch()))
    hooked, kept = distributed(PLAN), []
    for layer in (hooked.model.layers[0], hooked.model.layers[-1]):  # one on each rank
        layer.register_forward_hook(lambda module, args, output: kept.append(output))
    loss = hooked(**batch()).loss
    record("kept activation", lambda: (loss + kept[-1].pow(2).mean()).backward())
    hooked(**batch()).loss.backward()  # what is kept does no harm
    for number, (schedule, layer) in enumerate([("1f1b", 0), ("zbv", 1), ("zbv", 3), ("1f1b", -1)]):
        # One stage alone runs the hook: before the stages know what crosses between them, and after it.
        stopped = distributed({**PLAN, "schedule": schedule})
        for moment in ("at first", "later"):
            handle = stopped.model.layers[layer].register_forward_hook(lambda _, __, x: mw.gather_rows(x))
            record(f"rows {number} {moment}", functools.partial(stopped, **batch()))
            handle.remove()
            stopped(**batch()).loss.backward()
    three = distributed({"pp": 2, "schedule": "interleaved", "gradient_accumulation_steps": 3})
    record("three micro-batches", lambda: three(**batch(rows=6)))
    return said


WORDS = {
    "frequencies": "scale_grad_by_freq",
    "optimizer": "a plan with pp=1",
    "more stages than layers": "has 4 layers",
    "stages that do not add up": "add up",
    "deepspeed": "pp=1",
    "own loss": "pass labels",
    "hidden states": "turn the option off",
    "cache": "use_cache",
    "generate": "save_pretrained",
    "copy": "pp=1",
    "base model": "Call the model that to_distributed returned",
    "logits": "gather_logits=True",
    "loss on logits": "pp=1",
    "loss in eval mode": "pp=1",
    "float16": "no error",
    "torch's clipping": "meshwright.clip_grad_norm_",
    "checkpointing": "gradient_checkpointing_disable",
    "reentrant": "{'use_reentrant': False}",
    "state dict": "another pipeline stage holds model.",
    "optimizer's state dict": "the state of its own stages",
    "read of another stage": "another pipeline stage holds model.",
    "read after a step that raised": "another pipeline stage holds model.",
    "kept activation": "Compute the loss from the model's output",
    "three micro-batches": "a multiple of 2",
    **{f"rows {n} {at}": "mw.gather_rows(x) needs all rows" for n in range(4) for at in ("at first", "later")},
}


def test_what_a_pipeline_cannot_run_is_an_error_on_every_rank(pool2: Any) -> None:
    for said in pool2.run(refusals):
        assert {name: word for name, word in WORDS.items() if word not in said[name]} == {}, said
        assert not [text for text in said.values() if re.search(r"\btp\b|ensor parallel", text)]  # tp is 1


def with_parts_of_rows() -> tuple[dict[str, str], list[int], bool]:
    """Refusals under pp x cp, the bytes of all that this rank sent to another stage, and whether nothing is kept."""
    said: dict[str, str] = {}
    model = distributed({**PLAN, "cp": 2})
    sent: list[int] = []
    send = Links.send

    def counted(self: Links, crossing: tuple[torch.Tensor, ...], receiver: int, **options: Any) -> None:
        sent.append(sum(x.nbytes for x in crossing))
        send(self, crossing, receiver, **options)

    model(**batch()).loss.backward()  # makes the dtypes known that cross the stages
    with mock.patch.object(Links, "send", counted):
        model(**batch(length=9)).loss.backward()
    is_empty = not runtime_of(model).features.find(ContextRegion)._cut
    wrong: dict[str, dict[str, Any]] = {
        "a mask of pairs": {"attention_mask": torch.ones(4, 1, 10, 10, dtype=torch.bool)},
        "some logits": {"logits_to_keep": 1},
    }
    for name, more in wrong.items():
        with pytest.raises(mw.PlanError) as caught:
            model(**batch(), **more)
        said[name] = str(caught.value)
    with pytest.raises(mw.PlanError) as caught:
        mw.to_distributed(build_family("bloom"), plan=mw.ParallelPlan(**PLAN, cp=2))
    said["own attention"] = str(caught.value)
    with torch.no_grad(), pytest.raises(ValueError) as unread:
        model.eval()(**batch()).logits.sum()
    said["logits"] = str(unread.value)
    return said, sent, is_empty


def test_parts_of_rows_cross_the_stages(pool4: Any) -> None:
    """Two micro-batches of two rows: of 9 tokens each rank has two chunks of 3, with 32 channels of 4 bytes."""
    words = {"a mask of pairs": "[rows, tokens]", "some logits": "eval mode", "own attention": "cp=1"}
    for said, sent, is_empty in pool4.run(with_parts_of_rows):
        assert sent == [2 * 6 * 32 * 4] * 2 and is_empty
        assert all(word in said[name] for name, word in (words | {"logits": "gather_logits=True"}).items()), said


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"pp": 2, "zero_stage": 2}, "zero_stage=1"),
        ({"pp": 2, "schedule": "zb-h1", "recompute": "full"}, "schedule='1f1b'"),
        ({"pp": 2, "schedule": "dualpipe"}, "'zbv'"),
        ({"pp": 2, "chunks": 2}, "schedule='interleaved'"),
        ({"pp": 2, "stages": (4,)}, "one number of layers for each stage"),
        ({"pp": 2, "stages": (4, 0)}, "at least 1"),
        ({"stages": (4, 4)}, "pp=1"),
    ],
)
def test_plans_that_no_pipeline_can_run(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(mw.PlanError, match=word.replace("(", r"\(")):
        mw.ParallelPlan(**fields)


def save(folder: str) -> dict[str, torch.Tensor]:
    model = distributed({**PLAN, "schedule": "zbv"}, "gemma2")
    model.save_pretrained(folder)
    return mw.full_state_dict(model)


def test_save_pretrained_writes_the_model_of_one_device(pool2: Any, tmp_path: Path) -> None:
    expected = pool2.run(save, str(tmp_path))[0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in loaded)


def which_have_gradients(plan: dict[str, Any] | None) -> list[list[bool]]:
    """Of each parameter, whether it has a gradient: after a pass, another one, clearing, and a third pass."""
    model: Any = build("llama", num_hidden_layers=4)
    for layer in model.model.layers:
        layer.unused = torch.nn.Parameter(torch.zeros(3))
    model = model if plan is None else mw.to_distributed(model, plan=mw.ParallelPlan(**plan))[0]
    found = []
    for clears in (False, True, False):
        model(**batch()).loss.backward()
        found.append([p.grad is not None for p in model.parameters()])
        if clears:
            model.zero_grad()
            found.append([p.grad is not None for p in model.parameters()])
    return found


def test_a_parameter_without_a_gradient_has_none_on_every_stage(pool2: Any) -> None:
    of_ranks = pool2.run(which_have_gradients, PLAN)
    assert of_ranks == [which_have_gradients(None)] * 2


def other_batch_on_one_stage() -> None:
    model = distributed()
    model(**batch(seed=dist.get_rank()))


def test_another_batch_on_one_stage_is_named(pool2: Any) -> None:
    with pytest.raises(WorkerError, match="compute parts of one model for the same tokens"):
        pool2.run(other_batch_on_one_stage)


def one_stage_raises() -> None:
    model = distributed()
    if dist.get_rank() == 1:
        model.model.layers[3].register_forward_hook(lambda *_: 1 / 0)
    model(**batch())


def test_a_stage_that_fails_is_named_on_the_other(pool2: Any) -> None:
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        pool2.run(one_stage_raises)


def changed_tie() -> None:
    model = distributed(None, "gemma2")
    with torch.no_grad(), reading_shards():
        if dist.get_rank() == 1:
            model.lm_head.weight.add_(1e-3)
    mw.full_state_dict(model)


def test_a_tied_weight_that_differs_between_its_stages_is_named(pool2: Any) -> None:
    with pytest.raises(WorkerError, match=r"embed_tokens\.weight: rank"):
        pool2.run(changed_tie)


def train_two_models_in_turns() -> tuple[list[int], list[float], list[float]]:
    """The number of groups after each call, and the losses of a model in turns with another, and alone."""
    models, counts, losses = [], [], []
    for _ in range(3):
        models.append(distributed({**PLAN, "cp": 2}, "gemma2"))
        counts.append(len(dist.distributed_c10d._world.pg_map))
    for step in range(3):
        losses.append(models[0](**batch(seed=step)).loss.item())
        models[1](**batch(rows=2, length=7, seed=step))
    return counts, losses, [models[2](**batch(seed=step)).loss.item() for step in range(3)]


def test_models_share_the_groups_of_their_ranks(pool4: Any) -> None:
    """A tied model with parts of rows needs channels, a group of the tie, and a group of dp x cp."""
    for counts, losses, alone in pool4.run(train_two_models_in_turns):
        assert counts[0] == counts[1] == counts[2] and losses == alone
