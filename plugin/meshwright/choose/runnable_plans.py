"""Which plans the runtime takes for one call: what its rows refuse (``Feature.refusals``), and what shows when a plan
cuts the model, in passes without values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from meshwright.choose.given_plan import with_sequence_parallel
from meshwright.choose.model_sizes import against_tensor
from meshwright.errors import OptimizerMismatchError, PlanError
from meshwright.features.decision import Call, Decision, Refusal, refusing
from meshwright_plan.job.candidate import Candidate
from meshwright_plan.search.search import BESIDE_DP


@dataclass(frozen=True, kw_only=True)
class RunnablePlans:
    """Which plans the runtime takes for one call.

    Args:
        call: the call, under any plan.
        rows: the rows by which a call is refused before its plan cuts the model.
        decide: decides what the plan of a call does to the model, or raises.
        by_rows: the rows that refuse kinds of plans, as far as this was asked, and what they say; under None what is
            wrong with a plan itself.
        when_cut: why kinds of plans are refused when the model is cut; None for those that are not.
    """

    call: Call
    rows: Sequence[Refusal]
    decide: Callable[[Call], Decision]
    by_rows: dict[Candidate, Mapping[Refusal | None, str]] = field(default_factory=dict)
    when_cut: dict[Candidate, str | None] = field(default_factory=dict)

    def refusal(self, plan: Candidate) -> str | None:
        """Return why the call is refused under a plan, as far as shows before the model is cut; None if it is not."""
        self._ask_rows(plan)
        return self.known_refusal(plan)

    def known_refusal(self, plan: Candidate) -> str | None:
        """Return the same without a new question, which a search would ask about hundreds of plans.

        What refuses recompute alone is known of every plan with it.
        """
        said = next(iter(self.by_rows.get(_alike(plan), {}).values()), None) or self.when_cut.get(_kind(plan))
        if said is None and plan.recompute != "none":
            said = self._added(_recompute_alone(plan), Candidate())
        return said

    def refusal_when_cut(self, plan: Candidate) -> str | None:
        """Return the same after the model was cut by the plan, which takes as long as passes without values."""
        if self.refusal(plan) is None and (kind := _kind(plan)) not in self.when_cut:
            self.when_cut[kind] = self._cut(plan)
        return self.known_refusal(plan)

    def blames(self, axis: str, size: int, *, cut: bool = False) -> str | None:
        """Return why plans with an axis are refused, if those without it are not refused for the same reason.

        Args:
            axis: the axis.
            size: its size.
            cut: whether the model is cut for the answer.
        """
        alone = _with_axis(axis, size)
        without = alone.copy(**{axis: 1})
        self._ask_rows(without)
        if self._ask_rows(alone) or not cut:
            return self._added(alone, without)
        reason = self.refusal_when_cut(alone)
        return None if reason == self.refusal_when_cut(without) else reason

    def _added(self, plan: Candidate, without: Candidate) -> str | None:
        """Return what a row says that refuses a plan, and not the plan without a part of it, as far as was asked."""
        others = self.by_rows.get(_alike(without), {})
        return next((said for row, said in self.by_rows.get(_alike(plan), {}).items() if row not in others), None)

    def _ask_rows(self, plan: Candidate) -> Mapping[Refusal | None, str]:
        if (kind := _alike(plan)) not in self.by_rows:
            said: dict[Refusal | None, str] = {}
            try:
                for row, error in refusing(self._under(plan), self.rows).items():
                    said[row] = str(error)
            except PlanError as error:
                said[None] = str(error)
            self.by_rows[kind] = said
        return self.by_rows[kind]

    def _under(self, plan: Candidate) -> Call:
        return dataclasses.replace(self.call, plan=with_sequence_parallel(plan.plan, self.call.config))

    def _cut(self, plan: Candidate) -> str | None:
        try:
            cut = self.decide(self._under(plan)).cut
        except (PlanError, OptimizerMismatchError) as error:
            return str(error)
        is_known = cut is None or cut.order.is_plain
        return None if is_known else "what crosses its stages beside [rows, tokens, channels] has no estimate"

    def against(self) -> dict[str, str]:
        """Return each axis with which no plan may be picked, and the reason; ask about recompute alone too."""
        call, found = self.call, {}
        if (reason := against_tensor(call.model, call.config.sharding_plan)) is not None:
            found["tp"] = reason
        if not call.config.picks_stages:
            found["pp"] = "ToDistributedConfig(picks_stages=False)"
        elif next(call.model.parameters()).dtype is torch.float16:
            found["pp"] = "stages were not compared with one device with float16 weights, only under autocast"
        for axis in BESIDE_DP:
            if axis not in found and (reason := self.blames(axis, 2)) is not None:
                found[axis] = reason
        for layers in (None, 1):
            self._ask_rows(Candidate(recompute="full", recomputed_layers=layers))
        return found


def _kind(plan: Candidate) -> Candidate:
    """Return a plan that is refused for the same reasons: how many rows a rank has, and layers a stage, is none."""
    return plan.copy(
        dp=min(plan.dp, 2),
        micro_batch_size=1,
        gradient_accumulation_steps=min(plan.gradient_accumulation_steps, 2),
        recomputed_layers=None if plan.recomputed_layers is None else 1,
        stages=None if plan.stages is None else (),
    )


def _alike(plan: Candidate) -> Candidate:
    """Return a plan that the rows refuse for the same reasons: they ask which axes it has, and for the size of ep."""
    return _kind(plan).copy(**{axis: min(size, 2) for axis, size in plan.sizes.items()}, chunks=None, ulysses=None)


def _with_axis(axis: str, size: int) -> Candidate:
    """Return a plan with one axis alone; ranks that share experts are those of dp."""
    return Candidate(dp=size if axis == "ep" else 1).copy(**{axis: size})


def _recompute_alone(plan: Candidate) -> Candidate:
    return Candidate(recompute=plan.recompute, recomputed_layers=plan.recomputed_layers)
