"""Writes evidence/families.md from the results of a sweep; a test reads the page back and compares it with the code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import transformers

from conformance.families.models import DENSE, model_types
from conformance.families.parity import TOLERANCE, Record
from conformance.families.refusals import Refusal

PAGE = Path(__file__).resolve().parents[2] / "evidence" / "families.md"

_REMARKS = {
    "falcon": "alibi and multi-query here; its other two orders of fused rows have plans too",
    "gemma4_text": "with attention_k_eq_v its attention stays whole",
    "gpt-sw3": "GPT-2's class",
    "internlm3": "Llama's class",
    "iquestcoder": "Llama's class",
    "lfm2": "with attention layers only; [context.md](../docs/context.md) has its convolutions",
    "stablelm": "with qk_layernorm its attention stays whole",
}
_DECODER_HALF = "the decoder of an encoder-decoder model; its cross-attention is sharded too"


def render(
    records: Iterable[Record], refusals: Iterable[Refusal], experts: Sequence[str], accepted: Mapping[str, str]
) -> str:
    """Return the page's text.

    Args:
        records: what was compared of each dense decoder.
        refusals: the types that are refused.
        experts: the lines of the section on types with experts.
        accepted: the kinds of the other types that are accepted, by type.
    """
    records = sorted(records, key=lambda record: record.family)
    refusals = sorted(refusals, key=lambda refusal: (refusal.kind, refusal.family))
    passed = sum(record.passes for record in records)
    lines = [
        "# Families",
        "",
        "```bash",
        "make families    # runs all sweeps of families and writes this page; less than an hour on 2 cores",
        "```",
        "",
        f"**{passed} families pass**, of all {len(model_types())} types that `AutoModelForCausalLM` knows in "
        f"transformers {transformers.__version__}, with torch {torch.__version__}. Each is a model of two layers with "
        "random weights and biases. It runs in float64 on two ranks with `tp=2` and sequence parallelism, and on one "
        f"device. Logits, loss and the gradient of every parameter differ by at most {TOLERANCE:g} of a tensor's "
        "largest value (only the order of sums differs; about 1e-14 is measured). The other columns repeat this "
        "comparison with one more trait; a dash means that the family does not have the trait.",
        "",
        "- kv: one key/value head, which both ranks then hold",
        "- tied: one matrix for embedding and head",
        "- packed: two documents per row, separated by `position_ids`",
        "",
        "[What was compared](../docs/compared.md#a-model-that-is-not-in-the-tables) says what a model that is not here "
        "needs.",
        "",
        "## Equal to one device",
        "",
        "The second column lists how a family's structure differs from Llama's. \"Fused by kind\" is a projection "
        'whose rows are all queries, then all keys, then all values; "fused by group" has, for each key head, its '
        'queries, its key and its value. "MLP owned by the layer" means that the layer has the projections of the MLP '
        'itself, without a module for the MLP. A "plain MLP" has no gate.',
        "",
        "| family | differences from Llama | tp2+sp | kv | tied | packed | remark |",
        "|---|---|---|---|---|---|---|",
        *(_row(record) for record in records),
        "",
        *experts,
        "",
        *accepted_section(accepted),
        "",
        "## Refused, or not tried",
        "",
        f"These are {len(refusals)} types. `to_distributed` with tp above 1 raises a `PlanError` that gives the "
        "reason, or transformers builds no model from the default config, so that nothing was tried. With only data "
        "parallelism and ZeRO types of the first kind run. A pipeline needs only their embedding, layers, "
        "final norm and head, and context parallelism only attention that calls transformers' interface.",
        "",
        "| family | what it is | first reason given |",
        "|---|---|---|",
        *(f"| {r.family} | {r.kind} | {_short(r.message)} |" for r in refusals),
    ]
    return "\n".join(lines) + "\n"


def accepted_section(accepted: Mapping[str, str]) -> list[str]:
    """Return the lines of the section on types that are accepted, and that this command does not compare."""
    return [
        "## Accepted, and not compared here",
        "",
        f"These are {len(accepted)} types with other structures than those above, such as encoders, models with towers "
        "and hybrids, for which tp has a plan. [models.md](models.md) says which of them equal one device under "
        "`tp2+sp`.",
        "",
        "| family | what it is |",
        "|---|---|",
        *(f"| {family} | {accepted[family]} |" for family in sorted(accepted, key=lambda n: (accepted[n], n))),
    ]


def _row(record: Record) -> str:
    remark = _REMARKS.get(record.family, _DECODER_HALF if "is_encoder_decoder" in DENSE[record.family] else "")
    cells = (record.parity, record.kv, record.tied, record.packed)
    return f"| {record.family} | {record.traits} | {' | '.join(map(verdict, cells))} | {remark} |"


def verdict(difference: float | None) -> str:
    """Return a cell: yes, no with the difference, or a dash if there is nothing to compare."""
    if difference is None:
        return "-"
    return "yes" if difference <= TOLERANCE else f"**no** ({difference:.0e})"


def _short(message: str) -> str:
    return message.split(": whether")[0].split(", so no")[0].split(". Use ")[0].replace("|", "/")


def rows(text: str) -> dict[str, list[str]]:
    """Return family -> the other cells of its row, from all tables of a text."""
    table = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row] for row in table]
    return {family: rest for family, *rest in cells if family not in ("family", "type")}
