"""Encoders and encoder-decoders equal one process, with the heads of their tasks.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs, about 1e-16 a sum, and the steps
of AdamW divide tiny differences by tiny moments.
"""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn

import meshwright as mw
from meshwright.context.record import record_context
from meshwright.distribute.decide import structure_of
from meshwright.facts import Facts
from meshwright.mesh.axes import Axis
from meshwright.optim.zero.units import read_weights, units_of
from meshwright.parallel.shards.added_parameters import KeptModules
from meshwright.parallel.tensor_parallel import second_inputs
from meshwright.parallel.tensor_parallel.second_inputs import SecondInputs
from meshwright.parallel.tensor_parallel.sequence_parallel import SequenceSharding
from meshwright.parallel.tensor_parallel.structure import DecoderStructure
from meshwright.roles import Role
from meshwright.roles.blocks import Attention
from meshwright.roles.decoder import find_decoder
from support.encoder_models import MODELS, build, loader
from support.exact import Float64, gradient_differences
from support.parity import pool_for
from support.tiers import crossings

PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "tp2+sp, micro-batches, recompute": {
        "tp": 2, "sequence_parallel": True, "gradient_accumulation_steps": 2, "recompute": "full",
    },
    "dp2+zero3": {"dp": 2, "zero_stage": 3},
    "dp2, micro-batches": {"dp": 2, "gradient_accumulation_steps": 2},
    "dp2 x tp2+sp, zero1": {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1},
    "pp2, micro-batches": {"pp": 2, "gradient_accumulation_steps": 2},
    "cp2": {"cp": 2},
}  # fmt: skip
# Layers that run again are not cut into stages.
CASES = [(name, plan) for name in MODELS for plan in PLANS if plan != "cp2"]
CASES.remove(("albert, tokens", "pp2, micro-batches"))
CASES += [("albert, tokens", "cp2")]
CASES.remove(("albert, tokens", "tp2+sp, micro-batches, recompute"))  # it has no activation checkpointing


def train(plan: dict[str, Any] | None, name: str) -> dict[str, Tensor]:
    """Losses, the first gradients, norms and weights of three steps."""
    with Float64():
        model, data = build(name), loader(name)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if plan is not None:
            model, optimizer, data = mw.to_distributed(model, optimizer, data, plan=mw.ParallelPlan(**plan))
        found: dict[str, Tensor] = {}
        for step, batch in enumerate(data):
            loss = model(**batch).loss
            loss.backward()
            found[f"loss {step}"] = loss.detach()
            if step == 0:
                gradients = (
                    {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
                    if plan is None
                    else mw.full_gradients(model)
                )
                found |= {f"gradient of {n}": x for n, x in gradients.items()}
            found[f"norm {step}"] = mw.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        weights = model.state_dict() if plan is None else mw.full_state_dict(model)
        return found | {f"weight {n}": x.clone() for n, x in weights.items() if x.is_floating_point()}


reference = functools.cache(functools.partial(train, None))


def largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    parts = {n: x for n, x in expected.items() if n.startswith("gradient")}
    others = {n: x for n, x in expected.items() if n not in parts}
    assert found.keys() == expected.keys()
    differences = gradient_differences({n: found[n] for n in parts}, parts)
    # A key's bias changes no score: its gradient is rounding, which Adam's first step turns into a whole step.
    others = {n: x for n, x in others.items() if not n.endswith(("key.bias", "k_lin.bias", "k_proj.bias"))}
    differences |= gradient_differences({n: found[n] for n in others}, others)
    return max(differences.values())


@pytest.mark.parametrize(
    ("name", "plan_name"),
    crossings(CASES, but=[("bert, rows", "tp2+sp"), ("t5, translations", "tp2+sp"), ("deberta, rows", "tp2+sp")]),
)
def test_equals_one_process(name: str, plan_name: str, request: pytest.FixtureRequest) -> None:
    results = pool_for(PLANS[plan_name], request).run(train, PLANS[plan_name], name)
    assert largest(results[0], reference(name)) <= 1e-10


def train_without_sums(plan: dict[str, Any], name: str) -> dict[str, Tensor]:
    """A fault: each rank keeps its own addend of the gradient of what enters beside the hidden states."""
    with mock.patch.object(second_inputs, "share", lambda x, axis: x.view_as(x)):
        return train(plan, name)


@pytest.mark.parametrize("name", ["t5, translations", "deberta, rows"])
def test_second_inputs_that_are_not_summed_are_named(name: str, pool2: Any) -> None:
    kind, said = pool2.run_expecting_error(train_without_sums, PLANS["tp2+sp"], name)[0]
    assert kind == "DivergenceError" and "weight(s) that the ranks of tp share are no longer equal" in said


def structure(name: str) -> DecoderStructure:
    found = structure_of(build(name), mw.ParallelPlan(tp=2, sequence_parallel=True), mw.ToDistributedConfig())
    assert isinstance(found, DecoderStructure)
    return found


def test_what_is_cut() -> None:
    bert = structure("bert, rows")
    assert len(bert.blocks) == 4 and not bert.whole
    cut = {name for name, layout in bert.parameters.items() if layout.is_sharded and "layer.0" in name}
    parts = ("self.query", "self.key", "self.value", "attention.output.dense", "intermediate.dense", "output.dense")
    assert {n.rpartition("0.")[2].rpartition(".")[0].removeprefix("attention.") for n in cut} == {
        part.removeprefix("attention.") for part in parts
    }
    t5 = structure("t5, translations")
    assert t5.parameters["decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"].is_sharded
    assert len(t5.embeddings) == 3 and len(t5.blocks) == 6


def test_layers_without_a_known_place_where_tokens_meet_stay_whole() -> None:
    """FNet mixes tokens in a module without weights, which a rank with its own tokens would get wrong."""
    found = structure("fnet, rows")
    assert not found.blocks and not found.is_sequence_parallel


def test_layers_that_run_again_and_layers_that_mix_tokens_are_known_under_cp() -> None:
    """ALBERT runs one group of layers twice, and FNet's layers have no attention."""
    albert = find_decoder(build("albert, tokens"))
    assert record_context(albert).layers == albert.layers * 2
    with pytest.raises(mw.PlanError, match="does not call transformers' attention interface"):
        record_context(find_decoder(build("fnet, rows")))


@pytest.mark.quick
def test_reversible_layers_are_refused_where_tokens_or_layers_are_cut() -> None:
    sizes = {"attn_layers": ["local"] * 2, "axial_pos_embds": False, "hidden_size": 32, "num_attention_heads": 2}
    model = transformers.ReformerModelWithLMHead(transformers.ReformerConfig(**sizes, is_decoder=True, vocab_size=97))
    assert structure_of(model, mw.ParallelPlan(tp=2), mw.ToDistributedConfig()) is not None
    for plan, cure in (({"tp": 2, "sequence_parallel": True}, "sequence_parallel=False"), ({"pp": 2}, "pp=1")):
        with pytest.raises(mw.PlanError, match=rf"ReformerLayer is a reversible layer.*ParallelPlan\({cure}\)"):
            structure_of(model, mw.ParallelPlan(**plan), mw.ToDistributedConfig())


@pytest.mark.quick
def test_an_encoders_result_is_not_taken_for_a_ranks_tokens_of_the_same_number() -> None:
    """As in ProphetNet, whose attention stays whole: 14 tokens of a text, and 14 of the decoder's 27 on each rank."""
    sequence, text, own = SequenceSharding(Axis("tp", size=2, rank=0)), torch.randn(2, 14, 4), torch.randn(2, 14, 4)
    sequence.set_length(27)
    sequence.keep_whole([text.view_as(text)])  # the view ends with the layer that was given it
    assert sequence.is_kept_whole(text.view_as(text)) and not sequence.is_kept_whole(own)
    assert sequence.is_local(14) and not sequence.is_kept_whole(text[:, :7])


class Table(nn.Module):
    """A module that reads a child's weight, and calls it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.words = nn.Embedding(4, 4), nn.Embedding(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids).to(self.words.weight.dtype) + self.table()

    def table(self) -> Tensor:
        return self.positions.weight.unsqueeze(0)

    def set_words(self, other: nn.Embedding) -> None:
        self.words.weight = other.weight


@pytest.mark.quick
def test_weights_that_a_module_reads_itself_are_found() -> None:
    module = Table()
    (found,) = read_weights(module)
    assert found is module.positions.weight


class Shifted(nn.Embedding):
    """A table with a method beside forward, as ProphetNet's."""

    def shifted(self, ids: Tensor) -> Tensor:
        return super().forward(ids + 1)


class TwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Shifted(5, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.positions(ids) + self.positions.shifted(ids)


@pytest.mark.quick
def test_weights_of_a_child_whose_other_method_runs_are_found() -> None:
    module = TwoStreams()
    assert read_weights(module) == [module.positions.weight]


@pytest.mark.quick
def test_containers_in_lists_are_no_units() -> None:
    """Florence-2's blocks are lists of lists, and Chameleon's hold their parts in plain modules."""
    holder = nn.Module()
    holder.inner = nn.ModuleList([nn.Linear(2, 2)])
    layers = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), holder, nn.Sequential(nn.Linear(2, 2))])
    found = dict(units_of(layers))
    assert found == {layers[0][0]: True, layers[0][1]: True, holder.inner[0]: True, layers[2]: True}  # type: ignore[index]


@pytest.mark.quick
def test_an_attention_with_heads_of_an_unknown_name_is_not_cut() -> None:
    """ProphetNet's num_attn_heads, which ended in an error of torch about shapes."""
    attention = nn.Module()
    for name in ("query_proj", "key_proj", "value_proj", "out_proj"):
        setattr(attention, name, nn.Linear(8, 8))
    attention.head_dim, attention.num_heads = 4, 2  # type: ignore[assignment]
    assert Attention.claim(attention, 8, {})[""] is Role.ATTENTION
    del attention.num_heads
    attention.num_attn_heads = 2  # type: ignore[assignment]
    assert Attention.claim(attention, 8, {}) == {}


@pytest.mark.quick
def test_a_module_that_forward_replaces_is_named() -> None:
    """BigBird chooses an attention by the number of tokens, which ended in an error of torch about shapes."""
    layer = nn.Sequential(nn.Linear(2, 2))
    KeptModules(Facts(layer), layer)
    layer[0] = nn.Linear(2, 2)
    with pytest.raises(mw.PlanError, match=r"0 of Sequential, a Linear, was replaced .*attention_type"):
        layer(torch.zeros(1, 2))


class Cache:
    """Keys and values of another decoder."""

    def __init__(self, needs_gradient: bool):
        self.layers = [SimpleNamespace(keys=torch.zeros(1, requires_grad=needs_gradient), values=None)]


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_a_cache_that_is_trained_is_refused(needs_gradient: bool) -> None:
    """PI0's action decoder reads the keys and values of its language model."""

    class Reader(nn.Module):
        def forward(self, hidden_states: Tensor, past_key_values: Cache) -> Tensor:
            return hidden_states

    layer = Reader()
    SecondInputs((layer,), (), (), Axis("tp"))
    refused = pytest.raises(mw.PlanError, match="Reader is given past_key_values beside its hidden states")
    with refused if needs_gradient else contextlib.nullcontext():
        layer(torch.zeros(1, 2, 4, requires_grad=True), past_key_values=Cache(needs_gradient))


class Layer(nn.Module):
    """A layer whose block reads a second input, which the layer may add to the hidden states too."""

    def __init__(self, adds: bool):
        super().__init__()
        self.adds, self.block = adds, nn.Bilinear(4, 4, 4)

    def forward(self, hidden_states: Tensor, other: Tensor) -> Tensor:
        result: Tensor = self.block(hidden_states, other)
        return result + other if self.adds else result


@pytest.mark.quick
def test_a_second_input_that_a_layer_uses_outside_of_its_blocks_is_refused() -> None:
    for adds in (False, True):
        layer = Layer(adds)
        block = mock.Mock(entries=(layer.block,), heads=None)
        SecondInputs((layer,), (block,), (), Axis("tp"))
        hidden, other = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
        with mock.patch.object(second_inputs, "share", lambda x, axis: x.view_as(x)):
            if not adds:
                layer(hidden, other)
                continue
            with pytest.raises(mw.PlanError, match="Layer is given other beside its hidden states"):
                layer(hidden, other)
