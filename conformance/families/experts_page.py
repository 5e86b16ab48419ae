"""The section of evidence/families.md on types with experts, from the results of ``conformance.families.experts``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from conformance.families.expert_models import DRAWS, EXPERTS
from conformance.families.experts import PLANS
from conformance.families.markdown import table
from conformance.families.page import rows, verdict
from conformance.families.parity import TOLERANCE

HEADING = "## With experts"
REFUSED = "refused"

_REMARKS = {
    "dbrx": "with attn_config={'rope_theta': 10000.0}: transformers builds no model from the default config",
    "doge": "with is_moe=True, which is not the default",
    "gemma4_text": "with enable_moe_block=True, which is not the default",
    "granitemoehybrid": "with attention layers only",
    "lfm2_moe": "with attention layers only",
    "nemotron_h": "with layers of attention and of experts only",
    "zaya": "its router sends most tokens to one expert of four; those of the other types use all experts",
    **dict.fromkeys(DRAWS, "in evaluation mode, since its router draws random numbers in training"),
}


def section(found: Mapping[str, float | str]) -> list[str]:
    """Return the lines of the section, given the result of each program of the sweep."""
    families = sorted(family for family in EXPERTS if f"{family}: {PLANS[0]}" in found)
    everywhere = sum(all(_cell(found, family, plan) == "yes" for plan in PLANS) for family in families)
    differences = [result for result in found.values() if not isinstance(result, str)]
    exact = sum(result <= TOLERANCE for result in differences)
    return [
        HEADING,
        "",
        f"Each of {len(families)} types with experts runs under six plans on two ranks: a model of two layers and four "
        "experts with random weights and biases, in float64, on plain and on padded rows. The loss, the norm and every "
        f"gradient are compared with one device. {exact} of {len(differences)} programs that are not refused differ by "
        f"at most {TOLERANCE:g} of a tensor's largest value, and the largest difference is {max(differences):.0e}. "
        f"{everywhere} types run under all six plans. What is refused raises a `PlanError` on every rank, before "
        "anything is changed; the reasons are below the table.",
        "",
        "Under `tp2+sp` each rank routes its own tokens and has whole experts. Under `ep2` two ranks share experts, "
        "which needs experts that transformers calls through its interface for them "
        "(`use_experts_implementation`). A family that calls its experts with code of its own has them whole on each "
        "rank. If a family uses transformers' `load_balancing_loss_func`, its load-balancing loss "
        "(`output_router_logits=True`) is that of the global batch. A multimodal type with experts has the experts of "
        "its language model, whose type is in the table.",
        "",
        *table(
            ["type", *PLANS, "remark"],
            (
                [family, *(_cell(found, family, plan) for plan in PLANS), _REMARKS.get(family, "")]
                for family in families
            ),
        ),
        "",
        *(line for family in families for line in _reasons(found, family)),
    ]


def _cell(found: Mapping[str, float | str], family: str, plan: str) -> str:
    result = found.get(f"{family}: {plan}")
    return REFUSED if isinstance(result, str) else verdict(result)


def _reasons(found: Mapping[str, float | str], family: str) -> Iterator[str]:
    of_reason: dict[str, list[str]] = defaultdict(list)
    for plan in PLANS:
        if isinstance(result := found.get(f"{family}: {plan}"), str):
            of_reason[_short(result)].append(f"`{plan}`")
    for reason, plans in of_reason.items():
        yield f"- {family} under {', '.join(plans)}: {reason}"


def _short(message: str) -> str:
    """Return the first reason of a message, without what to use instead; of parameters without a role, the first."""
    first, *names = message.split("\n")
    if "gives no role to" in first:
        return f"no role for {names[0].strip()}"
    for end in (". Set ", ". Use ", ", so the", "; pass ", ": whether", f". {_class(message)} has experts"):
        first = first.split(end)[0]
    return first


def _class(message: str) -> str:
    return message.rpartition(" has experts")[0].rpartition(" ")[2]


def expert_rows(text: str) -> dict[str, list[str]]:
    """Return type -> the other cells of its row, of a page's table of types with experts."""
    return rows(_parts(text)[1])


def without_experts(text: str) -> str:
    """Return a page without its section on types with experts."""
    before, _, after = _parts(text)
    return before + after


def _parts(text: str) -> tuple[str, str, str]:
    before, _, rest = text.partition(HEADING)
    own, _, after = rest.partition("\n## ")
    return before, own, after
