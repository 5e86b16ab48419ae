"""LoRA by PEFT under every plan: the numbers of one process, whole adapters on disk, and refusals by name."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from torch import Tensor

import meshwright as mw
from support import optimizer_files
from support.adapters import needs_add_adapter
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.short_programs import distribute, gradients_of

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "dp2+zero1": {"dp": 2, "zero_stage": 1},
    "tp2+sp x dp2+zero1": {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1},
}
STEPS = 2
METHODS: dict[str, Any] = {
    "IA3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA": VeraConfig(r=4, target_modules=["q_proj", "o_proj"]),
    "LoHa": LoHaConfig(r=3, target_modules=["q_proj", "down_proj"]),
    "AdaLoRA": AdaLoraConfig(target_modules=["q_proj"], init_r=4, target_r=2, total_step=10, tinit=1, tfinal=2),
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16),
}


def adapted(
    family: str = "llama", *, settings: dict[str, Any] | None = None, method: str | None = None, **traits: Any
) -> Any:
    """A model whose adapters are all at work: PEFT starts with lora_B at zero, where lora_A has no gradient."""
    model = build(family, **traits)
    targets = FUSED if family == "phi3" else TARGETS
    config: Any = LoraConfig(**{"r": 3, "lora_alpha": 4, "target_modules": targets, **(settings or {})})
    torch.manual_seed(3)
    model = get_peft_model(model, METHODS[method] if method else config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():
                parameter.normal_(std=0.1)
    return model.double().train()


def train(
    plan: dict[str, Any] | None,
    family: str = "llama",
    *,
    settings: dict[str, Any] | None = None,
    recompute: bool = False,
    merges: bool = False,
    folder: Path | None = None,
    **traits: Any,
) -> dict[str, Tensor]:
    """Losses, first gradients and last weights of a few steps over the adapters."""
    with Float64():
        model = adapted(family, settings=settings, **traits)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        ids = [tokens(4, 11, seed=step) for step in range(STEPS)]
        batches: Any = [{"input_ids": x, "labels": labels_for(x)} for x in ids]
        options = None if plan is None else {**plan, "recompute": "full" if recompute else "none"}
        model, optimizer, batches = distribute(options, model, optimizer, batches)
        found: dict[str, Tensor] = {}
        losses = []
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            if not losses:
                found |= {f"gradient of {n}": g for n, g in gradients_of(model, plan).items()}
            losses.append(loss.detach())
            mw.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if merges:
            model.merge_adapter()
            model.eval()
            found["merged logits"] = model(input_ids=ids[0]).logits.detach()
        if folder is not None:
            model.save_pretrained(folder)
        return found | {"losses": torch.stack(losses)} | mw.full_state_dict(model)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() >= expected.keys() and any("gradient of" in name for name in expected)
    # float64, where only the order of sums differs. A gradient that is not summed over tp is off by about a half, a
    # lora_B that is applied once a rank by as much as the adapters give.
    worst = {name: relative_difference(actual[name], value) for name, value in expected.items()}
    assert max(worst.values()) < 1e-10, max(worst.items(), key=lambda item: item[1])


@pytest.mark.quick
@pytest.mark.parametrize("plan", PLANS)
def test_training_equals_one_process(plan: str, pool2: Any, pool4: Any) -> None:
    pool = pool4 if "x" in plan else pool2
    assert_equal(pool.run(train, PLANS[plan])[0], train(None))


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "rank-stabilised, trained biases": ("tp2+sp", "llama", {"settings": {"use_rslora": True, "bias": "all"}}),
    "one key head, tied": ("tp2", "llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "fused projections": ("tp2+sp", "phi3", {}),
    "head norms, attention only": ("tp2", "qwen3", {"settings": {"target_modules": ["q_proj", "v_proj", "o_proj"]}}),
    "wide norms": ("tp2+sp", "olmo2", {"num_key_value_heads": 1}),
    "bias of column adapters": (
        "tp2",
        "llama",
        {"settings": {"lora_bias": True, "target_modules": ["q_proj", "k_proj", "up_proj"]}},
    ),
    "recomputation": ("tp2+sp", "llama", {"recompute": True}),
    "merged": ("tp2+sp", "llama", {"merges": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_kinds_of_adapters(case: str, pool2: Any) -> None:
    plan, family, options = CASES[case]
    assert_equal(pool2.run(train, PLANS[plan], family, **options)[0], train(None, family, **options))


def each_method(plan: dict[str, Any] | None) -> dict[str, dict[str, Tensor]]:
    return {method: train(plan, method=method) for method in METHODS}


def test_other_methods_train_where_each_rank_has_the_model(pool2: Any) -> None:
    found = [pool2.run(each_method, {"dp": 2, "zero_stage": stage})[0] for stage in (1, 3)]
    for method, expected in each_method(None).items():
        for plan in found:
            assert_equal(plan[method], expected)
    for kind, message in pool2.run_expecting_error(refused, METHODS["prefix tuning"], "dp2 ga2"):
        assert kind == "PlanError" and "PREFIX_TUNING" in message and "micro-batches" in message


def test_adapters_matter() -> None:
    """So that the comparisons above could fail."""
    with_them, without = train(None), train(None, settings={"target_modules": ["q_proj"]})
    assert relative_difference(with_them["losses"], without["losses"]) > 1e-3


def assert_same_files(ours: Path, stock: Path) -> dict[str, Tensor]:
    """That both folders hold the same adapters; returns them."""
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in stock.iterdir())
    saved, wanted = load_file(ours / "adapter_model.safetensors"), load_file(stock / "adapter_model.safetensors")
    assert saved.keys() == wanted.keys()
    assert max(relative_difference(saved[name], value) for name, value in wanted.items()) < 1e-10  # as above
    return saved


@pytest.mark.parametrize("plan", ["tp2+sp", "dp2+zero1"])
def test_saved_adapters_are_whole_and_alone(plan: str, pool2: Any, tmp_path: Path) -> None:
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    pool2.run(train, PLANS[plan], folder=ours)
    expected = train(None, folder=stock)
    assert all("lora_" in name for name in assert_same_files(ours, stock))
    with Float64():
        again = PeftModel.from_pretrained(build("llama").double(), ours)
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.default.weight"
    assert relative_difference(again.state_dict()[name].double(), expected[name]) < 1e-6  # PEFT loads float32


# What only data parallelism can have: adapters of the vocabulary's matrices, and whole modules beside adapters.
ZERO_3: dict[str, dict[str, Any]] = {
    "projections, recomputed": {"recompute": True},
    "of the vocabulary": {"settings": {"target_modules": ["embed_tokens", "q_proj", "lm_head"]}},
    "whole modules beside them": {"settings": {"modules_to_save": ["lm_head", "norm"]}},
}


@pytest.mark.parametrize("case", ZERO_3)
def test_zero_3(case: str, pool2: Any, tmp_path: Path) -> None:
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    plan = {"dp": 2, "zero_stage": 3, "gradient_accumulation_steps": 2}
    assert_equal(pool2.run(train, plan, folder=ours, **ZERO_3[case])[0], train(None, folder=stock, **ZERO_3[case]))
    assert_same_files(ours, stock)


def generate_from_the_decoder() -> tuple[Tensor, Tensor]:
    """The decoder inside PEFT's wrappers; one rank has more words to say than the other."""
    model, _, _ = mw.to_distributed(
        adapted(), config=mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2, zero_stage=3), timeout_s=20)
    )
    prompt = tokens(1, 3 + 4 * torch.distributed.get_rank(), seed=3)
    return prompt, model.eval().get_base_model().generate(prompt, max_length=9, do_sample=False)


def test_the_decoder_generates_alone_under_zero_3(pool2: Any) -> None:
    model = adapted().eval()
    for prompt, text in pool2.run(generate_from_the_decoder):
        assert torch.equal(text, model.generate(input_ids=prompt, max_length=9, do_sample=False))


def completed_late(what: str, plan: dict[str, Any]) -> None:
    """Parameters change between the call that distributes the model and the one with its optimizer."""
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
    model: Any = mw.to_distributed(build("llama"), config=config)[0]
    if what == "wrapped":
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    elif what == "added":
        model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    else:
        model.lm_head.requires_grad_(False)
    mw.to_distributed(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))


@pytest.mark.parametrize(
    ("what", "plan", "words"),
    [
        ("wrapped", {"tp": 2}, ("LlamaForCausalLM", "PeftModel", "wrap it")),
        pytest.param("added", {"tp": 2}, ("lora_A", "added after"), marks=needs_add_adapter),
        ("frozen", {"dp": 2, "zero_stage": 3}, ("requires_grad of lm_head.weight", "zero_stage=2")),
    ],
)
def test_a_distributed_model_is_what_it_is(what: str, plan: dict[str, Any], words: tuple[str, ...], pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(completed_late, what, plan):
        assert kind in ("PlanError", "AlreadyDistributedError") and all(word in message for word in words), message


def native(plan: dict[str, Any] | None, folder: Path) -> dict[str, Tensor]:
    """Adapters that transformers adds itself, without PEFT's wrappers; their optimizer's state is saved too."""
    with Float64():
        model: Any = build("llama")
        model.add_adapter(LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False))
        model = model.double()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        batches: Any = [{"input_ids": tokens(4, 12), "labels": tokens(4, 12)}] * 2
        if plan is not None:
            config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
            model, optimizer, batches = mw.to_distributed(model, optimizer, batches, config=config)
        for batch in batches:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(folder)
        mw.save_optimizer(model, optimizer, folder / "optimizer")
    adapters = {key: x for file in folder.glob("*.safetensors") for key, x in load_file(file).items()}
    return adapters | optimizer_files.contents(folder / "optimizer")[1]


@needs_add_adapter
def test_adapters_that_transformers_adds(pool4: Any, tmp_path: Path) -> None:
    ours = pool4.run(native, PLANS["tp2+sp x dp2+zero1"], tmp_path / "ours")[0]
    stock = native(None, tmp_path / "stock")
    assert ours.keys() == stock.keys() and any("exp_avg" in name for name in stock)
    assert not any("base_layer" in name for name in stock)
    assert max(relative_difference(ours[name], value) for name, value in stock.items()) < 1e-10  # as above


def second_adapter(plan: dict[str, Any] | None) -> dict[str, Tensor]:
    """Under an inferred plan: gradients of the second of two adapters, logits without any, and generated words."""
    with Float64():
        model = adapted()
        inferred = mw.infer_plan(model.get_base_model())
        assert inferred.roles == mw.infer_plan(build("llama")).roles
        settings: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
        model.add_adapter("second", LoraConfig(**settings))
        model.set_adapter("second")
        model = model.double()
        batches: Any = [{"input_ids": tokens(4, 12), "labels": tokens(4, 12)}]
        if plan is not None:
            config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), sharding_plan=inferred)
            model, _, batches = mw.to_distributed(model, None, batches, config=config)
        for batch in batches:
            model(**batch).loss.backward()
        found = {f"gradient of {name}": gradient for name, gradient in gradients_of(model, plan).items()}
        model.eval()
        with model.disable_adapter():
            found["without"] = model(input_ids=tokens(2, 5)).logits.detach()
        words = model.generate(input_ids=tokens(2, 5), max_new_tokens=3, do_sample=False)
        return found | {"words": words.double()}


@pytest.mark.parametrize("plan", ["tp2", "tp2+sp"])
def test_two_adapters_and_an_inferred_plan(plan: str, pool2: Any) -> None:
    expected = second_adapter(None)
    assert all(".second." in name for name in expected if "gradient of" in name)
    assert_equal(pool2.run(second_adapter, PLANS[plan])[0], expected)


def kept(forward: Any, masks: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Run a dropout, and note which elements it keeps. A hook may not be made there after the call."""
    output: Tensor = forward(x)
    masks.setdefault(name, output != 0)
    return output


def dropped(plan: dict[str, Any], *, recompute: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Which elements each adapter's dropout keeps, by module; and the gradients."""
    with Float64():
        model = adapted(settings={"lora_dropout": 0.5})
        options = mw.ParallelPlan(**plan, recompute="full" if recompute else "none")
        model, _, _ = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=options, draws="rank"))
        masks: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            if name.endswith("lora_dropout.default"):
                module.forward = functools.partial(kept, module.forward, masks, name)
        model(input_ids=tokens(2, 12), labels=tokens(2, 12)).loss.backward()
        return masks, mw.full_gradients(model)


@pytest.mark.parametrize("plan", ["tp2", "tp2+sp"])
def test_ranks_drop_the_same_of_what_they_share(plan: str, pool2: Any) -> None:
    (masks, gradients), (others, _) = pool2.run(dropped, PLANS[plan], recompute=False)
    assert len(masks) == 14 and all(0.3 < mask.double().mean() < 0.7 for mask in masks.values())
    shared = {name for name in masks if torch.equal(masks[name], others[name])}
    assert shared == {name for name in masks if "o_proj" not in name and "down_proj" not in name}
    assert len({tuple(masks[name].flatten().tolist()) for name in shared}) == len(shared)
    replayed = pool2.run(dropped, PLANS[plan], recompute=True)[0][1]
    # The same operations on the same masks; other masks would change gradients by their own size.
    assert max(relative_difference(replayed[name], value) for name, value in gradients.items()) < 1e-10


def refused(config: Any, plan: str = "tp2") -> None:
    mw.to_distributed(get_peft_model(build("llama"), config), plan=plan)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LoraConfig(target_modules=["q_proj"], use_dora=True), ("q_proj", "DoraLinearVariant")),
        (LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), ("lm_head", "modules_to_save")),
        (LoraConfig(target_modules=["embed_tokens"]), ("embed_tokens", "Embedding")),
        (LoraConfig(target_modules=["lm_head"]), ("lm_head", "has adapters", "target_modules")),
        (LoraConfig(target_modules=["o_proj"], lora_bias=True), ("o_proj", "lora_bias")),
        (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), ("IA3", "LoraConfig")),
    ],
    ids=["DoRA", "modules_to_save", "embedding", "head", "row bias", "another method"],
)
def test_what_cannot_be_sharded_is_refused_by_name(config: Any, words: tuple[str, ...], pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(refused, config):
        assert kind in ("PlanError", "UncoveredParameterError") and all(word in message for word in words), message


def invoked(plans: list[str]) -> list[float | str]:
    """The loss on one device, and the loss or the error under each plan, of adapters that begin somewhere in a row."""
    ids = tokens(4, 8)
    for row in range(4):
        ids[row, row + 1 : row + 3] = torch.tensor([5, 6])
    batch = {"input_ids": ids, "labels": ids}
    config = LoraConfig(
        task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6], init_lora_weights=False, target_modules=["q_proj"]
    )
    found: list[float | str] = []
    for plan in [None, *plans]:
        torch.manual_seed(3)
        with Float64():
            model: Any = get_peft_model(build("llama"), config).double()
            loader: Any = [batch]
            if plan is not None:
                model, _, loader = mw.to_distributed(model, None, loader, plan=plan)
            try:
                found += [model(**each).loss.item() for each in loader]
            except mw.PlanError as error:
                found.append(str(error))
    return found


def test_hooks_that_peft_adds_for_whole_rows(pool2: Any) -> None:
    for expected, *equal, parted, split in pool2.run(invoked, ["dp2 ga1 mb2", "pp2", "cp2", "pp2 mb2"]):
        assert equal == pytest.approx([expected] * 2, rel=1e-12)  # float64: only the order of sums differs
        assert re.search(r"q_proj has a hook for this call alone .*cp=2 gives it some tokens.*cp=1", parted)
        assert re.search(
            r"q_proj has a hook for this call alone .*one of 2 micro-batches.*micro_batch_size=None", split
        )


def change(method: str, plan: dict[str, Any]) -> None:
    model, _, _ = mw.to_distributed(adapted(), config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))
    getattr(model, method)()


@pytest.mark.parametrize("method", ["merge_and_unload", "unload"])
def test_adapters_stay_in_a_sharded_model(method: str, pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(change, method, {"tp": 2}):
        assert kind == "PlanError" and "merge_adapter()" in message


@pytest.mark.parametrize("method", ["merge_adapter", "merge_and_unload"])
def test_adapters_are_not_merged_into_weights_that_no_rank_has(method: str, pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(change, method, {"dp": 2, "zero_stage": 3}):
        assert kind == "PlanError" and "zero_stage=2" in message
