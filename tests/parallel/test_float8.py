"""torchao's float8 layers under a plan have the scales, and so the numbers, of one device."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any
from unittest import mock

import pytest
import torch

import meshwright as mw
from meshwright.distribute.quantised import check_float8, rows_are_apart
from meshwright.facts import Facts
from meshwright.features.decision import Decision
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.axes import Mesh
from meshwright.parallel.tensor_parallel import float8
from meshwright.parallel.tensor_parallel.float8 import Float8Kernel
from meshwright_hf.accelerate import prepare
from support.accelerated import accelerator, dataset
from support.accelerated import losses_of as losses_of_accelerate
from support.exact import Float64
from support.float8 import Float8Run, exact_products, run, with_float8
from support.models import build
from support.short_programs import Plan, batches, distribute, losses_of, train, worst
from support.tiers import crossings
from support.traffic import Traffic

pytest.importorskip("torchao")

SP = {"tp": 2, "sequence_parallel": True}
ZERO3 = {"dp": 2, "zero_stage": 3}
RECIPES = ["tensorwise", "rowwise"]
# The plan, the recipe, the layers that stay in 16 bits, the length of the rows and the steps.
CASES: dict[str, tuple[dict[str, Any], str, str, int, int]] = {
    **{f"tp2+sp, {recipe}": (SP, recipe, "lm_head", 9, 20) for recipe in RECIPES},
    **{f"dp2 zero3, {recipe}": (ZERO3, recipe, "lm_head", 9, 20) for recipe in RECIPES},
    **{f"pp2, {recipe}": ({"pp": 2}, recipe, "lm_head", 9, 20) for recipe in RECIPES},
    "tp2, the head too": ({"tp": 2}, "tensorwise", "none", 9, 4),
    "dp2 zero1, the head too": ({"dp": 2, "zero_stage": 1}, "rowwise", "none", 9, 4),
    "dp2 zero2, gradients of weights in high precision": (
        {"dp": 2, "zero_stage": 2}, "rowwise_with_gw_hp", "lm_head", 9, 4
    ),
    "cp2, tensorwise": ({"cp": 2}, "tensorwise", "lm_head", 8, 4),
    "cp2, rowwise": ({"cp": 2}, "rowwise", "lm_head", 8, 4),
    "tp2+sp, recomputed": ({**SP, "recompute": "full"}, "tensorwise", "lm_head", 9, 4),
    "dp2, tp2+sp, zero2": ({**SP, "dp": 2, "zero_stage": 2}, "tensorwise", "lm_head", 9, 4),
    "pp2, tp2+sp": ({**SP, "pp": 2}, "rowwise", "lm_head", 9, 4),
}  # fmt: skip
# Plans whose float8 weights are gathered in float8.
GATHERED: dict[str, dict[str, Any]] = {
    "dp2 zero3, gathered in float8": ZERO3,
    "dp2, tp2+sp, zero3, recomputed, gathered in float8": {**SP, **ZERO3, "recompute": "full"},
}
CASES |= {name: (plan, "tensorwise", "lm_head", 9, 20) for name, plan in GATHERED.items()}
FIRST = ("tp2+sp, tensorwise", "dp2 zero3, rowwise", "pp2, tensorwise", "dp2 zero3, gathered in float8")


@functools.cache
def reference(*case: Any) -> Float8Run:
    return run(None, *case)


@pytest.mark.parametrize("name", crossings(CASES, only=[name for name in CASES if name not in FIRST]))
def test_scales_and_losses_are_those_of_one_device(name: str, request: pytest.FixtureRequest) -> None:
    plan, *case = CASES[name]
    ranks = plan.get("pp", 1) * plan.get("tp", 1) * plan.get("dp", 1) * plan.get("cp", 1)
    pool: Any = request.getfixturevalue(f"pool{ranks}")
    got: list[Float8Run] = pool.run(run, plan, *case, gathers=name in GATHERED)
    losses, weights, scales = reference(*case)
    for mine, _, _ in got:
        assert mine == pytest.approx(losses, abs=1e-12)  # float64: only the order of sums differs
    assert worst(got[0][1], weights) < 1e-10
    for role, expected in scales.items():
        assert {x for _, _, found in got for x in found[role]} == set(expected), role  # bitwise, in float32
    assert len(scales["input"]) > 1


def test_micro_batches_are_those_of_one_device(pool2: Any) -> None:
    case = ("tensorwise", "lm_head", 9, 4)
    plan = {"pp": 2, "gradient_accumulation_steps": 2, "schedule": "zb-h1"}
    losses, weights, _ = pool2.run(run, plan, *case)[0]
    expected = run(None, *case, parts=[(0, 1), (2, 3)])
    assert losses == pytest.approx(expected[0], abs=1e-12) and worst(weights, expected[1]) < 1e-10
    assert worst(reference(*case)[1], expected[1]) > 1e-4  # in one batch the scales are others


# The plan, and the rows of each micro-batch on one device. The first rank has row 0 for its second micro-batch and
# none for its first; of a batch with one row, the second rank has none.
WITHOUT_ROWS: dict[str, tuple[dict[str, Any], list[tuple[int, ...]]]] = {
    "a micro-batch": (
        {"dp": 2, "zero_stage": 1, "gradient_accumulation_steps": 2, "recompute": "full"},
        [(1,), (0, 2)],
    ),
    "a batch": ({"dp": 2, "zero_stage": 1}, [(0,)]),
}


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_a_rank_without_rows_takes_part_with_none_of_its_own(name: str, pool2: Any) -> None:
    plan, parts = WITHOUT_ROWS[name]
    case = ("tensorwise", "lm_head", 9, 3)
    losses, weights, scales = run(None, *case, parts=parts)
    got: list[Float8Run] = pool2.run(run, plan, *case, parts=parts)
    assert got[0][0] == pytest.approx(losses, abs=1e-12) and worst(got[0][1], weights) < 1e-10
    assert {x for _, _, found in got for x in found["input"]} == set(scales["input"])


def test_any_number_of_tokens_has_the_gradient_of_a_weight() -> None:
    """A rank's part of a multiple of 16 tokens may be none; torch._scaled_mm sums over multiples alone."""
    from torchao.float8 import float8_ops

    def scaled_mm(a: Any, a_scale: Any, b: Any, b_scale: Any, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        assert a.shape[1] == b.shape[0] and a.shape[1] % 16 == 0
        return ((a.float() / a_scale) @ (b.float() / b_scale)).to(dtype)

    def gradient_of_weight(*, emulate: bool) -> torch.Tensor:
        (layer,) = with_float8(torch.nn.Sequential(torch.nn.Linear(32, 16)), "tensorwise", emulate=emulate)
        layer.weight.meshwright = TensorLayout(shape=layer.weight.shape).placed("weight", Mesh())
        return Float8Kernel(layer, Mesh()).weight_gradient(x, gradient)

    x, gradient = torch.randn(8, 32), torch.randn(8, 16)
    with mock.patch.object(float8_ops, "addmm_float8_unwrapped", scaled_mm):
        assert torch.allclose(gradient_of_weight(emulate=False), gradient_of_weight(emulate=True), rtol=0, atol=1e-5)
        with mock.patch.object(float8, "_MULTIPLE", 8), pytest.raises(AssertionError):
            gradient_of_weight(emulate=False)


def started(plan: Plan, *, gathers: bool, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    """A model whose first layer is frozen, its optimizer and four batches."""
    model = with_float8(build("llama").to(dtype), "tensorwise", enable_fsdp_float8_all_gather=gathers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.get_submodule("model.layers.0").requires_grad_(False)
    return distribute(plan, model, optimizer, batches(4))


def gathered(*, gathers: bool) -> tuple[list[float], int, bool]:
    """The losses in training and of a copy, the bytes that are gathered, and whether other code reads a weight."""
    model, optimizer, loader = started(ZERO3, gathers=gathers)
    with Traffic() as traffic:
        losses = losses_of(model, optimizer, loader)
    model.get_submodule("model.layers.0").requires_grad_(True)
    losses += losses_of(model, optimizer, loader)
    copied = copy.deepcopy(model)
    losses_of(model, optimizer, loader)
    with torch.no_grad():
        losses += [each(**batches(1)[0]).loss.item() for each in (copied, model)]
    layer = model.model.layers[1].mlp.up_proj
    layer.register_forward_hook(lambda module, _, output: output + module.weight.sum())
    try:
        model(**batches(1)[0])
    except mw.UnreadableTensorError:
        return losses, traffic.bytes["all_gather"], False
    return losses, traffic.bytes["all_gather"], True


def test_gathers_in_float8_send_a_byte_for_each_element(pool2: Any) -> None:
    losses, sent, is_read = pool2.run(gathered, gathers=True)[0]
    others, wide, _ = pool2.run(gathered, gathers=False)[0]
    assert losses == others and losses[-1] != losses[-2]  # bitwise; the model that was copied has trained on
    weights = [layer.weight.numel() for _, layer in float8.float8_layers(with_float8(build("llama"), "tensorwise"))]
    assert wide - sent == 4 * 2 * 3 * sum(weights)  # in four steps, forward and backward: one byte in place of four
    assert not is_read  # the rounded values


def resumed(plan: Plan, folder: Any) -> tuple[list[float], list[float]]:
    """The losses of a run after it was saved, and those of the run that goes on under another plan."""
    with Float64(), exact_products():
        model, optimizer, loader = started(ZERO3, gathers=True, dtype=torch.float64)
        losses_of(model, optimizer, loader)
        mw.save_checkpoint(folder, model, optimizer)
        expected = losses_of(model, optimizer, loader)
        model, optimizer, loader = started(plan, gathers=True, dtype=torch.float64)
        mw.load_checkpoint(folder, model, optimizer)
        return expected, losses_of(model, optimizer, loader)


def test_a_run_that_gathers_in_float8_goes_on_under_another_plan(pool2: Any, tmp_path: Any) -> None:
    expected, losses = pool2.run(resumed, SP, tmp_path / "run")[0]
    assert losses == pytest.approx(expected, abs=1e-12)  # float64: only the order of sums differs


@pytest.mark.parametrize("plan", [SP, ZERO3])
def test_scales_of_a_part_are_other_numbers(plan: dict[str, Any], pool2: Any) -> None:
    case = ("tensorwise", "lm_head", 9, 20)
    losses, weights, _ = pool2.run(run, plan, *case, is_shared=False)[0]
    assert max(abs(a - b) for a, b in zip(losses, reference(*case)[0], strict=True)) > 1e-6
    assert worst(weights, reference(*case)[1]) > 1e-4


def refused(plan: dict[str, Any], what: str) -> str:
    """Return the error of one case."""
    model: Any = build("llama", hidden_size=64, intermediate_size=80)
    match what:
        case "width":
            model = with_float8(model, "tensorwise", emulate=False)
        case "another cast":
            from torchao.float8.config import CastConfig, ScalingGranularity

            cast = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=torch.float8_e4m3fn)
            options: Any = {"cast_config_weight_for_grad_input": cast, "enable_fsdp_float8_all_gather": True}
            model = with_float8(model, "tensorwise", **options)
        case "tied":
            model = build("llama", tie_word_embeddings=True)
            model = with_float8(model, "tensorwise", keep="none", enable_fsdp_float8_all_gather=True)
        case "another kind":
            from torchao.prototype.quantized_training.int8_mixed_precision import Int8MixedPrecisionTrainingLinear

            model.model.layers[0].mlp.up_proj.__class__ = Int8MixedPrecisionTrainingLinear
        case "weights of another kind":
            from torchao.prototype.quantized_training import int8_mixed_precision_training
            from torchao.quantization import quantize_

            quantize_(model, int8_mixed_precision_training(), lambda module, name: "up_proj" in name)
        case "shared heads":
            model = with_float8(build("llama", num_key_value_heads=1), "rowwise")
        case "adapters":
            from peft import LoraConfig, get_peft_model

            model = with_float8(get_peft_model(model, LoraConfig(r=4, target_modules=["o_proj"])), "tensorwise")
        case "data parallel":
            try:
                mw.DataParallel(with_float8(model, "tensorwise"))
            except ValueError as error:
                return str(error)
        case "compiled":
            model = with_float8(model, "tensorwise")
    try:
        model, _, _ = distribute(plan, model, **({"compile": "layers"} if what == "compiled" else {}))
        if what == "late":
            model = with_float8(model, "tensorwise")
        model(**batches(1)[0])
    except mw.PlanError as error:
        return str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("what", "text"),
    {
        "width": r"layers.0.mlp.gate_proj has a weight of 80 x 64, .* 40 x 64, .*multiples of 16.*smaller tp",
        "another cast": "q_proj casts its weight .*zero_stage=3.*enable_fsdp_float8_all_gather=False",
        "tied": r"lm_head.weight is tied to model.embed_tokens.weight.*name != 'lm_head'",
        "another kind": "mlp.up_proj computes as torchao.*convert_to_float8_training",
        "weights of another kind": "mlp.up_proj computes as torchao.*Int8MixedPrecisionTrainingLinearWeight",
        "shared heads": "k_proj is a float8 layer that several ranks of tp=2 have.*smaller tp",
        "adapters": "o_proj.lora_B.default is a float8 layer that several ranks.*name.endswith",
        "data parallel": "float8 layer.*to_distributed",
        "compiled": "compile='layers' would end the graph",
        "late": "converted to float8 after to_distributed.*Convert the model first",
    }.items(),
)
def test_what_is_not_equal_is_refused(what: str, text: str, pool2: Any) -> None:
    for message in pool2.run(refused, ZERO3 if what == "another cast" else {"tp": 2}, what):
        assert re.search(text, message, re.DOTALL), message


def train_fake_quantised(plan: Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with torchao's fake quantisation of weights, in groups, and of activations, by token."""
    from torchao.quantization.qat import FakeQuantizedLinear, IntxFakeQuantizeConfig

    model: Any = build("llama")
    by_token = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    by_group = IntxFakeQuantizeConfig(torch.int4, group_size=16)
    for layer in model.model.layers:
        layer.mlp.up_proj = FakeQuantizedLinear.from_linear(layer.mlp.up_proj, by_token, by_group)
    return train(model, plan, batches(1), torch.optim.SGD(model.parameters(), lr=0.1))


def test_fake_quantisation_is_that_of_one_device_where_nothing_is_cut(pool2: Any) -> None:
    losses, weights = train_fake_quantised(None)
    got = pool2.run(train_fake_quantised, {"dp": 2, "zero_stage": 1})[0]
    # float32, in which sums have another order. A scale of several tokens would differ by 1e-2.
    assert got[0] == pytest.approx(losses, rel=1e-6) and worst(got[1], weights) < 1e-5
    for message in pool2.run_expecting_error(train_fake_quantised, {"tp": 2}):
        assert "up_proj computes as torchao" in message[1]


def test_a_layer_with_a_scale_for_all_tokens_is_found() -> None:
    from torchao.quantization.granularity import PerTensor
    from torchao.quantization.qat import FakeQuantizedLinear
    from torchao.quantization.qat.fake_quantize_config import Float8FakeQuantizeConfig

    assert rows_are_apart(torch.nn.Linear(32, 16)) and rows_are_apart(torch.nn.Embedding(8, 16, device="meta"))
    layer = FakeQuantizedLinear(32, 16, activation_config=Float8FakeQuantizeConfig(granularity=PerTensor()))
    assert not rows_are_apart(layer)


@pytest.mark.parametrize("plan", [{"dp": 3}, {"dp": 2, "cp": 3}])
def test_scales_of_powers_of_2_need_such_a_number_of_ranks(plan: dict[str, int]) -> None:
    def decision(recipe: str) -> Decision:
        facts, config = Facts(with_float8(build("llama"), recipe)), mw.ToDistributedConfig()
        return Decision(facts=facts, plan=mw.ParallelPlan(**plan), config=config, loss=None, structure=None)

    with pytest.raises(mw.PlanError, match=r"times cp=\d is none.*round_scales_to_power_of_2=False"):
        check_float8(decision("rowwise"))
    check_float8(decision("tensorwise"))


def train_with_accelerate(plan: Plan, *, all_gather: bool) -> tuple[list[float], list[str]]:
    """The losses, and the layers that are not gathered in float8, of a script of accelerate."""
    from accelerate.utils import AORecipeKwargs
    from torch.utils.data import DataLoader
    from torchao.float8 import Float8LinearConfig

    recipe = AORecipeKwargs(config=Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=all_gather))
    with accelerator(mixed_precision="fp8", kwargs_handlers=[recipe]) as accelerate:
        model: Any = build("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader: Any = DataLoader(dataset(16), batch_size=4 if plan is None else 4 // plan.get("dp", 1))
        if plan is None:
            model, optimizer, loader = accelerate.prepare(model, optimizer, loader)
        else:
            config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
            model, optimizer, loader = prepare(accelerate, model, optimizer, loader, config=config)
        losses = losses_of_accelerate(accelerate, model, optimizer, loader)
        layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        casts = [name for name, layer in float8.float8_layers(model) if layer.config.enable_fsdp_float8_all_gather]
        return losses, sorted(layers.keys() - casts)


def test_accelerates_recipe(pool2: Any) -> None:
    losses, _ = train_with_accelerate(None, all_gather=False)
    for mine, wide in pool2.run(train_with_accelerate, ZERO3, all_gather=True):
        assert len(wide) == 2  # accelerate leaves the first and the last as they are
        # autocast in bf16, whose sums over 2 rows and over 4 differ
        assert mine == pytest.approx(losses, abs=2e-3)
