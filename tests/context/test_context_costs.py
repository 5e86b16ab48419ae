"""What the ranks of a context keep and send, and that they drop alike what they all hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AutoModelForTokenClassification,
    GPT2Config,
)

import meshwright as mw
from meshwright.context.attend import AttentionCall, attend_in_blocks
from meshwright.context.attention import stock_attention
from meshwright.context.key_exchange import RingKeys, WholeKeys
from meshwright.context.masks import ContextMask
from meshwright.context.ring import RingCall, ring_attention
from meshwright.mesh.axes import Axis
from meshwright.parallel.sequence_parts import TokenRun
from support.contexts import METHODS, batch, distributed
from support.exact import Float64, relative_difference
from support.models import SIZES, build, tokens
from support.traffic import Traffic

# ---- dropout --------------------------------------------------------------------------------------------------------


def dropped(plan: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """The logits of a classifier that drops what its head gets, in two passes, and the masks of a layer's dropout."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=SIZES["vocab_size"], n_embd=32, n_layer=2, n_head=4, n_positions=32, attn_pdrop=0, num_labels=3
    )
    model: Any = AutoModelForTokenClassification.from_config(config)
    model = mw.to_distributed(model, plan=mw.ParallelPlan(**plan))[0].train()
    masks: list[Tensor] = []
    model.transformer.h[1].mlp.dropout.register_forward_hook(lambda _, args, output: masks.append(output == 0))
    logits = [model(input_ids=tokens(2, 12), labels=tokens(2, 12) % 3).logits for _ in range(2)]
    torch.stack(logits).sum().backward()  # with recompute, a layer draws its mask again
    return torch.stack(logits).detach(), masks


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_ranks_drop_the_same_of_joined_tokens(recompute: str, pool2: Any) -> None:
    """Both ranks hold all tokens after the last norm, and each rank has its own in the layers."""
    (logits, masks), (others, other_masks) = pool2.run(dropped, {"cp": 2, "recompute": recompute})
    assert torch.equal(logits, others)
    assert not torch.equal(logits[0], logits[1])
    assert not any(torch.equal(mask, other) for mask, other in zip(masks, other_masks, strict=True))
    assert not torch.equal(masks[0], masks[1])
    assert recompute == "none" or all(any(torch.equal(x, y) for y in masks[:2]) for x in masks[2:])


# ---- attention dropout ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("implementation", "method"), [("sdpa", "gather"), ("eager", "gather"), ("sdpa", "ring")])
def test_blocks_are_run_again_with_the_same_dropout(implementation: str, method: str) -> None:
    """One block over all tokens draws what the stock function draws, and backward draws it again."""
    with Float64():
        module = build("llama", attn_implementation=implementation).double().model.layers[0].self_attn
        generator = torch.Generator().manual_seed(0)
        shapes = [(2, 8, 9, 4), (2, 4, 9, 4), (2, 4, 9, 4)]
        inputs = [torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
        mask = ContextMask.causal(rows=2, length=9)
        call = AttentionCall(
            module=module,
            stock=stock_attention(module)[0],
            is_additive=implementation == "eager",
            mask=mask,
            options={"dropout": 0.5, "scaling": 0.5},
        )
        weights = torch.randn(2, 9, 8, 4, generator=generator, dtype=torch.float64)
        torch.manual_seed(1)
        stock = call.run(*inputs, call.block(TokenRun(0, 9), TokenRun(0, 9), torch.float64))
        expected = torch.autograd.grad((stock * weights).sum(), inputs)
        torch.manual_seed(1)
        if method == "ring":
            ring = RingCall.of(call, RingKeys(Axis("cp"), ((TokenRun(0, 9),),)), width=4)
            ours = ring_attention(ring, *inputs)
        else:
            ours = attend_in_blocks(call, *inputs, (TokenRun(0, 9),), WholeKeys(None))
        torch.manual_seed(2)  # what the program draws between forward and backward
        state = torch.get_rng_state()
        found = torch.autograd.grad((ours * weights).sum(), inputs)
        assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(ours, stock) or method == "ring"  # which adds up in another order
    assert all(relative_difference(x, y) <= 1e-10 for x, y in zip([ours, *found], [stock, *expected], strict=True))


# ---- cost -----------------------------------------------------------------------------------------------------------


def saved_bytes(plan: dict[str, Any] | None, *, recomputes: bool = False) -> int:
    """Bytes that forward keeps for backward, parameters apart."""
    model: Any = build("llama", num_hidden_layers=4, max_position_embeddings=512, intermediate_size=112)
    if plan is not None:
        model = mw.to_distributed(model, plan=mw.ParallelPlan(**plan))[0]
    elif recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    held = []

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(x)  # alive, so that no address is used twice
        return x

    ids = tokens(1, 512)
    with saved_tensors_hooks(pack, lambda x: x):
        model(input_ids=ids, labels=ids)
    return sum(kept.values())


@pytest.mark.parametrize("method", METHODS)
def test_activations_kept(method: str, pool2: Any) -> None:
    assert max(pool2.run(saved_bytes, METHODS[method])) <= 1.05 / 2 * saved_bytes(None)


def test_recompute_keeps_inputs_of_own_tokens(pool2: Any) -> None:
    """Also that of the first layer: transformers' checkpointing begins after the hook that cuts it."""
    kept = pool2.run(saved_bytes, {"cp": 2, "recompute": "full"})
    assert max(kept) <= 1.05 / 2 * saved_bytes(None, recomputes=True)


def traffic_of(plan: dict[str, Any]) -> list[tuple[dict[str, int], dict[str, int]]]:
    model = distributed(plan)
    found = []
    with Traffic() as traffic:
        loss = model(**batch(length=16)).loss
        found.append((dict(traffic.calls), dict(traffic.bytes)))
        traffic.calls.clear(), traffic.bytes.clear()
        loss.backward()
    return [*found, (dict(traffic.calls), dict(traffic.bytes))]


def test_collectives_of_gather_and_ulysses(pool2: Any) -> None:
    """The formulas for 2 layers, 2 rows of 8 own tokens, 8 query and 4 key heads of 4 channels, in float32."""
    rows, width, key_width, layers = 2 * 8, 32, 16, 2
    forward, backward = pool2.run(traffic_of, METHODS["gather"])[0]
    whole = layers * 2 * rows * 2 * key_width * 4  # all ranks' keys and values
    # The loss gathers the ranks' counts of labels, and then their sums.
    assert forward[0] == {"all_gather": layers + 2} and forward[1]["all_gather"] == whole + 2 * 8 + 2 * 8
    assert (backward[0]["all_gather"], backward[0]["reduce_scatter"]) == (layers, layers)
    assert (backward[1]["all_gather"], backward[1]["reduce_scatter"]) == (whole, whole)
    forward, backward = pool2.run(traffic_of, METHODS["ulysses"])[0]
    sent = layers * rows * (2 * width + 2 * key_width) * 4
    for calls, size in (forward, backward):
        assert (calls["reduce_scatter"], size["reduce_scatter"]) == (2 * layers, sent)  # counted as all-to-alls
