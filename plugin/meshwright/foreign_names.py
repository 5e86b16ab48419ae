"""The names of a ParallelPlan's fields in other frameworks, for error messages."""

from __future__ import annotations

_TP = (
    "tensor_parallel tensor_parallel_size tensor_model_parallel_size tp_size tp_degree mp mp_degree mp_size "
    "model_parallel_size model_parallel autotp_size tp_plan"
)
_DP = (
    "data_parallel data_parallel_size dp_size dp_degree world_size num_processes replicas dp_replicate_size "
    "num_replicas ddp"
)
_PP = "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pp_size pp_degree"
_CP = "context_parallel context_parallel_size cp_size cp_degree context_parallel_degree sequence_parallel_degree"
_ULYSSES = (
    "sequence_parallel_size sp_size ulysses_size ulysses_degree ulysses_parallel_size ulysses_sequence_parallel_size"
)
_RING = "ring_size ring_degree ring_attn_size ring_sequence_parallel_size"
_METHOD = "cp_comm_type cp_comm_strategy cp_rotate_method context_parallel_rotate_method context_method"
_HYBRID = "hierarchical_context_parallel_sizes hybrid_context_parallel"
_SP = "sp enable_sequence_parallel megatron_sp"
_ZERO = "zero stage sharding sharding_stage zero_optimization zero_level use_distributed_optimizer"
_FULL = "fsdp dp_shard_size fsdp_size fully_shard data_parallel_shard_degree sharding_strategy"
_ROWS = (
    "micro_batch microbatch_size micro_batches train_micro_batch_size_per_gpu batch_size micro_batch_size_per_gpu "
    "per_device_train_batch_size mbs"
)
_STEPS = (
    "accumulation accumulation_steps accumulate_steps grad_accum num_micro_batches num_microbatches "
    "gradient_accumulation acc_steps ga"
)
_RECOMPUTE = (
    "gradient_checkpointing activation_checkpointing checkpoint_activations recompute_granularity checkpointing "
    "use_recompute recompute_activations"
)

_REDUCED = "grad_reduce_dtype communication_data_type reduce_scatter_dtype allreduce_dtype grad_comm_dtype comm_dtype"
_RECOMPUTED = "recompute_num_layers num_layers_to_recompute"

PLAN_NAMES: dict[str, str] = {
    name: ours
    for theirs, ours in (
        (_TP, "tp=N"),
        (_DP, "dp=N"),
        (_PP, "pp=N"),
        (_CP, "cp=N"),
        (_ULYSSES, "cp=N, context='ulysses'"),
        (_RING, "cp=N, context='ring'"),
        (_METHOD, "context='gather', 'ulysses', 'ring' or 'hybrid'"),
        (_HYBRID, "cp=N, context='hybrid', ulysses=N"),
        (_SP, "sequence_parallel=True"),
        (_ZERO, "zero_stage=1, 2 or 3"),
        (_FULL, "dp=N, zero_stage=3"),
        (_ROWS, "micro_batch_size=N"),
        (_STEPS, "gradient_accumulation_steps=N"),
        (_RECOMPUTE, "recompute='full'"),
        (_REDUCED, "reduce_dtype='bfloat16'"),
        (_RECOMPUTED, "recompute='full', recomputed_layers=N"),
    )
    for name in theirs.split()
}
