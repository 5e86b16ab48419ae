"""What a step costs, counted: collectives, their bytes, and the activations kept for backward."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.parallel.shards.sharded_parameter import ShardedParameter
from support.models import build, tokens
from support.reference import make_optimizer
from support.traffic import Traffic

SP = {"tp": 2, "sequence_parallel": True}
ROWS, LENGTH, HIDDEN = 4, 12, 32


def collectives_of_a_step(plan: dict[str, Any], layers: int) -> dict[str, tuple[Counter[str], Counter[str]]]:
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
    model = mw.to_distributed(build("llama", num_hidden_layers=layers), config=config)[0]
    ids = tokens(ROWS, LENGTH)
    with Traffic() as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with Traffic() as backward:
        loss.backward()
    return {"forward": (forward.calls, forward.bytes), "backward": (backward.calls, backward.bytes)}


def per_layer(pool: Any, plan: dict[str, Any]) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """The difference between three layers and two: what a layer adds."""
    two, three = (pool.run(collectives_of_a_step, plan, layers)[0] for layers in (2, 3))

    def difference(a: Counter[str], b: Counter[str]) -> dict[str, int]:
        return {name: b[name] - a[name] for name in b if b[name] != a[name]}

    return {when: (difference(two[when][0], three[when][0]), difference(two[when][1], three[when][1])) for when in two}


def test_collectives_of_a_layer_with_sequence_parallelism(pool2: Any) -> None:
    cost = per_layer(pool2, SP)
    activation = ROWS * LENGTH * HIDDEN * 4  # Megatron's 2bsh bytes a collective, at 4 bytes a number
    assert cost["forward"] == (
        {"all_gather": 2, "reduce_scatter": 2},
        {"all_gather": 2 * activation, "reduce_scatter": 2 * activation},
    )
    # Two gathers mirror the reduce-scatters, two gather the inputs again (see column_projections.py).
    calls, sizes = cost["backward"]
    assert calls == {"all_gather": 4, "reduce_scatter": 2}
    norms = {"all_reduce": sizes.pop("all_reduce", 0)}  # one call for all layers: it adds bytes, not calls
    assert sizes == {"all_gather": 4 * activation, "reduce_scatter": 2 * activation}
    # Two norm weights a layer, and the biases of o_proj and down_proj: 32 elements each, padded to 64.
    assert norms == {"all_reduce": 4 * 64 * 4}


def test_collectives_of_a_layer_without_sequence_parallelism(pool2: Any) -> None:
    cost = per_layer(pool2, {"tp": 2})
    activation = ROWS * LENGTH * HIDDEN * 4
    assert cost["forward"] == ({"all_reduce": 2}, {"all_reduce": 2 * activation})
    assert cost["backward"] == ({"all_reduce": 2}, {"all_reduce": 2 * activation})


def reductions_of_a_window(plan: dict[str, Any], use_no_sync: bool) -> dict[str, int]:
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), bucket_size_mb=0.01)
    model = build("llama")
    model, _optimizer, _ = mw.to_distributed(model, make_optimizer(model), config=config)
    ids = tokens(2, LENGTH)
    counts: Counter[str] = Counter()
    for i in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        with Traffic() as traffic:
            if use_no_sync and i < 2:
                with mw.no_sync(model):
                    loss.backward()
            else:
                loss.backward()
        counts += traffic.calls
    return dict(counts)


@pytest.mark.parametrize(("plan", "kind"), [({"dp": 2}, "all_reduce"), ({"dp": 2, "zero_stage": 1}, "reduce_scatter")])
def test_an_accumulation_window_reduces_once(plan: dict[str, Any], kind: str, pool2: Any) -> None:
    every_pass = pool2.run(reductions_of_a_window, plan, False)[0][kind]
    once = pool2.run(reductions_of_a_window, plan, True)[0][kind]
    assert once * 3 == every_pass and once > 3  # several buckets, or nothing could overlap


def micro_batched_reductions() -> dict[str, int]:
    plan = mw.ParallelPlan(dp=2, gradient_accumulation_steps=2)
    model = mw.to_distributed(build("llama"), config=mw.ToDistributedConfig(plan=plan, bucket_size_mb=100))[0]
    ids = tokens(2, LENGTH)
    loss = model(input_ids=ids, labels=ids).loss
    with Traffic() as traffic:
        loss.backward()
    return dict(traffic.calls)


def test_micro_batches_of_the_plan_reduce_once(pool2: Any) -> None:
    assert pool2.run(micro_batched_reductions)[0] == {"all_reduce": 1}


def guarded_reads(plan: dict[str, Any], layers: int) -> int:
    """How often a forward and a backward pass read a property of a guarded parameter, each time through Python."""
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
    model = build("llama", num_hidden_layers=layers)
    model, _, _ = mw.to_distributed(model, make_optimizer(model), config=config)
    ids = tokens(2, LENGTH)
    through_python = ShardedParameter.__torch_function__
    with mock.patch.object(ShardedParameter, "__torch_function__", side_effect=through_python) as call:
        model(input_ids=ids, labels=ids).loss.backward()
        in_step = call.call_count
        assert model.model.layers[0].self_attn.q_proj.weight.grad is not None
        assert call.call_count > in_step, "the parameter is not guarded, so nothing was counted"
    return in_step


@pytest.mark.parametrize("plan", [SP, {"dp": 2, "zero_stage": 3}])
def test_a_layer_reads_no_guarded_parameter_through_python(plan: dict[str, Any], pool2: Any) -> None:
    two, three = (pool2.run(guarded_reads, plan, layers)[0] for layers in (2, 3))
    assert two == three


def overlap(plan: dict[str, Any]) -> int:
    """How many bucket reductions start before backward has reached the embedding."""
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), bucket_size_mb=0.01)
    model = build("llama")
    model, _, _ = mw.to_distributed(model, make_optimizer(model), config=config)
    ids = tokens(2, LENGTH)
    started: list[int] = []
    with Traffic() as traffic:
        node: Any = get_gradient_edge(model.model.embed_tokens.weight).node
        node.register_prehook(lambda _: started.append(traffic.calls.total()))
        loss = model(input_ids=ids, labels=ids).loss
        traffic.calls.clear()
        loss.backward()
    return started[0]


class Issued(TorchDispatchMode):
    """The collectives and matrix multiplications of this thread, in the order in which they are issued."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1]
        if name in ("mm", "addmm"):
            # A product of a transposed matrix sums over the tokens: it is a weight's gradient.
            self.names.append("input" if args[-2].is_contiguous() else "weight")
        elif func.namespace == "c10d":
            self.names.append(name.strip("_"))
        return func(*args, **(kwargs or {}))


def order_of_backward(plan: dict[str, Any]) -> list[str]:
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
    model = mw.to_distributed(build("llama", num_hidden_layers=1), config=config)[0]
    ids = tokens(ROWS, LENGTH)
    loss = model(input_ids=ids, labels=ids).loss
    with Issued() as issued:
        loss.backward()
    return issued.names


@pytest.mark.parametrize(("plan", "gather", "reduce"), [
    (SP, ["allgather_base"], ["alltoall_base"]),
    ({"tp": 2}, [], ["allreduce"]),
])  # fmt: skip
def test_collectives_of_inputs_start_before_matrix_multiplications(
    plan: dict[str, Any], gather: list[str], reduce: list[str], pool2: Any
) -> None:
    first, second = pool2.run(order_of_backward, plan)
    assert first == second
    output = [*gather, "weight", "input"] if gather else ["weight", "input"]  # of the output projection
    mlp = [*gather, *["input"] * 2, *reduce, *["weight"] * 2]
    attention = [*gather, *["input"] * 3, *reduce, *["weight"] * 3]
    assert first[1 : 1 + 2 * len(output) + len(mlp) + len(attention)] == output + mlp + output + attention


@pytest.mark.parametrize("plan", [{"dp": 2}, {"dp": 2, "zero_stage": 1}])
def test_reductions_overlap_with_backward(plan: dict[str, Any], pool2: Any) -> None:
    assert pool2.run(overlap, plan)[0] >= 3


def saved_bytes(plan: dict[str, Any] | None) -> int:
    """Bytes that forward keeps for backward, parameters apart, at the benchmark's proportions."""
    model = build("llama", vocab_size=4000, hidden_size=64, intermediate_size=176, attention_bias=False, mlp_bias=False)
    if plan is not None:
        model = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))[0]
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    held = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        # The head and the loss keep what does not depend on the layers; test_head_loss.py holds their bytes.
        if storage.data_ptr() not in parameters and 4000 not in x.shape and 2000 not in x.shape:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(x)  # alive, so that no address is used twice
        return x

    ids = tokens(4, 64, vocab_size=4000)
    with saved_tensors_hooks(pack, lambda x: x):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()  # the graph holds its hooks, and these hold tensors of the graph
    return sum(kept.values())


def test_activations_kept_at_tp2_with_sequence_parallelism(pool2: Any) -> None:
    assert max(pool2.run(saved_bytes, SP)) <= 0.55 * saved_bytes(None)
    # Plain tensor parallelism keeps whole activations between blocks, and would fail the bound.
    assert min(pool2.run(saved_bytes, {"tp": 2})) > 0.55 * saved_bytes(None)
