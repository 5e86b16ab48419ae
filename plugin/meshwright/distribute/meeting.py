"""The one exchange by which the ranks of a call compare what they were given, before anything is changed.

rank 0   find the weights, digest them   -->  CallStatement  --+--  all statements, on every rank
rank 1   find the weights, digest them   -->  CallStatement  --+    equal plans, options, models: go on
                                                                equal weights: nothing is sent
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshwright.construct.initial_weights import InitialWeights
from meshwright.distribute.rehearse import brought_into
from meshwright.errors import PlanError
from meshwright.faults.together import exchange_together
from meshwright.features.decision import Decision
from meshwright.mesh.process_group import world_size
from meshwright.parallel.dropout_streams import dropout_seed

# The options of ToDistributedConfig that decide which collectives run; others, such as a folder, may differ by rank.
_OF_ALL_RANKS = ("gather_logits", "token_dispatcher", "bucket_size_mb", "compile", "check_replicas_every", "draws")


@dataclass(frozen=True, kw_only=True)
class CallStatement:
    """What one rank says of its call.

    Args:
        plan: the plan.
        options: the options that must be equal on all ranks.
        weights: the digests of the weights that the model starts from; see ``InitialWeights.digests``.
        brought: what the program brought into the parts that tp cuts; see ``brought_into``.
        seed: the seed of the dropout streams, which are those of the first rank.
    """

    plan: str
    options: str
    weights: list[str]
    brought: str
    seed: int


def meet(
    decision: Decision, find_weights: Callable[[], InitialWeights], device: torch.device
) -> tuple[InitialWeights, list[CallStatement]]:
    """Find the weights that the model starts from, and return them with the statements of all ranks.

    Args:
        decision: what this rank has decided.
        find_weights: a function that finds the weights, without communication.
        device: the device of this rank's weights.

    Raises:
        PlanError: on every rank, if the ranks were given different plans or options; the message shows what two of
            the ranks have.
        Exception: on every rank, if the weights are not found on one.
    """

    def state() -> tuple[InitialWeights, str]:
        weights = find_weights()
        statement = CallStatement(
            plan=str(decision.plan),
            options=", ".join(f"{name}={getattr(decision.config, name)!r}" for name in _OF_ALL_RANKS),
            weights=weights.digests(decision.facts, device) if world_size() > 1 else [],
            brought=brought_into(decision),
            seed=dropout_seed(),
        )
        return weights, json.dumps(dataclasses.asdict(statement))

    weights, texts = exchange_together(state)
    statements = [CallStatement(**json.loads(text)) for text in texts]
    for what in ("plan", "options"):
        values = [getattr(statement, what) for statement in statements]
        for rank, other in enumerate(values):
            if other != values[0]:
                raise PlanError(
                    f"the ranks were given different {what.removesuffix('s')}s; rank 0: {values[0]}, rank {rank}: "
                    f"{other}. Every process must make the same call"
                )
    return weights, statements
