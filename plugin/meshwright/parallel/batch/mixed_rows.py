"""Modules that mix the rows of a batch, so that a plan that splits the batch would give other numbers: refused by name.

What is not known by name is found in the first steps (``writes.py``).

Tells of an input that has as many entries as a batch has rows by chance, such as weights of classes.

::

    batch 1    x [4, 8]   y 2 0 1 3   weights 0.1 0.2 0.3 0.4
    batch 2    x [4, 8]   y 1 1 0 2   weights 0.1 0.2 0.3 0.4    the same numbers for other rows

No shape tells such an input from one with a number for each row, and it is cut by rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.faults.memory_digest import has_values, is_plain
from meshwright.parallel.batch.items import kind_of
from meshwright.parallel.batch.mean_over_ranks import TARGETS
from meshwright.parallel.batch.schema import PER_TOKEN, TOKENS, BatchSchema
from meshwright.parallel.method_chain import ChainStep
from meshwright.plan.config import ParallelPlan
from meshwright.progress import is_first_rank

# Options of torch's embeddings -> what they do.
EMBEDDING_OPTIONS = {
    "max_norm": "renormalises the weight's rows of the tokens that forward gets, and each part of a batch has other "
    "tokens, so ranks would hold other weights",
    "scale_grad_by_freq": "divides the gradient of each token by its count in the rows of one rank or micro-batch, "
    "instead of its count in the whole batch",
    "sparse": "gives sparse gradients, which are not averaged over ranks, sharded or summed over micro-batches",
}

# The method of transformers' models that computes the positions of tokens from all rows and the sizes of their images.
POSITIONS = "get_rope_index"

# Classes of modules -> how they compute with all tokens of the batch together.
_MIX_ROWS = {
    "DogeCDMoE": "splits the scores of all tokens of a batch in halves, so that a token's experts depend on other rows"
}


def mixed_rows(facts: Facts, plan: ParallelPlan) -> dict[str, str] | None:
    """Return a module that computes with all tokens of the batch together, if the plan splits the batch."""
    for module, name in facts.names.items() if splits_rows(plan) else ():
        if (how := _MIX_ROWS.get(type(module).__name__)) is not None:
            return {"axes": _parts(plan), "name": name, "kind": type(module).__name__, "reason": how}
    return None


def splits_rows(plan: ParallelPlan) -> bool:
    """Return whether a forward pass under a plan has some of the rows of a batch."""
    return plan.dp > 1 or plan.has_micro_batches


class PositionsOfRows(ChainStep):
    """The step of a method that computes positions, which refuses positions that depend on the rows before.

    The first positions of several images are computed a second time for the same rows twice: if the second half differs
    from the first, an image gets other positions on one device, where the rows of other ranks come before it.

    Args:
        owner: the module that has the method.
        plan: the plan, which splits the rows of a batch.
    """

    def __init__(self, owner: nn.Module, plan: ParallelPlan):
        self.owner, self.plan = owner, plan
        self._is_checked = False

    def __call__(self, *args: object, **kwargs: object) -> object:
        given: list[Any] = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        has_sizes = any(not x.is_floating_point() and x.ndim == 2 and x.shape[1] == 3 for x in given)
        if not self._is_checked and has_sizes and all(map(has_values, given)):
            self._is_checked = True
            self._check([_twice(x) for x in args], {name: _twice(x) for name, x in kwargs.items()})
        return self.method(*args, **kwargs)

    def _check(self, args: list[object], kwargs: dict[str, object]) -> None:
        found = next(x for x in tree_leaves(self.method(*args, **kwargs)) if isinstance(x, Tensor))
        first, second = found.chunk(2, dim=found.ndim - 2)  # [axes, rows, tokens]
        if not torch.equal(first, second):
            raise PlanError(
                f"the positions that {type(self.owner).__name__}.{POSITIONS} gives to the tokens of an image depend on "
                f"the images of the rows before, but the plan {self.plan.label} splits the batch over "
                f"{_parts(self.plan)}, so the numbers would not be those of one device. Use dp=1 without "
                "micro-batches, for example plan='tp2+sp'; or pass position_ids of your own to the model"
            )


def _twice(x: object) -> object:
    if isinstance(x, list):  # such as seconds for each video
        return [*x, *x]
    return torch.cat([x, x]) if isinstance(x, Tensor) and x.ndim else x


def split_embedding(facts: Facts, plan: ParallelPlan, engine: str | None) -> dict[str, object] | None:
    """Return an embedding whose numbers depend on how a plan splits the batch, or whose gradient cannot be reduced."""
    options = []
    if splits := _parts(plan):
        options.append("max_norm")
    if plan.dp > 1 or plan.pp > 1 or plan.has_micro_batches:  # every rank of cp has all tokens before the layers
        options.append("scale_grad_by_freq")
        options += ["sparse"] if engine is None else []
    elif plan.zero_stage > 0:  # which reduces gradients in flat buckets on one rank too
        options.append("sparse")
    found = refused_option(facts, options)
    return found and {**found, "split": f"the batch over {splits}" if splits else "gradients"}


EMBEDDING = "{module} is an {kind} with {option}={value}, which {effect}"
SET_OFF = "Set it off before the call: {module}.{option} = {off}"


def refused_option(model: nn.Module | Facts, options: list[str] | None = None) -> dict[str, object] | None:
    """Return an embedding that cannot be used where the batch is split, as fields of ``EMBEDDING``; None if all can.

    Args:
        model: the model.
        options: the options to look for: all by default.
    """
    kinds = nn.Embedding | nn.EmbeddingBag
    embeddings = [(name, module) for module, name in Facts.of(model).names.items() if isinstance(module, kinds)]
    for (name, module), option in product(embeddings, EMBEDDING_OPTIONS if options is None else options):
        value = getattr(module, option)
        if not value or not (option == "max_norm" or module.weight.requires_grad):
            continue
        return {
            "module": f"model.{name}" if name else "model",
            "kind": type(module).__name__,
            "option": option,
            "value": value,
            "effect": EMBEDDING_OPTIONS[option],
            "off": None if option == "max_norm" else False,
        }
    return None


class BatchStatistics:
    """Refuses passes in which a BatchNorm layer would normalise by the statistics of a part of the batch.

    Args:
        facts: what the model shows.
        plan: a function that returns the current plan, which says what splits the batch.
    """

    def __init__(self, facts: Facts, plan: Callable[[], ParallelPlan | None]):
        self._plan = plan
        self._layers = [(name, module) for module, name in facts.names.items() if isinstance(module, _BatchNorm)]

    def check(self) -> None:
        """Raise a PlanError if a layer is about to use the statistics of a part of the batch."""
        if not self._layers or (plan := self._plan()) is None or not (parts := _parts(plan)):
            return
        # SyncBatchNorm sees the rows of all ranks, but not those of later micro-batches.
        shared = () if plan.pp > 1 or plan.has_micro_batches else nn.SyncBatchNorm
        for name, layer in self._layers:
            if isinstance(layer, shared):
                continue
            if layer.training or layer.running_mean is None:
                raise PlanError(
                    f"{name} is a {type(layer).__name__}, which normalises by the mean and variance of the batch, but "
                    f"the plan splits the batch over {parts}, so each part would have its own statistics and "
                    "the numbers would not be those of one device. Use a norm within a row (nn.LayerNorm, "
                    "nn.GroupNorm), freeze the statistics after model.train():\n"
                    f'    model.get_submodule("{name}").eval()\n'
                    "or, on CUDA and without micro-batches, let the ranks share them:\n"
                    "    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)"
                )


def _parts(plan: ParallelPlan) -> str:
    """Return what splits a batch, in words; empty if nothing does."""
    axes = [f"{name}={size}" for name, size in (("dp", plan.dp), ("cp", plan.cp)) if size > 1]
    if plan.pp > 1 or plan.has_micro_batches:
        axes.append("micro-batches")
    return " and ".join(axes)


logger = logging.getLogger(__name__)

_ENOUGH = math.log(1e8)  # an input of rows is told wrongly once in as many cases, if its values are drawn at random
_MOST = 16  # batches that are looked at


class FixedInputs:
    """Looks at the first batches, until each input has changed.

    Real numbers are looked at alone: labels of classes, masks and positions are often the same in several batches.

    Args:
        parts: what gets the parts of a batch, as the beginning of a sentence.
    """

    def __init__(self, parts: str):
        self._parts = parts
        self._left = _MOST
        self._before: dict[str, tuple[Tensor, Tensor]] | None = None  # the tensors of the last batch, and their values
        self._starts: dict[str, Tensor] = {}  # the first values of the first batch's tensors
        self._evidence: dict[str, float] = {}

    def see(self, schema: BatchSchema) -> None:
        """Look at a batch that is about to be cut by rows."""
        if self._left == 0 or not all(is_plain(x) and has_values(x) for x in schema.tensors.values()):
            return
        self._left -= 1
        known = (*TOKENS, *TARGETS, *PER_TOKEN, *schema.format.dims)
        found = {
            name: x
            for name, x in schema.tensors.items()
            if x.is_floating_point() and name not in known and kind_of(name) is None and len(x) == schema.rows > 1
        }
        if (before := self._before) is None:
            self._before = {name: (x, x.detach().clone()) for name, x in found.items()}
            self._starts = {name: _start(x) for name, x in schema.tensors.items()}
        else:
            same = {name for name, (_, values) in before.items() if name in found and _is_same(found[name], values)}
            others = ((x, self._starts.get(name)) for name, x in schema.tensors.items() if name not in same)
            if any(start is not None and not _is_same(_start(x), start) for x, start in others):
                shown = {name for name in same if self._is_shown(name, found[name], before[name][0])}
                for name in shown:
                    self._tell(name, schema.rows)
                self._before = {name: (found[name], before[name][1]) for name in same - shown}
        self._left = self._left if self._before else 0

    def _is_shown(self, name: str, x: Tensor, before: Tensor) -> bool:
        """Return whether it is beyond chance that an input is the same for other rows."""
        distinct = len(torch.unique(x, dim=0))
        self._evidence[name] = self._evidence.get(name, 0.0) + len(x) * math.log(distinct)
        return (x is before and distinct > 1) or self._evidence[name] > _ENOUGH

    def _tell(self, name: str, rows: int) -> None:
        if is_first_rank():
            logger.warning(
                "%s has %d entries, as many as the batch has rows, and the same values in each batch, though other "
                "inputs change. %s gets the entries of its own rows alone, which is wrong if each row needs all of "
                "them, such as the weights of classes. Say which it is: ToDistributedConfig(batch_dims={%r: None}) if "
                "each row needs all entries, or {%r: 0} if each row has one",
                name,
                rows,
                self._parts,
                name,
                name,
            )


def _start(x: Tensor) -> Tensor:
    return x.detach().flatten()[:64].clone()


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
