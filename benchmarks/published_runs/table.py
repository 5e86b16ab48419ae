"""Read measured training runs from a table in the format of ``published_runs.csv``."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.published_runs.moe import Experts
from benchmarks.published_runs.other_runtimes import OtherJob, other_peak
from benchmarks.published_runs.table_words import (
    device_of,
    precision_of,
    recompute_of,
    recomputes_whole,
    why_not_trained_whole,
    yes_or_no,
    zero_stage_of,
)
from meshwright.errors import PlanError
from meshwright.plan.partition import even_stages
from meshwright.plan.schedule import check
from meshwright_plan.job.candidate import Candidate
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.machine.devices import matmul_peak
from meshwright_plan.machine.hardware import Cluster

COLUMNS = (
    "source", "model", "hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "params_B", "gpu", "n_gpus",
    "gpus_per_node", "seq_len", "global_batch", "micro_batch", "tp", "sp", "cp", "pp", "vp", "dp", "zero_stage",
    "recompute", "precision", "step_time_s", "mem_gb", "oom", "notes",
)  # fmt: skip

# Frameworks that one publisher's table may contain; each is calibrated separately, since their kernels differ.
_FRAMEWORKS = ("maxtext", "paxml", "jax-toolbox")
_LINE = re.compile(r": line (\d+): ")
_REASONS = 12  # largest number of reasons that are listed
_SHOWN = 6  # largest number of lines of dropped rows that are listed for one reason
# Estimated over available memory from which a run cannot have been as it is read: other frameworks keep up to 1.4
# times less than the estimate, and more in most cases (evidence/planner.md).
_FAR_TOO_MUCH = 2.0
# Stated weights over those that the sizes imply; a dense row of a published table is at most a tenth above it.
_TOO_LARGE = 1.5
_SIZES = ("n_gpus", "gpus_per_node", "seq_len", "global_batch", "tp", "cp", "pp", "dp")
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
    job: OtherJob
    seconds: float | None
    memory: float | None
    oom: bool

    @property
    def choice(self) -> tuple[Any, ...]:
        """The model, cluster and job; runs that agree in all three are competing plans."""
        shape = self.shape
        model = (shape.name, shape.hidden, shape.layers, shape.runs[0].heads, shape.runs[0].ffn)
        return (self.group, *model, self.cluster.gpus, self.job.seq_len, self.job.global_batch)


def read_runs(path: str | Path, dropped: list[str] | None = None) -> list[Run]:
    """Return the runs of a table.

    Args:
        path: a CSV file with at least the columns of ``COLUMNS``.
        dropped: a list to which a line is added for each row that the planner cannot use: a word that is not known, a
            number that does not fit the others, experts whose number is not stated. None raises the first as an error.

    Raises:
        PlanError: the file does not exist, a column is missing, or no row can be used; with ``dropped=None`` also if
            any row cannot be used. The message gives the line.
    """
    rows = 0
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte order mark
            reader = csv.DictReader(file)
            reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
            missing = [name for name in COLUMNS if name not in reader.fieldnames]
            if missing:
                raise PlanError(f"{path}: line 1: no column {', '.join(missing)}")
            runs = []
            for row in reader:
                rows += 1
                try:
                    runs.append(_run(row, reader.line_num, path))
                except PlanError as error:
                    if dropped is None:
                        raise
                    dropped.append(str(error))
    except FileNotFoundError:
        raise PlanError(f"{path}: no such file; give a table in the format of published_runs.csv") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise PlanError(f"{path}: not a CSV file ({error})") from None
    if not runs:
        what = "".join(f"\n  {line}" for line in summary(dropped or ()))
        raise PlanError(f"{path}: none of its {rows} rows can be used, so there is nothing to compare{what}")
    return [_gathered_once(run) for run in _apart(runs)]


def _check_fits(run: Run) -> None:
    """Raise if a run needs far too much memory even if it recomputes all layers, so its sizes are not what is read."""
    leanest = dataclasses.replace(run.plan, recompute="full")
    share = other_peak(run.shape, leanest, run.job).total / run.cluster.device.memory
    if share > _FAR_TOO_MUCH:
        raise PlanError(
            f"the row needs {share:.1f} times the device's memory even if all layers are recomputed; correct "
            "micro_batch, the plan or the device"
        )


def summary(dropped: Iterable[str]) -> list[str]:
    """Return a line for each reason why rows of a table were dropped, the commonest first, with the rows' lines.

    Example:
        >>> summary(["a.csv: line 2: gpu='x' is not known", "a.csv: line 5: gpu='x' is not known"])
        ["a.csv: lines 2, 5: gpu='x' is not known"]
    """
    lines: dict[tuple[str, str], list[str]] = {}
    for text in dropped:
        path, line, why = _LINE.split(text, maxsplit=1)
        lines.setdefault((path, why), []).append(line)
    ordered = sorted(lines.items(), key=lambda item: -len(item[1]))
    rest = sum(len(found) for _, found in ordered[_REASONS:])
    shown = [
        f"{path}: line{'s' * (len(found) > 1)} {', '.join(found[:_SHOWN])}"
        + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
        + f": {why}"
        for (path, why), found in ordered[:_REASONS]
    ]
    return shown + [f"and {rest} more rows for {len(ordered) - _REASONS} other reasons"] * bool(rest)


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
        if not value and name in _SIZES:
            raise PlanError(f"{path}: line {line}: {name}={text!r} must be at least 1")
        return value

    if None in row or None in row.values():
        raise PlanError(f"{path}: line {line}: the row has more or fewer cells than the header")
    # pandas writes the whole numbers of a column with empty cells as 8.0.
    row = {name: re.sub(r"^(\d+)\.0+$", r"\1", cell.strip()) for name, cell in row.items()}
    try:
        if (reason := why_not_trained_whole(row)) is not None:
            raise PlanError(reason)
        tp, cp, pp, dp = (number(name, int) for name in ("tp", "cp", "pp", "dp"))
        gpus, batch = (number(name, int) for name in ("n_gpus", "global_batch"))
        # Without a stated micro-batch, a rank's sequences form as many micro-batches as the pipeline has ranks. This is
        # the default of torchtitan (build_pipeline_schedule), whose tables do not state it.
        local, ranks = batch // max(1, dp), max(1, pp)
        micro = number("micro_batch", int, 1 if local % ranks else max(1, local // ranks))
        experts = Experts.of(row)
        ep = 1 if experts is None else experts.ep
        if tp * cp * dp % max(1, ep):
            raise PlanError(f"{path}: line {line}: ep={ep} does not divide tp x cp x dp = {tp * cp * dp}")
        if tp * cp * pp * dp != gpus:
            raise PlanError(f"{path}: line {line}: tp x cp x pp x dp = {tp * cp * pp * dp} is not n_gpus={gpus}")
        if not micro or batch % (dp * micro):
            raise PlanError(
                f"{path}: line {line}: global_batch={batch} is not a multiple of dp x micro_batch={dp * micro}"
            )
        zero = zero_stage_of(row["zero_stage"])
        shard = _state_ranks(row["notes"], dp) if zero else 1
        words = f"{row['source']} {row['notes']}"
        recompute = recompute_of(row["recompute"], words)
        shape = _shape(row, number, experts)
        cluster = _cluster(row, gpus, number("gpus_per_node", int, 8))
        precision = precision_of(row["precision"])
        matmul_peak(cluster.device, precision)  # raises for a precision that the device lacks
        chunks = number("vp", int, 1) or 1
        schedule = "interleaved" if chunks > 1 else "1f1b"
        check(schedule, pp, chunks, batch // (dp * micro))
        stages = _stages(shape.layers, pp * chunks)
        run = Run(
            line=line,
            group=_group(row),
            shape=shape,
            cluster=cluster,
            plan=Candidate(
                dp=dp,
                replicate=dp // shard if zero else 1,
                tp=tp,
                sequence_parallel=yes_or_no("sp", row["sp"]),
                cp=cp,
                ep=ep,
                context="ring",  # not stated: the default of Megatron-LM and NeMo; torchtitan rotates only gradients
                pp=pp,
                schedule=schedule,
                chunks=chunks,
                stages=stages,
                micro_batch_size=micro,
                gradient_accumulation_steps=batch // (dp * micro),
                zero_stage=zero,
                recompute=recompute,  # type: ignore[arg-type]  # or "per-op", which OtherModel knows
            ),
            job=OtherJob(
                seq_len=number("seq_len", int),
                global_batch=batch,
                precision=precision,
                # Tables in fp16 and those of Megatron-DeepSpeed predate the wide use of fused attention kernels.
                fused_attention=not (
                    row["precision"] == "fp16" or "Megatron-DeepSpeed" in words or "bigscience" in words
                ),
                whole_recompute=recomputes_whole(row["source"], row["precision"]),
                gradient_bytes=4 if "fp32 grad" in row["precision"] else 2,
            ),
            seconds=number("step_time_s", float, 0.0) or None,
            memory=number("mem_gb", float, 0.0) * 2**30 or None,
            oom=yes_or_no("oom", row["oom"]),
        )
        if not row["recompute"]:
            _check_fits(run)
        return run
    except ValueError as error:
        raise error if f"line {line}: " in str(error) else PlanError(f"{path}: line {line}: {error}") from None


def _shape(row: Mapping[str, str], number: Callable[..., Any], experts: Experts | None) -> ModelShape:
    """Return the model, with the MLP (gated or not) and embedding (tied or not) that come closest to the stated size.

    Experts are gated. If no size is stated, the MLP is gated and the embedding untied, as in Llama.
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
    if experts is not None:
        return experts.shape(sizes, stated)
    forms = [ModelShape.of(**sizes, gated=gated, tied=tied) for gated in (False, True) for tied in (False, True)]
    nearest = min(forms, key=lambda shape: abs(shape.parameters - stated)) if stated else forms[2]
    if stated > _TOO_LARGE * nearest.parameters:
        raise PlanError(
            f"params_B={row['params_B']!r}, but hidden, layers, ffn and vocab make {nearest.parameters / 1e9:.3g} B: "
            "the model has experts, whose number the row does not state, or a size is wrong"
        )
    return nearest


def _stages(layers: int, stages: int) -> tuple[int, ...] | None:
    """Return the layers of each virtual stage; None if the planner's even stages are meant.

    Megatron can count the embedding and the loss as layers (``account_for_embedding_in_pipeline_split``). They then
    have the first and the last stage alone, if there are as many stages as layers with them.
    """
    ends = stages - layers
    if 1 <= ends <= 2 < stages:
        return (0,) * (ends - 1) + (1,) * layers + (0,)
    even_stages(layers, stages)  # raises for more stages than layers
    return None


def _group(row: Mapping[str, str]) -> str:
    words = f"{row['source']} {row['notes']}".lower()
    publisher = (row["source"].split() or ["unnamed"])[0]
    if ":" in publisher:  # a URL without a name
        publisher = "BigScience" if "bigscience" in publisher else publisher.split(":")[-1]
    framework = next((f"/{name}" for name in _FRAMEWORKS if name in words), "")
    return f"{publisher}{framework} {row['gpu']} {_BITS[precision_of(row['precision'])]}"


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


def _state_ranks(notes: str, dp: int) -> int:
    """Return the number of data-parallel ranks that share one optimizer state."""
    found = _STATE_RANKS.search(notes)
    if found is None or (ranks := int(found[1])) == -1 or ranks > dp:
        return dp
    if ranks < 1 or dp % ranks:
        raise PlanError(f"notes: {found[0]!r}: {ranks} ranks do not divide dp={dp}")
    return ranks


def _cluster(row: Mapping[str, str], gpus: int, per_node: int) -> Cluster:
    kind = device_of(row["gpu"])
    slow = None
    if found := _PER_GPU.search(row["notes"]):
        slow = int(found[1]) / 8 * 1e9
    elif found := _PER_NODE.search(row["notes"]):
        slow = int(found[1] or 1) * int(found[2]) / 8 / per_node * 1e9
    if gpus > per_node and gpus % per_node:
        per_node = gpus  # the table does not say how GPUs that do not fill whole nodes are spread
    return Cluster(device=kind, gpus=gpus, gpus_per_node=per_node, slow_link=slow)
