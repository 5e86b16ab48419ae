"""Ranks that train on other values than each other are named: tokens, optimizer settings, weights, random draws."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor

import meshwright as mw
from conformance import false_alarms
from conformance.families.models import build as build_family
from meshwright.errors import DivergenceError
from meshwright.optim.runtime import runtime_of
from meshwright.parallel.dropout_streams import DropoutStreams
from meshwright.parallel.replicas.replicate_model import counts_digest
from meshwright.parallel.shards.state_of_parts import state_of
from support.models import build, labels_for, tokens
from support.own_gradients import on_arrival
from support.tiers import crossings

EVERY = 4  # steps between two comparisons of the weights
TP2 = {"tp": 2}
SP2 = {"tp": 2, "sequence_parallel": True}
DP2 = {"dp": 2}
STEP_OF_FAULT = 6


class Run:
    """A model in training on this rank, and what a planted fault may change."""

    def __init__(self, plan: dict[str, Any], every: int | None = EVERY, **overrides: Any):
        model = build("llama", **overrides)
        model.model.layers[1].register_buffer("steps", torch.arange(4, dtype=torch.int32))
        model.model.layers[1].scale = torch.ones(3)  # a tensor that a module keeps, and no buffer
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), check_replicas_every=every)
        self.model, self.optimizer, _ = mw.to_distributed(model, optimizer, config=config)
        self.skips_step = self.skips_clip = self.skips_batch = self.keeps_gradients = False
        self.mask: Tensor | None = None
        self.shift_of_batches = 0
        self.dp_rank = dist.get_rank() // plan.get("tp", 1) % plan.get("dp", 1)

    def step(self, number: int) -> None:
        # Each data-parallel rank has rows of its own, the ranks of tp the same ones.
        ids = tokens(2, 12, seed=100 * (number + self.shift_of_batches) + self.dp_rank)
        self.model(input_ids=ids, labels=labels_for(ids), attention_mask=self.mask).loss.backward()
        if not self.skips_clip:
            mw.clip_grad_norm_(self.model, 1.0)
        if not self.skips_step:
            self.optimizer.step()
        if not self.keeps_gradients:
            self.optimizer.zero_grad()


class OwnScaler(torch.amp.GradScaler):
    """A program's own scaler, which looks at the gradients of its rank."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        return {found_inf.device: found_inf}


def train_with_a_scaler(plan: dict[str, Any], kind: type = torch.amp.GradScaler) -> float:
    """Four steps, of which the third has an infinite gradient in one row of one weight, on the first rank."""
    run, steps = Run(plan), range(4)
    scaler = kind("cpu", init_scale=256.0)
    infinite = iter([number == 2 and dist.get_rank() == 0 for number in steps])
    on_arrival(
        run.model.model.layers[0].self_attn.q_proj.weight,
        lambda grad: grad.index_fill(0, torch.tensor([0]), torch.inf) if next(infinite) else grad,
    )
    for number in steps:
        ids = tokens(2, 12, seed=number)
        scaler.scale(run.model(input_ids=ids, labels=ids).loss).backward()
        scaler.unscale_(run.optimizer)
        mw.clip_grad_norm_(run.model, 1.0)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
    return scaler.get_scale()


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, OwnScaler])
def test_a_scaler_of_whole_gradients_works(kind: type, pool2: Any) -> None:
    """Gradients are averaged before the scaler looks at them, so both ranks skip the step."""
    assert pool2.run(train_with_a_scaler, DP2, kind) == [128.0, 128.0]


@pytest.mark.parametrize("plan", [{**DP2, "zero_stage": 1}, {**DP2, "zero_stage": 3}, TP2], ids=str)
def test_a_programs_own_scaler_of_parts_is_named(plan: dict[str, Any], pool2: Any) -> None:
    """Only the rank that has the row skips the step; with torch's scaler all do (tests/optim/test_grad_scaler.py)."""
    for kind, message in pool2.run_expecting_error(train_with_a_scaler, plan, OwnScaler):
        if plan.get("zero_stage"):  # a rank has the gradients in slices, which the scaler cannot read
            assert kind == "UnreadableTensorError" and "read with meshwright.full_gradients(model)" in message
            continue
        assert kind in ("DivergenceError", "PeerFailedError"), message
        assert "looks for infinite gradients in a way of its own" in message and "Use torch.amp.GradScaler" in message


def flip(parameter: Tensor, element: int, bit: int) -> None:
    """Flip a bit of a weight in memory, as a fault of the hardware does: torch's version counter does not see it."""
    word = parameter.detach().as_subclass(Tensor).view(-1)[element : element + 1].view(torch.int32)
    word.data.bitwise_xor_(torch.tensor(1 << bit).to(torch.int32))


def other_tokens(run: Run) -> None:
    run.shift_of_batches = 50


def other_mask(run: Run) -> None:
    run.mask = torch.ones(2, 12, dtype=torch.int64).index_fill(1, torch.tensor([0]), 0)


def skipped_step(run: Run) -> None:
    run.skips_step = True


def skipped_clip(run: Run) -> None:
    run.skips_clip = True


def kept_gradients(run: Run) -> None:
    run.keeps_gradients = True


def other_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 2


def other_decay(run: Run) -> None:
    run.optimizer.param_groups[0]["weight_decay"] = 0.5


def frozen(run: Run) -> None:
    run.model.model.norm.weight.requires_grad_(False)


def edited(run: Run) -> None:
    with torch.no_grad():
        run.model.model.norm.weight.add_(1e-3)


def flipped_norm(run: Run) -> None:
    flip(run.model.model.layers[1].input_layernorm.weight, 3, 0)


def flipped_matrix(run: Run) -> None:
    flip(run.model.model.layers[1].mlp.up_proj.weight, 5, 31)


def flipped_key(run: Run) -> None:
    flip(run.model.model.layers[0].self_attn.k_proj.weight, 40, 17)


def flipped_buffer(run: Run) -> None:
    flip(run.model.model.rotary_emb.inv_freq, 0, 3)  # not persistent


def flipped_state(run: Run) -> None:
    flip(run.model.model.layers[1].steps, 2, 31)
    flip(run.model.model.layers[1].scale, 1, 20)


def flipped_moment(run: Run) -> None:
    flip(state_of(run.optimizer, run.model.model.norm.weight)["exp_avg"], 3, 30)


def counted_step(run: Run) -> None:
    """Of a weight of which each rank of tp has a part, and which those of dp hold whole."""
    state_of(run.optimizer, run.model.model.layers[0].mlp.up_proj.weight)["step"] += 1


def counted_slice(run: Run) -> None:
    """Of the weight of which the first rank has the beginning."""
    zero = runtime_of(run.model).gradients.zero
    assert zero is not None
    state_of(run.optimizer, next(zero.slices).stepped)["step"] += 1


def other_stream(run: Run) -> None:
    torch.rand(())  # from which the model draws, but under pp
    runtime_of(run.model).features.find(DropoutStreams)._seed ^= 1 << 20


def train_until_named(plan: dict[str, Any], fault: Callable[[Run], None], overrides: dict[str, Any]) -> tuple[int, str]:
    """Plant a fault on the last rank; the step in which this rank hears of it, and what it hears."""
    run = Run(plan, **overrides)
    for number in range(1, STEP_OF_FAULT + 2 * EVERY):
        if number == STEP_OF_FAULT and dist.get_rank() == dist.get_world_size() - 1:
            fault(run)
        try:
            run.step(number)
        except DivergenceError as error:
            return number, str(error)
    return 0, "trained to the end in silence"


NAMED = {
    # fault, plans, steps after which it is named at the latest, what the message says
    "other tokens": (other_tokens, [TP2, SP2], 0, r"input_ids: int64 \(2, 12\) with digest \w+ on rank 0"),
    "another mask": (other_mask, [TP2], 0, r"attention_mask: "),
    "a skipped optimizer step": (
        skipped_step,
        [DP2, TP2, {"dp": 2, "zero_stage": 1}],
        1,
        r"optimizer.step\(\): called 6 times on rank 0 .*; called 5 times on rank 1|optimizer step, .*step 6.*step 7",
    ),
    "a skipped clip": (skipped_clip, [DP2, SP2], 1, r"clip_grad_norm_"),
    "gradients kept": (kept_gradients, [DP2, TP2], 1, r"zero_grad\(\): gradients cleared .* on rank 0"),
    "another learning rate": (
        other_rate,
        [DP2, TP2, {"dp": 2, "zero_stage": 3}],
        0,
        r"lr of the optimizer's group 0: 0.001 on rank 0 .*; 0.002 on rank 1.*last time in step 5",
    ),
    "another decay": (other_decay, [DP2], 0, r"weight_decay of the optimizer's group 0: 0.01 on rank 0"),
    "a parameter frozen": (frozen, [DP2], 0, r"requires_grad of model.norm.weight: True on rank 0"),
    "a weight edited": (edited, [DP2, SP2], EVERY, r"model.norm.weight: rank\(s\) 0 differ from rank\(s\) 1"),
    "a bit of a norm": (flipped_norm, [DP2, TP2, SP2], EVERY, r"layers.1.input_layernorm.weight: rank\(s\) 0 differ"),
    "a bit of a buffer": (
        flipped_buffer,
        [DP2, {"dp": 2, "zero_stage": 1}, {"dp": 2, "zero_stage": 3}, SP2, {"cp": 2}, {"pp": 2}],
        EVERY,
        r"buffer model.rotary_emb.inv_freq: rank\(s\) 0 differ from rank\(s\) 1.*since step 4",
    ),
    "bits of other state": (
        flipped_state,
        [DP2, TP2],
        EVERY,
        r"buffer model.layers.1.steps: rank\(s\) 0 differ.*buffer model.layers.1.scale: rank\(s\) 0 differ",
    ),
    "a bit of a moment": (
        flipped_moment,
        [DP2, SP2],
        EVERY,
        r"(optimizer's state of )?model.norm.weight: rank\(s\) 0 differ",
    ),
    "another count of steps": (
        counted_step,
        [DP2, TP2],
        EVERY,
        r"(optimizer's (state|counts) of )?model.layers.0.mlp.up_proj.weight: rank\(s\) 0 differ",
    ),
    "another count of a slice": (
        counted_slice,
        [{"dp": 2, "zero_stage": 1}],
        EVERY,
        r"optimizer's counts of \S+: rank\(s\) 0 differ",
    ),
    "another random stream": (
        other_stream,
        [DP2, TP2, {"pp": 2}],
        1,
        r"random state, .*\): \w+(\.| after )\d+( rows)? on rank 0",
    ),
    "a bit of a matrix": (flipped_matrix, [DP2], EVERY, r"layers.1.mlp.up_proj.weight: rank\(s\) 0 differ"),
}


@pytest.mark.quick
@pytest.mark.parametrize("name, plan", [(name, plan) for name, case in NAMED.items() for plan in case[1]])
def test_a_fault_on_one_rank_is_named(name: str, plan: dict[str, Any], pool2: Any) -> None:
    """Rows 32 and 33: every rank hears what differs, on which ranks, and since when."""
    fault, _, steps, message = NAMED[name]
    overrides = {"attention_dropout": 0.1} if fault is other_stream else {}
    for step, text in pool2.run(train_until_named, plan, fault, overrides):
        assert STEP_OF_FAULT <= step <= STEP_OF_FAULT + steps, text
        assert re.search(message, text.replace("\n", " ")), text


def test_counts_on_the_device_and_beside_it_have_one_digest() -> None:
    device = torch.device("cpu")
    found = [
        counts_digest({"step": step, "a": torch.tensor(2.0**40), "b": torch.tensor(True), "c": math.inf}, device)
        for step in (3, 3, 4)
    ]
    assert found[0] == found[1] != found[2]


def deferred_until_named(plan: dict[str, Any], fault: Callable[[Run], None]) -> tuple[int, str]:
    """As on a device whose numbers are read a step later."""
    with (
        mock.patch("meshwright.parallel.replicas.digests.is_deferred", lambda device: True),
        mock.patch("meshwright.parallel.replicas.comparison.is_deferred", lambda device: True),
        # Norms without sequence parallelism are compared on a device only where its kernels are deterministic.
        mock.patch("torch.are_deterministic_algorithms_enabled", lambda: True),
    ):
        return train_until_named(plan, fault, {})


@pytest.mark.parametrize(
    "plan, fault, steps, message",
    [
        (
            SP2,
            other_tokens,
            1,
            r"got different values of input_ids, labels in step 6 \(input_ids: rank 0: digest \w+; rank 1",
        ),
        (TP2, flipped_norm, EVERY, r"layers.1.input_layernorm.weight: rank\(s\) 0 differ .*since step 4"),
        (DP2, flipped_matrix, EVERY, r"layers.1.mlp.up_proj.weight: rank\(s\) 0 differ .*since step 4"),
    ],
)
def test_a_device_that_is_not_waited_for(plan: Any, fault: Any, steps: int, message: str, pool2: Any) -> None:
    for step, text in pool2.run(deferred_until_named, plan, fault):
        assert STEP_OF_FAULT < step <= STEP_OF_FAULT + steps, text
        assert re.search(message, text.replace("\n", " ")), text


def test_copies_of_key_heads_are_compared_row_by_row(pool4: Any) -> None:
    """Two key/value heads on four ranks: ranks 2 and 3 hold the second."""
    results = pool4.run(train_until_named, {"tp": 4}, flipped_key, {"num_key_value_heads": 2})
    for step, text in results:
        assert STEP_OF_FAULT <= step <= STEP_OF_FAULT + EVERY
        assert "layers.0.self_attn.k_proj.weight[4:8]: rank(s) 2 differ from rank(s) 3" in text


def flipped_ends(run: Run) -> None:
    """One weight that the first rank steps and one that the last steps."""
    flip(run.model.model.embed_tokens.weight, 5, 31)
    flip(run.model.lm_head.weight, 5, 31)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_flipped_bit_under_zero_is_named_in_its_step(stage: int, pool2: Any) -> None:
    """Each step overwrites the copies of a weight by its owner's: only a comparison in every step can find the flip."""
    plan = {"dp": 2, "zero_stage": stage}
    for step, text in pool2.run(train_until_named, plan, flipped_ends, {"every": None}):
        assert step == STEP_OF_FAULT and all(f"{name}.weight: rank" in text for name in ("embed_tokens", "lm_head"))


def saved_after_a_fault(directory: str) -> list[str]:
    """A weight is edited on one rank after the last comparison, and every way to save it is tried."""
    run = Run(DP2)
    run.step(1)
    if dist.get_rank() == 1:
        edited(run)
    said = []
    for save in (mw.full_state_dict, lambda m: mw.save_weights(m, directory), lambda m: m.save_pretrained(directory)):
        try:
            save(run.model)
            said.append("saved in silence")
        except DivergenceError as error:
            said.append(str(error))
    return said


def test_weights_are_compared_before_they_are_saved(pool2: Any, tmp_path: Any) -> None:
    for said in pool2.run(saved_after_a_fault, str(tmp_path)):
        assert len(said) == 3 and all("model.norm.weight: rank(s) 0 differ from rank(s) 1" in text for text in said), (
            said
        )


def sampled(plan: dict[str, Any] | None, has_adapters: bool) -> tuple[Tensor, Tensor]:
    """Sampled tokens and the random state after them; each rank has a seed of its own, the first that of one device."""
    model: Any = build("llama")
    if has_adapters:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
    if plan is not None:
        model = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))[0]
    torch.manual_seed(7 + (0 if plan is None else dist.get_rank()))
    ids = model.eval().generate(input_ids=tokens(2, 5), do_sample=True, max_new_tokens=10, eos_token_id=None)
    return ids, torch.get_rng_state()


@pytest.mark.parametrize("plan, has_adapters", [(TP2, False), (SP2, False), (TP2, True)])
def test_sampled_tokens_are_those_of_one_device(plan: dict[str, Any], has_adapters: bool, pool2: Any) -> None:
    """Row 25: ranks that share rows draw the same tokens, whatever their seeds, and go on from the same state."""
    expected = sampled(None, has_adapters)
    for ids, state in pool2.run(sampled, plan, has_adapters):
        assert torch.equal(ids, expected[0]) and torch.equal(state, expected[1])


def neftune(model: Any) -> Tensor:
    """As TRL and the Trainer do it: a hook after the call adds noise to the embeddings."""

    def add_noise(module: Any, args: Any, output: Tensor) -> Tensor:
        return output + torch.empty_like(output).uniform_(-0.5, 0.5)

    model.model.embed_tokens.register_forward_hook(add_noise)
    return model.train()(input_ids=tokens(2, 12)).logits


def monte_carlo(model: Any) -> Tensor:
    model.eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.train().p = 0.3
    with torch.no_grad():
        return model(input_ids=tokens(2, 12)).logits


def dropout_after_the_call(model: Any) -> Tensor:
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    return model.train()(input_ids=tokens(2, 12)).logits


def base_by_itself(model: Any) -> Tensor:
    dropout_after_the_call(model)
    return model.model(input_ids=tokens(2, 12)).last_hidden_state


def drawn(plan: dict[str, Any], program: Callable[[Any], Tensor]) -> tuple[Tensor, Tensor, bool]:
    """What the program gives, the zeros of attention's dropout, and whether its own random state is as before."""
    model = build("phi3", attn_implementation="eager")
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), draws="rank")
    model = mw.to_distributed(model, config=config)[0]
    torch.manual_seed(dist.get_rank())
    state, zeros, dropout = torch.get_rng_state(), [], torch.nn.functional.dropout

    def record(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        out = dropout(x, p, training, inplace)
        if x.ndim == 4:
            zeros.append((out == 0) & (x != 0))
        return out

    with mock.patch.object(torch.nn.functional, "dropout", record):
        out = program(model).detach().as_subclass(Tensor).clone()
    return out, torch.stack(zeros), torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("program", [neftune, monte_carlo, dropout_after_the_call, base_by_itself])
def test_replicated_activations_are_equal_whatever_draws(program: Any, pool2: Any) -> None:
    """Row 26: the ranks of tp have other seeds and get the same result; dp ranks have other streams."""
    (first, zeros, is_kept), (second, other_zeros, _) = pool2.run(drawn, TP2, program)
    assert torch.equal(first, second) and is_kept
    if zeros.any():  # other heads on each rank: other masks
        assert not torch.equal(zeros, other_zeros)
    first, second = pool2.run(drawn, DP2, program)
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("index", crossings(range(1, len(false_alarms.PLANS), 4), but=[17], one_in=2))
def test_a_legal_program_is_not_stopped(index: int, pool4: Any) -> None:
    """A few steps of ``python -m conformance.false_alarms``, which runs 10,000."""
    family = false_alarms.FAMILIES[index % len(false_alarms.FAMILIES)]
    assert pool4.run(false_alarms.train, false_alarms.PLANS[index], family, 15) == [15] * 4


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 8}
STOCK: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("falcon", "gpt2", "gemma3_text", "bart", "olmo3", "codegen")},
    "llama": DYNAMIC,  # forward replaces inv_freq, since the rows are longer than 8
}


def trained_in_silence(plan: dict[str, Any]) -> list[str]:
    """Train stock models with buffers, which forward of some writes; return the families that the plan can run."""
    names = []
    for family, overrides in STOCK.items():
        model: Any = build_family(family, **overrides)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), check_replicas_every=1)
        try:
            model, optimizer, _ = mw.to_distributed(model, optimizer, config=config)
        except mw.errors.PlanError:
            continue
        for step in range(4):
            # All rows have one length, since the frequencies of "dynamic" follow the longest row.
            ids = tokens(4, 12 + 4 * step, seed=step * 10 + dist.get_rank() % plan.get("dp", 1))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        names.append(family)
    return names


@pytest.mark.parametrize(
    "plan", [{"dp": 2, "zero_stage": 1}, {**DP2, "gradient_accumulation_steps": 2}, SP2, {"pp": 2}]
)
def test_buffers_of_stock_models_are_no_alarm(plan: dict[str, Any], pool2: Any) -> None:
    for names in pool2.run(trained_in_silence, plan):
        assert len(names) >= 5, names
