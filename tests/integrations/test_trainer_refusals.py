"""What MeshwrightTrainer is asked for and cannot do is an error that names the setting, before anything is changed."""

from __future__ import annotations

import runpy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Seq2SeqTrainingArguments, Trainer
from transformers.trainer_pt_utils import AcceleratorConfig

import meshwright as mw
from meshwright.mesh.axes import Axis, Mesh
from meshwright.optim.runtime import Runtime
from meshwright_hf.trainer import MeshwrightTrainer, accelerator
from meshwright_hf.trainer.accelerator import ItemsUse
from meshwright_hf.trainer.checks import check_arguments, check_run, check_trainer, config_of
from meshwright_hf.trainer.folders import place_in_epoch
from support.models import build
from support.trainers import Rows, arguments, fresh_accelerate

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "fsdp": ({"fsdp": True}, "TrainingArguments.fsdp=True.*zero_stage"),
    "deepspeed": (
        {"deepspeed": "ds.json"},
        r"Arguments.deepspeed.*zero_stage.*hf\.deepspeed\.DeepSpeedTrainerMixin",
    ),
    "parallelism_config": (
        {"parallelism_config": SimpleNamespace(tp_size=2, cp_size=1, dp_shard_size=2)},
        r"parallelism_config \(tp_size=2.*ParallelPlan\(tp=2",
    ),
    "liger": ({"use_liger_kernel": True}, "use_liger_kernel=True"),
    "sampling": ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance.*group_by_length"),
    "split batches": (
        {"accelerator_config": AcceleratorConfig(split_batches=True)},
        r"split_batches=True.*per_device_train_batch_size=ROWS // dp",
    ),
    "dispatch batches": (
        {"accelerator_config": AcceleratorConfig(dispatch_batches=True)},
        r"dispatch_batches=True.*LoaderOptions\(source='leader'\)",
    ),
    "every node": ({"save_on_each_node": True}, "save_on_each_node=True.*rank 0"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_contradict_a_plan(name: str) -> None:
    """Row 42, among others: batches that are split or dispatched."""
    changed, message = ARGUMENTS[name]
    with fresh_accelerate():
        args = arguments("unused")
        for key, value in changed.items():
            setattr(args, key, value)
        with pytest.raises(mw.PlanError, match=message):
            check_arguments(args)


@pytest.mark.parametrize("name", ["adamw_torch_xla", "adamw_torch_npu_fused", "lomo", "adalomo"])
def test_optimizers_that_no_plan_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh_accelerate():
        args = arguments("unused")
        args.optim = name
        check_arguments(args)
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(mw.PlanError, match=f"TrainingArguments.optim='{name}' steps .*use optim='ada"):
            check_arguments(args)


def test_plain_arguments_pass() -> None:
    with fresh_accelerate():
        check_arguments(arguments("unused"))
    check_arguments(None)


def test_several_processes_that_the_arguments_do_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh_accelerate():
        args = arguments("unused")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(mw.PlanError, match=r"2 processes were launched.*knows of 1.*use_cpu=True"):
            check_arguments(args)


def test_models_that_are_spread_or_quantised() -> None:
    spread, quantised = build("llama"), build("llama")
    spread.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(mw.PlanError, match="device_map, over 2 devices"):
        mw.to_distributed(spread)
    quantised.is_quantized = True
    trainer: Any = SimpleNamespace(model=quantised, is_fsdp_enabled=False, is_deepspeed_enabled=False)
    with pytest.raises(mw.PlanError, match="quantised"):
        check_trainer(trainer)


@pytest.mark.parametrize("value", [3, ["tp2"], mw.ToDistributedConfig(num_items_in_batch="global")], ids=str)
def test_a_plan_of_another_kind(value: Any) -> None:
    with pytest.raises(mw.PlanError, match=r"meshwright=|num_items_in_batch"):
        config_of(value)


def test_a_plan_that_was_not_launched_leaves_the_model_alone() -> None:
    model = build("llama")
    before = [(name, id(parameter)) for name, parameter in model.named_parameters()]
    with fresh_accelerate(), pytest.raises(mw.PlanError, match="needs 2 processes, but 1 were launched"):
        MeshwrightTrainer(model, arguments("unused"), train_dataset=Rows(4), meshwright=mw.ParallelPlan(tp=2))
    assert before == [(name, id(parameter)) for name, parameter in model.named_parameters()]


def test_an_optimizer_that_is_wrong_on_shards_is_refused() -> None:
    with fresh_accelerate(), pytest.raises(mw.PlanError, match="needs 2 processes"):
        args = arguments("unused", optim="adafactor")
        MeshwrightTrainer(build("llama"), args, train_dataset=Rows(4), meshwright=mw.ParallelPlan(dp=2))


@pytest.mark.parametrize("name", ["compute_loss_func", "label_smoothing_factor"])
def test_a_loss_of_ones_own_over_stages(name: str) -> None:
    """Evaluation works, since the logits are gathered; so a Trainer without rows to train on passes."""
    given = {"compute_loss_func": None, "label_smoother": None}
    given["label_smoother" if "label" in name else name] = print  # type: ignore[assignment]
    runtime = Runtime(mesh=Mesh(pp=Axis("pp", size=2)))
    with fresh_accelerate():
        trainer = SimpleNamespace(args=arguments("unused"), train_dataset=Rows(4), **given)
        with pytest.raises(mw.PlanError, match=rf"{name} computes the loss.*ParallelPlan\.pp=2.*pp=1"):
            check_run(trainer, runtime)
        trainer.train_dataset = None
        check_run(trainer, runtime)


@pytest.mark.parametrize(
    "mesh", [Mesh(pp=Axis("pp", size=2)), Mesh(cp=Axis("cp", size=2), tokens=Axis("dp", size=2))], ids=["pp", "cp"]
)
def test_generating_in_evaluation(mesh: Mesh) -> None:
    with fresh_accelerate():
        args = arguments("unused", kind=Seq2SeqTrainingArguments, predict_with_generate=True)
        trainer: Any = SimpleNamespace(args=args, train_dataset=None)
        with pytest.raises(mw.PlanError, match=r"predict_with_generate=True.*ParallelPlan\.[pc]p=2.*or [pc]p=1"):
            check_run(trainer, Runtime(mesh=mesh))


def test_a_checkpoint_inside_a_step_of_the_new_size() -> None:
    loader = {"epoch": 1, "samples": 24}
    assert place_in_epoch(loader, batch=6, accumulation=2) == (1, 4)
    with pytest.raises(ValueError, match=r"24 rows of epoch 1.*inside a step of 5 x 2 rows"):
        place_in_epoch(loader, batch=5, accumulation=2)


def test_parameters_thawed_before_training() -> None:
    """The optimizer is made with the Trainer, so it would never step them; one process makes it in ``train()``."""
    with fresh_accelerate():
        model = build("llama")
        model.model.layers[0].requires_grad_(False)
        trainer = MeshwrightTrainer(model, arguments("unused", max_steps=1), train_dataset=Rows(4))
        model.model.layers[0].mlp.requires_grad_(True)
        with pytest.raises(mw.PlanError, match=r"layers\.0\.mlp\.\S+ and 5 more.*before the Trainer is made"):
            trainer.train()


def test_a_count_of_items_is_read_by_what_depends_on_its_value() -> None:
    """The plan's own hooks look at the kind of a layer's tensors, and a model may ignore the count that it gets."""
    use = ItemsUse()
    count = use.watch(torch.tensor(8))
    assert count._base is not None and not count.is_floating_point() and count.is_contiguous() and count.numel() == 1
    assert not use.is_read
    assert torch.ones(1) / count == 1 / 8 and use.is_read


def test_a_replaced_compute_loss_does_not_hide_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """With transformers from 5.19 on, the count of items would be divided twice by the ranks with the same rows."""
    own = Trainer.compute_loss
    monkeypatch.setattr(Trainer, "compute_loss", lambda self, *args, **kwargs: own(self, *args, **kwargs))
    imported_later = runpy.run_path(accelerator.__file__)
    assert imported_later["ASKS_FOR_COPIES"] == ("get_tp_size" in own.__code__.co_names)
