"""Checks a plan without training: runs one step of a small model on fake ranks, in one process.

The collectives send nothing, so the numbers of the step mean nothing. Instead, the check follows each tensor's type
(see ``types``). ``meshwright verify`` compares numbers; this check says where and why numbers would differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conformance.spmd.mode import Finding, TypeMode
from conformance.spmd.stages import receiving
from conformance.spmd.types import Kind
from conformance.spmd.weight_rows import RowsRead, compare_rows
from meshwright.construct.initial_weights import InitialWeights
from meshwright.distribute.decide import build_on_fake_rank
from meshwright.distribute.installation import install, make_weights
from meshwright.errors import PlanError
from meshwright.layout.tensor_layout import TensorLayout, layout_of
from meshwright.mesh.axes import Axis
from meshwright.optim.runtime import Runtime
from meshwright.parallel.method_chain import find_step
from meshwright.parallel.tensor_parallel.column_projections import ColumnProjections
from meshwright.parallel.tensor_parallel.structure import DecoderStructure, describe
from meshwright.pipeline.pipeline_forward import PipelineForward
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright.roles import ShardingPlan, plan_for
from meshwright.roles.adapters import without_wrappers
from meshwright_tools.tracing.trace import fake_world, foresee

__all__ = ["Finding", "check_plan"]

ROWS, LENGTH = 2, 11  # a length that is not a multiple of 2 or 4


def check_plan(
    model_factory: Callable[[], nn.Module],
    plan: ParallelPlan,
    *,
    batch: Mapping[str, Tensor] | None = None,
    sharding_plan: ShardingPlan | None = None,
) -> list[Finding]:
    """Find where a plan would treat one rank's part of a tensor as the whole, or would not sum a gradient.

    Runs the ranks of the tp axis one after the other in this process, each with its own model, and under
    ``ParallelPlan.pp`` those of each pipeline rank.

    Args:
        model_factory: a function that returns the whole model, with few layers (at least one for each stage) and small
            sizes. It is called ``pp x tp + 1`` times.
        plan: the plan to check.
        batch: the arguments of a training step; by default random tokens, which are also the labels.
        sharding_plan: the roles of the modules, instead of the registered or inferred plan.

    Returns:
        The findings, in the order in which the operations run; an empty list if nothing is wrong.

    Raises:
        PlanError: if the model or this version cannot run the plan.
        ValueError: if this process is already in a process group.

    Example:
        >>> check_plan(lambda: LlamaForCausalLM(config), ParallelPlan(tp=2))  # doctest: +SKIP
        []
    """
    if plan.ep > 1:
        raise PlanError(
            f"the static check follows what the ranks of tp hold, but under ParallelPlan.ep={plan.ep} values decide "
            "which rows a rank gets; use ep=1, or compare the plan with meshwright verify"
        )
    whole = model_factory()
    rows = ROWS if plan.pp == 1 else ROWS * plan.pp * (plan.micro_batch_size or 1)  # interleaved needs a multiple of pp
    inputs = dict(batch) if batch is not None else _tokens(whole, rows)
    config = ToDistributedConfig(sharding_plan=sharding_plan)
    expected = _rows_of(whole, inputs, sharding_plan, plan)
    findings: dict[Finding, None] = {}
    for stage, rank in itertools.product(range(plan.pp), range(plan.tp)):
        with fake_world(plan.world_size, _global_rank(plan, pp=stage, tp=rank)):
            model = model_factory().train()
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
            build = build_on_fake_rank(model, plan, config=config)
            make_weights(build, InitialWeights.find(build.facts, None).make).attach(build.facts)
            install(build, optimizer, seed=0)
            structure = build.tensor_structure
            decoder = without_wrappers(model)[1]
            foresee(decoder, inputs["input_ids"], hidden=next(whole.parameters()).dtype)
            # The projections then read the gathered input and their weights by operations of known types; also when
            # backward recomputes a layer, which must save what its forward saved.
            with mock.patch.object(ColumnProjections, "can_enter", lambda *_: False):
                found = _check_step(model, build.runtime, structure, inputs)
            if expected is not None and structure is not None and not found:
                own = RowsRead.of(model, structure, inputs)
                found += [Finding(name, "reads", problem) for name, problem in compare_rows(expected, own, rank)]
            findings |= dict.fromkeys(found)
    return list(findings)


def _global_rank(plan: ParallelPlan, **places: int) -> int:
    """Return the first rank with these places on these axes."""
    grid = plan.dims.process_mesh()
    wanted = tuple(places.get(name, 0) for name in grid.dim_names)
    return next(rank for rank in grid.ranks if grid.coordinate(rank) == wanted)


def _check_step(
    model: nn.Module, runtime: Runtime, structure: DecoderStructure | None, inputs: dict[str, Tensor]
) -> list[Finding]:
    names = {id(module): name for name, module in model.named_modules()}
    wide_norms = [norm for block in (structure.blocks if structure else ()) for norm, _ in block.wide_norms]
    mode = TypeMode(runtime.mesh.tp, frozenset(names[id(norm)] for norm in wide_norms))
    for parameter in model.parameters():
        if layout_of(parameter).is_held:
            _declare(mode, parameter)
    for value in inputs.values():
        mode.declare(value, Kind.INVARIANT)
    findings = list(_held_rows(model))
    step = find_step(without_wrappers(model)[1], PipelineForward)
    tie = Axis("tie") if step is None else step.pipeline.tie
    try:
        with mode.watching(model), receiving(mode, runtime), _Reductions(tie) as summed:
            loss = model(**inputs).loss
    except RuntimeError:
        if mode.findings:  # the findings caused the failure, e.g. shapes that do not match
            return [*findings, *mode.findings]
        raise
    if (typed := mode.type_of(loss)) is not None and typed.kind is not Kind.INVARIANT:
        problem = f"{typed.kind.value} on the ranks of tp, but should be {Kind.INVARIANT.value}"
        mode.findings.append(Finding("the loss", "is", problem))
    with _Reductions(runtime.mesh.tp, runtime.mesh.tokens) as sent:
        loss.backward()
    return [*findings, *mode.findings, *_unsummed_ties(model, tie, summed), *_unsummed(model, runtime, sent)]


def _declare(mode: TypeMode, parameter: nn.Parameter) -> None:
    layout = layout_of(parameter)
    if layout.is_sharded:
        mode.declare(parameter, Kind.VARYING, dim=layout.over("tp").dim, name=layout.name)
    else:
        mode.declare(parameter, Kind.REPLICATED if layout.has_addends else Kind.INVARIANT, name=layout.name)


def _held_rows(model: nn.Module) -> Iterator[Finding]:
    """Yield parameters with a row that no rank holds, or with an unsummed gradient of a row that several ranks hold."""
    for parameter in model.parameters():
        layout: TensorLayout = layout_of(parameter)
        if not layout.is_held:  # another stage holds it, and is checked too
            continue
        held = [0] * layout.over("tp").size
        for spans in layout.over("tp").spans:
            for start, stop in spans:
                for row in range(start, stop):
                    held[row] += 1
        if 0 in held:
            yield Finding(layout.name, "is cut", f"so that no rank of tp holds row {held.index(0)}")
        elif layout.is_sharded and max(held) > 1 and parameter.requires_grad and not layout.has_addends:
            row = held.index(max(held))
            yield Finding(
                layout.name, "is cut", f"so that {max(held)} ranks hold row {row}, and nothing sums its gradients"
            )


def _unsummed_ties(model: nn.Module, tie: Axis, summed: _Reductions) -> Iterator[Finding]:
    """Yield a finding for each tied weight whose gradients of two stages were not added up."""
    for parameter in model.parameters():
        layout = layout_of(parameter)
        is_tied = tie.size > 1 and layout.is_held and layout.stage_copies > 1 and parameter.requires_grad
        if is_tied and parameter.numel() not in summed.sizes["tie"]:
            yield Finding(layout.name, "has a gradient", "of one stage only, and no sum over its stages was issued")


def _unsummed(model: nn.Module, runtime: Runtime, sent: _Reductions) -> Iterator[Finding]:
    """Yield a finding for each gradient that is not reduced, or whose reduction was not issued."""
    buckets = [bucket for sync in runtime.gradients.syncs for bucket in sync.buckets]
    bucketed = {id(p) for bucket in buckets for p in bucket.parameters}
    for parameter in model.parameters():
        layout = layout_of(parameter)
        if not (parameter.requires_grad and layout.is_held) or id(parameter) in bucketed:
            continue
        for axis, is_needed in (("tp", layout.has_addends), ("dp", runtime.mesh.tokens.size > 1)):
            if is_needed and runtime.engine is None:
                yield Finding(layout.name, "has a gradient", f"that nothing reduces over {axis}")
    for bucket in buckets:
        partial = [layout_of(p) for p in bucket.parameters if layout_of(p).has_addends]
        if runtime.mesh.tp.size > 1 and partial and bucket.tp_numel not in sent.sizes["tp"]:
            names = ", ".join(layout.name for layout in partial[:3])
            yield Finding(names, "has a gradient", "that is partial over tp, and no all-reduce of it was issued")
        if runtime.mesh.tokens.size > 1 and not any(size >= bucket.numel for size in sent.sizes["dp"]):
            name = layout_of(bucket.parameters[0]).name
            yield Finding(name, "has a gradient", "of one data-parallel rank only, and no reduction of it was issued")


class _Reductions(TorchDispatchMode):
    """Records the sizes, in elements, of the reducing collectives over each axis."""

    def __init__(self, *axes: Axis):
        super().__init__()
        self._names = {axis.group.group_name: axis.name for axis in axes if axis.group is not None}
        self.sizes: dict[str, list[int]] = {axis.name: [] for axis in axes}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", None) == "c10d" and func._opname.startswith(("allreduce", "alltoall", "_reduce")):
            leaves = tree_leaves((args, kwargs))
            groups = [x for x in leaves if isinstance(x, torch.ScriptObject) and x._type().name() == "ProcessGroup"]  # type: ignore[attr-defined]
            name = self._names.get(dist.ProcessGroup.unbox(groups[0]).group_name) if groups else None
            if name is not None:
                self.sizes[name].append(max(x.numel() for x in leaves if isinstance(x, Tensor)))
        return result


def _rows_of(
    model: nn.Module, inputs: dict[str, Tensor], roles: ShardingPlan | None, plan: ParallelPlan
) -> RowsRead | None:
    """Return the rows that the whole model reads from each projection, as the reference for ranks; None without tp."""
    if plan.tp == 1:
        return None
    decoder = without_wrappers(model)[1]
    structure = describe(decoder, roles or plan_for(decoder), tp=plan.tp, sequence_parallel=plan.sequence_parallel)
    return RowsRead.of(model, structure, inputs)


def _tokens(model: Any, rows: int) -> dict[str, Tensor]:
    head = model.get_output_embeddings()
    # Some models have an additional embedding for padding, which the head does not predict.
    words = min(x for x in (model.get_input_embeddings().num_embeddings, getattr(head, "out_features", None)) if x)
    ids = torch.randint(3, words, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}
