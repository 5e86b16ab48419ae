"""Check, before anything is changed, that a method computes what a decoder's own attention functions compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.context.attend import AttentionCall
from meshwright.context.attention import stock_attention
from meshwright.context.block_masks import is_flex
from meshwright.context.flash_package import PackageKernel, takes_sinks
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
from meshwright.plan.context_methods import can_exchange, group_sizes

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
        if is_flash(stock):
            _check_package(site, name, implementation, plan, exchange_size)
            continue
        if is_flex(stock):
            _check_flex(site, name, plan, exchange_size)
            continue
        if implementation not in _DELEGATED:
            raise PlanError(
                f"{name} has attn_implementation={implementation!r}, which takes no mask of a block of queries; under "
                "ParallelPlan.cp > 1 load the model with attn_implementation='sdpa', 'flash_attention_2', "
                "'flex_attention' or 'eager'"
            )
        if any("dropout" in key and value for key, value in site.options.items()) and ring_size > 1:
            raise PlanError(
                f"{name} drops attention probabilities (dropout={site.options.get('dropout')}), and "
                f"ParallelPlan.context={plan.context!r} computes them again in backward with other draws. Use "
                "context='gather' or 'ulysses', or set the config's attention_dropout to 0"
            )
        if exchange_size > 1:
            _check_heads(site, plan, exchange_size)
            _check_some_heads(site, name, plan)
        if ring_size > 1:
            _check_ring(site, name, plan)


def _check_package(site: AttentionSite, name: str, implementation: str, plan: ParallelPlan, exchange_size: int) -> None:
    """Check an attention that a flash attention package computes."""
    options = site.options
    flash_function(implementation)
    unknown = _unknown(options)
    if unknown:
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
    if exchange_size > 1:
        _check_heads(site, plan, exchange_size)
    if plan.context != "ulysses":
        PackageKernel(implementation).check()
        if options.get("dropout"):
            raise PlanError(
                f"{name} drops attention probabilities (dropout={options['dropout']}), which the kernels for blocks of "
                f"ParallelPlan.context={plan.context!r} do not. Use context='ulysses', or set the config's "
                "attention_dropout to 0"
            )


def _check_flex(site: AttentionSite, name: str, plan: ParallelPlan, exchange_size: int) -> None:
    """Check an attention that FlexAttention computes, of which a ring merges no results of blocks."""
    if plan.context not in ("gather", "ulysses"):
        raise PlanError(
            f"{name} has attn_implementation='flex_attention', which "
            f"ParallelPlan.context={plan.context!r} does not run block by block and merge. Use context='gather' or "
            "'ulysses', or load the model with attn_implementation='sdpa', whose blocks run in flash kernels"
        )
    unknown = _unknown(site.options)
    if unknown:
        raise PlanError(
            f"{name} gives FlexAttention {unknown[0]!r}, which ParallelPlan.cp > 1 cannot cut into the parts of the "
            "ranks. Load the model with attn_implementation='sdpa' (or 'eager')"
        )
    if exchange_size > 1:
        _check_heads(site, plan, exchange_size)


def _unknown(options: dict[str, Any]) -> list[str]:
    """Return the names of the tensors that neither the ring nor a mask knows."""
    return [name for name, value in options.items() if isinstance(value, Tensor) and name not in _KNOWN]


def _check_heads(site: AttentionSite, plan: ParallelPlan, ranks: int) -> None:
    heads, key_heads = site.heads // plan.tp, max(1, site.key_heads // plan.tp)
    if not can_exchange(heads, key_heads, ranks):
        raise PlanError(
            f"ParallelPlan.context={plan.context!r} gives each of {ranks} ranks its share of {heads} query and "
            f"{key_heads} key heads (those of one rank of tp={plan.tp}), which cannot be divided so. Use "
            "context='gather' or 'ring', or another cp"
        )


def _check_some_heads(site: AttentionSite, name: str, plan: ParallelPlan) -> None:
    """Check that the attention of a head does not depend on the other heads, or on the number of heads."""
    call, q, k, v = _example(site)
    groups = site.heads // site.key_heads
    whole = call.run(q, k, v, _mask(call))
    options: dict[str, Any] = {
        key: x[:groups] if isinstance(x, Tensor) and x.ndim == 1 else x for key, x in call.options.items()
    }
    options |= {key: x[..., :groups, :, :] for key, x in options.items() if key in site.kind.biases}
    try:
        one = call.run(q[:, :groups], k[:, :1], v[:, :1], _mask(call), **options)
        equal = torch.allclose(one, whole[:, :, :groups], atol=_TOLERANCE, rtol=_TOLERANCE)
    except RuntimeError:
        equal = False
    if not equal:
        raise PlanError(
            f"{name} reads values of all heads in its attention function, and ParallelPlan.context={plan.context!r} "
            "gives each rank some heads. Use context='gather'"
        )


def _check_ring(site: AttentionSite, name: str, plan: ParallelPlan) -> None:
    """Compare the ring's formula with the attention function of the model."""
    call, q, k, v = _example(site)
    trained = [torch.randn(x.shape, dtype=q.dtype, device="cpu") for x in call.trained]
    given = call.options.get("s_aux")
    sinks = next((x for x, own in zip(trained, call.trained, strict=True) if own is given), None)
    whole = call.run_with(trained, q, k, v, _mask(call))
    ring = RingCall.of(call, RingKeys(Axis("cp"), ((TokenRun(0, _LENGTH),),)), width=q.shape[-1])
    own = ring_attention(ring, q, k, v, sinks)
    if _unknown(call.options) or not torch.allclose(own, whole, atol=_TOLERANCE, rtol=_TOLERANCE):
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
        name: random(*value.shape) if isinstance(value, Tensor) else value for name, value in site.options.items()
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
