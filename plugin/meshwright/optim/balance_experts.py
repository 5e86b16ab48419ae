"""The tokens of each expert, and the update of the biases that correct the routing by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from meshwright.layout.tensor_layout import is_held
from meshwright.optim.runtime import device_of, runtime_of
from meshwright.parallel.experts.load_balancing import ExpertCounts
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright.roles.adapters import is_adapted


def expert_counts(model: nn.Module) -> dict[str, Tensor]:
    """Return how many tokens of the global batches were routed to each expert since the last call.

    The first call turns counting on and returns zeros, so make it before the first training pass. Every rank must make
    each call, and all ranks get the same counts, also those of the layers of other pipeline stages. Micro-batches and
    accumulated passes add up. Passes in eval mode, tokens that the attention mask leaves out, and the repetition of a
    layer in backward are not counted.

    Args:
        model: the model that ``to_distributed`` returned.

    Returns:
        For each module of experts, by its name in the model, the number of tokens of each expert: ``[experts]``, int64.

    Raises:
        ValueError: if the model is not distributed or has no experts, or if training passes ran before the first call.

    Example::

        mw.expert_counts(model)  # count from now on
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            counts = mw.expert_counts(model)
    """
    runtime = runtime_of(model)
    counts = runtime.features.find(ExpertCounts)
    if counts is None:
        raise ValueError(f"expert_counts(model): {type(model).__name__} has no experts")
    runtime.meet_all("expert counts")
    if not counts.is_on:
        counts.begin(device_of(model))
        if counts.is_late:
            raise ValueError(
                "expert_counts(model) turns counting on in its first call, and training passes have run before it, so "
                "that their tokens are unknown. Write mw.expert_counts(model) once before the first pass. The passes "
                "from now on are counted"
            )
    found = counts.take()
    return {name: found[module] for name, module in model.named_modules() if module in found}


def balance_experts(model: nn.Module, counts: Mapping[str, Tensor], *, rate: float = 1e-3) -> None:
    """Move the biases that correct the routing towards the experts with fewer tokens than the mean.

    This is the update of DeepSeek-V3, which needs no auxiliary loss: the rate is added to the bias of each expert with
    fewer tokens than the mean of its layer, and subtracted from that of each expert with more. The biases are the
    buffers, or the parameters that are not trained, with one number for each expert beside a module of experts, such as
    ``e_score_correction_bias``. Make the call once after each step of the optimizer, on every rank.

    Args:
        model: the model that ``to_distributed`` returned.
        counts: what :func:`expert_counts` returned after the step.
        rate: the size of the update.

    Raises:
        ValueError: if the model has no such bias, ZeRO stage 3 has cut it, or the counts are not those of its experts.

    Example::

        mw.expert_counts(model)  # count from now on
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mw.balance_experts(model, mw.expert_counts(model), rate=1e-3)
    """
    runtime = runtime_of(model)
    counter = runtime.features.find(ExpertCounts)
    counted = {} if counter is None else counter.sizes
    sizes = {name: counted.get(module) for name, module in model.named_modules()}
    for name, count in counts.items():
        if not isinstance(count, Tensor) or sizes.get(name) != count.numel():
            raise ValueError(
                f"balance_experts(model, counts): counts[{name!r}] is no tensor with the tokens of each expert of a "
                "module of this name. Pass what mw.expert_counts(model) has returned"
            )
    biases = [(name, bias, counts[experts]) for experts in counts for name, bias in _biases(model, experts, counts)]
    if not biases:
        raise ValueError(
            f"balance_experts(model): {type(model).__name__} has no bias that corrects the routing, such as "
            "e_score_correction_bias. Its load-balancing loss, if it has one, is turned on by "
            "model.config.output_router_logits = True"
        )
    for name, bias, _ in biases:
        if runtime.weights is not None and isinstance(bias, nn.Parameter):
            raise ValueError(
                f"balance_experts(model): {name} is a parameter, and under ParallelPlan.zero_stage=3 each "
                "rank holds a part of it; use zero_stage=2"
            )
    with torch.no_grad(), reading_shards():
        for _, bias, count in biases:
            if not isinstance(bias, nn.Parameter) or is_held(bias):
                bias.add_((count.double().mean() - count).sign().view_as(bias), alpha=rate)


def _biases(model: nn.Module, experts: str, counts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the biases beside a module of experts, with their names in the model."""
    parent = experts.rpartition(".")[0]
    while is_adapted(block := model.get_submodule(parent)):
        parent = parent.rpartition(".")[0]
    tensors = [*block.named_buffers(), *((n, p) for n, p in block.named_parameters() if not p.requires_grad)]
    size = len(counts[experts])
    for name, x in tensors:
        full = f"{parent}.{name}".lstrip(".")
        # The bias of a linear router, which may be frozen, is called bias alone.
        if not full.startswith(f"{experts}.") and name.endswith("_bias") and x.numel() == size:
            yield full, x
