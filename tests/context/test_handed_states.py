"""Mixers that compute a sequence by chunks, and hand their states over, equal those that compute it at once.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import meshwright as mw
from meshwright.context.handed_states import FORMS, Chunks, HandedStates, hands_states
from meshwright.mesh.axes import Axis
from meshwright.parallel.method_chain import add_step, find_chain
from meshwright.parallel.sequence_parts import SequenceParts
from meshwright.roles.blocks import mixers_of
from meshwright.roles.blocks.mixer_kinds import MIXER_KINDS
from support.exact import Float64, relative_difference
from support.hybrid_models import FAMILIES, SHARED_BY_RANKS, build
from support.models import tokens
from support.traffic import Traffic

HANDED = [name for name in (*FAMILIES, *SHARED_BY_RANKS) if name != "recurrent_gemma"]
LENGTHS = (2, 10, 140)  # a token per chunk, fewer than a convolution has, and more than a chunk of the scans


def results(mixer: nn.Module, length: int) -> list[Tensor]:
    """The output of a mixer, and the gradients of its input and weights."""
    with Float64():
        x = torch.randn(3, length, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
        output = mixer(x.requires_grad_())
        loss = (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()
        return [output.detach(), *torch.autograd.grad(loss, [x, *mixer.parameters()])]


def of_one_process(mixer: nn.Module) -> HandedStates:
    """The step of a mixer on one process, which has both chunks of each sequence."""
    return HandedStates("mixer", SequenceParts(Axis("cp")), mock.Mock(), mixer, None)


def largest_difference(name: str) -> float:
    plain = next(iter(mixers_of(build(name)).values()))
    chunked = copy.deepcopy(plain)
    add_step(chunked, of_one_process(chunked))
    found = [zip(results(chunked, length), results(plain, length), strict=True) for length in LENGTHS]
    return max(relative_difference(actual, expected) for pairs in found for actual, expected in pairs)


@pytest.mark.parametrize("name", HANDED)
def test_chunks_equal_the_whole(name: str) -> None:
    assert largest_difference(name) <= 1e-10


FAULTS = {
    "no states": (Chunks, "states_before", lambda self, made, advance, first: first),
    "no taps": (Chunks, "gather", lambda self, x: torch.zeros_like(x.unflatten(0, (-1, self.own)))),
}


@pytest.mark.parametrize(
    ("fault", "name"), [("no states", "qwen3_5_text"), ("no states", "bamba"), ("no taps", "lfm2")]
)
def test_a_planted_fault_is_found(fault: str, name: str) -> None:
    with mock.patch.object(*FAULTS[fault]):
        assert largest_difference(name) > 1e-3


def test_the_kernel_of_a_whole_mixer_does_not_run() -> None:
    """mamba-ssm's training kernel computes all from the convolution to the output projection, without states."""
    mixer = next(iter(mixers_of(build("bamba")).values()))
    add_step(mixer, of_one_process(mixer))
    kernel = "transformers.models.bamba.modeling_bamba.mamba2_split_conv1d_scan_combined"
    with mock.patch(kernel, side_effect=AssertionError):
        results(mixer, 4)
    assert mixer.training


def test_code_that_calls_other_functions_is_refused() -> None:
    mixer = next(iter(mixers_of(build("lfm2")).values()))
    step = of_one_process(mixer)
    step.functions = ("causal_conv1d_fn", "causal_conv1d_update")
    add_step(mixer, step)
    message = r"called \['causal_conv1d_fn'\] and not .*Use ParallelPlan\(cp=1\)"
    with mock.patch.dict(FORMS, causal_conv1d_update=None), pytest.raises(mw.PlanError, match=message):
        results(mixer, 4)
    assert all(name in FORMS for kind in MIXER_KINDS for name in kind.functions)


def steps(plan: dict[str, Any]) -> list[set[str]]:
    """The classes of the steps of mixers: by heads, of adapted projections, and whole."""
    models: list[Any] = [build(name) for name in ("falcon_h1, norm of one group", "lfm2", "delta net, 3 heads")]
    adapted = get_peft_model(models[1], LoraConfig(target_modules=["conv.in_proj", "conv.out_proj"]))
    found = []
    for model, owner in zip(models, (models[0], adapted, models[2]), strict=True):
        mw.to_distributed(owner, plan=plan)
        chains = [find_chain(mixer) for mixer in mixers_of(model).values()]
        found.append({type(step).__name__ for chain in chains if chain is not None for step in chain.steps})
    return found


def test_mixers_that_tp_cuts_hand_states_over_too(pool4: Any) -> None:
    assert all("HandedStates" in classes for classes in pool4.run(steps, {"tp": 2, "cp": 2})[0])


def sent(length: int) -> dict[str, int]:
    model: Any = build("mamba2")
    mw.to_distributed(model, plan={"cp": 2})
    ids = tokens(2, length)
    with Traffic() as traffic:
        model(input_ids=ids, labels=ids).loss.backward()
    return dict(traffic.bytes)


def test_what_ranks_send_does_not_grow_with_the_sequence(pool2: Any) -> None:
    assert pool2.run(sent, 32) == pool2.run(sent, 96)


def test_code_of_a_program_is_gathered() -> None:
    class Own(type(next(iter(mixers_of(build("lfm2")).values())))):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            output: Tensor = self.out_proj(self.in_proj(hidden_states))
            return output

    mixer = next(iter(mixers_of(build("lfm2")).values()))
    assert hands_states(mixer)
    mixer.__class__ = Own
    assert not hands_states(mixer)
