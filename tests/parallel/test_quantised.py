"""Adapters on bases that bitsandbytes has quantised: each rank's part has the values of one device, bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import meshwright as mw
from meshwright.construct.initial_weights import own_statistics
from meshwright.distribute.quantised import check_quantised
from meshwright.facts import Facts
from meshwright.layout.packed_weights import PackedMatrix
from meshwright.layout.row_layout import RowLayout
from meshwright.roles.blocks.block import cut_over_tp
from support.exact import relative_difference
from support.models import build, labels_for, tokens
from support.tiers import crossings

bnb = pytest.importorskip("bitsandbytes", reason="the environment of the oldest versions has no bitsandbytes")

from support.quantised import KINDS, adapted, double, in_float64, quantised  # noqa: E402  # it needs bitsandbytes

STEPS = 3


def linear(kind: str, rows: int, columns: int) -> Any:
    """A quantised projection whose blocks differ in scale."""
    torch.manual_seed(1)
    options = KINDS[kind]
    if "load_in_8bit" in options:
        made: Any = bnb.nn.Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False, threshold=0.0)
        weight = bnb.nn.Int8Params
    else:
        made = bnb.nn.Linear4bit(
            columns,
            rows,
            bias=False,
            compute_dtype=torch.float32,
            quant_type=options["bnb_4bit_quant_type"],
            compress_statistics=options.get("bnb_4bit_use_double_quant", False),
            quant_storage=options.get("bnb_4bit_quant_storage", torch.uint8),
        )
        weight = None
    values = torch.randn(rows, columns) * torch.rand(rows, columns // 32).repeat_interleave(32, 1)
    if weight is None:
        made.weight.data = values
    else:
        made.weight = weight(values, requires_grad=False)
    return made.to("cpu").train()


def values_of(module: Any) -> Tensor:
    """The values with which a projection computes."""
    weight = module.weight
    if weight.dtype == torch.int8:
        return weight.data * (weight.SCB[:, None] / 127)
    values: Tensor = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
    return values


CUTS = {
    "rows": RowLayout.even(96, 2),
    "columns": RowLayout.even(256, 2, 1),
    "fused rows with copies": RowLayout(0, 96, (((0, 16), (64, 80), (80, 96)), ((16, 64), (64, 80), (80, 96)))),
}


@pytest.mark.quick
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_has_the_values_of_the_whole(kind: str, cut: str) -> None:
    rows = CUTS[cut]
    whole = values_of(linear(kind, 96, 256))
    for rank in range(2):
        part = linear(kind, 96, 256)
        if rank:  # the first pass of an 8-bit projection moves its statistics
            part(torch.zeros(1, 256))
        layout = cut_over_tp(part.weight, rows, "weight")
        layout = dataclasses.replace(layout, place={"tp": rank})
        shard = layout.take(part.weight.data.view(layout.shape))
        packing = PackedMatrix.of(part.weight)
        assert packing is not None
        for owner, name, value in list(own_statistics(part, packing, shard, layout)):
            owner[name] = value
        part.weight.data = shard
        expected = rows.take(whole, rank)
        real = rows.real_rows(rank)
        assert torch.equal(values_of(part).narrow(rows.dim, 0, real), expected.narrow(rows.dim, 0, real))
        x = torch.randn(3, expected.shape[1])
        assert relative_difference(part(x), x @ expected.T) < 1e-5  # its own forward, in float32


def test_other_statistics_would_show() -> None:
    """A planted wrong answer: the statistics of other blocks, as a cut of the bytes alone would leave them."""
    part = linear("nf4", 96, 256)
    layout = cut_over_tp(part.weight, CUTS["columns"], "weight")
    layout = dataclasses.replace(layout, place={"tp": 1})
    whole = values_of(part)
    part.weight.data = layout.take(part.weight.data.view(layout.shape))
    part.weight.quant_state.shape = torch.Size((96, 128))
    assert relative_difference(values_of(part), CUTS["columns"].take(whole, 1)) > 0.1


@pytest.mark.quick
@pytest.mark.parametrize(
    ("shape", "rows", "said"),
    [
        ((96, 96), RowLayout.even(96, 2, 1), "gives a rank 48 of its 96 columns"),
        ((96, 256), RowLayout.even(256, 8, 1), "tp=8 gives a rank 32 of its 256 columns.*ParallelPlan.tp=4"),
        ((90, 32), RowLayout.even(90, 2), "gives a rank 45 of its 90 rows.*ParallelPlan.tp=1"),
        ((128, 33), RowLayout.even(128, 2), "of its 128 rows"),
    ],
)
def test_a_cut_inside_of_a_block(shape: tuple[int, int], rows: RowLayout, said: str) -> None:
    weight: Any = nn.Parameter(torch.zeros(4, 1, dtype=torch.uint8), requires_grad=False)
    weight.quant_state = bnb.functional.QuantState(None, shape=torch.Size(shape), blocksize=64, quant_type="nf4")
    assert PackedMatrix.of(weight) is not None
    with pytest.raises(mw.PlanError, match=rf"(?s)layer\.weight is a quantised .*{said}.*skip_modules"):
        cut_over_tp(weight, rows, "layer.weight")


def train(plan: str | None, kind: str = "nf4, double", family: str = "llama", *, is_wide: bool = True) -> Any:
    """Losses and first gradients of a few steps, and the adapters after them."""
    with in_float64() if is_wide else contextlib.nullcontext():
        model = adapted(kind, family)
        model = double(model) if is_wide else model
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        ids = [tokens(4, 11, seed=step) for step in range(STEPS)]
        batches: Any = [{"input_ids": x, "labels": labels_for(x)} for x in ids]
        if plan is not None:
            model, optimizer, batches = mw.to_distributed(model, optimizer, batches, plan=plan)
        found: dict[str, Tensor] = {}
        losses = []
        for step, batch in enumerate(batches):
            loss = model(**batch).loss
            loss.backward()
            if step == 0:
                of_one = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
                gradients = of_one if plan is None else mw.full_gradients(model)
                found |= {f"gradient of {n}": g.clone() for n, g in gradients.items()}
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return found | {"losses": torch.stack(losses)} | mw.full_state_dict(model)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert actual.keys() == expected.keys() and any("gradient of" in name for name in expected)
    assert not any("base_layer.weight" in name for name in expected)  # those do not change
    worst = {name: relative_difference(actual[name], value) for name, value in expected.items()}
    assert max(worst.values()) < tolerance, max(worst.items(), key=lambda item: item[1])


PLANS = ["dp2", "dp2 zero2", "dp2 zero3", "tp2", "tp2+sp", "pp2", "dp2 zero1", "cp2", "dp2 tp2+sp zero1"]
CASES = [
    *(("nf4, double", "llama", plan) for plan in PLANS),
    *(("fp4", "phi3", plan) for plan in ("tp2+sp", "pp2")),
    *((kind, "llama", plan) for kind in ("nf4 in bfloat16", "8 bits") for plan in ("tp2+sp", "dp2 zero3")),
]


# In float64 only the order of sums differs; statistics of other blocks change the losses by more than 1e-3.
@pytest.mark.parametrize(
    ("kind", "family", "plan"), crossings(CASES, but=[CASES[4], CASES[5], ("fp4", "phi3", "tp2+sp"), CASES[-2]])
)
def test_training_equals_one_process(kind: str, family: str, plan: str, request: pytest.FixtureRequest) -> None:
    pool: Any = request.getfixturevalue("pool4" if plan == PLANS[-1] else "pool2")
    assert_equal(pool.run(train, plan, kind, family)[0], train(None, kind, family))


def test_training_in_float32(pool2: Any) -> None:
    """bitsandbytes' own kernels, which compute in float32 here: sums of 256 products in another order."""
    assert_equal(pool2.run(train, "tp2+sp", is_wide=False)[0], train(None, is_wide=False), tolerance=2e-4)


def saved(plan: str | None, folder: Path, again: str | None = None, *, is_resumed: bool = False) -> dict[str, Tensor]:
    """Train, and save the run and its adapters; or go on after a save, under another plan."""
    with in_float64():
        model = double(adapted())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        if plan is not None:
            model, optimizer, _ = mw.to_distributed(model, optimizer, plan=again or plan)
        if is_resumed:
            mw.load_checkpoint(folder / "run", model, optimizer)
        for step in range(2):
            ids = tokens(4, 11, seed=step + 2 * is_resumed)
            rows = slice(None)
            if "dp2" in str(again or plan):
                rank = torch.distributed.get_rank()
                rows = slice(2 * rank, 2 * rank + 2)
            model(input_ids=ids[rows], labels=ids[rows]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        prompt = tokens(1, 5, seed=9)
        text = model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
        if not is_resumed:
            mw.save_checkpoint(folder / "run", model, optimizer)
        model.save_pretrained(folder / "adapters")
        return {**mw.full_state_dict(model), "text": text}


def test_saves_are_those_of_one_process_and_resume_under_another_plan(pool2: Any, tmp_path: Path) -> None:
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    expected = saved(None, stock)
    assert_states(pool2.run(saved, "tp2+sp", ours)[0], expected)
    files = load_file(ours / "adapters" / "adapter_model.safetensors")
    wanted = load_file(stock / "adapters" / "adapter_model.safetensors")
    assert files.keys() == wanted.keys() and all("lora_" in name for name in files)
    assert all(relative_difference(files[name], x) < 1e-10 for name, x in wanted.items())
    expected = saved(None, stock, is_resumed=True)
    assert_states(pool2.run(saved, "tp2+sp", ours, "dp2 zero3", is_resumed=True)[0], expected)


def assert_states(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert torch.equal(actual.pop("text"), expected.pop("text")) and actual.keys() == expected.keys()
    assert all(relative_difference(actual[name], x) < 1e-10 for name, x in expected.items())


def refused(what: str, plan: str) -> None:
    """A call that would change the numbers."""
    if what in ("threshold", "evaluated in 8 bits"):
        model = adapted("8 bits")
        for module in model.modules():
            if what == "threshold" and hasattr(module, "state"):
                module.state.threshold = 6.0
    elif what == "not yet":
        model = build("llama", hidden_size=128)
        for layer in model.model.layers:
            layer.self_attn.o_proj = bnb.nn.Linear4bit(128, 128, compute_dtype=torch.float32)
    elif what == "block":
        model = adapted(hidden_size=96, intermediate_size=192)
    elif what == "head":
        model = quantised()
        model.lm_head = linear("nf4", 97, 128)
    else:
        model = adapted()
    model, *_ = mw.to_distributed(model, plan=plan)
    if what == "evaluated in 8 bits":
        model.eval()(input_ids=tokens(2, 5))
    elif what == "merged":
        model.merge_adapter()
    elif what == "base saved":
        model.get_base_model().save_pretrained("nowhere")


@pytest.mark.parametrize(
    ("what", "plan", "said"),
    [
        ("threshold", "dp2", "llm_int8_threshold=6.*llm_int8_threshold=0.0"),
        ("evaluated in 8 bits", "tp2", "largest one.*load_in_4bit=True"),
        ("not yet", "tp2", r"o_proj.weight is not quantised yet.*model.to\(device\)"),
        ("block", "tp2+sp", r"gives a rank 48 of its 96 columns.*Use ParallelPlan\(tp=1\)"),
        ("head", "tp2", r"lm_head is quantised.*skip_modules=\['lm_head'\]"),
        ("merged", "dp2", "would quantise these again.*save_pretrained"),
        ("base saved", "tp2", "14 weights of LlamaForCausalLM are quantised.*keep the checkpoint"),
    ],
)
def test_what_would_change_the_numbers_is_refused(what: str, plan: str, said: str, pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(refused, what, plan):
        assert kind == "PlanError" and re.search(said, message, re.DOTALL), message


def test_an_earlier_bitsandbytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantised()
    check_quantised(Facts(model), mw.ParallelPlan(dp=2), torch.device("cpu"))
    monkeypatch.setattr(bnb, "__version__", "0.49.2")
    with pytest.raises(mw.PlanError, match=r"bitsandbytes 0.49.2 .*bitsandbytes>=0.50"):
        check_quantised(Facts(model), mw.ParallelPlan(dp=2), torch.device("cpu"))
