"""The names that other frameworks use for a plan, its fields and the arguments of a call, for error messages."""

from __future__ import annotations

import re

_TP = (
    "tensor_parallel tensor_parallel_size tensor_model_parallel_size tp_size tp_degree mp mp_degree mp_size "
    "model_parallel_size model_parallel autotp_size tp_plan"
)
_DP = (
    "data_parallel data_parallel_size dp_size dp_degree world_size num_processes replicas dp_replicate_size "
    "num_replicas ddp dp_replicate no_shard"
)
_PP = "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pp_size pp_degree"
_CP = "context_parallel context_parallel_size cp_size cp_degree context_parallel_degree sequence_parallel_degree"
_ULYSSES = (
    "sequence_parallel_size sp_size ulysses_size ulysses_degree ulysses_parallel_size ulysses_sequence_parallel_size"
)
_RING = "ring_size ring_degree ring_attn_size ring_sequence_parallel_size"
_METHOD = "cp_comm_type cp_comm_strategy cp_rotate_method context_parallel_rotate_method context_method"
_HYBRID = "hierarchical_context_parallel_sizes hybrid_context_parallel"
_EP = (
    "expert_parallel expert_parallel_size expert_model_parallel_size ep_size ep_degree expert_parallel_degree "
    "enable_expert_parallel moe_ep_size moe_expert_parallel_size autoep_size"
)
_ETP = "expert_tensor_parallel expert_tensor_parallel_size etp_size"
_SP = "sp enable_sequence_parallel megatron_sp"
_ZERO = "zero z stage deepspeed sharding sharding_stage zero_optimization zero_level use_distributed_optimizer"
_FULL = (
    "fsdp hsdp dp_shard dp_shard_size fsdp_size fully_shard full_shard hybrid_shard data_parallel_shard_degree "
    "sharding_strategy"
)
_ROWS = (
    "micro_batch microbatch_size micro_batches train_micro_batch_size_per_gpu batch_size micro_batch_size_per_gpu "
    "per_device_train_batch_size mbs"
)
_STEPS = (
    "accumulation accumulation_steps accumulate_steps grad_accum num_micro_batches num_microbatches "
    "gradient_accumulation acc_steps ga gas"
)
_RECOMPUTE = (
    "gradient_checkpointing activation_checkpointing checkpoint_activations recompute_granularity checkpointing "
    "use_recompute recompute_activations ac"
)

_REDUCED = "grad_reduce_dtype communication_data_type reduce_scatter_dtype allreduce_dtype grad_comm_dtype comm_dtype"
_OFFLOADED = "optimizer_cpu_offload offload_optimizer optimizer_offload cpu_offload_optimizer offload_optimizer_device"
_RECOMPUTED = "recompute_num_layers num_layers_to_recompute"

# The names, the field to write in Python, and the word to write in a plan in words, with N for the number.
_GROUPS = (
    (_TP, "tp=N", "tpN"),
    (_DP, "dp=N", "dpN"),
    (_PP, "pp=N", "ppN"),
    (_CP, "cp=N", "cpN"),
    (_ULYSSES, "cp=N, context='ulysses'", "cpN(ulysses)"),
    (_RING, "cp=N, context='ring'", "cpN(ring)"),
    (_METHOD, "context='gather', 'ulysses', 'ring' or 'hybrid'", "cpN(ring)"),
    (_HYBRID, "cp=N, context='hybrid', ulysses=N", "cp4(hybrid-2)"),
    (_EP, "ep=N", "epN"),
    (_ETP, "etp=N", "etpN"),
    (_SP, "sequence_parallel=True", "tpN+sp"),
    (_ZERO, "zero_stage=1, 2 or 3", "zeroN"),
    (_FULL, "dp=N, zero_stage=3", "zero3"),
    (_ROWS, "micro_batch_size=N", "mbN"),
    (_STEPS, "gradient_accumulation_steps=N", "gaN"),
    (_RECOMPUTE, "recompute='full'", "recompute=full"),
    (_OFFLOADED, "zero_stage=1, offload='optimizer'", "offload=optimizer"),
    (_REDUCED, "reduce_dtype='bfloat16'", "reduce=bf16"),
    (_RECOMPUTED, "recompute='full', recomputed_layers=N", "recompute=full(N)"),
)
PLAN_NAMES: dict[str, str] = {name: ours for theirs, ours, _ in _GROUPS for name in theirs.split()}
# Names that only a plan in words has.
_WORDS = {name: word for theirs, _, word in _GROUPS for name in theirs.split()} | {
    "shard_grad_op": "zero2", "distopt": "zero1", "distributed_optimizer": "zero1", "tensor": "tpN",
    "pipeline": "ppN", "ulysses": "cpN(ulysses)", "ring": "cpN(ring)", "context": "cpN",
}  # fmt: skip
_VERSIONS = ("fsdp1", "fsdp2")  # whose number is a part of the name


def word_for(text: str) -> str | None:
    """Return the word of a plan for a word of another framework; None if it is not known.

    Example:
        >>> word_for("fsdp2"), word_for("fsdp8"), word_for("zero-3"), word_for("mp4"), word_for("quick")
        ('zero3', 'dp8 zero3', 'zero3', 'tp4', None)
    """
    parts = re.fullmatch(r"[-_]*([a-z][a-z_]*?)[_=:]?(\d+)?", text.strip().lower().replace("-", "_"))
    if parts is None or (word := _WORDS.get(parts[1])) is None:
        return None
    name, number = parts.groups()
    if word == "zero3" and number and name + number not in _VERSIONS:
        return f"dp{number} zero3"
    return word.replace("N", number or ("1" if word == "zeroN" else "2"))


_PRECISION = (
    "precision mixed_precision mixed_precision_policy mp_policy dtype torch_dtype amp autocast fp16 bf16 fp8 "
    "param_dtype"
)
_SCHEDULER = "scheduler lr_scheduler schedulers lr_schedulers"
_LOADER = (
    "train_dataloader train_loader training_dataloader dataloaders train_dataloaders data_loader trainloader "
    "data_loaders training_data train_data train_dataset dataset data"
)
_WRAPPED = (
    "auto_wrap_policy reshard_after_forward backward_prefetch forward_prefetch "
    "use_orig_params ignored_modules limit_all_gathers sync_module_states parallelize_plan shard_placement_fn"
)
_DDP = "device_ids output_device find_unused_parameters static_graph gradient_as_bucket_view broadcast_buffers"
NO_SCALER = (
    "a GradScaler stays as it is: scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); or train in "
    "bfloat16, which needs none: model.bfloat16(), or torch.autocast('cuda', dtype=torch.bfloat16)"
)
# Keywords of other frameworks' calls that make a model parallel -> what to write in ``to_distributed``.
CALL_NAMES: dict[str, str] = {
    name: ours
    for theirs, ours in (
        (_LOADER, "dataloader=DataLoader(dataset, batch_size=GLOBAL_BATCH), or loader="),
        (_PRECISION, "leave it out: call model.bfloat16() before, or run the forward pass under torch.autocast"),
        (_SCHEDULER, "leave it out: a scheduler over the optimizer keeps working as on one device"),
        ("scaler grad_scaler gradscaler", f"leave it out: {NO_SCALER}"),
        (
            "mesh device_mesh meshes process_mesh mpu process_group parallelism_config",
            "plan='dp2 tp2'; the mesh is made from the plan",
        ),
        ("offload_policy cpu_offload", "plan='dp2 zero3 offload=optimizer', which keeps the optimizer on the host"),
        (_WRAPPED, "leave it out: the plan decides, as in plan='dp2 zero3'"),
        (_DDP, "leave it out: the plan decides, as in plan='dp2'"),
        ("optim optimizers model_optimizer", "optimizer="),
        ("model_parameters params", "optimizer=torch.optim.AdamW(model.parameters())"),
        ("net module model_or_models", "model="),
        ("args options kwargs config_params ds_config deepspeed_config", "config=ToDistributedConfig(...)"),
        ("strategy parallel_plan parallel parallelism tp_plan", "plan='dp2 tp2+sp zero1'"),
        ("nproc nproc_per_node num_gpus gpus devices num_devices gpus_per_node ngpus world_size num_processes",
         "device_num=N, the devices per node"),
        ("nnodes num_nodes nodes num_machines", "node_num=N"),
        ("bucket_cap_mb bucket_size", "config=ToDistributedConfig(bucket_size_mb=VALUE)"),
        ("torch_compile compile_model", "config=ToDistributedConfig(compile='layers')"),
        ("max_grad_norm gradient_clipping max_norm clip_grad clip_grad_norm",
         "mw.clip_grad_norm_(model, VALUE) between backward() and step()"),
        ("loss loss_fn loss_func criterion",
         "leave it out: compute the loss in the loop, or say what the model's averages over: "
         "config=ToDistributedConfig(loss_averages_over='rows')"),
        ("timeout", "config=ToDistributedConfig(timeout_s=VALUE)"),
        ("checkpoint ckpt load resume pretrained", "config=ToDistributedConfig(weights=PATH), or mw.load_checkpoint"),
    )
    for name in theirs.split()
}  # fmt: skip
