"""Attention of a rank's queries by the model's own function, a block at a time, over the whole sequence or over an
encoder's keys.

Only this rank's queries, keys and values are kept for backward, which runs the blocks again. So neither a mask nor the
keys of the other ranks stay in memory.

FlexAttention takes masks of its own, and skips blocks of queries and keys between which no pair is seen.

Each query needs all keys and no other query, so a rank computes the attention of its own queries by the model's own
function, and sends nothing. The keys get a part of their gradient on each rank, and so do the weights behind them. The
parts are added up where the gradients of weights are averaged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshwright.autograd import TensorFunction
from meshwright.context.key_exchange import WholeKeys
from meshwright.context.masks import ContextMask, Documents, query_blocks
from meshwright.errors import PlanError
from meshwright.parallel.batch.flash_rows import is_flash
from meshwright.parallel.draws.passes import score_blocks
from meshwright.parallel.draws.score_blocks import ScoreBlock, ScoreBlocks
from meshwright.parallel.sequence_parts import TokenRun
from meshwright.temporarily import temporarily

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


GROUPS = "num_key_value_groups"  # what a module has another value of while its attention function runs

# An attention function of transformers: (module, query, key, value, mask, **options) -> (output [B, S, heads, d], ...).
StockAttention = Callable[..., tuple[Tensor, Any]]


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One call of a model's attention function, with everything but queries, keys and values.

    Args:
        module: the attention module, from which the function may read options.
        stock: the function that the model had.
        is_additive: whether the function adds its mask to the scores; otherwise the mask is boolean.
        mask: the mask.
        options: the keyword arguments of the call.
        biases: the names of those that have a value for each pair of tokens, ``[..., S, S]``, on every rank.
        config: the module's config, without our attention.
        heads: which of the ranks that share the heads of a rank of tp has those of the call, and the number of these
            ranks.
    """

    module: nn.Module
    stock: StockAttention
    is_additive: bool
    mask: ContextMask
    options: dict[str, Any]
    biases: frozenset[str] = frozenset()
    config: Any = None
    heads: tuple[int, int] = (0, 1)

    def block(self, queries: TokenRun, keys: TokenRun, dtype: torch.dtype) -> Tensor | BlockMask:
        """Return the mask of a block in the form that the function takes."""
        if self.is_flex:
            return block_mask(self.mask, queries, keys)
        mask = self.mask.block(queries, keys)
        if not self.is_additive:
            return mask
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)

    @property
    def trained(self) -> tuple[Tensor, ...]:
        """The tensors with a gradient that the function reads besides queries, keys and values, such as sinks."""
        found = [x for x in (*self.options.values(), *self.module._parameters.values()) if isinstance(x, Tensor)]
        return tuple({id(x): x for x in found if x.requires_grad}.values())

    def scale(self, width: int) -> float:
        """Return the factor of the scores of heads with ``width`` channels."""
        given: float | None = self.options.get("scaling")
        return width**-0.5 if given is None else given

    def score_blocks(self, device: torch.device) -> ScoreBlocks | None:
        """Return what draws for the blocks of this call; None if none drops probabilities or each draws for itself."""
        return score_blocks(device) if self.dropout else None

    def at(
        self, blocks: ScoreBlocks | None, queries: tuple[TokenRun, ...], keys: tuple[TokenRun, ...]
    ) -> contextlib.AbstractContextManager[None]:
        """Compute some queries and keys inside the context, which draw their part of what one device draws."""
        return contextlib.nullcontext() if blocks is None else blocks.at(ScoreBlock(queries, keys, self.heads))

    @property
    def dropout(self) -> float:
        """The part of the probabilities that this call drops."""
        return float(self.options.get("dropout") or 0)

    @property
    def implementation(self) -> str:
        """The name of the function in the module's config."""
        return str(self.config._attn_implementation)

    @property
    def is_flash(self) -> bool:
        """Whether the function calls a flash attention package, which takes documents and windows, and no mask."""
        return is_flash(self.stock)

    @property
    def is_flex(self) -> bool:
        """Whether the function calls FlexAttention, which takes masks of its own."""
        return is_flex(self.stock)

    @property
    def documents_alone(self) -> Documents | None:
        """Where documents start, if the call is torch's attention, causal within documents and nothing else."""
        stock = sys.modules["transformers.integrations.sdpa_attention"].sdpa_attention_forward
        has_tensors = any(isinstance(x, Tensor) for x in self.options.values())
        if self.stock is not stock or self.dropout or has_tensors:
            return None
        return self.mask.documents

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | BlockMask | None,
        *,
        block: tuple[TokenRun, TokenRun] | None = None,
        **options: object,
    ) -> Tensor:
        """Run the function with some options replaced, and return ``[B, S, heads, d]``.

        Args:
            q: the queries.
            k: the keys.
            v: the values.
            mask: the mask in the form that the function takes.
            block: the queries and keys in the sequence; None if biases are for these already, or there are none.
            options: the options that are replaced.
        """
        options = {**self.options, **options}
        if block is not None:
            options |= {name: self._bias_of(name, options[name], *block) for name in self.biases}
        with _key_heads(self.module, q.shape[1], k.shape[1]), self._own_config():
            return self.stock(self.module, q, k, v, mask, **options)[0]

    def _own_config(self) -> contextlib.AbstractContextManager[None]:
        """Let the function see the config that names it, by which transformers finds a flash attention package."""
        return temporarily(self.module, config=self.config) if self.is_flash else contextlib.nullcontext()

    def _bias_of(self, name: str, bias: Any, queries: TokenRun, keys: TokenRun) -> Tensor:
        """Return the values of a bias for a block; queries beyond the end of the sequence act as the last one."""
        if bias.shape[-2:] != (self.mask.length, self.mask.length):
            raise PlanError(
                f"{type(self.module).__name__} gives its attention function {name!r} of shape {tuple(bias.shape)} for "
                f"a row of {self.mask.length} tokens, so it is not known which tokens it is for. Use ParallelPlan(cp=1)"
            )
        rows = torch.arange(queries.start, queries.stop, device=bias.device).clamp(max=self.mask.length - 1)
        part: Tensor = bias[..., keys.start : keys.stop].index_select(-2, rows)
        return part

    def run_with(
        self,
        trained: list[Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | BlockMask | None,
        block: tuple[TokenRun, TokenRun] | None = None,
    ) -> Tensor:
        """Run the function with other tensors in place of :attr:`trained`, in its order."""
        stand_ins = dict(zip(map(id, self.trained), trained, strict=True))
        options = {name: stand_ins.get(id(x), x) for name, x in self.options.items()}
        parameters: dict[str, Any] = self.module._parameters
        before = dict(parameters)
        parameters.update({name: stand_ins.get(id(p), p) for name, p in before.items()})
        try:
            return self.run(q, k, v, mask, block=block, **options)
        finally:
            parameters.update(before)


def as_autocast(x: Tensor) -> Tensor:
    """Cast queries, keys or values as autocast casts them in attention, since rotary embeddings make them float32."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def attend_in_blocks(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, runs: tuple[TokenRun, ...], keys: WholeKeys
) -> Tensor:
    """Return the attention of this rank's queries, ``[B, queries, heads, d]``.

    Args:
        call: the attention.
        q: the queries, ``[B, heads, queries, d]``.
        k: the keys, ``[B, key heads, keys, d]``.
        v: the values, in the same places.
        runs: where the queries lie in the sequence.
        keys: how the keys and values of the whole sequence are made of these.
    """
    result: Tensor = _AttendInBlocks.apply(call, runs, keys, q, k, v, *call.trained)
    return result


class _AttendInBlocks(TensorFunction):
    @staticmethod
    def forward(
        ctx: Any,
        call: AttentionCall,
        runs: tuple[TokenRun, ...],
        keys: WholeKeys,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *trained: Tensor,
    ) -> Tensor:
        ctx.call, ctx.runs, ctx.keys = call, runs, keys
        ctx.save_for_backward(q, k, v, *trained)
        ctx.replay = ReplayedDraws(q.device) if call.dropout else None
        ctx.blocks = call.score_blocks(q.device)
        ctx.autocast = _autocast_of(q.device)
        k, v = keys.gathered(k, v)
        outputs = []
        for place, run in query_blocks(runs):
            low, high = call.mask.visible(run)
            block = run, TokenRun(low, high - low)
            mask = call.block(*block, q.dtype)
            with call.at(ctx.blocks, (run,), block[1:]):
                outputs.append(call.run(q[:, :, place], k[:, :, low:high], v[:, :, low:high], mask, block=block))
        if ctx.blocks is not None:
            ctx.blocks.end()
        return torch.cat(outputs, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        call, (q, k, v, *trained) = ctx.call, ctx.saved_tensors
        sums = ctx.keys.gradients(k, v, torch.promote_types(q.dtype, torch.float32))
        d_k, d_v = sums.of_block()
        k, v = ctx.keys.gathered(k, v)
        d_q = torch.empty_like(q)
        d_trained: list[Tensor | None] = [None] * len(trained)
        with ctx.replay or contextlib.nullcontext(), ctx.autocast(), torch.enable_grad():
            for place, run in query_blocks(ctx.runs):
                low, high = call.mask.visible(run)
                block = run, TokenRun(low, high - low)
                mask = call.block(*block, q.dtype)
                inputs = [x.detach().requires_grad_() for x in (q[:, :, place], k[:, :, low:high], v[:, :, low:high])]
                others = [x.detach().as_subclass(Tensor).requires_grad_() for x in trained]
                with call.at(ctx.blocks, (run,), block[1:]):
                    output = call.run_with(others, *inputs, mask, block)
                found = torch.autograd.grad(output, [*inputs, *others], grad[:, place], allow_unused=True)
                d_q[:, :, place] = found[0]
                d_k[:, :, low:high] += found[1]
                d_v[:, :, low:high] += found[2]
                for i, new in enumerate(found[3:]):
                    if new is not None:
                        before = d_trained[i]
                        d_trained[i] = new if before is None else before + new
        if ctx.blocks is not None:
            ctx.blocks.end()
        d_k, d_v = sums.own()
        return None, None, None, d_q, d_k.to(k.dtype), d_v.to(v.dtype), *d_trained


def _key_heads(module: nn.Module, heads: int, key_heads: int) -> contextlib.AbstractContextManager[None]:
    """Let a module's attention function see the number of queries for each key that it is given."""
    own = vars(module).get(GROUPS)
    is_right = own is None or own * key_heads == heads
    return contextlib.nullcontext() if is_right else temporarily(module, **{GROUPS: heads // key_heads})


class ReplayedDraws:
    """Draws in backward what was drawn in forward, so that both drop the same probabilities."""

    def __init__(self, device: torch.device):
        self.device = device
        self.state = self._get()

    def _get(self) -> tuple[Tensor, Tensor | None]:
        on_device = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return torch.get_rng_state(), on_device

    def _set(self, state: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self.device)

    def __enter__(self) -> None:
        self.outside = self._get()
        self._set(self.state)

    def __exit__(self, *_: object) -> None:
        self._set(self.outside)


def _autocast_of(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled)


def is_flex(stock: Callable[..., object]) -> bool:
    """Return whether an attention function is the one by which transformers calls FlexAttention."""
    module = sys.modules.get("transformers.integrations.flex_attention")
    return module is not None and stock is module.flex_attention_forward


def block_mask(mask: ContextMask, queries: TokenRun, keys: TokenRun) -> BlockMask:
    """Return the mask of some queries and keys, which FlexAttention counts from 0.

    Queries beyond the end of the sequence act as the last one, and keys beyond it are not seen. It is made once for all
    layers of a forward pass.
    """
    if (queries, keys) not in mask.of_flex:
        mask.of_flex[queries, keys] = _made(mask, queries, keys)
    return mask.of_flex[queries, keys]


def _made(mask: ContextMask, queries: TokenRun, keys: TokenRun) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask  # imports torch's compiler

    function, padding, last = mask.function, mask.padding, mask.length - 1  # which keep the mask itself out of a cycle

    def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = key + keys.start
        inside = place.clamp(max=last)
        seen: Tensor = function(row, head, (query + queries.start).clamp(max=last), inside)
        if padding is not None:
            seen = seen & padding[row, inside].bool()
        return seen & (place <= last)

    return create_block_mask(is_seen, mask.rows, None, queries.size, keys.size, device=str(mask.device))


def attend_across(call: AttentionCall, given: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of this rank's queries over keys that are not those of the sequence.

    Args:
        call: the attention.
        given: the mask that the attention was called with: one of transformers' functions, a tensor whose queries the
            layer's own tokens are, or None.
        q: this rank's queries, ``[B, heads, queries, d]``.
        k: all keys, ``[B, key heads, keys, d]``.
        v: their values.
    """
    mask = _own_mask(call, given, q) if isinstance(given, ContextMask) else given
    return call.run(q, k, v, mask)  # type: ignore[arg-type]


def _own_mask(call: AttentionCall, mask: ContextMask, q: Tensor) -> object:
    if not mask.is_for_all_queries:
        raise PlanError(
            f"{type(call.module).__name__} attends to the result of an encoder under a mask that differs between the "
            "tokens of a row, so a rank with some of the tokens cannot cut it. Use ParallelPlan(cp=1)"
        )
    padding = mask.padding
    if padding is None or call.is_flash:
        return padding
    if call.is_flex:
        of_keys = dataclasses.replace(mask, length=mask.keys, of_flex={})
        return block_mask(of_keys, TokenRun(0, q.shape[2]), TokenRun(0, mask.keys))
    seen = padding[:, None, None].bool()
    if not call.is_additive:
        return seen
    return torch.zeros(seen.shape, dtype=q.dtype, device=seen.device).masked_fill(~seen, torch.finfo(q.dtype).min)
