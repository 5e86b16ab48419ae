"""Read and write a plan in the words that the planner prints: "dp2 tp2+sp zero1"."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from typing import Any

from meshwright.errors import PlanError
from meshwright.mesh.rank_grid import PLAN_AXES
from meshwright.plan.fields import nearest
from meshwright.plan.foreign_names import word_for

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
