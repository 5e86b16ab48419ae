"""A decision about one model, which follows from its facts, a plan and the options, and its build."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.context.record import ContextRecord
from meshwright.facts import Facts
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.optim.runtime import Runtime
from meshwright.parallel.forward.coupled_rows import has_stock_loss
from meshwright.parallel.losses.causal_lm import calls_cross_entropy
from meshwright.parallel.losses.head_losses import LossKind
from meshwright.parallel.tensor_parallel.structure import DecoderStructure
from meshwright.pipeline.cut import Cut, with_stages
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright.roles import Decoder
from meshwright.roles.adapters import decoder_of, without_wrappers
from meshwright.roles.blocks.experts import adapter_layouts, expert_layouts
from meshwright.roles.decoder import all_towers, modules_apart, modules_left_out


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a plan does to one model. It changes nothing, and needs no other rank.

    Args:
        facts: what the user's model shows, with adapters and other wrappers around its decoder.
        plan: the plan to carry out.
        config: the options of the call.
        loss: what the model's loss averages over; None if unknown.
        structure: how the plan cuts the decoder; None if the plan does not cut it.
        mixers: the modules of the layers with recurrences or convolutions over tokens, by name.
        cut: which layers and weights this rank's pipeline stages hold; None without a pipeline.
        context: what the layers and attentions of the decoder are given; None without context parallelism.
    """

    facts: Facts
    plan: ParallelPlan
    config: ToDistributedConfig
    loss: LossKind | None
    structure: Decoder | None
    mixers: Mapping[str, nn.Module] = field(default_factory=dict)
    cut: Cut | None = None
    context: ContextRecord | None = None

    def of_rank(self, rank: int) -> Decision:
        """Return the same for another rank of pp."""
        return self if self.cut is None else dataclasses.replace(self, cut=dataclasses.replace(self.cut, rank=rank))

    @property
    def model(self) -> Any:
        """The user's model."""
        return self.facts.model

    @property
    def of_decoder(self) -> Facts:
        """What the model inside of adapters and other wrappers shows."""
        return decoder_of(self.facts)

    @property
    def decoder(self) -> Any:
        """The model inside of adapters and other wrappers."""
        return self.of_decoder.model

    @property
    def owners(self) -> list[nn.Module]:
        """The model and its decoder, each once: with adapters, a program may call or save either."""
        return list(dict.fromkeys((self.model, self.decoder)))

    @property
    def layouts(self) -> dict[str, TensorLayout]:
        """The layout of each parameter of the decoder, by its name in the whole model; empty if all stay whole."""
        if not self.cuts_weights:
            return {}
        prefix, _ = without_wrappers(self.model)
        if self.tensor_structure is not None:
            layouts = self.tensor_structure.parameters
        else:
            layouts = {name: TensorLayout.whole(parameter) for name, parameter in self.of_decoder.parameters.items()}
        layouts = {**layouts, **expert_layouts(self.of_decoder, ep=self.plan.ep, etp=self.plan.etp)}
        layouts |= adapter_layouts(self.of_decoder, self.plan.ep)
        layouts = layouts if self.cut is None else with_stages(layouts, self.cut)
        return {prefix + name: layout for name, layout in layouts.items()}

    @property
    def cuts_weights(self) -> bool:
        """Whether a rank may hold a part of a weight, or none of it."""
        return bool(self.plan.weight_axes)

    @property
    def tensor_structure(self) -> DecoderStructure | None:
        """The structure, if the plan has tensor parallelism."""
        return self.structure if isinstance(self.structure, DecoderStructure) else None

    @property
    def towers(self) -> tuple[nn.Module, ...]:
        """The towers beside the decoder, for images or sound; the whole model if its decoder is not known."""
        return all_towers(self.of_decoder, self.structure)

    @property
    def beside(self) -> set[nn.Module]:
        """The modules that a forward pass may leave out, depending on its inputs; none without towers."""
        return modules_left_out(self.of_decoder, self.structure)

    @property
    def apart(self) -> set[nn.Module]:
        """The modules that a forward pass may run for some rows only, and so on some ranks only."""
        return modules_apart(self.of_decoder, self.structure)

    @property
    def may_couple_rows(self) -> bool:
        """Whether dp splits rows that a stock loss of unknown kind may compare with each other."""
        is_known = self.loss is not None and self.config.loss_averages_over is None
        is_cut = self.plan.pp > 1 or self.plan.cp > 1 or self.config.engine is not None
        return self.plan.dp > 1 and not is_known and not is_cut and has_stock_loss(self.decoder)

    @property
    def is_split(self) -> bool:
        """Whether a batch runs as several micro-batches."""
        return self.plan.has_micro_batches or self.plan.pp > 1

    @property
    def draws_as_one_device(self) -> bool:
        """Whether each rank draws the random numbers of the whole batch, and keeps those of its rows."""
        plan = self.plan
        is_known = plan.pp == plan.cp == plan.ep == plan.etp == 1 and self.config.engine is None
        is_cut = plan.dp * plan.tp > 1 or plan.has_micro_batches
        return self.config.draws == "device" and is_known and is_cut

    @property
    def head(self) -> Any:
        """The module that computes the logits; None if there is none."""
        if self.structure is not None:
            return self.structure.head
        find = getattr(self.decoder, "get_output_embeddings", None)
        return find() if callable(find) else None

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether each rank of tp has its own tokens between the blocks."""
        return self.tensor_structure is not None and self.tensor_structure.is_sequence_parallel

    @property
    def sharded_words(self) -> int:
        """The number of words in the full vocabulary if tp shards it, and otherwise 0."""
        return self.tensor_structure.vocab_size if self.tensor_structure else 0

    @property
    def is_causal_lm(self) -> bool:
        """Whether the loss is the causal-LM loss."""
        return self.loss is not None and self.loss.is_causal_lm

    @property
    def has_sharded_loss(self) -> bool:
        """Whether the loss takes logits that are sharded over the vocabulary."""
        return self.is_causal_lm and not self.config.gather_logits and self.tensor_structure is not None

    @property
    def has_head_loss(self) -> bool:
        """Whether training with labels needs no logits but for the loss, which can compute them in chunks."""
        # An engine gathers weights by hooks of its own. Under gpipe the last stage would hold the gradient of the
        # head's weight once for each micro-batch.
        is_single = self.cut is None or self.cut.schedule != "gpipe"
        # A loss that the forward itself computes is of the labels of all tokens, and a rank of cp has some of them.
        is_known = self.is_causal_lm or (self.context is None and calls_cross_entropy(self.decoder))
        return is_known and not self.config.gather_logits and self.config.engine is None and is_single


@dataclass(frozen=True, kw_only=True)
class Build(Decision):
    """What was decided about one model, and the objects that carry it out.

    Args:
        runtime: the state that the model will carry; it holds this rank's axes.
        device: the device of this rank's weights.
        optimizer: the optimizer over the model's parameters, if the call has one.
        wholes: for the modules that tp lets read the sizes of a rank's part: what they had read of the whole.
    """

    runtime: Runtime
    device: torch.device
    optimizer: Optimizer | None = None
    wholes: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, decision: Decision, runtime: Runtime, device: torch.device) -> Build:
        """Return a decision for this rank of pp, with the objects that carry it out."""
        return cls(**vars(decision.of_rank(runtime.mesh.pp.rank)), runtime=runtime, device=device)

    def with_optimizer(self, optimizer: Optimizer | None) -> Build:
        """Return the same for a call with an optimizer."""
        return dataclasses.replace(self, optimizer=optimizer)
