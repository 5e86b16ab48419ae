"""Refuses Trainer settings that contradict the plan or would give wrong results on sharded weights.

Each error names the setting.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from meshwright.checkpoint.files.place import local_path
from meshwright.compiling import without_compilation
from meshwright.distribute.attach_optimizer import plan_to_complete
from meshwright.distribute.quantised import is_packed, is_quantised, method_of
from meshwright.errors import PlanError
from meshwright.mesh.process_group import world_size
from meshwright.optim.runtime import Runtime, find_runtime, runtime_of
from meshwright.plan.config import ParallelPlan, ToDistributedConfig


class StockTrainer:
    """The attributes of the Trainer that its mixins use."""

    args: Any  # the class of some Trainers has more fields
    accelerator: Accelerator
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: TrainerState
    control: TrainerControl
    processing_class: Any
    data_collator: Any
    train_dataset: object
    label_smoother: Any
    compute_loss_func: Any
    callback_handler: CallbackHandler
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    deepspeed: Any


def config_of(meshwright: object) -> ToDistributedConfig:
    """Return the ToDistributedConfig for the argument of ``MeshwrightTrainer(meshwright=...)``.

    Raises:
        PlanError: if the argument has another type, or sets an option that the Trainer sets itself.
    """
    if meshwright is None:
        return ToDistributedConfig()
    if isinstance(meshwright, ToDistributedConfig):
        if meshwright.num_items_in_batch != "auto":
            raise PlanError(
                f"ToDistributedConfig.num_items_in_batch={meshwright.num_items_in_batch!r}: the Trainer counts the "
                "items of a step itself; leave it at 'auto'"
            )
        return meshwright
    if isinstance(meshwright, ParallelPlan | Mapping | str | os.PathLike):
        return ToDistributedConfig(plan=meshwright)
    raise PlanError(
        "meshwright= takes a meshwright.ParallelPlan, its words ('dp2 tp2+sp zero1'), a dict of its fields, the path "
        f"of a plan file, 'auto' or a ToDistributedConfig, not {type(meshwright).__name__}"
    )


def arguments_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the TrainingArguments among the arguments of a Trainer; None if there are none."""
    named = kwargs.get("args")
    return named if named is not None else next((x for x in args if hasattr(x, "per_device_train_batch_size")), None)


def check_arguments(args: TrainingArguments) -> None:
    """Raise if a TrainingArguments field works under no plan, before the Trainer uses it.

    Raises:
        PlanError: if there is such a field; the message names it and what to use instead.
        CheckpointError: if ``output_dir`` is a URL, where the Trainer's own files cannot be.
    """
    if args is None:
        return
    local_path(args.output_dir or ".", "TrainingArguments.output_dir")
    for reason in _refusals(args):
        raise PlanError(reason)


_INSIDE_BACKWARD = (
    "steps inside of backward, before gradients are averaged over the ranks; use optim='adafactor' or 'adamw_8bit', "
    "whose states are small too, with ParallelPlan(zero_stage=2), which shards gradients"
)
_ON_ONE_DEVICE = (
    "steps on {} alone, but plans run on CPU and CUDA; use optim='adamw_torch_fused', which has the same formula"
)
REFUSED_OPTIMIZERS = {
    "adamw_torch_xla": _ON_ONE_DEVICE.format("XLA devices"),
    "adamw_torch_npu_fused": _ON_ONE_DEVICE.format("NPUs"),
    "lomo": _INSIDE_BACKWARD,
    "adalomo": _INSIDE_BACKWARD,
}  # a name of the Trainer's -> why no plan of several ranks runs it, and the cure


def _refusals(args: TrainingArguments) -> Iterator[str]:
    world = world_size()
    name = str(getattr(args.optim, "value", args.optim))
    if world > 1 and name in REFUSED_OPTIMIZERS:
        yield f"TrainingArguments.optim={name!r} {REFUSED_OPTIMIZERS[name]}"
    if getattr(args, "fsdp", None):
        yield (
            f"TrainingArguments.fsdp={args.fsdp!r} shards the model, and so does the plan; leave fsdp out and set "
            "ParallelPlan(zero_stage=...), or use transformers.Trainer"
        )
    if getattr(args, "deepspeed", None):
        yield (
            "TrainingArguments.deepspeed makes DeepSpeed shard the optimizer, but ParallelPlan.zero_stage makes "
            "MeshwrightTrainer do it; leave deepspeed out, or use meshwright_hf.deepspeed.DeepSpeedTrainerMixin with "
            "transformers.Trainer"
        )
    if (sizes := getattr(args, "parallelism_config", None)) is not None:
        yield (
            f"TrainingArguments.parallelism_config (tp_size={sizes.tp_size}, cp_size={sizes.cp_size}, "
            f"dp_shard_size={sizes.dp_shard_size}) is a second plan beside meshwright=; leave it out and set "
            f"ParallelPlan(tp={sizes.tp_size}, ...)"
        )
    if args.use_liger_kernel:
        yield (
            "TrainingArguments.use_liger_kernel=True replaces the head and its loss, which the plan shards; leave it "
            "out: the vocabulary-parallel loss keeps no whole logits either"
        )
    if world > 1 and args.auto_find_batch_size:
        yield (
            "TrainingArguments.auto_find_batch_size=True restarts a rank that ran out of memory, while the others "
            "wait for it; set per_device_train_batch_size, which `meshwright plan` can compute"
        )
    if args.train_sampling_strategy == "batch_rebalance":
        yield (
            "TrainingArguments.train_sampling_strategy='batch_rebalance' distributes rows over all processes, "
            "including those that need the same rows; use 'group_by_length'"
        )
    if args.save_on_each_node:
        yield (
            "TrainingArguments.save_on_each_node=True is not available: only rank 0 has the whole weights, and writes "
            "them; leave it out, and set output_dir to a directory that all nodes see"
        )
    if getattr(args.accelerator_config, "split_batches", False):
        yield (
            "TrainingArguments.accelerator_config has split_batches=True, by which per_device_train_batch_size would "
            "be the rows of all ranks, but under a plan it is the rows of each data-parallel rank; leave split_batches "
            "out and divide: per_device_train_batch_size=ROWS // dp"
        )
    if getattr(args.accelerator_config, "dispatch_batches", None):
        yield (
            "TrainingArguments.accelerator_config has dispatch_batches=True, by which rank 0 would read for all ranks, "
            "but under a plan each rank reads its own rows; leave dispatch_batches out. To read once for the ranks "
            "that need the same rows, pass ToDistributedConfig(loader=LoaderOptions(source='leader'))"
        )
    if args.n_gpu > 1:
        yield (
            f"one process sees {args.n_gpu} GPUs, on which the Trainer would use torch's DataParallel; launch one "
            f"process per GPU: torchrun --nproc-per-node {args.n_gpu} SCRIPT"
        )
    if args.world_size != world:
        yield (
            f"{world} processes were launched, but TrainingArguments knows of {args.world_size}; on CPU set "
            "TrainingArguments(use_cpu=True)"
        )


def check_trainer(trainer: StockTrainer) -> None:
    """Raise if a setting of the launcher or of the model contradicts the plan; called after the Trainer is made.

    Raises:
        PlanError: if there is such a setting; the message names it and what to use instead.
    """
    for enabled, name in ((trainer.is_fsdp_enabled, "FSDP"), (trainer.is_deepspeed_enabled, "DeepSpeed")):
        if enabled:
            instead = "meshwright_hf.deepspeed.DeepSpeedTrainerMixin with " if name == "DeepSpeed" else ""
            raise PlanError(
                f"the launcher's config turns {name} on, which shards the model, and so does the plan; launch without "
                f"it and set ParallelPlan(zero_stage=...), or use {instead}transformers.Trainer"
            )
    if without_compilation(trainer.model) is not trainer.model:
        raise PlanError(
            "the model is the wrapper of torch.compile(model). The Trainer chooses the columns of a batch by the names "
            "of forward's arguments, and the wrapper hides them; pass the plain model, and set TrainingArguments("
            "torch_compile=True)"
        )
    if is_quantised(trainer.model) and not is_packed(trainer.model):
        raise PlanError(
            f"the model is quantised ({method_of(trainer.model)}), and weights of this kind cannot be sharded; load it "
            "with BitsAndBytesConfig, or without quantization_config"
        )


def check_distributed(model: nn.Module, optimizer: object, config: ToDistributedConfig, *, trains: bool) -> None:
    """Raise if an optimizer or a plan does not match a model that is already distributed.

    Args:
        model: the distributed model; if it is to be trained, it was distributed with its optimizer.
        optimizer: the Trainer's optimizer; None if the Trainer would make one.
        config: the Trainer's config; its plan may be None.
        trains: whether the model is to be trained.

    Raises:
        PlanError: if the optimizer is not the model's, or the plan differs from the model's plan.
    """
    runtime = runtime_of(model)
    if trains and (optimizer is None or find_runtime(optimizer) is not runtime):
        raise PlanError(
            "the model was distributed together with its optimizer, and only that gets its gradients; pass it as "
            "optimizers=(optimizer, None), or distribute the model without an optimizer and let the Trainer make one"
        )
    plan = plan_to_complete(runtime, model, None, config)
    if plan != runtime.plan:
        raise PlanError(f"the model was distributed by {runtime.plan}, but meshwright= is {plan}; leave meshwright out")


def check_nothing_thawed(model: nn.Module, trained: Collection[str]) -> None:
    """Raise if parameters were frozen when the Trainer was made, but are not frozen when training begins.

    Args:
        model: the Trainer's model.
        trained: the names of the parameters with gradients when the Trainer's optimizer was made.

    Raises:
        PlanError: if there are such parameters; the message names the first one.
    """
    if thawed := [name for name, p in model.named_parameters() if p.requires_grad and name not in trained]:
        raise PlanError(
            f"{thawed[0]} and {len(thawed) - 1} more parameter(s) were frozen when this Trainer was made, so its "
            "optimizer, which is sharded with the model, has none of them. Set requires_grad before the Trainer is "
            "made. To unfreeze parameters later, leave them unfrozen until the Trainer is made, and freeze and "
            "unfreeze them in a callback"
        )


def renew_options(optimizer: Optimizer, fresh: Optimizer, args: TrainingArguments) -> None:
    """Give the groups of a Trainer's optimizer the options of one that was made from the arguments as they are now.

    Args:
        optimizer: the optimizer, which has made no step.
        fresh: an optimizer over the same model, made now.
        args: the Trainer's arguments, for the message.

    Raises:
        PlanError: if they have other classes or other groups, so that the plan would need another optimizer.
    """
    kinds = [type(getattr(made, "optimizer", made)) for made in (optimizer, fresh)]
    if kinds[0] is not kinds[1] or len(optimizer.param_groups) != len(fresh.param_groups):
        raise PlanError(
            f"the arguments changed after this Trainer was made: TrainingArguments.optim={args.optim!s} now makes a "
            f"{kinds[1].__name__} with {len(fresh.param_groups)} groups, but the optimizer that was sharded with the "
            f"model is a {kinds[0].__name__} with {len(optimizer.param_groups)}; set optim and the optimizer's other "
            "arguments before MeshwrightTrainer(...)"
        )
    for group, wanted in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        group.update({name: value for name, value in wanted.items() if name not in ("params", "param_names")})
    optimizer.defaults.update(fresh.defaults)


def check_run(trainer: StockTrainer, runtime: Runtime) -> None:
    """Raise if an argument of a Trainer gives wrong results under the model's plan.

    Raises:
        PlanError: if there is such an argument; the message names it.
    """
    args = trainer.args
    if runtime.mesh.pp.size > 1 and trainer.train_dataset is not None and has_own_loss(trainer):
        named = "compute_loss_func" if trainer.compute_loss_func is not None else "label_smoothing_factor"
        raise PlanError(
            f"{named} computes the loss from the model's outputs, but under ParallelPlan.pp={runtime.mesh.pp.size} the "
            f"backward pass runs inside the model's forward, so the loss must be the model's own. Leave {named} out, "
            "or use pp=1"
        )
    for axis in (runtime.mesh.pp, runtime.mesh.cp):
        if axis.size > 1 and getattr(args, "predict_with_generate", False):
            raise PlanError(
                f"predict_with_generate=True generates in evaluation, but under ParallelPlan.{axis.name}={axis.size} a "
                f"rank has only a part of the keys and values. Set predict_with_generate=False, or {axis.name}=1"
            )
    if runtime.mesh.tp.size > 1 and args.neftune_noise_alpha is not None:
        raise PlanError(
            f"TrainingArguments.neftune_noise_alpha={args.neftune_noise_alpha} adds different noise on each of the "
            f"tp={runtime.mesh.tp.size} ranks that share a row; leave it out, or set ParallelPlan(tp=1)"
        )


def has_own_loss(trainer: StockTrainer) -> bool:
    """Return whether a Trainer's arguments make it compute the loss from the logits, instead of the model."""
    return trainer.compute_loss_func is not None or trainer.label_smoother is not None
