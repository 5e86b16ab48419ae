"""The attention and mask functions that a decoder's modules call in place of transformers' own.

They are registered with transformers under one name. Only the modules of a distributed decoder have that name in their
config (a ``LocalConfig``), which also holds the ``ContextAttention`` that they belong to.

Under the methods "ulysses" and "hybrid", ranks of cp exchange tokens for heads, as in DeepSpeed's Ulysses. Each rank
then has all tokens of the ranks that exchange, for some heads.

Source: Jacobs et al., "DeepSpeed Ulysses", 2023.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshwright.context.attend import AttentionCall, StockAttention, as_autocast, attend_across, attend_in_blocks
from meshwright.context.flash import FlashCall, flash_attention, has_flash, in_kernel_dtype, over_keys, over_whole_rows
from meshwright.context.key_exchange import KeyExchange, RingKeys, WholeKeys
from meshwright.context.masks import ContextMask
from meshwright.context.ring import RingCall, ring_attention
from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import exchange_rows
from meshwright.parallel.sequence_parts import SequenceParts, TokenRun
from meshwright.plan.config import ParallelPlan
from meshwright.roles import Decoder
from meshwright.roles.blocks.attention import LocalConfig
from meshwright.roles.decoder import modules_beside

NAME = "meshwright_context"
_OWNER = "meshwright_context"  # the attribute of a LocalConfig that holds the ContextAttention
_KIND = "meshwright_attention_kind"  # that which holds the AttentionKind


@dataclass(frozen=True, kw_only=True)
class AttentionKind:
    """What an attention computes with, as a pass without values has shown.

    Args:
        is_across: whether its keys are not those of the sequence, but those of an encoder's result.
        biases: the names of the options that have a value for each pair of tokens, ``[..., S, S]``.
    """

    is_across: bool = False
    biases: frozenset[str] = frozenset()


class _ContextConfig(LocalConfig):
    """A config that names our attention, and of which the decoder's own config, inside of it, names it too.

    Models with towers make the masks of their decoder with that one: ``config.get_text_config()``.
    """

    @classmethod
    def of(cls, config: object, attention: object, kind: AttentionKind | None = None) -> _ContextConfig:
        local: dict[str, Any] = {"_attn_implementation": NAME, _OWNER: attention, _KIND: kind or AttentionKind()}
        return cls(config, **local)

    def __getattr__(self, name: str) -> object:
        found = super().__getattr__(name)
        is_of_decoder = hasattr(found, "_attn_implementation") and found is plain_config(self).get_text_config()
        return _ContextConfig.of(found, vars(self)[_OWNER]) if is_of_decoder else found

    def get_text_config(self, *args: object, **kwargs: object) -> object:
        config = plain_config(self)
        found = config.get_text_config(*args, **kwargs)
        return self if found is config else _ContextConfig.of(found, vars(self)[_OWNER])


@dataclass(frozen=True, kw_only=True)
class ContextAxes:
    """The ranks of cp, and their two halves in the method "hybrid".

    Args:
        cp: all ranks that share a sequence.
        inner: the ranks that exchange tokens for heads: all of cp under "ulysses", none under "gather" and "ring".
        outer: the ranks of a ring: all of cp under "ring".
    """

    cp: Axis
    inner: Axis
    outer: Axis


def context_axes(plan: ParallelPlan, cp: Axis) -> ContextAxes:
    """Return the axes of a plan's method; under "hybrid" every rank of the world must make the call."""
    alone = Axis("cp")
    if plan.context == "hybrid":
        assert plan.ulysses is not None
        groups, size = plan.dims.groups("cp"), plan.ulysses
        inner = [ranks[start : start + size] for ranks in groups for start in range(0, len(ranks), size)]
        outer = [ranks[start::size] for ranks in groups for start in range(size)]
        return ContextAxes(cp=cp, inner=Axis.over(inner, "cp"), outer=Axis.over(outer, "cp"))
    return ContextAxes(
        cp=cp, inner=cp if plan.context == "ulysses" else alone, outer=cp if plan.context == "ring" else alone
    )


class HeadExchange:
    """Exchanges tokens for heads over an axis.

    Args:
        axis: the ranks that exchange, neighbours on cp.
        first: the first of them on cp.
    """

    def __init__(self, axis: Axis, first: int):
        self.axis, self.first = axis, first

    def to_heads(self, parts: SequenceParts, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return some heads of all tokens that the ranks of the axis hold, in order: one all-to-all.

        Args:
            parts: how the ranks of cp share the sequence.
            q: this rank's queries, ``[B, heads, tokens, d]``.
            k: its keys. If there are fewer heads of keys than ranks, each head is sent to several ranks.
            v: its values.
        """
        size = self.axis.size
        sent = [torch.stack(x.chunk(size, 1)) for x in (q, self._enough(k), self._enough(v))]
        received = exchange_rows(torch.cat([x.flatten(1) for x in sent], 1), self.axis)
        found = received.split([x[0].numel() for x in sent], 1)
        stacked = (x.view(size, *like.shape[1:]) for x, like in zip(found, sent, strict=True))
        q, k, v = (parts.ordered(x, 2, self.first) for x in stacked)
        return q, k, v

    def to_tokens(self, parts: SequenceParts, output: Tensor) -> Tensor:
        """Return all heads of this rank's tokens, ``[B, tokens, heads, d]``: the inverse, by one all-to-all."""
        sent = parts.parted(output, 1, self.first, self.axis.size)
        received = exchange_rows(sent, self.axis)  # [ranks, B, tokens, some heads, d]
        return torch.cat(received.unbind(), 2)

    def _enough(self, x: Tensor) -> Tensor:
        """Repeat the heads of keys or values, so that each rank gets one."""
        heads, size = x.shape[1], self.axis.size
        return x if heads % size == 0 else x.repeat_interleave(size // heads, 1)


class ContextAttention:
    """Computes attention over the whole sequence on ranks that hold a part of it.

    Args:
        axes: the ranks.
        method: "gather", "ulysses", "ring" or "hybrid".
    """

    def __init__(self, axes: ContextAxes, method: str):
        self.axes, self.method = axes, method
        self.parts = SequenceParts(axes.cp)
        self._exchange = HeadExchange(axes.inner, axes.cp.rank // axes.inner.size * axes.inner.size)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextAttention:
        return self  # a copied model is on the same ranks

    def is_across(self, kind: AttentionKind, q: Tensor, k: Tensor) -> bool:
        """Return whether the keys of an attention are not those of the sequence."""
        return kind.is_across

    def attend_across(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of this rank's queries over other keys, which every rank has whole."""
        return attend_across(call, call.mask, q, k, v)

    def attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of this rank's queries over the sequence, ``[B, queries, heads, d]``."""
        length, parts = call.mask.length, call.mask.parts or self.parts
        if call.is_flash:
            q, k, v = in_kernel_dtype(call, q, k, v)
        dtype = q.dtype
        # Autocast leaves the dtypes of FlexAttention as they are. Others are cast before they are sent.
        cast = (lambda x: x) if call.is_flex else as_autocast
        k, v = cast(k), cast(v)
        if self.method == "gather":
            return self._over(call, parts.runs(length), WholeKeys(parts), q, k, v)
        if self.method == "ring":
            return self._over_ring(call, parts, q, k, v)
        rank = self.axes.inner.rank
        q, k, v = self._exchange.to_heads(parts, cast(q), k, v)
        q = q.to(dtype)  # the model's function may take the dtype of its mask and probabilities from q
        call = _with_own_heads(call, rank, self.axes.inner.size)
        if self.method == "hybrid":
            output = self._over_ring(call, parts, q, k, v)
        elif call.is_flash:
            output = over_whole_rows(call, q, k, v)
        elif call.mask.is_causal_alone and not (call.is_additive or call.is_flex or call.biases):
            whole = (TokenRun(0, q.shape[2]),)
            with call.at(call.score_blocks(q.device), whole, whole):
                output = call.run(q, k, v, None, is_causal=True)
        else:
            output = self._over(call, parts.runs(length, 0, self.axes.cp.size), WholeKeys(None), q, k, v)
        return self._exchange.to_tokens(parts, output)

    def _over(
        self, call: AttentionCall, runs: tuple[TokenRun, ...], keys: WholeKeys, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        if call.is_flash:
            return over_keys(call, runs, keys, q, k, v)
        flash = _flash_call(call, runs, keys, q, k, v)
        if flash is None:
            return attend_in_blocks(call, q, k, v, runs, keys)
        return flash_attention(flash, as_autocast(q), k, v)

    def _over_ring(self, call: AttentionCall, parts: SequenceParts, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outer, inner = self.axes.outer, self.axes.inner.size
        keys = RingKeys(outer, tuple(parts.runs(call.mask.length, r * inner, inner) for r in range(outer.size)))
        if call.is_flash:
            return over_keys(call, keys.runs_of[outer.rank], keys, q, k, v)
        flash = _flash_call(call, keys.runs_of[outer.rank], keys, q, k, v)
        if flash is None:
            return ring_attention(RingCall.of(call, keys, width=q.shape[-1]), q, k, v, call.options.get("s_aux"))
        return flash_attention(flash, as_autocast(q), k, v)


def _flash_call(
    call: AttentionCall, runs: tuple[TokenRun, ...], keys: KeyExchange, q: Tensor, k: Tensor, v: Tensor
) -> FlashCall | None:
    """Return the same call for flash kernels; None if they cannot compute it."""
    documents = call.documents_alone
    if documents is None or not has_flash(as_autocast(q), k, v):
        return None
    return FlashCall(keys=keys, runs=runs, documents=documents, scale=call.scale(q.shape[-1]))


def _with_own_heads(call: AttentionCall, rank: int, ranks: int) -> AttentionCall:
    """Return the call for the heads that a rank got in an exchange."""
    of_heads = {name: -3 for name in call.biases if call.options[name].shape[-3] > 1}
    of_heads |= {"s_aux": 0} if call.options.get("s_aux") is not None else {}
    own = {name: call.options[name].chunk(ranks, dim)[rank] for name, dim in of_heads.items()}
    return dataclasses.replace(call, options={**call.options, **own}, heads=(rank, ranks))


def stock_attention(module: nn.Module) -> tuple[StockAttention, str]:
    """Return the attention function that a module's config names, and that name."""
    config: object = module.config
    implementation = getattr(plain_config(config), "_attn_implementation", None) or "eager"
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    if implementation != "eager":
        return functions[implementation], implementation
    for kind in type(module).__mro__:
        if (own := getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)) is not None:
            return own, implementation
    raise PlanError(
        f"{type(module).__name__} has no attention function that context parallelism could call; use ParallelPlan(cp=1)"
    )


def plain_config(config: object) -> Any:
    """Return the config below those with local values that name our attention."""
    while isinstance(config, LocalConfig) and _OWNER in vars(config):
        config = vars(config)["_config"]
    return config


def attach_attention(
    decoder: Decoder, attention: object, kinds: Mapping[nn.Module, AttentionKind] | None = None
) -> None:
    """Make the modules of a decoder call ``attention`` in place of their attention function; undone by detaching.

    Args:
        decoder: the decoder. Its own config stays, since programs read and save it. What is beside it, such as a tower,
            runs whole on each rank.
        attention: a ContextAttention, or a recorder with its methods.
        kinds: for each attention, what it computes with; None for a recorder.
    """
    _register()
    kinds = kinds or {}
    layers = set(decoder.layers)
    facts = decoder.facts
    beside = modules_beside(facts, layers)
    others = {decoder.model, *(m for m in beside if layers.isdisjoint(facts.inside(m)))}
    for module in facts.names:
        config = vars(module).get("config")
        if module not in others and hasattr(config, "_attn_implementation"):
            own = _ContextConfig.of(plain_config(config), attention, kinds.get(module))
            module.config = own  # type: ignore[assignment]


def detach_attention(facts: Facts) -> None:
    """Give the modules of a decoder their own configs back."""
    for module in facts.names:
        if isinstance(vars(module).get("config"), LocalConfig):
            module.config = plain_config(module.config)


def _register() -> None:
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:
        raise PlanError(
            "ParallelPlan.cp > 1 works through transformers' attention interface, and this model is not one of "
            "transformers'; use cp=1"
        )
    transformers.AttentionInterface.register(NAME, _attention)
    sys.modules["transformers.masking_utils"].AttentionMaskInterface.register(NAME, _mask)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: object
) -> tuple[Tensor, None]:
    """Compute attention, with the arguments of transformers' attention functions."""
    owner = getattr(module.config, _OWNER)
    stock, implementation = stock_attention(module)
    kind: AttentionKind = getattr(module.config, _KIND)
    is_across = owner.is_across(kind, query, key)
    kept = {name: x for name, x in options.items() if is_across or name not in ("is_causal", "position_ids")}
    call = AttentionCall(
        module=module,
        stock=stock,
        is_additive=implementation == "eager",
        mask=cast(ContextMask, attention_mask),
        options=kept,
        biases=kind.biases,
        config=plain_config(module.config),
    )
    if is_across:
        return owner.attend_across(call, query, key, value), None
    if not isinstance(attention_mask, ContextMask):
        raise PlanError(
            f"{type(module).__name__} got a mask that transformers' mask functions did not make "
            f"({type(attention_mask).__name__}), so it cannot be cut for ParallelPlan.cp > 1. Pass attention_mask "
            "[rows, tokens], or position_ids that begin anew for each document, if the program has made the mask. If "
            "the model makes it, as for images whose tokens see each other, use cp=1"
        )
    if attention_mask.keys != attention_mask.length:
        raise PlanError(
            f"{type(module).__name__} got a mask of {attention_mask.length} queries and {attention_mask.keys} keys. "
            "Under ParallelPlan.cp > 1 an attention takes the keys of all tokens of the row, or those of an encoder. "
            "If the program passes past_key_values, leave them out; otherwise use cp=1"
        )
    return owner.attend(call, query, key, value), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | ContextMask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: object = None,
    **_: object,
) -> ContextMask:
    """Make a mask, with the arguments of transformers' mask functions."""
    if isinstance(attention_mask, ContextMask):  # made by the model around this one: transformers keeps it as it is
        return attention_mask
    chunk = getattr(config, "attention_chunk_size", None)
    return ContextMask(
        function=mask_function,
        padding=attention_mask,
        rows=batch_size,
        length=q_length,
        keys=kv_length,
        window=local_size,
        # A chunk of chunked attention is no window: its mask depends on where the chunk begins.
        is_plain=allow_is_causal_skip and attention_mask is None and chunk is None,
        averages_blind=plain_config(config)._attn_implementation == "eager",
        is_vectorized=not use_vmap,
        device=torch.device(device),
    )
