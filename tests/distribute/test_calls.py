"""Calls that people get wrong: each is an error that says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import meshwright as mw
from conformance.families.expert_models import build as build_with_experts
from meshwright.data.loader import DistributedLoader
from meshwright.distribute.check_arguments import explained
from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.faults.together import on_first_rank, succeed_together
from meshwright.roles import plan_for
from meshwright_plan.job.shapes import describe
from support.models import build

pytestmark = pytest.mark.quick

DATA = TensorDataset(torch.zeros(8, 4, dtype=torch.int64))
LOADER = DataLoader(DATA, batch_size=4)
MODEL = nn.Linear(4, 4)
SCALER: Any = torch.amp.GradScaler("cpu")


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(MODEL.parameters(), lr=0.1)


class Rows(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(DATA)


def scheduler() -> Any:
    return torch.optim.lr_scheduler.ConstantLR(optimizer())


def hf_dataset() -> Any:
    import datasets

    return datasets.Dataset.from_dict({"input_ids": [[1, 2]]})


to = mw.to_distributed
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a plan as config": (
        lambda: to(MODEL, config=mw.ParallelPlan(dp=2)),  # type: ignore[arg-type]
        "is a plan, and config takes the options; write plan='dp2 zero0', or config=ToDistributedConfig",
    ),
    "words as config": (lambda: to(MODEL, config="dp2"), "write plan='dp2'"),  # type: ignore[arg-type]
    "a number as config": (lambda: to(MODEL, config=3), "config=3 must be a meshwright.ToDistributedConfig"),  # type: ignore[arg-type]
    "a config as plan": (lambda: to(MODEL, plan=mw.ToDistributedConfig()), r"write config=ToDistributedConfig\("),  # type: ignore[arg-type]
    "two plans": (lambda: to(MODEL, config=mw.ToDistributedConfig(plan="dp2"), plan="tp2"), "both give a plan"),
    "a number as plan": (lambda: to(MODEL, plan=4), "plan=4 is a number and must be a ParallelPlan, its words"),  # type: ignore[arg-type]
    "a class": (lambda: to(nn.Linear), r"not the class Linear; make one: model = Linear\(config\)"),  # type: ignore[arg-type]
    "a name": (lambda: to("gpt2"), r"model = AutoModelForCausalLM.from_pretrained\('gpt2'\)"),  # type: ignore[arg-type]
    "a config for a model": (lambda: to(transformers.LlamaConfig()), r"AutoModelForCausalLM.from_config\(config\)"),
    "an optimizer for a model": (lambda: to(optimizer(), MODEL), r"not a SGD; the order is to_distributed\(model, opt"),
    "a function": (lambda: to(lambda: MODEL), "call it, and pass what it returns"),  # type: ignore[arg-type]
    "nothing": (lambda: to(None), "must be a torch.nn.Module, not a NoneType"),  # type: ignore[arg-type]
    "swapped": (
        lambda: to(MODEL, LOADER, optimizer()),
        "optimizer is a DataLoader and dataloader a SGD: they are swapped; write to_distributed",
    ),
    "no optimizer": (lambda: to(MODEL, LOADER), r"write to_distributed\(model, None, loader\)"),
    "an optimizer class": (lambda: to(MODEL, torch.optim.AdamW), r"make one: AdamW\(model.parameters\(\), lr="),
    "a scheduler": (lambda: to(MODEL, scheduler()), "pass scheduler.optimizer"),
    "a plan by position": (lambda: to(MODEL, "dp2"), r"a plan is passed by name: to_distributed\(model, plan="),
    "a config by position": (lambda: to(MODEL, mw.ToDistributedConfig()), r"write to_distributed\(model, config="),
    "optimizers": (lambda: to(MODEL, [optimizer()]), "pass one optimizer, with groups"),
    "a dataset": (lambda: to(MODEL, None, DATA), r"the dataset itself \(TensorDataset\).*DataLoader\(dataset, batch"),
    "a stream": (lambda: to(MODEL, None, Rows()), r"the dataset itself \(Rows\).*batch_size=None if it yields whole"),
    "a dataset of datasets": (lambda: to(MODEL, None, hf_dataset()), r"the dataset itself \(Dataset\)"),
    "a loader class": (lambda: to(MODEL, None, DataLoader), r"make one: DataLoader\(dataset, batch_size=8\)"),
    "a tensor": (lambda: to(MODEL, None, torch.zeros(2)), "is a Tensor; the order is"),
    "a batch": (lambda: to(MODEL, None, {"input_ids": torch.zeros(2, 2)}), "is a dict; the order is"),
    "devices": (lambda: to(MODEL, device_num=2.0), "device_num must be a positive integer, not 2.0"),  # type: ignore[arg-type]
    "nodes": (lambda: to(MODEL, node_num="1"), "node_num must be a positive integer, not '1'"),  # type: ignore[arg-type]
    "more nodes than processes": (lambda: to(MODEL, node_num=2), "node_num=2 nodes cannot share 1 process"),
    "a compiled forward": (
        lambda: to(with_compiled_forward()),
        r"model.0.forward is a function that torch.compile made.*write model.0.compile\(...\) instead",
    ),
    "a compiled model for an engine": (
        lambda: mw.to_distributed(torch.compile(MODEL), config=mw.ToDistributedConfig(plan="dp1", engine="DeepSpeed")),
        "the model is compiled.*DeepSpeed adds its own hooks.*leave torch.compile out",
    ),
    "two loaders": (
        lambda: to(MODEL, optimizer(), LOADER, loader=LOADER),
        "got dataloader= and loader=, two names of one argument",
    ),
    "samples for a loader": (
        lambda: to(MODEL, loader=[{"input_ids": torch.zeros(8, dtype=torch.int64)}] * 4),
        r"list of 4 single samples: input_ids has the shape \(8,\).*DataLoader\(samples, batch_size=8\)",
    ),
    "samples of numbers": (
        lambda: to(MODEL, loader=[{"input_ids": [1, 2]}]),
        r"input_ids is a list of 2 numbers.*wrap the samples: DataLoader",
    ),
    "a loader of an earlier call": (
        lambda: to(MODEL, optimizer(), DistributedLoader.__new__(DistributedLoader)),
        r"distributed by an earlier call.*Leave it out.*model, optimizer, _ = to_distributed\(model, optimizer\)",
    ),
    "texts for a loader": (lambda: to(MODEL, loader=["a", "b"]), "list of 2 single samples: texts. Tokenize and wrap"),
    "a GradScaler for an optimizer": (lambda: to(MODEL, SCALER), "not a GradScaler; leave it out: .*train in bfloat16"),  # type: ignore[arg-type]
    "a GradScaler for a loader": (lambda: to(MODEL, None, SCALER), "is a GradScaler; leave it out: .*bfloat16"),  # type: ignore[arg-type]
    "a GradScaler after the loader": (
        lambda: to(MODEL, optimizer(), LOADER, SCALER),  # type: ignore[arg-type]
        "device_num must be a positive integer.*Leave the GradScaler out: .*bfloat16",
    ),
    **{
        f"the keyword {name}": (lambda name=name: to(MODEL, **{name: 1}), f"no argument '{name}'; {said}")  # type: ignore[misc]
        for name, said in (
            ("train_dataloader", r"write dataloader=DataLoader\(dataset, batch_size=GLOBAL_BATCH\), or loader="),
            ("device_mesh", "write plan='dp2 tp2'; the mesh is made from the plan"),
            ("mixed_precision", r"leave it out: call model.bfloat16\(\)"),
            ("lr_scheduler", "leave it out: a scheduler over the optimizer keeps working"),
            ("scaler", "leave it out: a GradScaler .* train in bfloat16"),
            ("device_ids", "leave it out: the plan decides"),
            ("model_parameters", r"write optimizer=torch.optim.AdamW\(model.parameters\(\)\)"),
            ("tp", r"write plan=ParallelPlan\(tp=VALUE\)"),
            ("tensor_parallel_size", r"write plan=ParallelPlan\(tp=N\)"),
            ("gather_logits", r"write config=ToDistributedConfig\(gather_logits=VALUE\)"),
            ("nnodes", "write node_num=N"),
            ("optimiser", "write optimizer. Its arguments are model, optimizer, dataloader"),
        )
    },
    "a keyword of shard_dataloader": (
        lambda: mw.shard_dataloader(LOADER, device_mesh=1),  # type: ignore[call-arg]
        "shard_dataloader has no argument 'device_mesh'; write meshes=",
    ),
    **{
        f"the plan {plan}": (lambda plan=plan: to(MODEL, plan=plan), said)  # type: ignore[misc]
        for plan, said in (
            ("--tensor-model-parallel-size 2", "'--tensor-model-parallel-size' is not a word of a plan; write tp2"),
            ('{"zero_optimization": {"stage": 3}}', "no field 'zero_optimization'; write zero_stage=1, 2 or 3"),
            ("full_shard auto_wrap", "'full_shard' is not a word of a plan; write zero3"),
            ("ulysses2", "write cp2\\(ulysses\\)"),
            ("TP 2", "'TP' is not a word of a plan; did you mean tp2?"),
            ("tp: 2", "did you mean tp2?"),
            ("tp2dp1", r"'tp2dp1' is not a word of a plan\. The words are dp2"),
            ("tp2 tp1", "gives tp twice, as 2 and 1; write it once"),
            ("dp-1 tp2", "did you mean dp1?"),
            ("AUTO", "to have a plan picked, write plan='auto', or leave --plan out"),
            ("", "has no words; write for example 'dp2 tp2"),
            ("plans/mine.yaml", "plans/mine.yaml: no such plan; write one with meshwright plan --save"),
            ("dp2 zero1", "needs 2 processes, but 1 were launched; write plan='dp1 zero1', or launch with: torchrun"),
            ("tp2", "needs 2 processes, but 1 were launched; change the sizes of ParallelPlan"),
        )
    },
    "a tuple as plan": (lambda: to(MODEL, plan=(2, 1)), "is a tuple and must be a ParallelPlan, its words"),  # type: ignore[arg-type]
    "words in a dict": (lambda: to(MODEL, plan={"tp": "2"}), r"not '2'; write ParallelPlan\(tp=2\)"),
    "words for a stage": (lambda: mw.ParallelPlan(zero_stage="3"), "zero_stage='3' must be 0, 1, 2 or 3"),  # type: ignore[arg-type]
    "options as config": (lambda: to(MODEL, config={"logging_steps": 1}), "write plan="),  # type: ignore[arg-type]
    "a rate": (lambda: to(MODEL, optimizer(), lr=0.1), "no argument 'lr'; remove it"),  # type: ignore[call-arg]
    "a model on several devices": (
        lambda: to(with_device_map(), plan="dp1"),
        "loaded with device_map, over 2 devices; load it without device_map",
    ),
    "Megatron's name": (
        lambda: mw.ParallelPlan(tensor_model_parallel_size=2),  # type: ignore[call-arg]
        "ParallelPlan has no field 'tensor_model_parallel_size'; write tp=N. Its fields are dp, tp",
    ),
    "DeepSpeed's name": (lambda: mw.ParallelPlan(stage=2), "write zero_stage=1, 2 or 3"),  # type: ignore[call-arg]
    "FSDP's name": (lambda: mw.ParallelPlan(dp_shard_size=2), "write dp=N, zero_stage=3"),  # type: ignore[call-arg]
    "accelerate's name": (lambda: mw.ParallelPlan(tp_size=2), "write tp=N"),  # type: ignore[call-arg]
    "a pipeline": (lambda: mw.ParallelPlan(pipeline_parallel=2), "write pp=N"),  # type: ignore[call-arg]
    "a misspelt field": (lambda: mw.ParallelPlan(zero_stge=2), "write zero_stage"),  # type: ignore[call-arg]
    "by position": (lambda: mw.ParallelPlan(2), r"by position; write ParallelPlan\(dp=2\)"),  # type: ignore[misc]
    "a word for a bool": (
        lambda: mw.ParallelPlan(sequence_parallel="no"),  # type: ignore[arg-type]
        "sequence_parallel='no' is a string and must be True or False",
    ),
    "a number for a bool": (lambda: mw.ParallelPlan(sequence_parallel=1), "must be True or False"),  # type: ignore[arg-type]
    "a bool for a stage": (lambda: mw.ParallelPlan(zero_stage=True), "must be 0, 1, 2 or 3"),
    "a float for a stage": (lambda: mw.ParallelPlan(zero_stage=1.0), "must be 0, 1, 2 or 3"),  # type: ignore[arg-type]
    "a plan's field in the config": (
        lambda: mw.ToDistributedConfig(zero_stage=1),  # type: ignore[call-arg]
        r"ToDistributedConfig has no field 'zero_stage'; write plan=ParallelPlan\(zero_stage=VALUE\)",
    ),
    "a word for a number": (
        lambda: mw.ToDistributedConfig(timeout_s="60"),  # type: ignore[arg-type]
        r"timeout_s='60' must be a number above zero; write ToDistributedConfig\(timeout_s=60.0\)",
    ),
    "another loader option": (lambda: mw.LoaderOptions(shufle=True), "write shuffle"),  # type: ignore[call-arg]
    "a dict of loader options": (
        lambda: mw.ToDistributedConfig(loader={"seed": 1}),  # type: ignore[arg-type]
        "must be a meshwright.LoaderOptions",
    ),
}


def with_device_map() -> nn.Module:
    model = nn.Linear(4, 4)
    model.hf_device_map = {"": 0, "bias": "cpu"}  # type: ignore[assignment]
    return model


def with_compiled_forward() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].forward = torch.compile(model[0].forward)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_fix(name: str) -> None:
    """Row 43 and the calls of list B: raw Python errors, or no error at all."""
    call, message = MISTAKES[name]
    with pytest.raises(PlanError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mw.save_weights("folder", MODEL), r"of type str, not .* write mw.save_weights\(model, directory\)"),  # type: ignore[arg-type]
        (lambda: mw.full_state_dict(optimizer()), r"not a torch.nn.Module; write mw.full_state_dict\(model\)"),  # type: ignore[arg-type]
    ],
)
def test_calls_take_the_model_first(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_config_is_checked_when_it_is_assigned_to() -> None:
    config = mw.ToDistributedConfig()
    config.sequence_parallel = True
    config.plan = "tp2"
    assert config == mw.ToDistributedConfig(plan="tp2", sequence_parallel=True)
    for name, value, message in (
        ("sequence_parallel", "yes", "must be True, False or None"),
        ("sequence_paralel", True, "write sequence_parallel"),
        ("tp", 2, r"write plan=ParallelPlan\(tp=VALUE\)"),
        ("prefer", "speed", "must be 'throughput' or 'memory'"),
        ("gather_logits", 1, "must be True or False"),
    ):
        with pytest.raises(PlanError, match=message):
            setattr(config, name, value)
    assert config == mw.ToDistributedConfig(plan="tp2", sequence_parallel=True)


def test_every_option_has_a_check() -> None:
    """A field that nothing checks is one that takes anything in silence."""
    import dataclasses

    class Foreign:
        pass

    for field in dataclasses.fields(mw.ToDistributedConfig):
        with pytest.raises(PlanError, match=f"ToDistributedConfig.{field.name}"):
            mw.ToDistributedConfig(**{field.name: Foreign()})


def test_what_is_returned_is_not_the_model() -> None:
    """As in ``model = DistributedDataParallel(model)``; a tuple says only that it cannot be called."""
    returned: Any = to(build("llama"), plan="dp1")
    model, none, _ = returned
    assert none is None and isinstance(model, nn.Module) and isinstance(returned, tuple)
    with pytest.raises(TypeError, match="not the model; write model, optimizer, loader = to_distributed"):
        returned(input_ids=torch.zeros(1, 2))
    with pytest.raises(AttributeError, match="no attribute 'train'; write model, optimizer, loader = to_distributed"):
        returned.train()


def test_the_loader_has_two_names() -> None:
    """The README calls it ``loader``."""
    _, none, loader = to(build("llama"), loader=LOADER, plan="dp1")
    assert none is None and [len(batch[0]) for batch in loader] == [4, 4]


@pytest.mark.parametrize("extra", [{}, {"labels": 0}, {"targets": 0}])
def test_batches_without_labels_are_named_at_the_first_one(extra: dict[str, int], caplog: Any) -> None:
    """List B: ``loss.backward()`` of None was all that a user saw."""
    rows = [{"input_ids": torch.arange(4), **{name: torch.arange(4) for name in extra}} for _ in range(4)]
    _, _, loader = mw.to_distributed(build("llama"), None, DataLoader(rows, batch_size=2), plan="dp1")  # type: ignore[arg-type]
    assert len(list(loader)) == 2
    said = caplog.text.count("the loader's batches have input_ids but no labels, so model(**batch).loss is None")
    assert said == (0 if extra else 1)


@pytest.mark.parametrize(("dtype", "times"), [(torch.float16, 1), (torch.bfloat16, 0)])
def test_float16_weights_with_an_optimizer_get_a_word(dtype: torch.dtype, times: int, caplog: Any) -> None:
    """Adam's eps rounds to 0 in float16, and the weights are NaN after a step or two, as on one device."""
    model = build("llama").to(dtype)
    to(model, torch.optim.AdamW(model.parameters()), plan="dp1")
    assert caplog.text.count("weights in float16 (the first is") == times


def optimizer_after_the_call(plan: str) -> list[str]:
    model = build("llama")
    to(model, plan=plan)
    optimizer = torch.optim.AdamW(model.parameters())
    with patch("meshwright.optim.steps.logger.warning") as warning:
        for _ in range(2):
            ids = torch.zeros(2, 4, dtype=torch.int64)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    return [call.args[0] % call.args[1:] for call in warning.call_args_list]


def test_an_optimizer_that_zero_does_not_shard_gets_a_word(pool2: Any) -> None:
    said, nothing = pool2.run(optimizer_after_the_call, "dp2 zero1")
    assert len(said) == 1 and nothing == []
    assert "zero_stage=1 shards nothing: each of the 2 data-parallel ranks keeps the whole" in said[0]
    assert "model, optimizer, _ = meshwright.to_distributed(model, optimizer)" in said[0]
    assert pool2.run(optimizer_after_the_call, "dp2") == [[], []]


# What a model is

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip


def test_models_are_refused_by_what_they_are() -> None:
    """List B: "no role for 21 parameters", of a mixture of experts or an encoder."""
    with torch.device("meta"):
        xlm = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("xlm", emb_dim=64))
        of_layer, of_own_code = build_with_experts("gemma4_text"), build_with_experts("jetmoe")
    for model, said in (
        (
            of_layer,
            r"of 'model.layers.0' to .* plan='tp2\+sp'\. Gemma4.* has experts, and runs without tp: plan='dp2 ep2'",
        ),
        (
            of_own_code,
            r"(?s)no role to 2 param.* JetMoe.* has experts, and runs without tp: plan='dp2 zero3' or plan='pp2'",
        ),
        (xlm, r"is an encoder, not a decoder \(model_type='xlm'\): .* plan='dp2'.*2 stacks of layers"),
    ):
        with pytest.raises(PlanError) as raised:
            from meshwright.parallel.tensor_parallel.structure import describe as take_apart

            take_apart(model, plan_for(model), tp=2, sequence_parallel=False)
        with pytest.raises(PlanError, match=said):
            raise explained(raised.value, Facts(model), ["tp"])
        assert "give a plan" not in str(explained(raised.value, Facts(model), ["tp"]))  # which the user has done
    llama: Any = build("llama")
    error = PlanError("its heads do not divide")
    assert explained(error, Facts(llama), ["tp"]) is error
    llama.is_quantized, llama.quantization_method = True, "bitsandbytes"
    with pytest.raises(PlanError, match=r"is quantised \(bitsandbytes\).*without quantization_config"):
        raise explained(error, Facts(llama), ["tp"])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8, **SIZES}, r"mixture-of-experts model \(num_local_experts=8"),
        ({"model_type": "gemma3", "vision_config": {"a": 1}, "text_config": SIZES}, "get_text_config"),
        (
            {"model_type": "llama4", "vision_config": {"a": 1}, "text_config": {**SIZES, "num_local_experts": 16}},
            r"mixture-of-experts model \(num_local_experts=16\)",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True, **SIZES}, "encoder-decoder"),
        ({"model_type": "roberta", **SIZES}, "an encoder, not a decoder"),
        ({"model_type": "qwen2_audio", "audio_config": {"a": 1}, "text_config": SIZES}, r"multimodal .*audio_config"),
    ],
)
def test_the_planner_refuses_what_the_runtime_does(config: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        describe(config)


def test_a_language_model_inside_another_config_is_planned() -> None:
    assert describe({"model_type": "wrapper", "text_config": {"model_type": "llama", **SIZES}}).hidden == 64


def test_a_multimodal_model_of_transformers() -> None:
    with pytest.raises(PlanError, match="multimodal model"):
        describe(transformers.AutoConfig.for_model("gemma3"))


# Errors keep their class


def fail_on_rank_1(kind: type[Exception], message: str, how: str) -> None:
    def step() -> str:
        if torch.distributed.get_rank() == (1 if how == "together" else 0):
            raise kind(message)
        return "done"

    (succeed_together if how == "together" else on_first_rank)(step)


class OwnError(PlanError):
    pass


def test_an_error_keeps_its_class_on_every_rank(pool2: Any) -> None:
    """List B: a PlanError on one rank reached the others as CheckpointError."""
    for kind, there in (
        (mw.PlanError, "PlanError"),
        (OwnError, "PlanError"),
        (FileNotFoundError, "FileNotFoundError"),
        (KeyError, "KeyError"),
        (torch.OutOfMemoryError, "RuntimeError"),
    ):
        errors = pool2.run_expecting_error(fail_on_rank_1, kind, "no plan", "together")
        assert [name for name, _ in errors] == [there, kind.__name__]
        assert f"rank 1 failed, so every rank stops: {kind.__name__}: " in errors[0][1]
        assert "no plan" in errors[0][1] and "rank 1" not in errors[1][1]
    for how in ("first", "text"):
        errors = pool2.run_expecting_error(fail_on_rank_1, FileNotFoundError, "no profile", how)
        assert [name for name, _ in errors] == ["FileNotFoundError"] * 2
        assert "rank 0 failed" in errors[1][1]
