"""Check, before anything is changed, that a method computes what a decoder's own attention functions compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.context.attend import AttentionCall, is_flex
from meshwright.context.attention import stock_attention
from meshwright.context.flash import functions_for_blocks, takes_sinks
from meshwright.context.key_exchange import RingKeys
from meshwright.context.masks import ContextMask
from meshwright.context.record import ContextRecord
from meshwright.context.recorded_pass import AttentionSite
from meshwright.context.ring import RingCall, ring_attention
from meshwright.errors import PlanError
from meshwright.mesh.axes import Axis
from meshwright.parallel.batch.flash_rows import flash_function, is_flash
from meshwright.parallel.sequence_parts import TokenRun
from meshwright.plan.config import ParallelPlan
from meshwright.plan.parts import can_exchange, group_sizes

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_DELEGATED = ("sdpa", "eager")
_KNOWN = {"scaling", "dropout", "softcap", "s_aux", "sliding_window"}  # options for the ring or for masks
_LENGTH = 6
# The stock functions take the softmax in float32, and sinks in some families too: 1e-6 of a value of about 1.
_TOLERANCE = 1e-4


def check_method(record: ContextRecord, plan: ParallelPlan) -> None:
    """Check the attentions of a decoder against a plan.

    Args:
        record: what the decoder's attentions are given.
        plan: the plan.

    Raises:
        PlanError: if the plan's method cannot run an attention. The message names a method that can.
    """
    exchange_size, ring_size = group_sizes(plan.context, plan.cp, plan.ulysses)
    for site in record.sites:
        if site.kind.is_across:  # every rank runs the model's own function on all keys
            continue
        name = type(site.module).__name__
        stock, implementation = stock_attention(site.module)
        heads, key_heads = site.heads // plan.tp, max(1, site.key_heads // plan.tp)
        if exchange_size > 1 and not can_exchange(heads, key_heads, exchange_size):
            raise PlanError(
                f"ParallelPlan.context={plan.context!r} gives each of {exchange_size} ranks its share of {heads} query "
                f"and {key_heads} key heads (those of one rank of tp={plan.tp}), which cannot be divided so. Use "
                "context='gather' or 'ring', or another cp"
            )
        if is_flash(stock):
            _check_package(site, name, implementation, plan)
        elif is_flex(stock):
            _check_flex(site, name, plan)
        elif implementation not in _DELEGATED:
            raise PlanError(
                f"{name} has attn_implementation={implementation!r}, which takes no mask of a block of queries; under "
                "ParallelPlan.cp > 1 load the model with attn_implementation='sdpa', 'flash_attention_2', "
                "'flex_attention' or 'eager'"
            )
        else:
            _try(site, name, plan, exchanges=exchange_size > 1, is_ring=ring_size > 1)


def _check_package(site: AttentionSite, name: str, implementation: str, plan: ParallelPlan) -> None:
    """Check an attention that a flash attention package computes."""
    options = site.options
    flash_function(implementation)
    if unknown := _unknown(options):
        raise PlanError(
            f"{name} gives its attention function {unknown[0]!r}, which flash attention packages leave out. Load the "
            "model with attn_implementation='sdpa' (or 'eager')"
        )
    if options.get("s_aux") is not None and not takes_sinks(implementation):
        raise PlanError(
            f"{name} has sinks, which the package of attn_implementation={implementation!r} leaves out without a word. "
            "Load the model with another package, or with attn_implementation='eager'"
        )
    if not options.get("is_causal", getattr(site.module, "is_causal", True)):
        raise PlanError(f"{name} is not causal. Under ParallelPlan.cp > 1 load it with attn_implementation='sdpa'")
    if plan.context != "ulysses":
        functions_for_blocks(implementation)
        if options.get("dropout"):
            raise PlanError(
                f"{name} drops attention probabilities (dropout={options['dropout']}), which the kernels for blocks of "
                f"ParallelPlan.context={plan.context!r} do not. Use context='ulysses', or set the config's "
                "attention_dropout to 0"
            )


def _check_flex(site: AttentionSite, name: str, plan: ParallelPlan) -> None:
    """Check an attention that FlexAttention computes, of which a ring merges no results of blocks."""
    if plan.context not in ("gather", "ulysses"):
        raise PlanError(
            f"{name} has attn_implementation='flex_attention', which "
            f"ParallelPlan.context={plan.context!r} does not run block by block and merge. Use context='gather' or "
            "'ulysses', or load the model with attn_implementation='sdpa', whose blocks run in flash kernels"
        )
    if unknown := _unknown(site.options):
        raise PlanError(
            f"{name} gives FlexAttention {unknown[0]!r}, which ParallelPlan.cp > 1 cannot cut into the parts of the "
            "ranks. Load the model with attn_implementation='sdpa' (or 'eager')"
        )


def _unknown(options: dict[str, Any]) -> list[str]:
    """Return the names of the tensors that neither the ring nor a mask knows."""
    return [name for name, value in options.items() if isinstance(value, torch.Size | Tensor) and name not in _KNOWN]


def _try(site: AttentionSite, name: str, plan: ParallelPlan, *, exchanges: bool, is_ring: bool) -> None:
    """Run the model's attention function on random values of a few tokens, and compare what a rank would compute.

    Where ranks exchange heads, a head must not depend on the other heads, or on the number of heads. A ring computes a
    formula of its own.
    """
    if not (exchanges or is_ring):
        return
    call, q, k, v = _example(site)
    if exchanges:
        groups = site.heads // site.key_heads
        own = call.run(q, k, v, _mask(call))[:, :, :groups]
        options: dict[str, Any] = {
            key: x[:groups] if isinstance(x, Tensor) and x.ndim == 1 else x for key, x in call.options.items()
        }
        options |= {key: x[..., :groups, :, :] for key, x in options.items() if key in site.kind.biases}
        try:
            one = call.run(q[:, :groups], k[:, :1], v[:, :1], _mask(call), **options)
            is_equal = torch.allclose(one, own, atol=_TOLERANCE, rtol=_TOLERANCE)
        except RuntimeError:
            is_equal = False
        if not is_equal:
            raise PlanError(
                f"{name} reads values of all heads in its attention function, and ParallelPlan.context="
                f"{plan.context!r} gives each rank some heads. Use context='gather'"
            )
    if is_ring:
        trained = [torch.randn(x.shape, dtype=q.dtype, device="cpu") for x in call.trained]
        whole = call.run_with(trained, q, k, v, _mask(call))
        given = call.options.get("s_aux")
        sinks = next((x for x, own in zip(trained, call.trained, strict=True) if own is given), None)
        ring = RingCall.of(call, RingKeys(Axis("cp"), ((TokenRun(0, _LENGTH),),)), width=q.shape[-1])
        found = ring_attention(ring, q, k, v, sinks)
        if _unknown(call.options) or not torch.allclose(found, whole, atol=_TOLERANCE, rtol=_TOLERANCE):
            raise PlanError(
                f"{name} computes another attention than softmax(scale q k) v with a soft cap or sinks, which is what "
                f"ParallelPlan.context={plan.context!r} computes. Use context='gather' or 'ulysses'"
            )


def _example(site: AttentionSite) -> tuple[AttentionCall, Tensor, Tensor, Tensor]:
    """Return a call of the model's attention function on random values, of one row and a few tokens."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=dtype)

    options: dict[str, Any] = {
        name: random(*value) if isinstance(value, torch.Size) else value for name, value in site.options.items()
    }
    options |= {name: random(*options[name].shape[:-2], _LENGTH, _LENGTH) for name in site.kind.biases}
    options |= {name: 0.0 for name in options if "dropout" in name}
    options |= {name: site.module._parameters[own] for name, own in site.shared.items()}
    stock, implementation = stock_attention(site.module)
    call = AttentionCall(
        module=site.module,
        stock=stock,
        is_additive=implementation == "eager",
        mask=ContextMask.causal(rows=1, length=_LENGTH),
        options=options,
    )
    shapes = (site.heads, site.key_size), (site.key_heads, site.key_size), (site.key_heads, site.value_size)
    q, k, v = (random(1, heads, _LENGTH, size) for heads, size in shapes)
    return call, q, k, v


def _mask(call: AttentionCall) -> Tensor | BlockMask:
    run = TokenRun(0, _LENGTH)
    return call.block(run, run, torch.get_default_dtype())
