"""A decision about one model, which follows from its facts, a plan and the options; its build; and what refuses it.

All refusals of a call are raised together; ``Feature.refusals`` has the rows of each part of a plan.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.context.record import ContextRecord
from meshwright.errors import OptimizerMismatchError, PlanError
from meshwright.facts import Facts
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.optim.runtime import Runtime
from meshwright.parallel.forward.coupled_rows import has_stock_loss
from meshwright.parallel.losses.causal_lm import BatchLoss, calls_cross_entropy
from meshwright.parallel.losses.head_losses import LossKind
from meshwright.parallel.tensor_parallel.structure import DecoderStructure
from meshwright.pipeline.cut import Cut, with_stages
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright.roles import Decoder
from meshwright.roles.adapters import decoder_of, without_wrappers
from meshwright.roles.blocks.experts import adapter_layouts, expert_layouts
from meshwright.roles.decoder import all_towers, modules_apart, modules_left_out


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a call of ``to_distributed`` asks for.

    Args:
        facts: what the user's model shows, with adapters and other wrappers around its decoder.
        plan: the plan to carry out.
        config: the options of the call.
        loss: what the model's loss averages over, or what computes it if the model is distributed; None if unknown.
        optimizer: the optimizer over the model's parameters, if the call has one.
        device: the device on which the model will run; None if that is not known yet.
    """

    facts: Facts
    plan: ParallelPlan
    config: ToDistributedConfig
    loss: LossKind | BatchLoss | None = None
    optimizer: Optimizer | None = None
    device: torch.device | None = None

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


@dataclass(frozen=True, kw_only=True)
class Decision(Call):
    """What a plan does to one model. It changes nothing, and needs no other rank.

    Args:
        loss: what the model's loss averages over; None if unknown.
        structure: how the plan cuts the decoder; None if the plan does not cut it.
        mixers: the modules of the layers with recurrences or convolutions over tokens, by name.
        cut: which layers and weights this rank's pipeline stages hold; None without a pipeline.
        context: what the layers and attentions of the decoder are given; None without context parallelism.
    """

    loss: LossKind | None
    structure: Decoder | None
    mixers: Mapping[str, nn.Module] = field(default_factory=dict)
    cut: Cut | None = None
    context: ContextRecord | None = None

    def of_rank(self, rank: int) -> Decision:
        """Return the same for another rank of pp."""
        return self if self.cut is None else dataclasses.replace(self, cut=dataclasses.replace(self.cut, rank=rank))

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
        is_cut = plan.dp * plan.cp * plan.tp * plan.pp > 1 or plan.has_micro_batches
        return self.config.draws == "device" and self.config.engine is None and is_cut

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
    def shares_tokens(self) -> bool:
        """Whether each rank of tp may have its own tokens, between the blocks or where they are routed to experts."""
        structure = self.tensor_structure
        return structure is not None and (structure.is_sequence_parallel or bool(structure.routed))

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
        wholes: for the modules that the plan lets read the sizes of a rank's part: what they had read of the whole.
    """

    runtime: Runtime
    device: torch.device
    wholes: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, decision: Decision, runtime: Runtime, device: torch.device) -> Build:
        """Return a decision for this rank of pp, with the objects that carry it out."""
        return cls(**{**vars(decision.of_rank(runtime.mesh.pp.rank)), "runtime": runtime, "device": device})


Read = Callable[[Any], tuple[Any, ...]]

# What of a call a refusal belongs to, in the words of docs/support.md.
UNDER: dict[str, Callable[[Call], object]] = {
    "any plan": lambda call: True,
    "pp": lambda call: call.plan.pp > 1,
    "ep, etp": lambda call: call.plan.ep * call.plan.etp > 1,
    "micro-batches": lambda call: call.plan.has_micro_batches,
    "recompute": lambda call: call.plan.recompute == "full",
    "cut weights, ZeRO": lambda call: call.plan.weight_axes or call.plan.zero_stage,
    "an engine": lambda call: call.config.engine is not None,
    "compile": lambda call: call.config.compile is not None,
    "an optimizer": lambda call: call.optimizer is not None,
}


@dataclass(frozen=True)
class Refusal:
    """A row by which a call is refused; docs/support.md prints the rows.

    Args:
        under: the key of ``UNDER`` for which the row holds.
        when: a function of the call, or of its decision, that finds what is refused. It returns the values of the
            fields in the texts beyond those that every call has, True if there are none, or nothing if all is well. It
            may raise the error itself, in more words than the row has.
        says: what is wrong, and why it matters; with fields in braces, as for ``str.format``.
        cure: what to write instead, as a sentence, or in lower case after a semicolon.
        after_cut: whether the row needs a decision.
    """

    under: str
    when: Callable[[Any], object]
    says: str
    cure: str
    after_cut: bool = False

    @classmethod
    def by(cls, under: str, check: Callable[..., object], read: Read, cure: str, after_cut: bool = False) -> Refusal:
        """Return the row of a check that raises errors of its own, whose docstring begins with "Raise if"."""
        says = (check.__doc__ or "").partition("\n")[0].removeprefix("Raise if ").removesuffix(".")
        return cls(under, lambda call: check(*read(call)), says, cure, after_cut)

    def reason(self, call: Call) -> str | None:
        """Return the message, whatever the row is under; None if the call is not refused."""
        if not (found := self.when(call)):
            return None
        own = {"plan": call.plan.label, "model": type(call.decoder).__name__, "engine": call.config.engine}
        fields = {**vars(call.plan), **own, **(found if isinstance(found, Mapping) else {})}
        stop = ";" if self.cure[0].islower() else "."
        return f"{self.says}{stop} {self.cure}".format(**fields)

    def error(self, call: Call) -> ValueError | None:
        """Return the error with which the row refuses a call; None if it does not."""
        try:
            reason = self.reason(call) if UNDER[self.under](call) else None
        except (PlanError, OptimizerMismatchError) as error:
            return error
        return None if reason is None else PlanError(reason)


def refusing(call: Call, rows: Iterable[Refusal]) -> dict[Refusal, ValueError]:
    """Return the rows that refuse a call, or its decision, with their errors; see :func:`refuse`."""
    is_cut = isinstance(call, Decision)
    errors: dict[Refusal, ValueError] = {}
    for row in rows:
        try:
            if row.after_cut == is_cut and (error := row.error(call)) is not None:
                errors[row] = error
        except Exception:  # of a check of a model that an earlier row has refused already
            if not errors:
                raise
    return errors


def refuse(call: Call, rows: Iterable[Refusal]) -> None:
    """Raise one error with all that the rows refuse of a call.

    Args:
        call: the call, or its decision.
        rows: the rows; of a decision those that need one are used, and otherwise the others.

    Raises:
        PlanError: if a row refuses the call; an error that is the only one keeps its class.
    """
    errors = list(refusing(call, rows).values())
    if len(errors) == 1:
        raise errors[0]
    if errors:
        lines = "\n".join(f"{number}. {error}" for number, error in enumerate(errors, 1))
        raise PlanError(f"{len(errors)} things keep the plan {call.plan.label} from this call:\n{lines}")


def table(rows: Iterable[Refusal]) -> Iterator[str]:
    """Yield the rows of the table in docs/support.md, with the names of fields in capitals."""
    yield "| under | refused | instead |"
    yield "|---|---|---|"
    for row in rows:
        texts = (string.Formatter().parse(text) for text in (row.says, row.cure))
        says, cure = ("".join(literal + (name or "").upper() for literal, name, *_ in parts) for parts in texts)
        yield f"| {row.under} | {says} | {cure} |"
