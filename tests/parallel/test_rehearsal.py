"""What a program brings into the parts that tp and cp cut: equal to one device, else whole (tp) or an error (cp)."""

from __future__ import annotations

import functools
import logging
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

import meshwright as mw
from meshwright.roles.brought import Brought
from support.exact import Float64
from support.logs import logged
from support.models import FAMILIES, build, labels_for, tokens
from support.short_programs import weights_of, worst

TP, SP, CP = "tp2", "tp2+sp", "cp2"
Edit = Callable[[Any], object]


# Classes of linear layers, activations and blocks.
class RoundedRows(nn.Linear):
    """The weight in steps of a part of each row's largest element: another step for a part of a row."""

    def forward(self, x: Tensor) -> Tensor:
        step = self.weight.abs().amax(1, keepdim=True) / 7
        rounded = self.weight + ((self.weight / step).round() * step - self.weight).detach()
        return F.linear(x, rounded, self.bias)


class StandardisedRows(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        centred = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(x, 0.1 * centred / (self.weight.std(1, keepdim=True) + 1e-3), self.bias)


class Masked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


class OfTheLargest(nn.Linear):
    """A head whose logits are relative to those of all words."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits - 0.5 * logits.logsumexp(-1, keepdim=True).detach()


class Largest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) * (x >= x.topk(8, -1).values[..., -1:])


class OwnSilu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class NormedInside(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(F.layer_norm(inner, inner.shape[-1:]))


class Swapped(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).flip(-1))


class Gated(LlamaMLP):
    """Adds a product with its own input that is right under any cut."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(0.5 * x)


class MeanOfTokens(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 0.5 * x.mean(1, keepdim=True))


class MixingLayer(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states + 0.5 * hidden_states.mean(1, keepdim=True), *args, **kwargs)


class Centred(nn.Embedding):
    def forward(self, words: Tensor) -> Tensor:
        return F.embedding(words, self.weight - self.weight.mean(0))


class Hashed(nn.Embedding):
    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words) + super().forward((words * 31 + 7) % self.num_embeddings)


class Scaled(nn.Embedding):
    def forward(self, words: Tensor) -> Tensor:
        return 2 * super().forward(words)


def of_class(kind: type, *paths: str) -> Edit:
    """Change the class of modules: of each layer, or of the model."""

    def edit(model: Any) -> None:
        for path in paths:
            for module in map(model.get_submodule, _paths(model, path)):
                module.__class__ = kind
                if kind is Masked:
                    draws = torch.Generator().manual_seed(0)
                    module.register_buffer("mask", (torch.rand(module.weight.shape, generator=draws) > 0.3).double())

    return edit


def layers_become(kind: type) -> Edit:
    def edit(model: Any) -> None:
        for layer in model.model.layers:
            layer.__class__ = kind

    return edit


def activation(make: Callable[[], nn.Module]) -> Edit:
    def edit(model: Any) -> None:
        for layer in model.model.layers:
            layer.mlp.act_fn = make()

    return edit


def patched_forward(model: Any) -> None:
    """Functions of the program in place of a forward, one of which holds the old one."""
    first, last = model.model.layers[0].mlp, model.model.layers[-1].mlp
    old = first.forward
    first.forward = lambda x: old(x) + 0.1 * torch.tanh(old(x))
    last.forward = types.MethodType(NormedInside.forward, last)


def patched_head(model: Any) -> None:
    old = model.lm_head.forward
    model.lm_head.forward = lambda x: F.normalize(old(x), dim=-1)


def own_checkpoint(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.forward = functools.partial(checkpoint, layer.mlp.forward, use_reentrant=False)


# Hooks.
def hook(path: str, make: Callable[[nn.Module], object]) -> Edit:
    def edit(model: Any) -> None:
        for module in map(model.get_submodule, _paths(model, path)):
            make(module)

    return edit


def _paths(model: Any, path: str) -> list[str]:
    return list(dict.fromkeys(path.replace("*", f"model.layers.{index}") for index in range(len(model.model.layers))))


def clip(module: nn.Module) -> None:
    """A full backward hook that clips by the norm of what it gets."""
    module.register_full_backward_hook(
        lambda _, gi, go: tuple(None if g is None else g * (0.01 / (g.norm() + go[0].norm())).clamp(max=1) for g in gi)
    )


def read_gradient(module: nn.Module) -> None:
    module.register_full_backward_hook(lambda _, gi, go: None)


def clip_before(module: nn.Module) -> None:
    module.register_full_backward_pre_hook(lambda _, go: tuple(g * (0.01 / g.norm()).clamp(max=1) for g in go))


def largest_alone(module: nn.Module) -> None:
    """A forward hook that reads all of the output, and whose gradient hook reads all of the gradient."""

    def change(_: nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        changed = first / (1 + first.norm())
        if changed.requires_grad:
            changed.register_hook(lambda g: g / (1 + g.norm()))
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    module.register_forward_hook(change)


def of_input(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda _, args: (args[0] / (1 + args[0].norm()), *args[1:]))


def shifted(words: int) -> Callable[[nn.Module], None]:
    return lambda module: module.register_forward_hook(lambda _, args, out: out + torch.arange(words).to(out) / words)


# by name: the plan, what the program does, what the log says of it, and what an error says ("" where none comes)
BEFORE: dict[str, tuple[str, Edit, str, str]] = {
    "rows rounded, cut by rows": (TP, of_class(RoundedRows, "*.mlp.gate_proj"), "", ""),
    "rows rounded, cut by columns": (
        TP,
        of_class(RoundedRows, "*.mlp.down_proj"),
        "layers.0.mlp (RoundedRows",
        "",
    ),
    "rows standardised": (
        SP,
        of_class(StandardisedRows, "*.self_attn.o_proj"),
        "0.self_attn (Standard",
        "",
    ),
    "masked": (TP, of_class(Masked, "*.mlp.up_proj"), "cut over tp it raises RuntimeError", ""),
    "head of all words": (TP, of_class(OfTheLargest, "lm_head"), "lm_head (OfTheLargest", ""),
    "largest channels": (TP, activation(Largest), "layers.0.mlp (Largest, test_rehearsal.py:", ""),
    "softmax of torch": (SP, activation(lambda: nn.Softmax(-1)), "layers.0.mlp (Softmax", ""),
    "own silu": (SP, activation(OwnSilu), "", ""),
    "norm inside": (SP, of_class(NormedInside, "*.mlp"), "layers.0.mlp (NormedInside", ""),
    "channels swapped": (TP, of_class(Swapped, "*.mlp"), "layers.0.mlp (Swapped", ""),
    "own mlp": (SP, of_class(Gated, "*.mlp"), "", ""),
    "patched": (TP, patched_forward, "layers.1.mlp (LlamaMLP", ""),
    "patched head": ("dp2", patched_head, "", ""),
    "patched head, cp": (CP, patched_head, "", ""),
    "mean of tokens": (
        SP,
        of_class(MeanOfTokens, "*.input_layernorm"),
        "input_layernorm (MeanOfTokens",
        "",
    ),
    "mean of tokens at the end": (SP, of_class(MeanOfTokens, "model.norm"), "model.norm (MeanOfTokens", ""),
    "mixing layer": (TP, layers_become(MixingLayer), "", ""),
    "mixing layer, sp": (SP, layers_become(MixingLayer), "", "plan='tp2'"),
    "own mlp, cp": (CP, of_class(Gated, "*.mlp"), "", ""),
    "mean of tokens, cp": (CP, of_class(MeanOfTokens, "*.input_layernorm"), "", "of some tokens of a row"),
    "mean of tokens at the end, cp": (CP, of_class(MeanOfTokens, "model.norm"), "", "model.norm (MeanOfTokens"),
    "mixing layer, cp": (CP, layers_become(MixingLayer), "", "ParallelPlan(cp=1)"),
    "centred words": (TP, of_class(Centred, "model.embed_tokens"), "embed_tokens (Centred", ""),
    "hashed words": (TP, of_class(Hashed, "model.embed_tokens"), "embed_tokens (Hashed", ""),
    "scaled words": (SP, of_class(Scaled, "model.embed_tokens"), "", ""),
    "checkpoint of one's own": (TP, own_checkpoint, "", ""),
    "checkpoint of one's own, sp": (SP, own_checkpoint, "", ""),
    "hook on the head": (SP, hook("lm_head", largest_alone), "", ""),
    "hook with a number for each word": (TP, hook("lm_head", shifted(97)), "", ""),
    "backward hook on the head": (TP, hook("lm_head", clip), "", ""),
    "hook on the embedding": (TP, hook("model.embed_tokens", largest_alone), "", ""),
    "hook on layers": (SP, hook("*", largest_alone), "", ""),
    "pre-hook on layers": (SP, hook("*", of_input), "", ""),
    "backward hook on layers": (SP, hook("*", clip), "", ""),
    "backward pre-hook on layers": (SP, hook("*", clip_before), "", ""),
    "hook on norms": (SP, hook("*.input_layernorm", largest_alone), "", ""),
    "hook on the final norm": (SP, hook("model.norm", largest_alone), "", ""),
    "hook on blocks": (SP, hook("*.mlp", largest_alone), "", ""),
    "backward hook on blocks": (TP, hook("*.mlp", clip), "", ""),
    "backward hook on blocks, cp": (CP, hook("*.mlp", read_gradient), "this rank's rows or tokens", ""),
    "backward hook on blocks, sp": (SP, hook("*.mlp", clip), "", ""),
    "hook inside": (TP, hook("model.layers.0.mlp.act_fn", largest_alone), "hooks of the program (change, test_re", ""),
    "backward hook inside": (
        SP,
        hook("*.self_attn.o_proj", clip),
        "model.layers.0.self_attn and 1 more",
        "",
    ),
}
AFTER: dict[str, tuple[str, Edit, str, str]] = {
    "hook on the head": (TP, hook("lm_head", largest_alone), "", ""),
    "hook on the embedding": (SP, hook("model.embed_tokens", largest_alone), "", ""),
    "hook on layers": (SP, hook("*", largest_alone), "", ""),
    "backward hook on blocks": (SP, hook("*.mlp", clip), "", ""),
    "hook inside": (TP, hook("model.layers.0.mlp.act_fn", largest_alone), "", "Register it before to_distributed"),
    "checkpoint of one's own": (SP, own_checkpoint, "", ""),
}


def trained(plan: str | None, edit: Edit, *, is_late: bool) -> tuple[list[float], dict[str, Tensor], float]:
    """The losses of three steps, the weights after them, and what the program draws after the call."""
    with Float64():
        model: Any = build("llama").double()
        if not is_late:
            edit(model)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if plan is not None:
            torch.manual_seed(0)
            before = random.getstate()
            model, optimizer, _ = mw.to_distributed(model, optimizer, plan=plan)
            assert before == random.getstate()
        drawn = torch.rand(()).item()
        if is_late:
            edit(model)
        losses = []
        for step in range(3):
            ids = tokens(3, 9, seed=step)
            loss = model(input_ids=ids, labels=labels_for(ids)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, weights_of(model, plan), drawn


def outcomes(names: list[tuple[str, bool]]) -> dict[tuple[str, bool], Any]:
    """What each program does under its plan: its losses and weights, or its error; and the log."""
    found = {}
    for name, is_late in names:
        plan, edit, *_ = (AFTER if is_late else BEFORE)[name]
        with logged(level=logging.WARNING) as said:
            try:
                found[name, is_late] = trained(plan, edit, is_late=is_late), list(said)
            except Exception as error:
                found[name, is_late] = f"{type(error).__name__}: {error}", list(said)
    return found


def test_what_a_program_brings_is_equal_or_refused(pool2: Any) -> None:
    """In float64 only the order of sums differs: 1e-9 of the largest element. A part for the whole is off by 1e-3."""
    names = [(name, False) for name in BEFORE] + [(name, True) for name in AFTER]
    first, second = pool2.run(outcomes, names)
    wrong = []
    for name, is_late in names:
        _, edit, warning, refusal = (AFTER if is_late else BEFORE)[name]
        result, said = first[name, is_late]
        if refusal:
            ok = all(
                isinstance(one[name, is_late][0], str) and refusal in one[name, is_late][0] for one in (first, second)
            )
            wrong += [] if ok else [(name, is_late, str(result)[:300])]
            continue
        if isinstance(result, str):
            wrong.append((name, is_late, result))
            continue
        losses, weights, _ = trained(None, edit, is_late=is_late)
        distance = max(worst(result[1], weights), *(abs(a - b) for a, b in zip(result[0], losses, strict=True)))
        if distance > 1e-9 or not (any(warning in text for text in said) if warning else not said):
            wrong.append((name, is_late, distance, said))
    drawn = {result[2] for result, _ in first.values() if not isinstance(result, str)}
    assert len(drawn) == 1  # a trial takes no numbers from the program
    assert not wrong, "\n".join(map(str, wrong))


def test_stock_families_bring_nothing() -> None:
    """No rehearsal costs a stock model time: its classes, and how they are put together, are the library's."""
    for family in FAMILIES:
        model = build(family)
        layers = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
        assert not [(family, name) for stack in layers for layer in stack for name in Brought().inside(layer)]


def test_what_is_brought_is_told_by_its_code() -> None:
    """Not by names, which a class or a wrapped function can take from the one that it replaces."""
    layer = build("llama").model.layers[0]
    own = functools.wraps(LlamaMLP.forward)(NormedInside.forward)
    layer.mlp.forward = types.MethodType(own, layer.mlp)
    assert Brought().inside(layer) == ["mlp"]
    del layer.mlp.forward
    named = type("LlamaMLP", (LlamaMLP,), {"forward": own, "__module__": LlamaMLP.__module__})
    layer.mlp.__class__ = named
    del layer.mlp.act_fn
    layer.mlp.act_fn = functools.partial(torch.softmax, dim=-1)
    assert Brought().inside(layer) == ["mlp"]
    layer.mlp.__class__ = LlamaMLP
    assert Brought().inside(layer) == ["mlp"]
    del layer.mlp.act_fn
    layer.mlp.act_fn = nn.SiLU()
    layer.mlp.__class__ = type("Bound", (LlamaMLP,), {"forward": functools.partialmethod(NormedInside.forward)})
    assert Brought().inside(layer) == ["mlp"]
    layer.mlp.__class__ = LlamaMLP
    assert Brought().inside(layer) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", lambda q, k, *_: (q, k))
        assert Brought().inside(layer) == ["self_attn"]
