"""Reads and writes a plan in words, "dp2 tp2+sp zero1", and knows the names that other frameworks use."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from typing import Any

from meshwright.errors import PlanError
from meshwright.mesh.rank_grid import PLAN_AXES
from meshwright.plan.fields import nearest

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
_RECOMPUTE_NAMES = (
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
    (_RECOMPUTE_NAMES, "recompute='full'", "recompute=full"),
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


_FORMS = (
    "dp2, tp2, tp2+sp, cp2, cp2(ring), cp2(ulysses), cp4(hybrid-2), ep2, etp2, pp2, zero1, mb4 (4 rows per "
    "micro-batch), mb4x2 (2 micro-batches of 4 rows), ga2 (2 micro-batches), recompute=full, recompute=full(3) (3 "
    "layers of each rank), reduce=bf16 and offload=optimizer"
)
_ABBREVIATIONS = (*PLAN_AXES, "ep", "etp", "sp", "zero", "mb", "ga", "recompute", "reduce", "offload")
_SIZES = {name: name for name in (*PLAN_AXES, "ep", "etp")} | {
    "zero": "zero_stage",
    "ga": "gradient_accumulation_steps",
}
_ASSIGNED = _SIZES | {"sp": "sequence_parallel", "mb": "micro_batch_size", "reduce": "reduce_dtype"}
_SIZE = re.compile(rf"({'|'.join(_SIZES)}|mb)(\d+)(?:x(\d+))?(?:\(([\w-]+)\))?((?:\+sp)?)")
_RECOMPUTE = re.compile(r"recompute=(none|selective|full)(?:\((\d+)\))?")
_REDUCE = re.compile(r"reduce(?:_dtype)?=(bf16|bfloat16|none)")
_STAGES = re.compile(r"stages=(\d+(?:x\d+)?(?:-\d+(?:x\d+)?)*)")  # "3x2-2": 3, 3 and 2 layers
_SEPARATOR = re.compile(r"[\s,]+(?:x\s+)?")


def parse_plan(text: str, source: str = "the plan") -> dict[str, object]:
    """Return the fields of ``ParallelPlan`` that a plan in words sets.

    Field names work too: "tp=2 sequence_parallel=true".

    Args:
        text: the plan, as the planner prints it.
        source: where the text comes from, for messages.

    Raises:
        PlanError: if a word is unknown, or two words set one field to different values.

    Example:
        >>> parse_plan("dp2 tp2+sp zero1")
        {'dp': 2, 'tp': 2, 'sequence_parallel': True, 'zero_stage': 1}
    """
    fields: dict[str, object] = {}
    words = [word for word in _SEPARATOR.split(text.strip()) if word]
    if not words:
        raise PlanError(f"{source} {text!r} has no words; write for example 'dp2 tp2+sp zero1'")
    for word in words:
        for name, value in _fields_of(word, text, source).items():
            if fields.get(name, value) != value:
                raise PlanError(f"{source} {text!r} gives {name} twice, as {fields[name]} and {value}; write it once")
            fields[name] = value
    if not fields.get("zero_stage"):
        fields.pop("replicate", None)  # without ZeRO all ranks are replicas
    return fields


def format_plan(fields: Mapping[str, Any], *, accumulation: int | None = None) -> str:
    """Return fields of ``ParallelPlan`` as words that ``parse_plan`` reads; missing fields have their defaults.

    Args:
        fields: the fields.
        accumulation: the number of micro-batches, if the batch is known; it is shown with their size, as in "mb1x8".

    Example:
        >>> format_plan({"dp": 2, "tp": 2, "sequence_parallel": True, "recompute": "full"})
        'dp2 tp2+sp zero0 recompute=full'
        >>> format_plan({"recompute": "full", "recomputed_layers": 3})
        'dp1 zero0 recompute=full(3)'
        >>> format_plan({"pp": 4, "schedule": "zb-h1", "micro_batch_size": 1})
        'dp1 pp4(zb-h1) zero0 mb1'
        >>> format_plan({"dp": 2, "reduce_dtype": "bfloat16"})
        'dp2 zero0 reduce=bf16'
    """
    words = [f"dp{fields.get('dp', 1)}"]
    if 1 < (replicate := fields.get("replicate", 1)) < fields.get("dp", 1):
        words[0] += f"({replicate}x{fields['dp'] // replicate})"
    if fields.get("tp", 1) > 1 or fields.get("sequence_parallel"):
        words.append(f"tp{fields.get('tp', 1)}" + ("+sp" if fields.get("sequence_parallel") else ""))
    if fields.get("cp", 1) > 1:
        words.append(context_word(fields["cp"], fields.get("context", "gather"), fields.get("ulysses")))
    if fields.get("ep", 1) > 1:
        words.append(f"ep{fields['ep']}")
    if fields.get("etp", 1) > 1:
        words.append(f"etp{fields['etp']}")
    if fields.get("pp", 1) > 1:
        words += _pipeline_words(fields)
    words.append(f"zero{fields.get('zero_stage', 0)}")
    if fields.get("micro_batch_size") is not None:
        words.append(f"mb{fields['micro_batch_size']}" + ("" if accumulation is None else f"x{accumulation}"))
    if fields.get("gradient_accumulation_steps", 1) > 1:
        words.append(f"ga{fields['gradient_accumulation_steps']}")
    if fields.get("recompute", "none") != "none":
        layers = fields.get("recomputed_layers")
        words.append(f"recompute={fields['recompute']}" + ("" if layers is None else f"({layers})"))
    if fields.get("reduce_dtype") is not None:
        words.append("reduce=bf16")
    if fields.get("offload") is not None:
        words.append(f"offload={fields['offload']}")
    return " ".join(words)


def context_word(cp: int, method: str, ulysses: int | None) -> str:
    """Return the word for context parallelism.

    Example:
        >>> context_word(4, "gather", None), context_word(4, "ring", None), context_word(8, "hybrid", 2)
        ('cp4', 'cp4(ring)', 'cp8(hybrid-2)')
    """
    of_method = {"gather": "", "hybrid": f"(hybrid-{ulysses})"}.get(method, f"({method})")
    return f"cp{cp}{of_method}"


def _pipeline_words(fields: Mapping[str, Any]) -> list[str]:
    schedule = fields.get("schedule", "1f1b")
    of_schedule = f"x{fields.get('chunks') or 2}" if schedule == "interleaved" else f"({schedule})"
    words = [f"pp{fields['pp']}" + ("" if schedule == "1f1b" else of_schedule)]
    if fields.get("stages") is not None:
        runs = ((count, len(list(run))) for count, run in itertools.groupby(fields["stages"]))
        words.append("stages=" + "-".join(str(count) + (f"x{times}" if times > 1 else "") for count, times in runs))
    return words


def is_plan_text(text: str) -> bool:
    """Return whether a string is a plan in words, perhaps a misspelt one, rather than the path of a plan file."""
    first, _, second = text.strip().partition(" ")
    begins = re.match(r"[A-Za-z_]+(?=[\d=])|sp\b", first)
    if "/" in text or "." in text:
        return False
    return begins is not None or bool(second) or (word_for(first) is not None and not os.path.exists(text))


def _fields_of(word: str, text: str, source: str) -> dict[str, object]:
    lower = word.lower()
    if lower in ("sp", "+sp"):
        return {"sequence_parallel": True}
    if recompute := _RECOMPUTE.fullmatch(lower):
        kind, layers = recompute.groups()
        return {"recompute": kind} | ({"recomputed_layers": int(layers)} if layers else {})
    if reduce := _REDUCE.fullmatch(lower):
        return {"reduce_dtype": None if reduce.group(1) == "none" else "bfloat16"}
    if size := _SIZE.fullmatch(lower):
        fields = _sizes(*size.groups())
        if fields is not None:
            return fields
    if stages := _STAGES.fullmatch(lower):
        runs = [run.partition("x") for run in stages.group(1).split("-")]
        return {"stages": [int(count) for count, _, times in runs for _ in range(int(times or 1))]}
    name, equals, value = word.lstrip("-").partition("=")
    if equals and name and value:
        return {_ASSIGNED.get(name.lower(), name): _value(value)}
    if (ours := word_for(lower)) is not None and ours != lower:
        raise PlanError(f"{source} {text!r}: {word!r} is not a word of a plan; write {ours}. The words are {_FORMS}")
    letters = re.split(r"[\d=]", lower)[0]
    near, rest = nearest(letters, _ABBREVIATIONS, cutoff=0.5), lower[len(letters) :] or "2"
    hint = f"; did you mean {near}{rest}?" if near and near + rest != lower else "."
    raise PlanError(f"{source} {text!r}: {word!r} is not a word of a plan{hint} The words are {_FORMS}")


def _sizes(axis: str, size: str, times: str | None, inner: str | None, sequence: str) -> dict[str, object] | None:
    """Return the fields of a word such as "tp2+sp"; None if its parts cannot be combined."""
    has = (times is not None, inner is not None, bool(sequence))
    if axis == "mb" and has in ((False, False, False), (True, False, False)):
        # In the planner's tables, a single micro-batch ("x1") means the whole batch.
        return {"micro_batch_size": None if times is not None and int(times) == 1 else int(size)}
    fields: dict[str, object] = {_SIZES[axis]: int(size)} if axis in _SIZES else {}
    if not any(has):
        return fields
    if axis == "tp" and has == (False, False, True):
        return fields | {"sequence_parallel": True}
    if axis == "pp" and has == (True, False, False):
        return fields | {"schedule": "interleaved", "chunks": int(times or 1)}
    if axis == "pp" and has == (False, True, False):
        return fields | {"schedule": inner}
    if axis == "cp" and has == (False, True, False):
        hybrid = re.fullmatch(r"hybrid-(\d+)", inner or "")
        return fields | ({"context": "hybrid", "ulysses": int(hybrid.group(1))} if hybrid else {"context": inner})
    factors = re.fullmatch(r"(\d+)x\d+", inner or "")
    if axis == "dp" and factors and has == (False, True, False):
        return fields | {"replicate": int(factors.group(1))}
    return None


def _value(text: str) -> object:
    """Return the value of the text after ``name=``; booleans and None are spelled as in YAML."""
    words = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False, "none": None}
    return int(text) if re.fullmatch(r"-?\d+", text) else words.get(text.lower(), text)
