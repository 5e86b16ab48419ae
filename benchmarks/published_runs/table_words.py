"""The words of published tables of runs: precisions, devices, recompute and ZeRO, as the projects spell them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshwright.errors import PlanError
from meshwright_plan.job.candidate import Precision, Recompute
from meshwright_plan.machine.hardware import Device, device

# Names of devices; a letter before a name makes it another device, as in GH200 and GB300, and so does H100's NVL.
_DEVICES = tuple(
    (re.compile(rf"(?<![A-Z])(?:[DH]GX)?{pattern}"), name)
    for pattern, name in (
        (r"GB200", "gb200"), (r"GB300", "gb300"), (r"B200", "b200"), (r"B300", "b300"), (r"H200(?!.*NVL)", "h200"),
        (r"H100.*PCIE", "h100-pcie"), (r"H100.*96", "h100-96"), (r"H100(?!.*NVL)", "h100-sxm"), (r"H800", "h800"),
        (r"A[18]00.*40", "a100-40"), (r"A[18]00", "a100-80"), (r"V100.*16", "v100-16"), (r"V100", "v100-32"),
        (r"L40S", "l40s"), (r"(?:RTX)?[ _-]*4090", "rtx-4090"), (r"MI300X?\b", "mi300x"), (r"MI325X?\b", "mi325x"),
        (r"MI350X?\b", "mi350x"), (r"MI355X?\b", "mi355x"),
    )
)  # fmt: skip
# Dtypes of the layers' matrix multiplications.
_DTYPES: Mapping[str, Precision] = {
    **dict.fromkeys(("bf16", "fp16", "bfloat16", "float16", "half"), "bf16"),
    **dict.fromkeys(("fp8", "float8", "mxfp8"), "fp8"),
    **dict.fromkeys(("fp4", "nvfp4", "mxfp4"), "fp4"),
}  # fmt: skip
# Words beside a dtype that say how its tensors are scaled (torchtitan's tensorwise, Megatron-Bridge's CS), or that
# norms and reductions stay in more bits (llm-foundry's amp, NeMo's bf16_with_fp8_current_scaling_mixed).
_SCALINGS = frozenset(
    (
        "cs", "ds", "sc", "mx", "tensorwise", "rowwise", "axiswise", "blockwise", "block", "per", "tensor", "row",
        "channel", "current", "delayed", "subchannel", "scaling", "dynamic", "recipe", "e4m3", "e5m2", "gw", "hp", "te",
    )
)  # fmt: skip
_BESIDE = frozenset(("amp", "mixed", "true", "hybrid", "with", "training"))
_RECOMPUTE: Mapping[str, Recompute] = {
    **dict.fromkeys(("", "none", "no", "off", "false", "0", "disabled"), "none"),
    # Megatron's and NeMo's modules whose recompute repeats elementwise work alone.
    **dict.fromkeys(("norm", "layernorm", "rmsnorm", "act", "activation", "swiglu", "gelu"), "none"),
    **dict.fromkeys(("selective", "core-attn", "core-attention", "attention"), "selective"),
    **dict.fromkeys(("sac", "op", "per-op", "selective-op"), "per-op"),
    **dict.fromkeys(("full", "uniform", "all", "yes", "true"), "full"),
}  # fmt: skip
_STAGES: Mapping[str, int] = {
    **dict.fromkeys(("0", "none", "no", "ddp"), 0),
    **dict.fromkeys(("1", "distopt", "dist-opt", "distributed-optimizer", "distributed-optim"), 1),
    **dict.fromkeys(("2", "shard-grad-op"), 2),
    **dict.fromkeys(("3", "fsdp", "fsdp1", "fsdp2", "full-shard", "fully-shard"), 3),
}  # fmt: skip
_YES_OR_NO = {"": False, "0": False, "no": False, "false": False, "off": False} | dict.fromkeys(
    ("1", "yes", "true", "on"), True
)


def precision_of(text: str) -> Precision:
    """Return the dtype of the layers' matrix multiplications, by its name in a table; parentheses are a remark.

    Raises:
        PlanError: the name has a word that is not known.

    Example:
        >>> precision_of("float8-tensorwise"), precision_of("FP8-CS"), precision_of("bf16_with_mxfp8_mixed")
        ('fp8', 'fp8', 'fp8')
    """
    words = re.findall(r"[a-z0-9]+", text.split("(")[0].lower())
    found = {_DTYPES[word] for word in words if word in _DTYPES}
    beside = {word for word in words if word not in _DTYPES}
    # A 16-bit dtype beside another one is that of the rest of the model, if the name says so.
    if len(found) == 2 and beside & _BESIDE:
        found -= {"bf16"}
    if len(found) == 1 and beside <= _BESIDE | (_SCALINGS if found != {"bf16"} else set()):
        return found.pop()
    raise PlanError(
        f"precision={text!r} is not known; write one of {', '.join(_DTYPES)}, with a word such as amp_bf16, "
        "float8-tensorwise or FP8-CS"
    )


def recompute_of(text: str, source: str = "") -> Recompute:
    """Return what backward recomputes, by the words of a table, such as "full", "core_attn" or "norm, act".

    Args:
        text: the words.
        source: who has run it. Megatron's "selective" is attention, torchtitan's is by operations.

    Raises:
        PlanError: a word is not known.

    Example:
        >>> recompute_of("norm, act"), recompute_of("core_attn, layernorm"), recompute_of("selective op")
        ('none', 'selective', 'per-op')
    """
    words = [word.strip() for word in re.split(r"[,+/;&]", text.strip().lower())]
    keys = [re.sub(r"[\s_]+", "-", word) for word in words]
    if "torchtitan" in source.lower():
        keys = ["per-op" if key == "selective" else key for key in keys]
    if unknown := [key for key in keys if key not in _RECOMPUTE]:
        raise PlanError(
            f"recompute={text!r}: {unknown[0]!r} is not known; must be none, selective or full, or names of modules "
            "such as core_attn, norm, act"
        )
    found = {_RECOMPUTE[key] for key in keys}
    most: tuple[Recompute, ...] = ("full", "per-op", "selective", "none")
    return next(kind for kind in most if kind in found)


def recomputes_whole(source: str, precision: str) -> bool:
    """Return whether recompute repeated whole layers, instead of ending with the last tensor that backward reads.

    Megatron's does. PyTorch's has not since 2.1, unless it is reentrant, and neither do compiled layers. torchtitan ran
    later versions; llm-foundry measured its rows in amp with 2.1.0 and the others with 1.13.1 (images in ``sweep.sh``).

    Example:
        >>> [recomputes_whole("llm-foundry", precision) for precision in ("bf16", "amp_bf16")]
        [True, False]
    """
    name = source.lower()
    return not ("torchtitan" in name or ("llm-foundry" in name and precision.startswith("amp")))


def zero_stage_of(text: str) -> int:
    """Return the ZeRO stage, by its number or by another project's name for it.

    Raises:
        PlanError: the name is not known.

    Example:
        >>> zero_stage_of("FSDP2"), zero_stage_of("zero-1"), zero_stage_of("")
        (3, 1, 0)
    """
    key = re.sub(r"[\s_]+", "-", text.strip().lower()) or "0"
    key = re.sub(r"^zero-?(?=[0-3]$)", "", key)
    if key not in _STAGES:
        raise PlanError(f"zero_stage={text!r} is not known; write 0, 1, 2 or 3")
    return _STAGES[key]


def yes_or_no(name: str, text: str) -> bool:
    """Return whether a cell says yes.

    Raises:
        PlanError: it says neither yes nor no.
    """
    key = text.strip().lower()
    if key not in _YES_OR_NO:
        raise PlanError(f"{name}={text!r} is not known; write 0 or 1")
    return _YES_OR_NO[key]


def device_of(text: str) -> Device:
    """Return the device of the catalogue, by its name in a table.

    Raises:
        PlanError: the name is not known.

    Example:
        >>> device_of("DGX-H100").name, device_of("AMD Instinct MI300X").name
        ('h100-sxm', 'mi300x')
    """
    name = next((name for pattern, name in _DEVICES if pattern.search(text.upper())), text)
    try:
        return device(name)
    except PlanError as error:
        raise PlanError(f"gpu={text!r} is not known: {error}") from None


def why_not_trained_whole(row: Mapping[str, str]) -> str | None:
    """Return why a row is not of a run that trains all weights of its model; None if nothing in it says so."""
    if found := re.search(r"\b(Q?LoRA|DoRA|PEFT)\b", f"{row['model']} {row['notes']}", re.IGNORECASE):
        return f"notes: {found[0]!r} trains a part of the weights, and the planner's times are for all of them"
    return None
