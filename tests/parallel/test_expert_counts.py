"""The tokens of each expert and DeepSeek-V3's update of the routing's biases, compared with one process.

Counts are equal as integers. The weights' tolerance is that of test_anatomy.py: only the order of sums differs.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor

import meshwright as mw
from meshwright.parallel.experts import load_balancing
from meshwright.roles.blocks.experts import is_experts
from support.anatomies import EXPERTS, MODELS, build, loader
from support.exact import Float64, relative_difference
from support.models import SIZES
from support.parity import TOLERANCE, pool_for
from support.tiers import crossing

STEPS, RATE = 3, 0.05  # a rate that sends some tokens elsewhere in the next step


def ernie() -> Any:
    """The biases are parameters that are not trained."""
    routed = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 0}
    return transformers.Ernie4_5_MoeForCausalLM(
        transformers.Ernie4_5_MoeConfig(**SIZES, **routed, experts_implementation=EXPERTS["experts_implementation"])
    )


def add_up(total: Tensor, _: Any, args: tuple[Tensor, ...]) -> None:
    total += args[1].flatten().bincount(minlength=len(total))


def balanced_run(plan: dict[str, Any] | None, name: str, rows: int) -> dict[str, Tensor]:
    """Steps that update the biases, by the package or, on one device, by what the update says."""
    with Float64(), mock.patch.dict(MODELS, {"ernie": ernie}):
        model: Any = build(name)
        data = loader(name, rows=rows, steps=STEPS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if plan is not None:
            model, optimizer, data = mw.to_distributed(model, optimizer, data, plan=mw.ParallelPlan(**plan))
        totals: dict[str, Tensor] = {}
        if plan is None:
            for path, experts in model.named_modules():
                if is_experts(experts):
                    totals[path] = torch.zeros(4, dtype=torch.int64)
                    experts.register_forward_pre_hook(functools.partial(add_up, totals[path]))
        else:
            assert all(not counts.any() for counts in mw.expert_counts(model).values())
        found: dict[str, Tensor] = {}
        for step, batch in enumerate(data):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            counts = {path: count.clone() for path, count in totals.items()}
            if plan is None:
                for path, count in counts.items():
                    block = model.get_submodule(path.rpartition(".")[0])
                    tensors = [*block.named_buffers(), *block.named_parameters()]
                    (bias,) = [x for n, x in tensors if n.endswith("e_score_correction_bias")]
                    bias.data += RATE * torch.sign(count.double().mean() - count).view_as(bias)
                    totals[path].zero_()
            else:
                counts = mw.expert_counts(model)
                mw.balance_experts(model, counts, rate=RATE)
            found |= {f"{step} {path}": count for path, count in counts.items()} | {f"loss {step}": loss.detach()}
        with torch.no_grad():
            model.eval()(**batch)
        if plan is not None:
            assert all(not counts.any() for counts in mw.expert_counts(model).values())
        tensors = [*model.named_buffers(), *model.named_parameters()]
        return found | {n: x.detach().clone() for n, x in tensors if n.endswith("correction_bias")}


@pytest.mark.parametrize(
    ("name", "rows", "plan"),
    [
        ("deepseek_v3", 3, {"dp": 2, "ep": 2, "gradient_accumulation_steps": 2, "recompute": "full"}),
        ("deepseek_v3", 3, {"pp": 2, "gradient_accumulation_steps": 2}),
        crossing("ernie", 3, {"dp": 2, "zero_stage": 1}),
        crossing("deepseek_v3", 4, {"cp": 2}),
        crossing("deepseek_v3", 3, {"tp": 4, "sequence_parallel": True, "ep": 2}),
        crossing("deepseek_v3", 3, {"dp": 4, "ep": 2}),
        crossing("deepseek_v3", 3, {"tp": 2, "ep": 2}),
        crossing("deepseek_v3", 3, {"dp": 2, "etp": 2}),
        crossing("deepseek_v3", 3, {"pp": 2, "gradient_accumulation_steps": 2, "recompute": "full"}),
    ],
)
def test_counts_and_biases_are_those_of_one_process(
    name: str, rows: int, plan: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    expected = balanced_run(None, name, rows)
    for found in pool_for(plan, request).run(balanced_run, plan, name, rows):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if value.is_floating_point():
                assert relative_difference(found[key], value) <= TOLERANCE, key
            else:
                assert torch.equal(found[key], value), (key, found[key], value)
    assert len({tuple(value.tolist()) for key, value in expected.items() if key[0].isdigit()}) >= STEPS


def balanced_run_with_copies(plan: dict[str, Any]) -> dict[str, Tensor]:
    """A fault: the rows that only keep a rank in step are counted."""
    with mock.patch.object(load_balancing, "runs_filler", lambda inputs: False):
        return balanced_run(plan, "deepseek_v3", 3)


def test_counted_copies_of_rows_would_be_caught(pool2: Any) -> None:
    plan = {"dp": 2, "gradient_accumulation_steps": 2}
    found, expected = pool2.run(balanced_run_with_copies, plan)[0], balanced_run(None, "deepseek_v3", 3)
    key = next(iter(expected))
    assert found[key].sum() > expected[key].sum()


def move_one_bias(late: bool) -> None:
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2), check_replicas_every=1)
    model, _, data = mw.to_distributed(build("deepseek_v3"), None, loader("deepseek_v3"), config=config)
    for step, batch in enumerate(data):
        if step == 1 and late:
            mw.expert_counts(model)
        if step == 1:
            model.model.layers[1].mlp.gate.e_score_correction_bias[0] += torch.distributed.get_rank()
        with Float64():
            model(**batch).loss.backward()


def test_biases_that_differ_and_counts_that_miss_passes_are_errors(pool2: Any) -> None:
    for kind, said in pool2.run_expecting_error(move_one_bias, False):
        assert kind == "DivergenceError" and "layers.1.mlp.gate.e_score_correction_bias" in said, said
    for kind, said in pool2.run_expecting_error(move_one_bias, True):
        assert kind == "ValueError" and "once before the first pass" in said, said


def test_a_model_without_such_biases_is_named() -> None:
    model = mw.to_distributed(build("mixtral"), plan=mw.ParallelPlan())[0]
    with pytest.raises(ValueError, match=r"MixtralForCausalLM has no bias .*output_router_logits = True"):
        mw.balance_experts(model, mw.expert_counts(model))
    for counts in ({"x": torch.zeros(4)}, {"model.layers.0.mlp.experts": torch.zeros(3)}, {"model.layers.0.mlp": [1]}):
        with pytest.raises(ValueError, match=r"Pass what mw\.expert_counts"):
            mw.balance_experts(model, counts)
    model = mw.to_distributed(build("llava"), plan=mw.ParallelPlan())[0]
    with pytest.raises(ValueError, match="has no experts"):
        mw.expert_counts(model)
