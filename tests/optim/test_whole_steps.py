"""Optimizers that read whole parameters, stepped by an owner of each, equal one device under every plan."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import Adafactor

import meshwright as mw
from meshwright.optim import elementwise, whole_steps
from meshwright.optim.elementwise import Reads
from support.anatomies import mixtral
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.optimizers import HeadMuon, Lamb, Shampoo, TrustRatio
from support.tiers import crossings

SP = {"tp": 2, "sequence_parallel": True}
PLANS: dict[str, dict[str, Any]] = {
    "tp2+sp": SP,
    "dp2 zero1": {"dp": 2, "zero_stage": 1},
    "dp2 zero2": {"dp": 2, "zero_stage": 2},
    "dp2 zero3": {"dp": 2, "zero_stage": 3},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "cp2 zero1": {"cp": 2, "zero_stage": 1},
    "dp2 tp2+sp": {**SP, "dp": 2},
    "dp2 tp2+sp zero1": {**SP, "dp": 2, "zero_stage": 1},
    "dp2 tp2 zero3": {"tp": 2, "dp": 2, "zero_stage": 3},
    "pp2 dp2 zero1": {"pp": 2, "dp": 2, "zero_stage": 1},
    "dp2 ep2": {"dp": 2, "ep": 2},
    "dp4 ep2 zero1": {"dp": 4, "ep": 2, "zero_stage": 1},
}
FOUR = {"dp2 tp2+sp", "dp2 tp2+sp zero1", "dp2 tp2 zero3", "pp2 dp2 zero1", "dp4 ep2 zero1"}


def make(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "head" not in n]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    if kind == "muon":
        return mw.ChainedOptimizer(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-2))
    if kind == "muon per head":
        heads = [
            p
            for n, p in model.named_parameters()
            if n.endswith(tuple(f"{x}_proj.weight" for x in ("q", "k", "v", "qkv")))
        ]
        rest = [p for p in matrices if not any(p is head for head in heads)]
        own: Any = model.config
        rows = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        muon = HeadMuon([{"params": heads, "rows": rows}, {"params": rest}])
        return mw.ChainedOptimizer(muon, torch.optim.AdamW(others, lr=1e-2))
    if kind == "adafactor":
        return torch.optim.Adafactor([{"params": others}, {"params": matrices, "weight_decay": 0.1}], lr=1e-2)
    if kind == "adafactor of transformers":
        return Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=False, lr=None)
    if kind == "8 bits":
        return pytest.importorskip("bitsandbytes").optim.AdamW8bit(model.parameters())
    return {"trust ratio": TrustRatio, "LAMB": Lamb, "Shampoo": Shampoo}[kind](model.parameters())


def train(
    plan: dict[str, Any] | None,
    kind: str,
    family: str = "qwen3",
    *,
    first: int = 0,
    last: int = 4,
    given: int = 0,
    dtype: torch.dtype = torch.float64,
    frozen: bool = False,
    folder: str | None = None,
    **overrides: Any,
) -> dict[str, torch.Tensor]:
    """Weights after some steps, of which those up to ``given`` run before the call."""
    with Float64():
        torch.manual_seed(0)
        model = (mixtral() if family == "mixtral" else build(family, **overrides)).to(dtype)
        if frozen:
            model.model.embed_tokens.weight.requires_grad_(False)
            model.model.unused = torch.nn.Parameter(torch.ones(3, 2, dtype=dtype))
        optimizer = make(kind, model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if kind != "adafactor of transformers" else None
        sizes = {axis: 1 if plan is None else plan.get(axis, 1) for axis in ("dp", "tp", "cp", "pp")}
        for step in range(first, last):
            if plan is not None and step == first + given:
                config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), bucket_size_mb=0.03)
                model, optimizer, _ = mw.to_distributed(model, optimizer, config=config)
                if folder is not None and first:
                    mw.load_checkpoint(folder, model, optimizer, scheduler=scheduler)
            ids = tokens(4, 12, seed=step)
            rows = {"input_ids": ids, "labels": labels_for(ids)}
            if plan is not None and dist.is_initialized() and step >= first + given:
                rank = dist.get_rank() // (sizes["tp"] * sizes["cp"]) % sizes["dp"]
                rows = {name: value.chunk(sizes["dp"])[rank] for name, value in rows.items()}
            model(**rows).loss.backward()
            mw.clip_grad_norm_(model, 0.5)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        if folder is not None and not first:
            mw.save_checkpoint(folder, model, optimizer, scheduler=scheduler, step=last)
        return mw.full_state_dict(model)


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    # 1e-10 in float64: only the order of the sums of gradients differs.
    worst = {name: relative_difference(actual[name], weight) for name, weight in expected.items()}
    assert max(worst.values()) < 1e-10, {name: value for name, value in worst.items() if value >= 1e-10}


KINDS = ("muon", "adafactor", "adafactor of transformers", "trust ratio")


@pytest.mark.parametrize(
    ("kind", "plan"),
    crossings(
        [(kind, plan) for kind in KINDS for plan in PLANS],
        but=[("muon", "dp2 tp2+sp zero1"), ("adafactor", "tp2+sp"), ("trust ratio", "dp2 zero3")],
        quick=[("muon", "dp2 zero1")],
    ),
)
def test_equal_to_one_device(kind: str, plan: str, pool2: Any, pool4: Any) -> None:
    family = "mixtral" if "ep" in PLANS[plan] else "qwen3"
    assert_equal((pool4 if plan in FOUR else pool2).run(train, PLANS[plan], kind, family)[0], train(None, kind, family))


ALL_KINDS = (*(kind for kind in KINDS if kind != "trust ratio"), "muon per head", "LAMB", "Shampoo")
TEN = ("tp2+sp", "dp2 zero1", "dp2 zero2", "pp2", "dp2 tp2+sp zero1", "dp2 ep2", "cp2")


@pytest.mark.parametrize(("kind", "plan"), crossings([(kind, plan) for kind in ALL_KINDS for plan in TEN]))
def test_ten_steps(kind: str, plan: str, pool2: Any, pool4: Any) -> None:
    family = "mixtral" if "ep" in PLANS[plan] else "qwen3"
    actual = (pool4 if plan in FOUR else pool2).run(train, PLANS[plan], kind, family, last=10)[0]
    assert_equal(actual, train(None, kind, family, last=10))


SPECIAL: dict[str, tuple[str, dict[str, Any]]] = {
    "fused query, key and value": ("tp2+sp", {"family": "phi3"}),
    "a key head on both ranks": ("tp2+sp", {"num_key_value_heads": 1}),
    "tied": ("dp2 tp2+sp zero1", {"tie_word_embeddings": True}),
    "tied over stages": ("pp2 dp2 zero1", {"tie_word_embeddings": True}),
    "frozen, and without a gradient": ("dp2 zero1", {"frozen": True}),
    "without a gradient, where weights are sent": ("dp2 zero3", {"frozen": True}),
    "state from before the call": ("dp2 tp2+sp zero1", {"given": 2}),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    crossings(
        [(kind, name) for kind in (*ALL_KINDS, "trust ratio") for name in SPECIAL],
        but=[
            ("muon", "a key head on both ranks"),
            ("adafactor", "frozen, and without a gradient"),
            ("adafactor", "without a gradient, where weights are sent"),
        ],
    ),
)
def test_special_parameters(kind: str, name: str, pool2: Any, pool4: Any) -> None:
    plan, options = SPECIAL[name]
    expected = train(None, kind, **{**options, "given": 0})
    assert_equal((pool4 if plan in FOUR else pool2).run(train, PLANS[plan], kind, **options)[0], expected)


RESUMES = [
    ("muon", "dp2 tp2+sp zero1", "dp2 zero3"),
    ("adafactor", "dp2 zero1", "tp2+sp"),
    ("adafactor of transformers", "tp2+sp", "pp2 dp2 zero1"),
    ("trust ratio", "pp2 dp2 zero1", "dp2 zero2"),
]


@pytest.mark.parametrize(("kind", "before", "after"), crossings(RESUMES, but=RESUMES[1:2]))
def test_a_run_resumes_under_another_plan(
    kind: str, before: str, after: str, pool2: Any, pool4: Any, tmp_path: Any
) -> None:
    folder = str(tmp_path / "checkpoint")
    (pool4 if before in FOUR else pool2).run(train, PLANS[before], kind, last=2, folder=folder)
    pool = pool4 if after in FOUR else pool2
    assert_equal(pool.run(train, PLANS[after], kind, first=2, folder=folder)[0], train(None, kind))


def state_bytes(kept: dict[str, Any]) -> int:
    """Bytes of a parameter's state, without tables of quantised values, which all parameters share."""
    found = [x for name, x in kept.items() if torch.is_tensor(x) and not name.startswith("qmap")]
    return sum(x.numel() * x.element_size() for x in found)


def step_given(
    plan: dict[str, Any] | None, kind: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[dict[str, torch.Tensor], list[int], int, int]:
    """Weights after steps with given gradients; then the bytes of each state, and elements sent by and before a step.

    In one process, float32 copies of bf16 weights are stepped, as ZeRO does.
    """
    model: Any = build("qwen3", intermediate_size=256).to(dtype)  # 8,192 elements, enough to be quantised
    model = model if plan is not None else model.float()
    optimizer = make(kind, model)
    sent: list[int] = []
    start = whole_steps.start_all_to_all_uneven

    def counted(x: torch.Tensor, to: list[int], received: list[int], axis: Any) -> Any:
        sent.append(sum(to) - to[axis.rank])
        return start(x, to, received, axis)

    if plan is not None:
        model, optimizer, _ = mw.to_distributed(model, optimizer, plan=mw.ParallelPlan(**plan))
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype).to(parameter.dtype)
        sent.clear()
        with mock.patch.object(whole_steps, "start_all_to_all_uneven", counted):
            optimizer.step()
        optimizer.zero_grad()
    states = [state_bytes(kept) for kept in dict.values(optimizer.state)]
    weights = {name: weight.to(dtype) for name, weight in mw.full_state_dict(model).items()}
    return weights, states, sum(sent), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", crossings((*ALL_KINDS, "trust ratio", "8 bits"), but=["trust ratio", "8 bits"]))
def test_masters_state_and_traffic(kind: str, dtype: torch.dtype, pool2: Any) -> None:
    # By a rank too: this process has more threads, which add in another order.
    expected, whole, *_ = pool2.run(step_given, None, kind, dtype)[0]
    (weights, *_), *_ = found = pool2.run(step_given, PLANS["dp2 zero1"], kind, dtype)
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items()), "to the bit"
    for _, states, sent, numel in found:
        # Owners have about equally many elements; Shampoo's state of a tensor is not proportional to these.
        assert kind == "Shampoo" or sum(states) <= sum(whole) / 2 + max(whole)
        # ZeRO-1 itself sends half of the gradients, and half of the weights: as many elements as the model has.
        assert sent <= numel / (2 if dtype == torch.float32 else 1), (sent, numel)


def sliced(kind: str) -> dict[str, torch.Tensor]:
    with mock.patch.object(elementwise, "reads_of", lambda optimizer: [Reads.ELEMENT] * len(optimizer.param_groups)):
        return train(PLANS["dp2 zero1"], kind)


def test_steps_of_slices_would_differ(pool2: Any) -> None:
    with pytest.raises(AssertionError):
        assert_equal(pool2.run(sliced, "trust ratio")[0], train(None, "trust ratio"))


def step_with_a_closure() -> None:
    model = build("qwen3")
    model, optimizer, _ = mw.to_distributed(model, TrustRatio(model.parameters()), plan="dp2 zero1")
    optimizer.step(lambda: 0.0)


def test_a_closure_is_refused(pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(step_with_a_closure):
        assert kind == "ValueError" and "Call loss.backward(), and then optimizer.step()" in message


class ScheduleFree(torch.optim.Optimizer):
    """Keeps an average of the weights for evaluation, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr, "train_mode": True, "k": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "call optimizer.train() first"
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, 1 / group["k"]).sub_(0.1 * group["lr"] * p.grad)
                    z.sub_(group["lr"] * p.grad)

    @torch.no_grad()
    def _switch(self, weight: float, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train_mode:
                group["train_mode"] = train_mode
                for p in group["params"]:
                    p.lerp_(self.state[p]["z"], weight)  # which only the owner has

    def train(self) -> None:
        self._switch(0.1, True)

    def eval(self) -> None:
        self._switch(1 - 1 / 0.9, False)


def evaluate_between(plan: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    with Float64():
        model: Any = build("qwen3").double()
        optimizer = ScheduleFree(model.parameters())
        if plan is not None:
            model, optimizer, _ = mw.to_distributed(model, optimizer, plan=mw.ParallelPlan(**plan))
        for step in range(4):
            if step:
                optimizer.train()
            ids = tokens(4, 12, seed=step)
            if plan is not None:
                ids = ids.chunk(plan.get("dp", 1))[dist.get_rank() % plan.get("dp", 1)]
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.eval()
        return mw.full_state_dict(model)


@pytest.mark.parametrize("plan", crossings(["dp2 zero1", "dp2 zero3", "tp2+sp"], but=["dp2 zero1"]))
def test_schedule_free_optimizers_switch_the_weights(plan: str, pool2: Any) -> None:
    assert_equal(pool2.run(evaluate_between, PLANS[plan])[0], evaluate_between(None))
