"""Read measured training runs from a table in the format of ``published_runs.csv``."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from meshwright.errors import PlanError
from meshwright.pipeline.partition import even_stages
from meshwright.pipeline.schedule import check
from meshwright.planner.candidate import Candidate, Job, Precision, Recompute
from meshwright.planner.devices import matmul_peak
from meshwright.planner.hardware import Cluster, Device, device
from meshwright.planner.shapes import ModelShape

COLUMNS = (
    "source", "model", "hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "params_B", "gpu", "n_gpus",
    "gpus_per_node", "seq_len", "global_batch", "micro_batch", "tp", "sp", "cp", "pp", "vp", "dp", "zero_stage",
    "recompute", "precision", "step_time_s", "mem_gb", "oom", "notes",
)  # fmt: skip

_DEVICES = (
    (r"GB200", "gb200"), (r"GB300", "gb300"), (r"B200", "b200"), (r"H200", "h200"), (r"H100.*PCIE", "h100-pcie"),
    (r"H100.*96", "h100-96"), (r"H100", "h100-sxm"), (r"A[18]00.*40", "a100-40"), (r"A[18]00", "a100-80"),
    (r"V100.*16", "v100-16"), (r"V100", "v100-32"), (r"L40S", "l40s"), (r"4090", "rtx-4090"), (r"MI300", "mi300x"),
)  # fmt: skip
# Frameworks that one publisher's table may contain; each is calibrated separately, since their kernels differ.
_FRAMEWORKS = ("maxtext", "paxml", "jax-toolbox")
# Dtypes of the layers' matrix multiplications; "amp_" and what follows in parentheses say what is kept in more bits.
_PRECISIONS: tuple[tuple[str, Precision], ...] = (
    (r"(amp_)?(bf16|fp16|bfloat16|float16)", "bf16"),
    (r"(amp_)?(mx)?(fp8|float8)(-(cs|ds|mx|sc))?", "fp8"),
    (r"(nv|mx)?fp4", "fp4"),
)  # fmt: skip
_BITS = {"bf16": "16-bit", "fp8": "8-bit", "fp4": "4-bit"}
# Notes such as "zero1=8" give the number of ranks that share one optimizer state; -1 is all of them.
_STATE_RANKS = re.compile(r"\bzero[123]\s*=\s*(-?\d+)", re.IGNORECASE)
# Notes such as "4x100Gb/node", "800Gbps inter-node" and "1600 Gbps node-node" give the rate of all cards of a node.
# Notes with "per GPU" give the rate of one device.
_PER_NODE = re.compile(r"(?:(\d+)\s*x\s*)?(\d+)\s*Gb(?:ps|/s)?\s*(?:/node|inter-node|node-node)", re.IGNORECASE)
_PER_GPU = re.compile(r"(\d+)\s*Gb/?p?s\s*\w*\s*per GPU", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured run.

    Args:
        line: number of the run's line in the table.
        group: name of the runs that are calibrated together: a publisher's framework on one device and precision.
        shape: the model.
        cluster: the devices, with the network that the notes state.
        plan: the parallel plan.
        job: the sequence length and the batch.
        seconds: the measured time of a step; None if not stated.
        memory: the measured peak memory of a device in bytes; None if not stated.
        oom: whether the run ran out of memory.
    """

    line: int
    group: str
    shape: ModelShape
    cluster: Cluster
    plan: Candidate
    job: Job
    seconds: float | None
    memory: float | None
    oom: bool

    @property
    def choice(self) -> tuple[Any, ...]:
        """The model, cluster and job; runs that agree in all three are competing plans."""
        shape = self.shape
        model = (shape.name, shape.hidden, shape.layers, shape.heads, shape.ffn)
        return (self.group, *model, self.cluster.gpus, self.job.seq_len, self.job.global_batch)


class _OtherStages(PlanError):
    """A pipeline that the planner cannot lay out, such as one with stages without a layer."""


def read_runs(path: str | Path, left_out: list[str] | None = None) -> list[Run]:
    """Return the runs of a table.

    Args:
        path: a CSV file with at least the columns of ``COLUMNS``.
        left_out: a list to which a line is added for each row whose pipeline the planner cannot lay out; None to raise
            an error.

    Raises:
        PlanError: the file does not exist, a column is missing, or a row is malformed; the message gives the line.
    """
    try:
        with open(path, newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise PlanError(f"{path}: line 1: no column {', '.join(missing)}")
            runs = []
            for row in reader:
                try:
                    runs.append(_run(row, reader.line_num, path))
                except _OtherStages as error:
                    if left_out is None:
                        raise
                    left_out.append(str(error))
            return [_gathered_once(run) for run in _apart(runs)]
    except FileNotFoundError:
        raise PlanError(f"{path}: no such file; give a table in the format of published_runs.csv") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise PlanError(f"{path}: not a CSV file ({error})") from None


def _run(row: Mapping[str, Any], line: int, path: str | Path) -> Run:
    def number(name: str, kind: Callable[[str], Any], default: Any = None) -> Any:
        text = row[name]
        if (text is None or text == "") and default is not None:
            return default
        try:
            value = kind(text)
        except (TypeError, ValueError):
            raise PlanError(f"{path}: line {line}: {name}={text!r} is not a number") from None
        if not 0 <= value < float("inf"):
            raise PlanError(f"{path}: line {line}: {name}={text!r} must not be negative")
        return value

    if None in row or None in row.values():
        raise PlanError(f"{path}: line {line}: the row has more or fewer cells than the header")
    try:
        tp, cp, pp, dp = (number(name, int) for name in ("tp", "cp", "pp", "dp"))
        gpus, batch = (number(name, int) for name in ("n_gpus", "global_batch"))
        # Without a stated micro-batch, a rank's sequences form as many micro-batches as the pipeline has ranks. This is
        # the default of torchtitan (build_pipeline_schedule), whose tables do not state it.
        local, ranks = batch // max(1, dp), max(1, pp)
        micro = number("micro_batch", int, 1 if local % ranks else max(1, local // ranks))
        if tp * cp * pp * dp != gpus:
            raise PlanError(f"{path}: line {line}: tp x cp x pp x dp = {tp * cp * pp * dp} is not n_gpus={gpus}")
        if not micro or batch % (dp * micro):
            raise PlanError(
                f"{path}: line {line}: global_batch={batch} is not a multiple of dp x micro_batch={dp * micro}"
            )
        zero = number("zero_stage", int, 0)
        shard = _state_ranks(row["notes"], dp) if zero else 1
        recompute = row["recompute"] or "none"
        if recompute not in ("none", "selective", "full"):
            raise PlanError(f"{path}: line {line}: recompute={recompute!r} must be none, selective or full")
        shape = _shape(row, number)
        cluster = _cluster(row, gpus, number("gpus_per_node", int, 8))
        precision = _precision(row["precision"])
        matmul_peak(cluster.device, precision)  # raises for a precision that the device lacks
        chunks = number("vp", int, 1) or 1
        schedule = "interleaved" if chunks > 1 else "1f1b"
        try:
            check(schedule, pp, chunks, batch // (dp * micro))
            even_stages(shape.layers, pp * chunks)
        except ValueError as error:
            raise _OtherStages(f"{path}: line {line}: {error}") from None
        words = f"{row['source']} {row['notes']}"
        return Run(
            line=line,
            group=_group(row),
            shape=shape,
            cluster=cluster,
            plan=Candidate(
                replicate=dp // shard,
                shard=shard,
                tp=tp,
                sequence_parallel=bool(number("sp", int, 0)),
                cp=cp,
                context="ring",  # not stated: the default of Megatron-LM and NeMo; torchtitan rotates only gradients
                pp=pp,
                schedule=schedule,
                chunks=chunks,
                micro_batch=micro,
                accumulation=batch // (dp * micro),
                zero_stage=zero,
                recompute=cast(Recompute, recompute),
            ),
            job=Job(
                seq_len=number("seq_len", int),
                global_batch=batch,
                precision=precision,
                # Tables in fp16 and those of Megatron-DeepSpeed predate the wide use of fused attention kernels.
                fused_attention=not (
                    row["precision"] == "fp16" or "Megatron-DeepSpeed" in words or "bigscience" in words
                ),
                gradient_bytes=4 if "fp32 grad" in row["precision"] else 2,
            ),
            seconds=number("step_time_s", float, 0.0) or None,
            memory=number("mem_gb", float, 0.0) * 2**30 or None,
            oom=bool(number("oom", int, 0)),
        )
    except PlanError as error:
        raise error if f"line {line}" in str(error) else PlanError(f"{path}: line {line}: {error}") from None


def _shape(row: Mapping[str, str], number: Callable[..., Any]) -> ModelShape:
    """Return the model, with the MLP (gated or not) and embedding (tied or not) that come closest to the stated size.

    If no size is stated, the MLP is gated and the embedding untied, as in Llama.
    """
    hidden, heads = number("hidden", int), number("heads", int)
    sizes = {
        "name": row["model"] or "model",
        "layers": number("layers", int),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": number("kv_heads", int, heads),
        "head_dim": max(1, hidden // max(1, heads)),
        "ffn": number("ffn", int, 4 * hidden),
        "vocab": number("vocab", int),
    }
    stated = number("params_B", float, 0.0) * 1e9
    forms = [ModelShape(**sizes, gated=gated, tied=tied) for gated in (False, True) for tied in (False, True)]
    return min(forms, key=lambda shape: abs(shape.parameters - stated)) if stated else forms[2]


def _group(row: Mapping[str, str]) -> str:
    words = f"{row['source']} {row['notes']}".lower()
    publisher = row["source"].split()[0]
    if ":" in publisher:  # a URL without a name
        publisher = "BigScience" if "bigscience" in publisher else publisher.split(":")[-1]
    framework = next((f"/{name}" for name in _FRAMEWORKS if name in words), "")
    return f"{publisher}{framework} {row['gpu']} {_BITS[_precision(row['precision'])]}"


def _apart(runs: list[Run]) -> list[Run]:
    """Return the runs with those of ZeRO-3 in groups of their own, where a publisher compares them with pipelines.

    The two are different programs, even of one publisher, so that one calibration does not fit both.
    """
    piped = {run.group for run in runs if run.seconds and run.plan.pp > 1 and run.plan.zero_stage < 3}
    return [
        dataclasses.replace(run, group=run.group.replace(" ", "/zero-3 ", 1))
        if run.plan.zero_stage == 3 and run.group in piped
        else run
        for run in runs
    ]


def _gathered_once(run: Run) -> Run:
    """Return a run of ZeRO-3 with pipeline stages as one of ZeRO-1, whose communication and memory it has.

    In a pipeline, PyTorch's FSDP gathers the weights for the first micro-batch and keeps them (torchtitan's
    ``apply_fsdp``), and reduces the gradients after the last (``torch.distributed.pipelining``'s stages).
    """
    if run.plan.pp == 1 or run.plan.zero_stage != 3:
        return run
    return dataclasses.replace(run, plan=dataclasses.replace(run.plan, zero_stage=1))


def _precision(text: str) -> Precision:
    """Return the precision of the layers' matmuls, by its name in a table."""
    name = text.split("(")[0].strip().lower()
    for pattern, precision in _PRECISIONS:
        if re.fullmatch(pattern, name):
            return precision
    raise PlanError(
        f"precision={text!r} is not known; leave the row out, or write one of bf16, fp16, amp_bf16, fp8, float8, "
        "mxfp8, fp4, nvfp4, mxfp4"
    )


def _state_ranks(notes: str, dp: int) -> int:
    """Return the number of data-parallel ranks that share one optimizer state."""
    found = _STATE_RANKS.search(notes)
    if found is None or (ranks := int(found[1])) == -1 or ranks > dp:
        return dp
    if ranks < 1 or dp % ranks:
        raise PlanError(f"notes: {found[0]!r}: {ranks} ranks do not divide dp={dp}")
    return ranks


def _cluster(row: Mapping[str, str], gpus: int, per_node: int) -> Cluster:
    kind: Device = device(
        next((name for pattern, name in _DEVICES if re.search(pattern, row["gpu"].upper())), row["gpu"])
    )
    slow = None
    if found := _PER_GPU.search(row["notes"]):
        slow = int(found[1]) / 8 * 1e9
    elif found := _PER_NODE.search(row["notes"]):
        slow = int(found[1] or 1) * int(found[2]) / 8 / per_node * 1e9
    if gpus > per_node and gpus % per_node:
        per_node = gpus  # the table does not say how GPUs that do not fill whole nodes are spread
    return Cluster(device=kind, gpus=gpus, gpus_per_node=per_node, slow_link=slow)
