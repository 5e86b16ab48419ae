"""Models with experts equal one process under every axis, and models with towers under every axis but tp.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs, about 1e-16 a sum, and the steps
of AdamW divide tiny differences by tiny moments.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

import meshwright as mw
from harness import WorkerError
from meshwright.distribute.decide import structure_of
from meshwright.facts import Facts
from meshwright.mesh.axes import Axis, Mesh
from meshwright.optim import trained_parameters
from meshwright.parallel.autograd_graph import in_backward
from meshwright.parallel.batch.mean_over_ranks import GlobalMean
from meshwright.parallel.experts import load_balancing
from meshwright.parallel.experts.load_balancing import LoadBalancing
from meshwright.parallel.experts.routers import ARGUMENTS
from meshwright.parallel.saved_tensors import Replay
from meshwright.parallel.tensor_parallel.apply import OwnTokens
from meshwright.roles import find_decoder
from meshwright.roles.decoder import towers_beside
from support.anatomies import LENGTH, MODELS, build, collate, llama, loader, samples
from support.exact import Float64, relative_difference
from support.models import SIZES
from support.parity import pool_for
from support.planted_experts import FAULTS
from support.short_programs import gradients_of
from support.tiers import crossing, crossings
from support.whole_runs import assert_equals_one_process, differences, train_whole

PLANS: dict[str, dict[str, Any]] = {
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "tp2+sp, ep2": {"tp": 2, "sequence_parallel": True, "ep": 2},
    "tp2": {"tp": 2},
    "tp2, ep2, recompute": {"tp": 2, "ep": 2, "recompute": "full"},
    "dp2 x tp2, ep4, zero1": {"dp": 2, "tp": 2, "ep": 4, "zero_stage": 1},
    "tp4+sp, ep2, zero1": {"tp": 4, "sequence_parallel": True, "ep": 2, "zero_stage": 1},
    "dp2 x tp2+sp, ep2, zero3": {"dp": 2, "tp": 2, "sequence_parallel": True, "ep": 2, "zero_stage": 3},
    "dp2, ep2": {"dp": 2, "ep": 2},
    "dp4, ep2": {"dp": 4, "ep": 2},
    "dp4, ep2, zero1": {"dp": 4, "ep": 2, "zero_stage": 1},
    "dp2, ep2, zero2, micro-batches": {"dp": 2, "ep": 2, "zero_stage": 2, "gradient_accumulation_steps": 2},
    "dp2, ep2, zero3": {"dp": 2, "ep": 2, "zero_stage": 3},
    "dp4, ep2, zero3": {"dp": 4, "ep": 2, "zero_stage": 3},
    "pp2 x dp2, ep2, zero1": {"pp": 2, "dp": 2, "ep": 2, "zero_stage": 1},
    "cp2 x dp2, ep2, zero2": {"cp": 2, "dp": 2, "ep": 2, "zero_stage": 2},
    "dp2 x tp2+sp, ep4": {"dp": 2, "tp": 2, "sequence_parallel": True, "ep": 4},
    "cp2 x dp2, ep4, zero1": {"cp": 2, "dp": 2, "ep": 4, "zero_stage": 1},
    "dp2, ep2, micro-batches, recompute": {"dp": 2, "ep": 2, "gradient_accumulation_steps": 2, "recompute": "full"},
    "dp2 x tp2+sp, zero1": {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1},
    "pp2 x tp2+sp, ep2, micro-batches": {
        "pp": 2,
        "tp": 2,
        "sequence_parallel": True,
        "ep": 2,
        "gradient_accumulation_steps": 2,
    },
    "cp2 x tp2+sp, ep2, recompute": {"cp": 2, "tp": 2, "sequence_parallel": True, "ep": 2, "recompute": "full"},
    "dp2": {"dp": 2},
    "dp2+zero3": {"dp": 2, "zero_stage": 3},
    "pp2": {"pp": 2},
    "pp2, micro-batches": {"pp": 2, "gradient_accumulation_steps": 2},
    "cp2": {"cp": 2},
    "dp2, micro-batches": {"dp": 2, "gradient_accumulation_steps": 2},
    "pp2 x dp2+zero1, recompute": {"pp": 2, "dp": 2, "zero_stage": 1, "recompute": "full"},
    "pp2 x cp2, ring": {"pp": 2, "cp": 2, "context": "ring", "gradient_accumulation_steps": 2},
    "cp2+zero3, ulysses": {"cp": 2, "context": "ulysses", "zero_stage": 3},
}


def train(plan: dict[str, Any] | None, name: str) -> dict[str, Tensor]:
    with Float64(), wide_counts() if "balanced" in name else contextlib.nullcontext():
        return train_whole(build(name), plan, functools.partial(loader, name))


@contextlib.contextmanager
def wide_counts() -> Iterator[None]:
    """Let transformers' load-balancing loss, which counts tokens in float32, count them in float64."""

    def wide(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **options: Any) -> Tensor:
            if options.get("dtype") is torch.float32:
                options["dtype"] = torch.float64
            return make(*args, **options)

        return call

    with mock.patch.object(torch, "zeros", wide(torch.zeros)), mock.patch.object(Tensor, "to", wide(Tensor.to)):
        yield


EXPERT_MODELS = (
    "mixtral",
    "mixtral, idle experts",
    "mixtral, balanced",
    "olmoe, balanced",
    "qwen3_moe",
    "qwen2_moe",
    "deepseek_v3",
)


@functools.cache
def reference(name: str) -> dict[str, Tensor]:
    return train(None, name)


# With images in some rows, one rank of dp has none, and each of two micro-batches would have an unknown number.
CASES = [(name, plan) for name in MODELS for plan in PLANS if "some" not in name or plan in ("dp2", "pp2", "cp2")]
# Micro-batches have load-balancing losses of their own tokens, which a test below compares.
CASES = [
    (name, plan) for name, plan in CASES if "balanced" not in name or "gradient_accumulation_steps" not in PLANS[plan]
]
CASES = [(name, plan) for name, plan in CASES if "idle" not in name or re.search(r"ep\d", plan)]
CASES = [(name, plan) for name, plan in CASES if name in EXPERT_MODELS or not re.search(r"tp|ep\d", plan)]
ON_FOUR = [
    ("qwen3_moe", "dp4, ep2, zero1"),
    ("mixtral", "dp2, ep2, zero2, micro-batches"),
    ("mixtral, idle experts", "dp2, ep2, zero3"),
    ("qwen2_moe", "dp4, ep2, zero3"),
    ("deepseek_v3", "pp2 x dp2, ep2, zero1"),
    ("mixtral, balanced", "cp2 x dp2, ep2, zero2"),
    ("mixtral", "dp2, ep2, micro-batches, recompute"),
    ("qwen2_moe", "dp2 x tp2+sp, zero1"),
    ("mixtral", "pp2 x tp2+sp, ep2, micro-batches"),
    ("mixtral", "cp2 x tp2+sp, ep2, recompute"),
    ("qwen3_moe", "tp4+sp, ep2, zero1"),
    ("deepseek_v3", "dp2 x tp2+sp, ep2, zero3"),
    ("olmoe, balanced", "dp2 x tp2+sp, zero1"),
    ("mixtral, balanced", "cp2 x tp2+sp, ep2, recompute"),
    ("mixtral, idle experts", "dp2 x tp2+sp, ep4"),
    ("mixtral, balanced", "cp2 x dp2, ep4, zero1"),
    ("mixtral, balanced", "tp2"),
    ("qwen2_moe", "tp2, ep2, recompute"),
    ("deepseek_v3", "dp2 x tp2, ep4, zero1"),
]
# Towers under each of these plans; a model with experts under every third, and each plan with two or more of them.
ON_TWO = ("tp2+sp", "dp2+zero3", "pp2, micro-batches", "cp2", "dp2, ep2", "tp2+sp, ep2")
MIDDLE = [
    (name, plan)
    for name, plan in CASES
    if plan in ON_TWO and (name not in EXPERT_MODELS or (EXPERT_MODELS.index(name) + ON_TWO.index(plan)) % 3 == 0)
]


@pytest.mark.parametrize(
    ("name", "plan_name"),
    crossings(CASES, but=[*ON_FOUR, *MIDDLE]),
)
def test_equals_one_process(name: str, plan_name: str, request: pytest.FixtureRequest) -> None:
    results = pool_for(PLANS[plan_name], request).run(train, PLANS[plan_name], name)
    assert_equals_one_process(results, reference(name))


def train_without_sums(plan: dict[str, Any]) -> dict[str, Tensor]:
    """A fault: the gradients of experts that several ranks hold are not summed."""
    make = trained_parameters.AllReduce
    trained_parameters.AllReduce = lambda axis, *args: make(Axis("alone") if axis.name == "copies" else axis, *args)
    try:
        return train(plan, "mixtral")
    finally:
        trained_parameters.AllReduce = make


def train_without_scale(plan: dict[str, Any]) -> dict[str, Tensor]:
    """A fault: the gradients of experts are not divided by the number of ranks that share them."""
    with FAULTS["gradients of experts are not divided by ep"].plant():
        return train(plan, "mixtral")


def train_with_all_tokens(plan: dict[str, Any]) -> dict[str, Tensor]:
    """A fault: under tp without sp every rank routes all tokens, although their gradients are summed."""
    with mock.patch.object(OwnTokens, "__call__", lambda self, *args, **kwargs: self.method(*args, **kwargs)):
        return train(plan, "mixtral")


def test_tokens_that_every_rank_routes_would_be_caught(pool2: Any) -> None:
    found = differences(pool2.run(train_with_all_tokens, PLANS["tp2"]), reference("mixtral"))
    assert found["gradient of model.layers.0.mlp.gate.weight"] > 0.5
    assert found["norm 0"] > 1e-3


def test_a_wrong_scale_of_experts_would_be_caught(pool2: Any) -> None:
    found = differences(pool2.run(train_without_scale, PLANS["dp2, ep2"]), reference("mixtral"))
    assert found["gradient of model.layers.0.mlp.experts.down_proj"] > 0.5
    assert found["norm 0"] > 1e-3


def test_copies_of_experts_that_are_not_summed_are_named(pool4: Any) -> None:
    with pytest.raises(WorkerError, match=r"experts.gate_up_proj: rank\(s\) 0 differ from rank\(s\) 2"):
        pool4.run(train_without_sums, {"tp": 4, "sequence_parallel": True, "ep": 2})


BALANCED = "olmoe, balanced"
# The plan, and which rows are in each micro-batch. A rank of dp4 has a row that only keeps it in step, as rank 0
# has in its first micro-batch of one row.
MICRO_BATCHES: list[tuple[dict[str, Any], list[list[int]]]] = [
    ({"dp": 2}, [[0, 1, 2, 3, 4]]),
    ({"dp": 2, "gradient_accumulation_steps": 2}, [[0, 2], [1, 3, 4]]),
    ({"dp": 2, "micro_batch_size": 1, "zero_stage": 2}, [[1], [0, 2]]),
    ({"tp": 2, "sequence_parallel": True, "gradient_accumulation_steps": 2}, [[0], [1, 2]]),
    ({"cp": 2, "gradient_accumulation_steps": 2}, [[0, 1], [2, 3]]),
    ({"dp": 4}, [[0, 1, 2]]),
    ({"pp": 2, "gradient_accumulation_steps": 2}, [[0, 1], [2, 3]]),
    ({"pp": 2, "schedule": "zbv", "gradient_accumulation_steps": 2}, [[0], [1, 2]]),
    ({"pp": 2, "schedule": "interleaved", "chunks": 2, "gradient_accumulation_steps": 2}, [[0], [1]]),
    ({"pp": 2, "dp": 2, "micro_batch_size": 1, "recompute": "full"}, [[1], [0, 2]]),
    ({"pp": 2, "tp": 2, "sequence_parallel": True, "gradient_accumulation_steps": 2}, [[0, 1], [2, 3]]),
    ({"pp": 2, "cp": 2, "schedule": "gpipe", "gradient_accumulation_steps": 2}, [[0], [1, 2]]),
]


def balance(plan: dict[str, Any] | None, groups: list[list[int]], name: str = BALANCED) -> dict[str, Tensor]:
    """One training pass of micro-batches of these rows and an evaluation of all of them."""
    with Float64(), wide_counts():
        model: Any = build(name)
        data = loader(name, rows=sum(map(len, groups)), steps=1)
        if plan is not None:
            model, _, data = mw.to_distributed(model, None, data, plan=mw.ParallelPlan(**plan))
        batch = next(iter(data))
        if plan is not None:
            output = model(**batch)
            loss, auxiliary = output.loss, output.aux_loss
        else:
            items = (batch["labels"][:, 1:] != -100).sum()
            loss, auxiliary = torch.zeros(()), torch.zeros(())
            for rows in groups:
                output = model(**{name: x[rows] for name, x in batch.items()}, num_items_in_batch=items)
                auxiliary = auxiliary + output.aux_loss / len(groups)
                loss = loss + output.loss - 0.5 * output.aux_loss
            loss = loss + 0.5 * auxiliary
        loss.backward()
        found = {"loss": loss.detach(), "mean": auxiliary.detach(), **gradients_of(model, plan)}
        with torch.no_grad():
            output = model.eval()(**batch)
        return found | {"evaluation": output.loss, "auxiliary": output.aux_loss}


@pytest.mark.parametrize(
    ("plan", "groups"), crossings(MICRO_BATCHES, only=[MICRO_BATCHES[place] for place in (2, 8, 10)])
)
def test_a_load_balancing_loss_is_that_of_all_tokens(
    plan: dict[str, Any], groups: list[list[int]], request: pytest.FixtureRequest
) -> None:
    assert_equals_one_process(pool_for(plan, request).run(balance, plan, groups), balance(None, groups))


@pytest.mark.crossing
def test_a_load_balancing_loss_of_stages_with_other_layers(pool2: Any) -> None:
    plan, groups = MICRO_BATCHES[6]
    name = "qwen4_exp, balanced"
    assert_equals_one_process(pool2.run(balance, plan, groups, name), balance(None, groups, name))


def balance_locally(plan: dict[str, Any], groups: list[list[int]]) -> dict[str, Tensor]:
    """A fault: the product of each rank's own means."""
    with mock.patch.object(load_balancing, "all_reduce", lambda x, axis: x):
        return balance(plan, groups)


def test_a_load_balancing_loss_of_ones_own_tokens_would_be_caught(pool2: Any) -> None:
    plan, groups = MICRO_BATCHES[0]
    found = pool2.run(balance_locally, plan, groups)[0]
    expected = balance(None, groups)
    assert relative_difference(found["auxiliary"], expected["auxiliary"]) > 1e-3
    router = "model.layers.0.mlp.gate.weight"
    assert relative_difference(found[router], expected[router]) > 0.01


def balance_by_stage(plan: dict[str, Any], groups: list[list[int]]) -> dict[str, Tensor]:
    """A fault: the last stage knows its own routers only."""
    with mock.patch.object(LoadBalancing, "after", lambda self, earlier: contextlib.nullcontext()):
        return balance(plan, groups)


def test_a_load_balancing_loss_of_the_last_stage_would_be_caught(pool2: Any) -> None:
    plan, groups = MICRO_BATCHES[6]
    found, expected = pool2.run(balance_by_stage, plan, groups), balance(None, groups)
    assert relative_difference(found[0]["mean"], expected["mean"]) > 1e-3
    name = "model.layers.0.mlp.gate.weight"
    router = next(gradients[name] for gradients in found if name in gradients)
    assert relative_difference(router, expected[name]) > 0.01


def test_every_familys_load_balancing_loss_is_the_same() -> None:
    """Each modelling file of transformers has a copy of the function, of which ours is the sum over the ranks."""
    logits = tuple(torch.randn(2 * LENGTH, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    mask = (torch.arange(2 * LENGTH) % 5 > 0).view(2, LENGTH).long()
    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    names = [path.stem for path in files if "\ndef load_balancing_loss_func(\n    gate_logits" in path.read_text()]
    step = LoadBalancing(torch.nn.Linear(1, 1), balance, mean=GlobalMean(Axis("dp")), mesh=Mesh(), region=None)
    step._batch = {"input_ids": mask}
    compared = set()
    for name in names:
        family = name.removeprefix("modeling_")
        stock = importlib.import_module(f"transformers.models.{family}.{name}").load_balancing_loss_func
        if list(inspect.signature(stock).parameters) == ARGUMENTS:
            for given in (None, mask):
                torch.testing.assert_close(step.loss(logits, 5, 2, given), stock(logits, 5, 2, given))
            compared.add(family)
    assert len(compared) > 15


def test_a_load_balancing_loss_of_frozen_routers_is_known() -> None:
    """Nothing before the routers need be trained, as where only the head is: it is still no term of unknown origin."""
    mean = GlobalMean(Axis("dp"))
    statistics = torch.ones(3)
    for is_known in (True, False):
        loss = mean.of(torch.ones(1, requires_grad=True), torch.ones(1))
        term = mean.added(statistics, statistics.sum(), statistics) if is_known else torch.ones(())
        assert mean.returned(loss + 0.5 * term) is is_known


class Flips(TorchFunctionMode):
    """Lets equal scores be told apart: the first of them is the largest in a forward pass, and the last in backward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.topk:
            order = 1e-13 * torch.arange(args[0].shape[-1])
            args = (args[0] + order if in_backward() else args[0] - order, *args[1:])
        return func(*args, **(kwargs or {}))


def route_again(plan: dict[str, Any] | None, *, replays: bool = True) -> dict[str, Tensor]:
    """A training pass of a model whose layers are run again, in which the router then prefers other experts."""
    router = transformers.models.mixtral.modeling_mixtral.MixtralTopKRouter
    forward = router.forward

    def flipping(self: Any, x: Tensor) -> Any:
        with Flips():
            return forward(self, x)

    with Float64(), mock.patch.object(router, "forward", flipping), contextlib.ExitStack() as stack:
        if not replays:
            stack.enter_context(mock.patch.object(Replay, "attach", lambda self, model: None))
        model: Any = build("mixtral")
        for layer in model.model.layers:
            layer.mlp.gate.weight.data[:3] = layer.mlp.gate.weight.data[0]
        data = loader("mixtral", steps=1)
        if plan is not None:
            model, _, data = mw.to_distributed(model, None, data, plan=mw.ParallelPlan(**plan))
        if plan is not None and plan.get("recompute") is None:
            model.activation_checkpointing_enable()
        loss = model(**next(iter(data))).loss
        loss.backward()
        return {"loss": loss.detach(), **gradients_of(model, plan)}


@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 2, "ep": 2, "recompute": "full"},
        crossing({"pp": 2, "gradient_accumulation_steps": 2, "recompute": "full"}),
        crossing({"tp": 2, "sequence_parallel": True, "ep": 2}),
    ],
)
def test_a_layer_that_runs_again_chooses_the_same_experts(plan: dict[str, Any], pool2: Any) -> None:
    assert_equals_one_process(pool2.run(route_again, plan), route_again(None))


def test_a_layer_that_chooses_other_experts_would_be_caught(pool2: Any) -> None:
    plan = {"dp": 2, "recompute": "full"}
    kind, said = pool2.run_expecting_error(functools.partial(route_again, replays=False), plan)[0]
    assert kind == "CheckpointError" and "recomputed metadata" in said


def read_router_logits(plan: dict[str, Any]) -> None:
    model = mw.to_distributed(build(BALANCED).float(), plan=mw.ParallelPlan(**plan))[0]
    batch = collate(samples(BALANCED, 2))
    output = model(**batch)
    assert len(output.router_logits) == 4
    output.router_logits[0].sum()


def test_router_logits_of_own_tokens_cannot_be_read(pool2: Any) -> None:
    for plan in ({"tp": 2, "sequence_parallel": True}, {"cp": 2}, {"pp": 2}):
        kind, said = pool2.run_expecting_error(read_router_logits, plan)[0]
        assert kind == "UnreadableTensorError" and "use tp=1, cp=1 and pp=1" in said, said


def train_stock_experts(plan: dict[str, Any] | None, rows: int | None = None) -> dict[str, float]:
    """Losses and norms in float32 with transformers' own choice of how experts are computed."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_experts_per_tok=2, num_local_experts=4)
    model = transformers.MixtralForCausalLM(config).train()
    assert model.config._experts_implementation == "grouped_mm"
    batches = functools.partial(loader, "mixtral")
    if rows is not None:
        batches = lambda: [{name: x[:rows] for name, x in batch.items()} for batch in loader("mixtral")]  # noqa: E731
    found = train_whole(model, plan, batches)
    return {name: float(x) for name, x in found.items() if name.startswith(("loss", "norm"))}


@pytest.mark.parametrize("plan_name", ["tp2+sp", "dp2+zero3", "pp2", "cp2"])
def test_stock_experts_in_float32(plan_name: str, pool2: Any) -> None:
    """1e-5 relative: sums in another order differ by 1e-7. A rank's own rows are off by 1e-3 at least."""
    expected, of_half = train_stock_experts(None), train_stock_experts(None, rows=2)
    assert len(expected) >= 4
    for found in pool2.run(train_stock_experts, PLANS[plan_name]):
        assert found == pytest.approx(expected, rel=1e-5)
    assert max(abs(of_half[name] / expected[name] - 1) for name in expected) > 1e-3


@pytest.mark.parametrize(
    ("name", "prefix", "towers"),
    [
        ("mixtral", "model", []),
        ("llava", "model.language_model", ["model.vision_tower"]),
        ("qwen2_vl", "model.language_model", ["model.visual"]),
    ],
)
def test_the_decoder_is_that_of_the_text(name: str, prefix: str, towers: list[str]) -> None:
    """The towers have three times as many layers."""
    model = build(name)
    decoder = find_decoder(model)
    assert decoder.layers == (model.get_submodule(f"{prefix}.layers.0"), model.get_submodule(f"{prefix}.layers.1"))
    assert decoder.embedding is model.get_submodule(f"{prefix}.embed_tokens")
    assert decoder.final_norm is model.get_submodule(f"{prefix}.norm") and decoder.head is model.lm_head
    assert decoder.towers == tuple(map(model.get_submodule, towers))


def test_two_stacks_in_one_place_are_named() -> None:
    model = torch.nn.Module()
    for name in ("left", "right"):
        layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)) for _ in range(2)]
        setattr(model, name, torch.nn.ModuleList(layers))
    with pytest.raises(mw.PlanError, match=r"2 stacks of layers \(left, right\).*Role\.LAYER"):
        find_decoder(model)


def test_layers_of_two_stacks_that_have_the_role_are_no_tower() -> None:
    model = torch.nn.Module()
    for name in ("left", "right"):
        layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)) for _ in range(2)]
        setattr(model, name, torch.nn.ModuleList(layers))
    assert list(towers_beside(Facts(model), (*model.left, *model.right))) == []
    assert list(towers_beside(Facts(model), tuple(model.left))) == [model.right]


def refusal(make: Callable[[], Any], **plan: Any) -> str:
    with pytest.raises(mw.PlanError) as caught:
        structure_of(make(), mw.ParallelPlan(**plan), mw.ToDistributedConfig())
    return str(caught.value)


def test_a_refusal_speaks_of_the_axis_at_hand() -> None:
    assert "Leave tp out of the plan: plan='dp2'" in refusal(MODELS["llava"], tp=3)
    mixing = llama()
    mixing.model.layers[0].mix = torch.nn.Conv1d(32, 32, 3)
    said = refusal(lambda: mixing, cp=2)
    assert "mix.weight" in said and "takes each token by itself" in said
    assert not re.search(r"\btp\b|ensor parallel", said)


def test_experts_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(mw.PlanError, match=r"Set ep to 1 or 3$"):
        mw.ParallelPlan(dp=3, ep=2)
    with pytest.raises(mw.PlanError, match=r"within or over whole groups of tp. Set ep to 1 or 2 or 4$"):
        mw.ParallelPlan(dp=3, tp=4, ep=3, sequence_parallel=True)
    with pytest.raises(mw.PlanError, match=r"ep x etp=4 with dp=6.*Set ep x etp to 1 or 2 or 3 or 6$"):
        mw.ParallelPlan(dp=6, ep=2, etp=2)
    assert "has 48 channels, which ParallelPlan.etp=5" in refusal(MODELS["mixtral"], dp=5, etp=5)
    assert "has no experts" in refusal(llama, dp=2, etp=2)
    assert "has no experts" in refusal(llama, dp=2, ep=2)
    assert "4 experts in a layer, so 8 ranks" in refusal(MODELS["mixtral"], tp=8, ep=8, sequence_parallel=True)
    said = refusal(lambda: llama(num_attention_heads=8), tp=8, ep=8, sequence_parallel=True)
    assert "has no experts" in said
