"""Tokens reach the experts that other ranks hold: what is computed, what travels, and by which dispatcher.

Tolerance 1e-10 of a tensor's largest value in float64, where only the order of sums differs, about 1e-16 a sum, and
1e-5 in float32, where it is 1e-7.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import meshwright as mw
from meshwright.distribute.decide import structure_of
from meshwright.mesh.axes import Axis
from meshwright.parallel import collectives
from meshwright.parallel.collectives import all_gather, gather_rows, largest, reduce_scatter_rows
from meshwright.parallel.experts import token_dispatchers
from meshwright.parallel.experts.token_dispatchers import (
    ExpertDispatch,
    RunExperts,
    TokenDispatcher,
    add_rows,
    take_rows,
)
from meshwright.parallel.method_chain import add_step
from support.anatomies import build, loader
from support.exact import Float64, relative_difference
from support.parity import TOLERANCE
from support.whole_runs import assert_equals_one_process, train_whole

RANKS, EXPERTS, SLOTS, WIDTH = 2, 6, 3, 8
Case = tuple[str, str, tuple[int, int], bool]  # dispatcher, the module's own code, tokens of each rank, is one-sided
CASES: list[Case] = [
    ("all_to_all", "eager", (7, 4), False),
    ("all_to_all", "batched_mm", (7, 4), False),
    ("all_to_all", "grouped_mm", (7, 4), False),
    ("all_to_all", "eager", (7, 0), False),
    ("all_to_all", "eager", (3, 5), True),
    ("all_to_all", "grouped_mm", (3, 5), True),
    ("all_gather", "eager", (7, 4), False),
    ("all_gather", "batched_mm", (7, 4), False),
    ("all_gather", "grouped_mm", (7, 4), False),
    ("all_gather", "eager", (7, 0), True),
    ("all_gather", "grouped_mm", (3, 5), True),
    ("toy", "eager", (7, 4), False),
    ("toy", "eager", (3, 5), True),
]


class ToyDispatcher(TokenDispatcher):
    """Lets each rank compute with the experts of all, one slot at a time: many rows, but few lines."""

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, run: RunExperts) -> Tensor:
        most = largest(len(hidden), self.axis)
        pad = (0, 0, 0, most - len(hidden))
        rows, weights = (gather_rows(nn.functional.pad(x, pad), self.axis) for x in (hidden, top_k_weights))
        index = all_gather(nn.functional.pad(top_k_index, pad), self.axis)
        is_own = index // self.experts == self.axis.rank
        results = [
            run(rows, index[:, [k]] % self.experts, (weights * is_own)[:, [k]], len(rows))
            for k in range(index.shape[1])
        ]
        return reduce_scatter_rows(torch.stack(results).sum(0), self.axis)[: len(hidden)]


def experts_module(own_code: str) -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=WIDTH, moe_intermediate_size=16, num_experts=EXPERTS)
    config._experts_implementation = own_code
    experts = Qwen3MoeExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    return experts.to(dtype_of(own_code))


def dtype_of(own_code: str) -> torch.dtype:
    return torch.float32 if own_code == "grouped_mm" else torch.float64


def tokens_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    _, own_code, counts, is_one_sided = case
    generator, dtype, count = torch.Generator().manual_seed(1), dtype_of(own_code), sum(counts)
    hidden = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    scores = torch.rand(count, EXPERTS // 2 if is_one_sided else EXPERTS, generator=generator)
    weights = torch.rand(count, SLOTS, generator=generator, dtype=torch.float64).to(dtype)
    return hidden.requires_grad_(), scores.topk(SLOTS).indices, weights.requires_grad_()


def loss_of(output: Tensor) -> Tensor:
    return (output * torch.arange(1, WIDTH + 1)).square().sum()


def on_one(case: Case) -> dict[str, Tensor]:
    experts, (hidden, index, weights) = experts_module(case[1]), tokens_of(case)
    output = experts(hidden, index, weights)
    loss_of(output).backward()
    found = {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad}
    return found | {name: parameter.grad for name, parameter in experts.named_parameters()}


def on_ranks(case: Case) -> dict[str, Tensor]:
    """The results of all tokens and experts, put together from those of the ranks."""
    mw.register_dispatcher("toy", ToyDispatcher)
    dispatcher, own_code, counts, _ = case
    axis = Axis.over([tuple(range(RANKS))], "ep")
    experts = experts_module(own_code)
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(parameter.detach().chunk(RANKS)[axis.rank].clone()))
    add_step(experts, ExpertDispatch(experts, axis, dispatcher))
    hidden, index, weights = (x.detach().split(counts)[axis.rank].clone() for x in tokens_of(case))
    output = experts(hidden.requires_grad_(), index, weights.requires_grad_())
    loss_of(output).backward()
    found = {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad}
    found |= {name: parameter.grad for name, parameter in experts.named_parameters()}
    parts: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(parts, found)
    return {name: torch.cat([part[name] for part in parts]) for name in found}


def compare(cases: list[Case]) -> dict[Case, float]:
    worst = {}
    for case in cases:
        found, expected = on_ranks(case), on_one(case)
        worst[case] = max(relative_difference(found[name], expected[name]) for name in expected)
    return worst


def test_equals_whole_experts(pool2: Any) -> None:
    for worst in pool2.run(compare, CASES):
        for case, difference in worst.items():
            assert difference <= (1e-5 if case[1] == "grouped_mm" else TOLERANCE), (case, difference)


def compare_sent_twice(case: Case) -> float:
    """A fault: a token travels for each of its slots, so that a rank with two of its experts adds both twice."""
    with mock.patch.object(Tensor, "triu", lambda x: x):
        return relative_difference(on_ranks(case)["output"], on_one(case)["output"])


def compare_in_order_of_arrival(case: Case) -> float:
    """A fault: results are not brought back to their tokens."""
    with mock.patch.object(token_dispatchers, "add_rows", lambda x, index, count: add_rows(x, index.sort()[0], count)):
        return relative_difference(on_ranks(case)["output"], on_one(case)["output"])


def test_tokens_that_are_sent_twice_or_mixed_up_would_be_caught(pool2: Any) -> None:
    assert min(pool2.run(compare_sent_twice, CASES[0])) > 0.01
    assert min(pool2.run(compare_in_order_of_arrival, CASES[0])) > 0.01


def traffic(tokens: int, width: int) -> dict[str, Any]:
    """The copies for each rank, and the bytes that this rank gives to the all-to-alls of a call and its backward."""
    axis, experts_count, slots = Axis.over([tuple(range(RANKS))], "ep"), 64, 4
    config = Qwen3MoeConfig(hidden_size=width, moe_intermediate_size=4, num_experts=experts_count // RANKS)
    config._experts_implementation = "grouped_mm"
    experts = Qwen3MoeExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    add_step(experts, ExpertDispatch(experts, axis))
    generator = torch.Generator().manual_seed(axis.rank)
    index = torch.rand(tokens, experts_count, generator=generator).topk(slots).indices
    hidden, weights = (torch.randn(tokens, size, requires_grad=True) for size in (width, slots))
    owners, start, sizes = index // (experts_count // RANKS), collectives._all_to_all, []

    def count(out: Tensor, x: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(x.nbytes)
        return start(out, x, *args, **options)

    with mock.patch.object(collectives, "_all_to_all", count):
        output = experts(hidden, index, weights)
        forward = list(sizes)
        output.square().sum().backward()
    copies = [int((owners == rank).any(1).sum()) for rank in range(RANKS)]
    return {"copies": copies, "forward": forward, "backward": sizes[len(forward) :]}


def test_what_travels_is_one_copy_for_each_rank(pool2: Any) -> None:
    """A row of float32 for each copy, with an integer and a weight for each of its four slots."""
    tokens, width = 2000, 32
    ranks = pool2.run(traffic, tokens, width)
    row, slots = width * 4, 4
    for number, found in enumerate(ranks):
        sent, received = sum(found["copies"]), sum(rank["copies"][number] for rank in ranks)
        sizes = RANKS * 2 * 8
        assert found["forward"] == [sizes, sent * row, sent * slots * 8, sent * slots * 4, received * row]
        assert found["backward"] == [sent * row, received * row, received * slots * 4]
        # Of 64 experts a token has four different ones, which lie on as many ranks as four independent ones do.
        assert sent / tokens == pytest.approx(RANKS * (1 - (1 - 1 / RANKS) ** slots), rel=0.02)


def test_rows_are_taken_and_added_with_exact_gradients() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([4, 0, 0, 2, 4, 4])
    assert torch.autograd.gradcheck(lambda x: take_rows(x, index), x)
    assert torch.autograd.gradcheck(lambda x: add_rows(x, index[:5], 6), x)


PLANS: dict[str, dict[str, Any]] = {
    "dp2, ep2": {"dp": 2, "ep": 2},
    "tp2+sp, ep2, recompute": {"tp": 2, "sequence_parallel": True, "ep": 2, "recompute": "full"},
}


def train(plan: dict[str, Any] | None, name: str, dispatcher: str = "all_to_all") -> dict[str, Tensor]:
    mw.register_dispatcher("toy", ToyDispatcher)
    with Float64():
        return train_whole(build(name), plan, functools.partial(loader, name), token_dispatcher=dispatcher)


@pytest.mark.parametrize(
    ("name", "plan_name", "dispatcher"),
    [
        ("qwen3_moe", "dp2, ep2", "all_gather"),
        ("mixtral, idle experts", "dp2, ep2", "all_gather"),
        ("mixtral", "tp2+sp, ep2, recompute", "all_gather"),
        ("mixtral", "dp2, ep2", "toy"),
    ],
)
def test_other_dispatchers_train_as_one_process(name: str, plan_name: str, dispatcher: str, pool2: Any) -> None:
    assert_equals_one_process(pool2.run(train, PLANS[plan_name], name, dispatcher), train(None, name))


def test_a_dispatcher_that_cannot_be_is_refused() -> None:
    def refusal(ep: int, **options: Any) -> str:
        with pytest.raises(mw.PlanError) as caught:
            structure_of(build("mixtral"), mw.ParallelPlan(dp=2, ep=ep), mw.ToDistributedConfig(**options))
        return str(caught.value)

    assert "'nothing' is not registered; use one of 'all_to_all', 'all_gather'" in refusal(
        2, token_dispatcher="nothing"
    )
    assert "but ep=1" in refusal(1, token_dispatcher="all_gather")
    with pytest.raises(mw.PlanError, match="the name of a dispatcher"):
        mw.ToDistributedConfig(token_dispatcher=ToyDispatcher)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes a subclass of TokenDispatcher"):
        mw.register_dispatcher("toy", "toy")  # type: ignore[arg-type]
