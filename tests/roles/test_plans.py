"""Sharding plans: matching, the registry, inference from structure, and the completeness check."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import meshwright as mw
from meshwright.parallel.tensor_parallel.structure import describe
from meshwright.roles import plan_for
from support.exact import relative_difference
from support.models import FAMILIES, build, labels_for, tokens

ATTENTION = {"q_proj": mw.Role.Q, "k_proj": mw.Role.K, "v_proj": mw.Role.V, "o_proj": mw.Role.O}
BEFORE = ("input_layernorm", "pre_feedforward_layernorm")
AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")

# The roles of each family, written by hand.
BY_HAND = {
    "llama": mw.decoder_roles(),
    "mistral": mw.decoder_roles(),
    "qwen2": mw.decoder_roles(),
    "qwen3": mw.decoder_roles(attention_roles=ATTENTION | dict.fromkeys(("q_norm", "k_norm"), mw.Role.HEAD_NORM)),
    "gemma2": mw.decoder_roles(norms=(*BEFORE, *AFTER)),
    "olmo2": mw.decoder_roles(
        attention_roles=ATTENTION | {"q_norm": mw.Role.Q_NORM, "k_norm": mw.Role.K_NORM}, norms=AFTER
    ),
    "phi3": mw.decoder_roles(
        attention_roles={"qkv_proj": mw.Role.QKV, "o_proj": mw.Role.O},
        mlp_roles={"gate_up_proj": mw.Role.GATE_UP, "down_proj": mw.Role.DOWN},
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gets_the_roles_that_are_written_by_hand(family: str) -> None:
    model = build(family)
    expected, found = (
        describe(model, plan, tp=2, sequence_parallel=True)
        for plan in (mw.ShardingPlan(roles=BY_HAND[family]), plan_for(model))
    )
    assert found.parameters == expected.parameters
    assert [b.name for b in found.blocks] == [b.name for b in expected.blocks]
    assert set(found.parameters) == {name for name, _ in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "olmo2"])
def test_an_mlp_as_wide_as_the_model_is_told_by_its_names(family: str) -> None:
    model = build(family, intermediate_size=build(family).config.hidden_size)
    found, expected = (
        describe(model, plan, tp=2, sequence_parallel=True)
        for plan in (plan_for(model), mw.ShardingPlan(roles=BY_HAND[family]))
    )
    assert found.parameters == expected.parameters


def test_inference_refuses_fused_projections_by_name() -> None:
    model = build("phi3")
    with pytest.raises(mw.UncoveredParameterError) as raised:
        describe(model, mw.infer_plan(model), tp=2, sequence_parallel=False)
    assert "model.layers.0.self_attn.qkv_proj.weight" in raised.value.names
    assert "model.layers.1.mlp.gate_up_proj.weight" in raised.value.names


def test_wildcards_match_one_component_and_exact_names_win() -> None:
    plan = mw.ShardingPlan(roles={"a.*.q": mw.Role.Q, "a.3.q": mw.Role.K})
    assert plan.role_of("a.0.q") is mw.Role.Q
    assert plan.role_of("a.3.q") is mw.Role.K
    assert plan.role_of("a.0.b.q") is None and plan.role_of("a.q") is None


def test_a_role_must_be_a_role() -> None:
    with pytest.raises(ValueError, match=r"'a' has the role 'column'"):
        mw.ShardingPlan(roles={"a": "column"})  # type: ignore[dict-item]


def test_registering() -> None:
    with pytest.raises(ValueError, match=r"takes a meshwright.ShardingPlan, not dict"):
        mw.register_plan("mine", {})  # type: ignore[arg-type]
    model = build("llama")
    model.config.model_type = "nobodys_llama"
    assert "inferred" in plan_for(model).source
    plan = mw.ShardingPlan(roles=mw.decoder_roles())
    mw.register_plan("nobodys_llama", plan)
    assert plan_for(model) is plan


class OwnAttention(nn.Module):
    """Nobody's class: other names, head counts as attributes, positional arguments."""

    def __init__(self, hidden: int, heads: int, groups: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = heads, groups, hidden // heads
        self.wq = nn.Linear(hidden, hidden, bias=False)
        self.wk = nn.Linear(hidden, groups * self.head_dim, bias=True)
        self.wv = nn.Linear(hidden, groups * self.head_dim, bias=False)
        self.wo = nn.Linear(hidden, hidden, bias=True)
        self.q_norm: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.wq(x)).view(batch, length, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, length, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, length, self.n_kv_heads, self.head_dim).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class OwnLayer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attn = OwnAttention(hidden, 8, 4)
        self.ff = nn.Sequential(nn.Linear(hidden, 40), nn.GELU(), nn.Linear(40, hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.first_norm(x))
        return x + self.ff(self.second_norm(x))


class OwnDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(97, 32)
        self.blocks = nn.ModuleList(OwnLayer(32) for _ in range(2))
        self.last_norm = nn.LayerNorm(32)
        self.out = nn.Linear(32, 97)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.out(self.last_norm(x))
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 97), labels[:, 1:].reshape(-1))


class NormedEmbedding(nn.Embedding):
    """Norms what it returns, and is read by the model too."""

    def __init__(self) -> None:
        super().__init__(97, 32, padding_idx=96)
        self.norm = nn.LayerNorm(32)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.norm(super().forward(input_ids))


class GatedLayer(OwnLayer):
    """Norms its queries over the whole width, and combines each token with a second input."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.attn.q_norm = nn.LayerNorm(hidden)
        self.narrow, self.widen = nn.Linear(hidden, 8), nn.Linear(8, hidden)

    def forward(self, x: Tensor, per_layer_input: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.widen(torch.tanh(self.narrow(x)) * per_layer_input)


class OddDecoder(OwnDecoder):
    """Its own code reads a row of its embedding, and has a module between its layers and its last norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GatedLayer(32) for _ in range(2))
        self.gates, self.between = nn.Embedding(97, 8), nn.Linear(32, 32)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, gates = self.words(input_ids), self.gates(input_ids)
        is_padding = input_ids == self.words.padding_idx
        x = torch.where(is_padding[..., None], 2 * self.words.weight[96, :], x)
        for block in self.blocks:
            x = block(x, per_layer_input=gates)
        logits = self.out(self.last_norm(self.between(x)))
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 97), labels[:, 1:].reshape(-1))


class OddPaddedDecoder(OddDecoder):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(97, 32, padding_idx=96)


class OddNormedDecoder(OddDecoder):
    """The head has the weight of the embedding, which stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.words = NormedEmbedding()
        self.out.weight = self.words.weight


def odd_model_step(kind: type[OddDecoder], plan: dict[str, Any] | None) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = kind().double()
    if plan is not None:
        model = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))[0]
    ids = tokens(3, 11)  # neither rows nor length divide
    ids[:, -2:] = 96
    for _ in range(2):  # a second call, with whatever hooks have left behind
        with torch.no_grad():
            of_copy = copy.deepcopy(model)(ids, labels=labels_for(ids))
        loss = model(ids, labels=labels_for(ids))
        loss.backward()
    assert abs(loss.item() - of_copy.item()) < 1e-12  # in float64, of the same sums
    if plan is None:
        return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), mw.full_gradients(model)


@pytest.mark.parametrize("kind", [OddPaddedDecoder, OddNormedDecoder])
@pytest.mark.parametrize("plan", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}])
def test_what_no_role_fits_equals_one_process(kind: type[OddDecoder], plan: dict[str, Any], pool2: Any) -> None:
    loss, expected = odd_model_step(kind, None)
    actual_loss, actual = pool2.run(odd_model_step, kind, plan)[0]
    assert abs(actual_loss - loss) < 1e-12
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():  # 1e-10 in float64: only the order of sums differs
        if not name.endswith("wk.bias"):  # zero but for rounding
            assert relative_difference(actual[name], gradient) < 1e-10, name


def own_model_step(plan: dict[str, Any] | None) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = OwnDecoder().double()
    if plan is not None:
        model = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))[0]
    ids = tokens(2, 12)
    loss = model(ids, labels=labels_for(ids))
    loss.backward()
    if plan is None:
        return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), mw.full_gradients(model)


@pytest.mark.quick
@pytest.mark.parametrize("plan", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}])
def test_a_class_nobody_has_seen_equals_one_process(plan: dict[str, Any], pool2: Any) -> None:
    loss, expected = own_model_step(None)
    actual_loss, actual = pool2.run(own_model_step, plan)[0]
    assert abs(actual_loss - loss) < 1e-12
    for name, gradient in expected.items():  # 1e-10 in float64: only the order of sums differs
        if not name.endswith("wk.bias"):  # zero but for rounding
            assert relative_difference(actual[name], gradient) < 1e-10, name


class FlatLayer(nn.Module):
    """Its MLP has no module of its own, and works on rows, as OPT's does; the norms come after the blocks."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attn = OwnAttention(hidden, 8, 8)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.grow, self.shrink = nn.Linear(hidden, 40), nn.Linear(40, hidden)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = self.norm1(x + self.attn(x if bias is None else x + bias))
        rows = x.reshape(-1, x.shape[-1])
        return self.norm2(rows + self.shrink(torch.relu(self.grow(rows)))).view(x.shape)


class FlatDecoder(nn.Module):
    """Learned positions, normed embeddings narrower than the layers, and no norm after them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(97, 16), nn.Embedding(64, 16)
        self.emb_norm, self.widen = nn.LayerNorm(16), nn.Linear(16, 32)
        self.blocks = nn.ModuleList(FlatLayer(32) for _ in range(2))
        self.narrow, self.out = nn.Linear(32, 16), nn.Linear(16, 97)
        self.bias: nn.Parameter | None = None

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        places = self.places(torch.arange(input_ids.shape[1]))
        x = self.widen(self.emb_norm(self.words(input_ids) + places))
        for block in self.blocks:
            x = block(x, self.bias)
        logits = self.out(self.narrow(x))
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 97), labels[:, 1:].reshape(-1))


def flat_model_step(plan: dict[str, Any] | None) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = FlatDecoder().double()
    if plan is not None:
        model = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))[0]
    ids = tokens(3, 11)  # neither rows nor length divide
    loss = model(ids, labels=labels_for(ids))
    loss.backward()
    if plan is None:
        return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), mw.full_gradients(model)


@pytest.mark.parametrize("plan", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}])
def test_another_class_nobody_has_seen_equals_one_process(plan: dict[str, Any], pool2: Any) -> None:
    loss, expected = flat_model_step(None)
    actual_loss, actual = pool2.run(flat_model_step, plan)[0]
    assert abs(actual_loss - loss) < 1e-12
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():  # 1e-10 in float64: only the order of sums differs
        if not name.endswith("wk.bias"):  # zero but for rounding
            assert relative_difference(actual[name], gradient) < 1e-10, name


def decoder_with(change: Any) -> nn.Module:
    model = OwnDecoder()
    for block in model.blocks:
        change(block)
    return model


def add_inner_norm(block: nn.Module) -> None:
    block.attn.sub_norm = nn.RMSNorm(32)  # as wide as the hidden states, but its input is sharded


def add_weightless_norm(block: nn.Module) -> None:
    block.attn.v_norm = nn.RMSNorm(4, elementwise_affine=False)


def norm_whole_queries(block: nn.Module) -> None:
    block.attn.q_norm = nn.LayerNorm(32)


def add_convolution(block: nn.Module) -> None:
    block.mix = nn.Conv1d(32, 32, 3)


def add_third_projection(block: nn.Module) -> None:
    block.ff.append(nn.Linear(32, 32))


def add_lone_weight(block: nn.Module) -> None:
    block.attn.temperature = nn.Parameter(torch.ones(8))


def widen_keys(block: nn.Module) -> None:
    block.attn.wk = nn.Linear(32, 18)  # no whole number of heads


def prune_keys(block: nn.Module) -> None:
    prune.l1_unstructured(block.attn.wk, "weight", 0.3)


def norm_key_weights(block: nn.Module) -> None:
    weight_norm(block.attn.wk)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (prune_keys, "blocks.0.attn.wk.weight is no parameter"),
        (norm_key_weights, "parametrize.remove_parametrizations(module, 'weight')"),
        (add_inner_norm, "blocks.0.attn.sub_norm.weight"),
        (add_convolution, "blocks.1.mix.weight"),
        (add_third_projection, "blocks.0.ff.3.weight"),
        (add_lone_weight, "blocks.1.attn.temperature"),
        (widen_keys, "the 18 rows of its keys"),
    ],
)
def test_what_cannot_be_placed_is_named(change: Any, name: str) -> None:
    model = decoder_with(change)
    with pytest.raises(mw.PlanError) as raised:
        describe(model, mw.infer_plan(model), tp=2, sequence_parallel=True)
    assert name in str(raised.value)


@pytest.mark.parametrize("change", [add_weightless_norm, norm_whole_queries])
def test_a_block_with_a_norm_that_cannot_be_cut_stays_whole(change: Any) -> None:
    model = decoder_with(change)
    found = describe(model, plan_for(model), tp=2, sequence_parallel=True)
    assert found.whole.keys() == {"blocks.0.attn", "blocks.1.attn"} and found.is_sequence_parallel
    assert {block.name for block in found.blocks} == {"blocks.0.ff", "blocks.1.ff"}


def norm_heads(block: nn.Module) -> None:
    block.attn.q_norm, block.attn.v_norm = nn.RMSNorm(4), nn.RMSNorm(4, elementwise_affine=False)


def test_a_norm_without_weights_is_taken_for_one_of_heads_beside_such_a_norm() -> None:
    model = decoder_with(norm_heads)
    found = describe(model, plan_for(model), tp=2, sequence_parallel=True)
    assert not found.whole and "blocks.0.attn" in {block.name for block in found.blocks}


def flat_model_with_a_learned_bias() -> None:
    model = FlatDecoder()
    model.bias = nn.Parameter(torch.zeros(32))
    model, _, _ = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(tp=2)))
    model(tokens(2, 4), labels=tokens(2, 4))


def plan_with_a_norm_that_comes_first() -> None:
    model = FlatDecoder()
    plan = mw.infer_plan(model)
    plan = mw.ShardingPlan(roles={**plan.roles, "emb_norm": mw.Role.FINAL_NORM})
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(tp=2, sequence_parallel=True), sharding_plan=plan)
    model, _, _ = mw.to_distributed(model, config=config)
    model(tokens(2, 4))


class UncalledProjection(nn.Module):
    """Reads the weight of its output projection instead of calling it, as Bloom does if told to."""

    def __init__(self, inner: nn.Linear, outer: nn.Linear) -> None:
        super().__init__()
        self.up, self.down = inner, outer

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.relu(self.up(x)), self.down.weight)


class UncalledBlock(FlatLayer):
    """Calls its attention's forward method, past all hooks."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x + self.attn.forward(x)


def run_small(change: Any, tp: int = 2) -> float:
    torch.manual_seed(0)
    model = OwnDecoder() if change in (use_uncalled_projection, add_residual) else FlatDecoder()
    for block in model.blocks:
        change(block)
    if tp > 1:
        model, _, _ = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(tp=tp)))
    output = model(tokens(2, 4), labels=tokens(2, 4))
    loss: Tensor = getattr(output, "loss", output)
    return loss.float().mean().item()


def use_uncalled_projection(block: nn.Module) -> None:
    block.ff = UncalledProjection(block.ff[0], block.ff[2])


def use_uncalled_block(block: nn.Module) -> None:
    block.__class__ = UncalledBlock


class OwnResidual(nn.Module):
    """An MLP that adds its input itself."""

    def __init__(self, inner: nn.Linear, outer: nn.Linear) -> None:
        super().__init__()
        self.up, self.down = inner, outer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def add_residual(block: nn.Module) -> None:
    block.ff = OwnResidual(block.ff[0], block.ff[2])


def drop_layers(block: nn.Module) -> None:
    block.layerdrop = 0.1


@pytest.mark.parametrize("change", [use_uncalled_projection, use_uncalled_block, add_residual])
def test_what_would_miss_a_reduction_stays_whole(change: Any, pool2: Any) -> None:
    """float32 sums in another order. A sum that is missing changes the loss by more than 1e-3."""
    assert pool2.run(run_small, change) == pytest.approx([run_small(change, tp=1)] * 2, rel=1e-5)


def test_what_skips_layers_at_random_is_refused(pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(run_small, drop_layers):
        assert kind == "PlanError" and "blocks.0 skips layers at random (layerdrop=0.1)" in message


def test_what_shows_only_when_it_runs_is_refused_then(pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(flat_model_with_a_learned_bias):
        assert kind == "PlanError" and "FlatLayer is given bias beside its hidden states" in message
    for kind, message in pool2.run_expecting_error(plan_with_a_norm_that_comes_first):
        assert kind == "PlanError" and "leave the FINAL_NORM out of the plan" in message
