"""Read the sizes of a model with experts, mixers or towers from its modules and from passes without values.

The names of an expert's width, of the layers with experts and of the MLP that every token takes differ from config to
config. The modules show them: ``roles.blocks.experts`` says which of them are experts. For the memory of mixers and
towers there are no formulas, so ``measured_shape`` measures it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.errors import PlanError
from meshwright.parallel.fake_passes.fake_pass import run_without_values
from meshwright.parallel.fake_passes.measured_shape import measured_layers, measured_tower, needs_measuring
from meshwright.roles.blocks.experts import has_experts, is_experts
from meshwright.roles.decoder import find_decoder, load_of_towers
from meshwright.roles.family_hints import layers_with_features
from meshwright.roles.linear_kernel import weight_of
from meshwright_plan.job.layer_shape import ExpertShape, LayerShape, traits_of
from meshwright_plan.job.shapes import ModelShape

_ROWS, _LENGTH = 2, 11
_MEASURED = 256  # tokens of the shorter of two rows whose memory is measured
_STATE = 64  # tokens at once in the chunks of mixers without attention, such as state spaces and linear attention
_Heads = tuple[int, int, int, int]  # query heads, key heads, channels of a query, channels of a value


def on_meta(model: nn.Module) -> nn.Module:
    """Return a model of the same config without memory, whose weights are whole however the model's own are cut."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        fresh: nn.Module = type(model)(model.config)
    return fresh


def routed_shape(model: nn.Module, *, name: str) -> ModelShape:
    """Return the sizes of a model with experts, mixers or towers.

    Args:
        model: a decoder whose weights are whole, with or without memory.
        name: name of the model in tables.

    Raises:
        PlanError: the model's structure is not a decoder's, or it cannot be run without values.
    """
    decoder = find_decoder(model)
    pass_ = _RoutedPass(decoder.layers)
    with pass_:
        run_without_values(model, rows=_ROWS, length=_LENGTH, instead="a plan: plan='dp2'")
    fields: dict[str, Any] = {}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        fields = {**config.to_dict(), "_attn_implementation": getattr(config, "_attn_implementation", None)}
    words = weight_of(decoder.embedding)
    vocab, hidden = words.shape
    layers = [_layer(layer, pass_, hidden) for layer in decoder.layers]
    traits = traits_of(str(fields.get("model_type", "")), fields)
    if not all(layer in pass_.heads for layer in decoder.layers):
        traits = dataclasses.replace(traits, context=())  # tokens meet outside of attention
    layers = [dataclasses.replace(layer, traits=traits) for layer in layers]
    windows, towers = _windows(fields, len(layers)), None
    if needs_measuring(decoder):
        towers, images = measured_tower(model, decoder)
        length = max(_MEASURED, *(_MEASURED + (w or 0) for w in windows), 2 * images.tokens if images else 0)
        if not any(layer.experts for layer in layers):
            found = measured_layers(model, decoder, images, length)
            layers = [
                dataclasses.replace(layer, measured=memory, held=held)
                for layer, (memory, held) in zip(layers, found, strict=True)
            ]
    runs = _runs(layers, windows)
    tied = decoder.head is not None and weight_of(decoder.head) is words
    shape = ModelShape(
        name=name, runs=runs, vocab=vocab, tied=tied, towers=towers, tower_layers=load_of_towers(decoder),
        least_on_first=max(1, layers_with_features(config)),
    )  # fmt: skip
    rest = sum(p.numel() for p in model.parameters()) - shape.parameters
    return dataclasses.replace(shape, positions=max(0, rest) // hidden)


class _RoutedPass(TorchFunctionMode):
    """Records in a pass without values how many experts each token takes, and the heads of each layer's attention."""

    def __init__(self, layers: tuple[nn.Module, ...]):
        super().__init__()
        self.heads: dict[nn.Module, _Heads] = {}
        self.attentions: set[nn.Module] = set()
        self.chosen: dict[nn.Module, int] = {}
        self._owners = {child: layer for layer in layers for child in layer.children()}
        self._running: nn.Module | None = None
        self._keys = (0, 0, 0)

    def __enter__(self) -> _RoutedPass:
        experts = {m for layer in self._owners.values() for m in layer.modules() if is_experts(m)}
        hooked = [(m, self._enter) for m in self._owners] + [(m, self._routed) for m in experts]
        self._handles = [m.register_forward_pre_hook(hook, with_kwargs=True) for m, hook in hooked]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _enter(self, child: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._running = child

    def _routed(self, experts: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        index = next(x for x in given if not x.is_floating_point())
        self.chosen[experts] = index.shape[-1]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {**dict(zip(("query", "key", "value"), args, strict=False)), **(kwargs or {})}
        if func is F.scaled_dot_product_attention:
            query, key, value = (given[name] for name in ("query", "key", "value"))
            self._record((query.shape[1], key.shape[1], query.shape[-1], value.shape[-1]))
        elif func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and all(x.ndim == 4 for x in args[:2]):
            a, b = args[:2]  # the products of eager attention: first the scores, then the values' mean
            if b.shape[-1] == a.shape[-2] == _LENGTH:
                self._keys = a.shape[1], b.shape[1], a.shape[-1]
            elif a.shape[-2:] == (_LENGTH, _LENGTH) and self._keys[0]:
                self._record((*self._keys, b.shape[-1]))
        return func(*args, **(kwargs or {}))

    def _record(self, heads: _Heads) -> None:
        if self._running is not None:
            self.attentions.add(self._running)
            self.heads.setdefault(self._owners[self._running], heads)


def _layer(layer: nn.Module, pass_: _RoutedPass, hidden: int) -> LayerShape:
    """Return the sizes of one layer, without window and traits."""
    found = [module for module in layer.modules() if is_experts(module)]
    inside = {id(p) for module in found for p in module.parameters()}
    matrices = {
        child: [p for p in child.parameters() if p.ndim > 1 and id(p) not in inside] for child in layer.children()
    }
    mixers = [child for child in matrices if child in pass_.attentions]
    if not mixers:  # a state space, linear attention, or a layer of experts alone
        mixers = [child for child in matrices if matrices[child] and not has_experts(child)][:1]
    mixed = sum(p.numel() for child in mixers for p in matrices[child])
    others = [p for child in matrices if child not in mixers for p in matrices[child]]
    gated = bool(found[0].has_gate) if found else True
    counts = {next(module.parameters()).shape[0] for module in found}
    routers = [p for p in others if p.shape[0] in counts | {1}]
    beside = sum(p.numel() for p in others) - sum(p.numel() for p in routers)
    ffn, left = divmod(beside, hidden * (3 if gated else 2))
    experts = None
    if found:
        experts = _experts(found[0], pass_.chosen[found[0]], hidden, sum(p.numel() for p in routers) + left)
    else:
        mixed += left
    sizes = pass_.heads.get(layer)
    if sizes is None:
        heads, key_heads, head_dim = 1, 1, max(1, mixed // (4 * hidden))
    else:
        heads, head_dim = sizes[0], (sizes[2] + sizes[3]) // 2
        key_heads = _key_heads(mixed, hidden, heads, head_dim) or sizes[1]
    small = sum(p.numel() for p in layer.parameters() if p.ndim < 2 and id(p) not in inside)
    shape = LayerShape(
        count=1, hidden=hidden, heads=heads, kv_heads=key_heads, head_dim=head_dim, ffn=ffn, gated=gated, norms=small,
        experts=experts, window=None if sizes else _STATE, windowed=0.0 if sizes else 1.0,
    )  # fmt: skip
    if shape.attention_parameters != mixed:
        shape = dataclasses.replace(shape, projections=mixed)
    return dataclasses.replace(shape, linears=_linears(layer, mixers, routers, inside))


def _linears(
    layer: nn.Module, mixers: list[nn.Module], routers: list[nn.Parameter], inside: set[int]
) -> tuple[tuple[int, int, bool, bool], ...]:
    """Return the linear projections of a layer that adapters are put on: not those of experts, nor routers."""
    ruled_out = inside | {id(p) for p in routers}
    found = []
    for child in layer.children():
        own = [m for m in child.modules() if isinstance(m, nn.Linear) and id(m.weight) not in ruled_out]
        # The last projection of a block leads back to the hidden states, so tp cuts its input.
        found += [(m.in_features, m.out_features, m is own[-1], child not in mixers) for m in own]
    return tuple(found)


def _key_heads(matrices: int, hidden: int, heads: int, head_dim: int) -> int | None:
    """Return the key heads for which q, k, v and o have so many elements: attention may be given repeated keys."""
    found, rest = divmod(matrices - 2 * hidden * heads * head_dim, 2 * hidden * head_dim)
    return found if not rest and 0 < found <= heads and heads % found == 0 else None


def _experts(module: nn.Module, chosen: int, hidden: int, router: int) -> ExpertShape:
    weights = list(module.parameters())
    count = weights[0].shape[0]
    gated = bool(module.has_gate)
    matrices = sum(p.numel() for p in weights if p.ndim > 2)
    width, rest = divmod(matrices, count * hidden * (3 if gated else 2))
    if rest:
        raise PlanError(f"the weights of {type(module).__name__} are not those of {count} experts of one width")
    biases = sum(p.numel() for p in weights if p.ndim < 3) // count
    return ExpertShape(
        count=count, chosen=chosen, hidden=hidden, width=width, gated=gated, biases=biases, router=router
    )


def _windows(fields: Mapping[str, Any], layers: int) -> list[int | None]:
    """Return the window of each layer's attention."""
    window, kinds = fields.get("sliding_window"), fields.get("layer_types")
    if not isinstance(window, int) or not fields.get("use_sliding_window", True):
        return [None] * layers
    return [window if kinds is None or "sliding" in kinds[index] else None for index in range(layers)]


def _runs(layers: list[LayerShape], windows: list[int | None]) -> tuple[LayerShape, ...]:
    """Return the layers as runs of equal sizes, each with the share of its layers that have a window."""

    def each() -> Iterator[LayerShape]:
        pairs = zip(layers, windows, strict=True)
        for shape, members in itertools.groupby(pairs, key=lambda pair: pair[0]):
            own = [window for _, window in members]
            found = next((window for window in own if window is not None), None)
            if shape.window is None and found is not None:
                share = sum(window is not None for window in own) / len(own)
                shape = dataclasses.replace(shape, window=found, windowed=share)
            yield dataclasses.replace(shape, count=len(own))

    return tuple(each())
