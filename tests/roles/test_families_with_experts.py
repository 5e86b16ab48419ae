"""Every type with experts equals one device under each axis, as evidence/families.md says, or is refused by name.

Tolerance 1e-10 in float64, relative to a tensor's largest value: only the order of sums differs, about 1e-16 a sum.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import transformers
from torch import nn

import meshwright as mw
from conformance.families.expert_models import EXPERTS, build
from conformance.families.experts import PLANS, difference
from conformance.families.experts_page import REFUSED, expert_rows
from conformance.families.kept_results import KeptResults
from conformance.families.models import model_types
from conformance.families.page import PAGE
from conformance.families.parity import TOLERANCE
from meshwright.features import passes
from meshwright.features.decision import refuse
from meshwright.roles.blocks.experts import roles_of_experts
from support.calls import call_of
from support.planted_experts import FAULTS
from support.tiers import crossing, nightly

FAMILIES = sorted(EXPERTS.keys() & set(model_types()))  # an older transformers lacks the newest
PROGRAMS = [(family, plan) for family in FAMILIES for plan in PLANS]
# Each family under two plans and each plan with a third of the families; the others are nightly.
SAMPLE = [(family, plan) for i, family in enumerate(FAMILIES) for plan in (PLANS[i % 6], PLANS[(i + 3) % 6])]
REST = [program for program in PROGRAMS if program not in SAMPLE]
ROWS = expert_rows(PAGE.read_text())
IS_THE_PAGES = f"transformers {transformers.__version__}," in PAGE.read_text()  # another version, other rows
# Interleaved rows of gate and up, experts beside an MLP in the layer, experts of own code, and all axes at once.
SOME = [("gpt_oss", "tp2+sp ep2"), ("gemma4_text", "tp2+sp ep2"), ("llama4_text", "tp2+sp"), ("nemotron_h", "cp2")]


def verdicts(programs: list[tuple[str, str]]) -> list[float | str]:
    """Return the difference of each program, or why it is refused."""
    kept = KeptResults[float](None)
    return [kept.of(f"{family}: {plan}", partial(difference, family, plan)) for family, plan in programs]


@pytest.mark.parametrize(
    "programs",
    [*(crossing(SAMPLE[i::4]) for i in range(4)), *(nightly(REST[i::8]) for i in range(8))],
    ids=lambda programs: f"{programs[0][0]} and so on",
)
def test_equals_one_device_as_the_page_says(programs: list[tuple[str, str]], pool2: Any) -> None:
    for (family, plan), found in zip(programs, pool2.run(verdicts, programs, timeout=280)[0], strict=True):
        assert isinstance(found, str) or found <= TOLERANCE, (family, plan, found)
        if IS_THE_PAGES:
            assert ROWS[family][PLANS.index(plan)] == (REFUSED if isinstance(found, str) else "yes"), (plan, found)


def test_some_equal_one_device(pool2: Any) -> None:
    programs = [(family, plan) for family, plan in SOME if family in FAMILIES]
    for program, found in zip(programs, pool2.run(verdicts, programs)[0], strict=True):
        assert not isinstance(found, str) and found <= TOLERANCE, (program, found)


def without_scale(family: str) -> float:
    """A fault: the gradients of experts are not divided by the number of ranks that share them."""
    with FAULTS["gradients of experts are not divided by ep"].plant():
        return difference(family, "dp2 ep2")


def test_a_wrong_answer_would_be_caught(pool2: Any) -> None:
    assert pool2.run(without_scale, "mixtral")[0] > 0.1


def test_the_page_has_every_type_with_experts() -> None:
    assert ROWS.keys() == EXPERTS.keys()
    everywhere = [family for family, cells in ROWS.items() if cells[: len(PLANS)] == ["yes"] * len(PLANS)]
    assert len(everywhere) >= 36
    assert all(cell in ("yes", REFUSED) for cells in ROWS.values() for cell in cells[: len(PLANS)])


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_found_from_the_structure(family: str) -> None:
    """Each weight of three dims that is no convolution's belongs to experts, and no dense layer has any."""
    model = build(family)
    claimed = {
        owner.get_submodule(name)
        for owner in model.modules()
        for name, role in roles_of_experts(owner).items()
        if role is mw.Role.EXPERTS
    }
    inside = {id(p) for module in claimed for p in module.parameters()}
    stacks = {
        name: id(p)
        for name, module in model.named_modules()
        if not isinstance(module, nn.Conv1d)
        for p in module.parameters(recurse=False)
        if p.ndim == 3
    }
    hashed = {"deepseek_v4"}  # its layers choose experts by token ids
    others = {"inkling_text"}  # its shared experts, which every token takes, are stacked too
    if family not in hashed | others:
        assert set(stacks.values()) <= inside, [name for name, p in stacks.items() if p not in inside]
    assert bool(inside) == (family not in hashed | {"doge"})  # doge keeps its experts in embeddings


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("llama4_text", "feed_forward.experts is a Llama4TextExperts, which Llama4ForCausalLM calls with code of its"),
        ("longcat_flash", "mlp.experts is a LongcatFlashExperts, which LongcatFlashForCausalLM calls with code of its"),
        ("jetmoe", "is a JetMoeParallelExperts, which JetMoeForCausalLM calls with code of its own"),
        ("dbrx", "ffn.experts is a DbrxExperts, which DbrxForCausalLM calls with code of its own"),
    ],
)
def test_experts_of_own_code_are_not_shared(family: str, said: str) -> None:
    with pytest.raises(mw.PlanError) as raised:
        refuse(call_of(build(family), dp=2, ep=2), passes.EXPERTS)
    assert said in str(raised.value) and "Set ParallelPlan.ep to 1" in str(raised.value)


def distribute(family: str, fields: dict[str, Any]) -> None:
    mw.to_distributed(build(family), plan=mw.ParallelPlan(**fields))


def test_a_router_that_mixes_the_rows_of_a_batch_is_refused(pool2: Any) -> None:
    for fields in ({"dp": 2}, {"pp": 2, "gradient_accumulation_steps": 2}):
        for kind, said in pool2.run_expecting_error(distribute, "doge", fields):
            assert kind == "PlanError" and "model.layers.0.mlp is a DogeCDMoE" in said and "plan='pp2'" in said, said
