"""A model without memory becomes shards: the weights of one process, to the bit, at no more than a shard's memory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import meshwright as mw
from meshwright.construct.deferred_init import recipe_of
from meshwright.parallel.shards.stand_in import own_nbytes
from support.construction import HOWS, PLANS, assert_equal, distribute, make, write_checkpoint
from support.logs import logged
from support.models import FAMILIES, SIZES, labels_for, tokens
from support.parity import crossed
from support.reference import make_optimizer
from support.tiers import crossing, crossings


def built_and_trained(family: str, how: str, plan: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    model = make(family, how=how, **overrides)
    optimizer = make_optimizer(model)
    model = distribute(model, optimizer, **plan)
    random_state = torch.get_rng_state()
    initial = mw.full_state_dict(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    ids = tokens(4, 12)
    loss = model(input_ids=ids, labels=labels_for(ids)).loss
    loss.backward()
    optimizer.step()
    return {
        "initial": initial,
        "trained": mw.full_state_dict(model),
        "buffers": buffers,
        "loss": loss.item(),
        "random_state": random_state,
    }


@pytest.mark.parametrize(
    ("family", "plan_name"),
    crossings(
        crossed(FAMILIES, PLANS),
        but=[("gemma2", "dp2xtp2+sp+zero1"), ("phi3", "tp2")],
        quick=[("llama", "dp2xtp2+sp+zero1")],
    ),
)
def test_weights_and_a_step_equal_those_of_a_materialised_model(
    family: str, plan_name: str, request: pytest.FixtureRequest
) -> None:
    plan = PLANS[plan_name]
    pool = request.getfixturevalue("pool4" if plan_name.startswith("dp2xtp2") else "pool2")
    one_process = {name: value.detach() for name, value in make(family).state_dict().items()}
    real = pool.run(built_and_trained, family, "real", plan)
    assert_equal(real[0]["initial"], one_process)
    for how in ("deferred", "meta"):
        for rank, made in enumerate(pool.run(built_and_trained, family, how, plan)):
            assert_equal(made["initial"], real[rank]["initial"])
            assert_equal(made["trained"], real[rank]["trained"])
            assert_equal(made["buffers"], real[rank]["buffers"])
            assert made["loss"] == real[rank]["loss"]
            assert torch.equal(made["random_state"], real[rank]["random_state"])


def one_rank(how: str) -> dict[str, Tensor]:
    model = distribute(make(how=how))
    assert all(not p.is_meta and p.shape == p.meshwright.shape for p in model.parameters())
    return mw.full_state_dict(model)


@pytest.mark.parametrize("how", ["deferred", "meta"])
def test_a_plan_of_one_process_materialises(how: str) -> None:
    assert_equal(one_rank(how), make().state_dict())


class Initialisers(nn.Module):
    """Every way to initialise that a tape might get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal = nn.Linear(20, 30)
        nn.init.orthogonal_(self.orthogonal.weight)
        nn.init.trunc_normal_(self.orthogonal.bias)
        self.embedding = nn.Embedding(11, 16, padding_idx=2)
        nn.init.sparse_(self.embedding.weight, 0.3)
        held = torch.empty(7, 7)
        self.changed_by_another_name = nn.Parameter(held)
        with torch.no_grad():
            held.normal_(generator=torch.Generator().manual_seed(5))
            self.changed_by_another_name[self.orthogonal.bias[:7] > 0] = 0.5  # reads one parameter to write another
            self.changed_by_another_name[1].mul_(self.orthogonal.bias[:7])
        self.register_buffer("norm", self.changed_by_another_name.detach().norm())
        self.number = self.changed_by_another_name.sum().item()
        self.row = self.orthogonal.weight.detach()[0]
        self.transposed = nn.Parameter(torch.empty(3, 5).t())
        nn.init.xavier_normal_(self.transposed)
        self.copied = nn.Parameter(torch.empty(5, 3))
        self.copied.data.copy_(torch.randn(5, 3))
        self.given = nn.Parameter(torch.rand(9, 9))
        self.replaced = nn.Parameter(torch.empty(6))
        self.replaced.data = torch.randn(6)
        self.narrow = nn.Parameter(torch.empty(300, 300, dtype=torch.bfloat16))  # large enough to be mapped
        nn.init.kaiming_uniform_(self.narrow)
        self.flipped = nn.Parameter(torch.empty(50))
        self.flipped.data.bernoulli_(0.3)
        self.flipped.data.copy_(torch.bernoulli(self.flipped.detach() * 0.5))  # how much it draws depends on values
        self.recurrent = nn.LSTM(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.convolution = nn.Conv2d(3, 4, 3)
        nn.init.dirac_(self.convolution.weight)
        self.norms = nn.BatchNorm1d(4)
        self.tied = nn.Linear(16, 11, bias=False)
        self.tied.weight = self.embedding.weight
        self.last = nn.Linear(4, 4)


def computed(module: nn.Module) -> dict[str, Tensor]:
    """The values of every parameter, from the last to the first: each stands alone."""
    named = list(module.named_parameters(remove_duplicate=False))
    found = {}
    for name, parameter in reversed(named):
        recipe = recipe_of(parameter)
        found[name] = parameter.detach() if recipe is None else recipe.compute(parameter.dtype)
    return {name: found[name] for name, _ in named}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_initialiser_gives_the_bits_of_one_process(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(3)
        expected = Initialisers()
        random_state = torch.get_rng_state()
        torch.manual_seed(3)
        with mw.deferred_init():
            actual = Initialisers()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_equal(computed(actual), computed(expected))
    assert torch.equal(torch.get_rng_state(), random_state)  # computing them draws nothing
    assert_equal(dict(actual.named_buffers()), dict(expected.named_buffers()))
    assert torch.equal(actual.row, expected.row) and actual.number == expected.number
    assert actual.tied.weight is actual.embedding.weight
    on_meta = {name for name, p in actual.named_parameters() if p.is_meta}
    assert {"orthogonal.weight", "narrow", "embedding.weight", "copied", "flipped", "last.bias"} <= on_meta
    assert (
        not {"given", "replaced", "norms.weight"} - {n for n, p in actual.named_parameters()}
        and not actual.given.is_meta
    )


def test_memory_that_was_touched_before_it_became_a_parameter_is_kept() -> None:
    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4).fill_(3.0))

    with mw.deferred_init():
        model = Filled()
    assert model.weight.tolist() == [3.0] * 4


def converted(how: str) -> dict[str, Tensor]:
    return mw.full_state_dict(distribute(make(how=how).to(torch.bfloat16), tp=2))


def test_a_cast_after_the_block_is_honoured(pool2: Any) -> None:
    assert_equal(pool2.run(converted, "deferred")[0], make().to(torch.bfloat16).state_dict())


def default_dtype(how: str) -> dict[str, Tensor]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = make(how=how)
    finally:
        torch.set_default_dtype(torch.float32)
    return mw.full_state_dict(distribute(model, tp=2)) if how != "real" else model.state_dict()


@pytest.mark.parametrize("how", ["deferred", "meta"])
def test_the_default_dtype_is_honoured(how: str, pool2: Any) -> None:
    assert_equal(pool2.run(default_dtype, how)[0], default_dtype("real"))


def from_config(how: str) -> dict[str, Tensor]:
    config_class, _, traits = FAMILIES["qwen3"]
    torch.manual_seed(5)
    with HOWS[how]():
        model = AutoModelForCausalLM.from_config(config_class(**{**SIZES, **traits}), dtype=torch.bfloat16)
    return mw.full_state_dict(distribute(model, tp=2)) if how != "real" else model.state_dict()


@pytest.mark.parametrize("how", ["deferred", "meta"])
def test_from_config_with_a_dtype(how: str, pool2: Any) -> None:
    assert_equal(pool2.run(from_config, how)[0], from_config("real"))


def tied(how: str) -> tuple[bool, dict[str, Tensor]]:
    model = distribute(make("llama", how=how, tie_word_embeddings=True), tp=2)
    return model.lm_head.weight is model.model.embed_tokens.weight, mw.full_state_dict(model)


@pytest.mark.parametrize("how", ["deferred", "meta"])
def test_tied_weights_stay_one_parameter(how: str, pool2: Any) -> None:
    is_tied, weights = pool2.run(tied, how)[0]
    assert is_tied
    assert_equal(weights, make("llama", tie_word_embeddings=True).state_dict())


class Custom(nn.Module):
    """Not of transformers: no config to build it from again."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))


def custom(how: str) -> dict[str, Tensor]:
    torch.manual_seed(4)
    with HOWS[how]():
        model = Custom()
    return mw.full_state_dict(distribute(model, dp=2)) if how != "real" else model.state_dict()


@pytest.mark.parametrize("how", ["deferred", "meta"])
def test_a_module_of_ones_own_is_reset(how: str, pool2: Any) -> None:
    assert_equal(pool2.run(custom, how)[0], custom("real"))


def seeded_by_rank(how: str) -> tuple[dict[str, Tensor], list[str]]:
    with logged() as records:
        model = distribute(make(how=how, seed=5 + torch.distributed.get_rank()), tp=2)
    return mw.full_state_dict(model), records


@pytest.mark.parametrize("how", ["deferred", "meta"])
def test_ranks_with_other_seeds_get_the_first_ranks_weights(how: str, pool2: Any) -> None:
    for rank, (weights, warnings) in enumerate(pool2.run(seeded_by_rank, how)):
        assert any("use those of the first rank" in text for text in warnings)
        if rank == 0:
            assert_equal(weights, make().state_dict())


class Uninitialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("table", torch.empty(2))


def uninitialised(how: str) -> None:
    with HOWS[how]():
        model = Uninitialised()
    distribute(model, dp=2)


@pytest.mark.parametrize(
    ("how", "pattern"), [("meta", r"2 tensor.*\s+scale\s+table"), ("deferred", r"1 tensor.*\s+scale")]
)
def test_a_parameter_that_nothing_initialises_is_named(how: str, pattern: str, pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(uninitialised, how):
        assert kind == "UninitialisedParameterError" and re.search(pattern, message)


def test_a_change_after_the_block_is_refused() -> None:
    model = make(how="deferred")
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(mw.PlanError, match=r"lm_head.weight was changed after meshwright.deferred_init\(\) ended"):
        distribute(model)


def test_a_meta_model_that_its_config_does_not_describe() -> None:
    model = make(how="meta")
    model.extra = nn.Linear(2, 2, device="meta")
    with pytest.raises(mw.PlanError, match=r"2 parameter\(s\) differ:\s+extra.bias: \(2,\) in the model, None"):
        distribute(model)


def built_differently() -> None:
    rank = torch.distributed.get_rank()
    distribute(make(how="deferred", initializer_range=0.02 * (1 + rank)), dp=2)


def test_ranks_that_initialise_differently(pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(built_differently):
        assert kind == "PlanError" and "rank(s) 1 built another model than rank 0" in message


WIDE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 16000}


def peak_increase(how: str, path: Path | None) -> tuple[int, int]:
    """By how many bytes construction raises this process's resident memory at its highest, and the shard's bytes."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

    distribute(make(how=how), tp=2)  # a first pass through the libraries' code makes it resident
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status("VmRSS")
    model = distribute(make(how=how, **WIDE), tp=2, weights=path)
    return status("VmHWM") - before, sum(map(own_nbytes, model.parameters()))


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="measures by Linux's own account")
@pytest.mark.parametrize("how", [crossing("deferred"), crossing("meta"), "checkpoint"])
def test_a_rank_allocates_its_shard_only(how: str, pool2: Any, tmp_path: Path) -> None:
    pool2.close()  # memory that earlier tests freed would be used again, and not be seen
    path = write_checkpoint(tmp_path, "single", **WIDE) if how == "checkpoint" else None
    for peak, shard in pool2.run(peak_increase, "meta" if path else how, path):
        # The whole model would be 2; 0.25 is 20 MB here.
        assert 0.9 * shard < peak <= 1.25 * shard, (peak, shard)
