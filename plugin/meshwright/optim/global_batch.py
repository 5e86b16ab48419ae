"""What a program computes from the whole batch: the rows of all data-parallel ranks, and a loss's mean over them."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.faults.together import exchange_together
from meshwright.mesh.axes import Axis
from meshwright.mesh.process_group import world_size
from meshwright.optim.runtime import Runtime, Watch, find_runtime, live_runtimes, runtime_of
from meshwright.parallel import collectives
from meshwright.parallel.batch.mean_over_ranks import GlobalMean
from meshwright.parallel.batch.share import are_cut, has_filler_rows
from meshwright.parallel.draws.passes import draw_rows_from
from meshwright.parallel.draws.sampling import HeldRows, RowDraws
from meshwright.parallel.forward.uneven_batches import UnevenBatches
from meshwright.parallel.losses.deferred_logits import deferred_of

CALL = "mw.gather_rows(x)"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_rows(x: Tensor, model: nn.Module | None = None) -> Tensor:
    """Return the rows of all data-parallel ranks, in the order that they have in the batch on one device.

    Use this function for what depends on all rows of a batch: in-batch negatives, a mean or a norm over rows. Every
    rank then computes the same value as one device. Backward gives each rank the sum of the gradients that all ranks
    have of its rows, so that gradients that are averaged over the ranks are those of one device. On one process the
    result is ``x``, so a program may always make the call.

    Every data-parallel rank must make the call. The ranks may have different numbers of rows. The row that keeps a
    rank in step, if a batch has fewer rows than there are ranks, is left out. The host waits for the numbers of rows,
    which the ranks exchange.

    Args:
        x: this rank's rows, ``[rows, ...]``, of any dtype; only floating-point rows have a gradient.
        model: the model that ``to_distributed`` or ``DataParallel`` returned. It may be left out if all distributed
            models of the process have the same data-parallel ranks.

    Returns:
        All rows, ``[rows of all ranks, ...]``.

    Raises:
        PlanError: if the plan runs a batch as several micro-batches, and ``x`` is a part of the forward pass.
        ValueError: if no model is distributed, or the ranks' rows have different shapes or dtypes.

    Example::

        queries, documents = encode(model, batch["query"]), encode(model, batch["document"])
        queries, documents = mw.gather_rows(queries), mw.gather_rows(documents)
        loss = F.cross_entropy(queries @ documents.T, torch.arange(len(queries), device=queries.device))
        loss.backward()
    """
    runtime = _runtime() if model is None else runtime_of(model)
    if not isinstance(x, Tensor) or x.ndim == 0:
        found = "a tensor without dims" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{CALL} takes a tensor whose first dim has this rank's rows, not {found}")
    if runtime is None:
        return x
    plan = runtime.plan
    if plan is not None and (plan.has_micro_batches or plan.pp > 1) and (are_cut() or x.requires_grad):
        raise PlanError(
            f"{CALL} needs all rows of the batch at a time, but the plan {plan.label} runs the batch as "
            "micro-batches, each of which has some of them. Use a plan with pp=1, without micro-batches: "
            "ParallelPlan(gradient_accumulation_steps=1, micro_batch_size=None). To save memory instead, use "
            "recompute='full'"
        )
    if (uneven := runtime.features.find(UnevenBatches)) is not None and _has_gradient(x):  # not for a metric
        uneven.leave_out_pass()
    axis = runtime.mesh.dp
    if axis.size == 1:
        return x
    if deferred_of(x) is not None:
        x = x.clone()  # computes logits that were not read yet
    counts = _rows_of_ranks(x, axis)
    rows = max(counts)
    x = x[: counts[axis.rank]]
    x = F.pad(x, (0, 0) * (x.ndim - 1) + (0, rows - len(x))) if len(x) < rows else x
    kind = x.dtype
    gathered = collectives.gather_rows(x.to(torch.uint8) if kind is torch.bool else x, axis).to(kind)
    if min(counts) == rows:
        return gathered
    return torch.cat([part[:count] for part, count in zip(gathered.split(rows), counts, strict=True)])


def _runtime() -> Runtime | None:
    """Return the last runtime, if all have its data-parallel ranks; None on one process without a runtime."""
    for _ in range(2):
        runtimes = [runtime for runtime in live_runtimes() if runtime.guard is None or runtime.guard.is_current]
        found = {_ranks(runtime.mesh.dp) for runtime in runtimes}
        if len(found) == 1:
            return runtimes[-1]
        if world_size() == 1:
            return None
        gc.collect()  # a model that the program has dropped
    if not found:
        raise ValueError(
            f"{CALL} gathers the rows of the data-parallel ranks, but no model is distributed yet. Call it after "
            "model, optimizer, loader = mw.to_distributed(model, optimizer, loader)"
        )
    raise ValueError(
        f"{CALL} does not know whose rows to gather, since the distributed models of this process have different "
        f"data-parallel ranks: {'; '.join(str(list(ranks)) for ranks in found)}. Pass the model: "
        "mw.gather_rows(x, model)"
    )


def _has_gradient(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _ranks(axis: Axis) -> tuple[int, ...]:
    return () if axis.group is None else tuple(dist.get_process_group_ranks(axis.group))


def _rows_of_ranks(x: Tensor, axis: Axis) -> list[int]:
    """Return the number of rows that count on each rank, after checking that rows are alike on all ranks."""

    def describe() -> tuple[None, str]:
        rows = 0 if has_filler_rows(x) else len(x)
        kind = f"{str(x.dtype).removeprefix('torch.')} rows of shape {tuple(x.shape[1:])}"
        return None, json.dumps([rows, kind + (" with a gradient" if _has_gradient(x) else "")])

    _, texts = exchange_together(describe, group=axis.group)
    reports: list[tuple[int, str]] = [json.loads(text) for text in texts]
    kinds = [kind for _, kind in reports]
    if len(set(kinds)) > 1:
        raise ValueError(
            f"{CALL} got different rows from the data-parallel ranks: "
            f"{'; '.join(f'{kind} on rank {rank} of dp' for rank, kind in enumerate(kinds))}. Give the rows the same "
            "shape and dtype on all ranks, for example pad sequences to one length: "
            "tokenizer.pad(rows, padding='max_length', max_length=N)"
        )
    return [rows for rows, _ in reports]


def sampling_generator(model: nn.Module, batch: Mapping[str, Any], *, seed: int, copies: int = 1) -> torch.Generator:
    """Return a generator with which a loop of your own samples the tokens that one device samples for these rows.

    A draw from it is that for all rows of the loader's batch, of which this rank keeps its own. ``generate`` of
    transformers needs none. On one process it is ``torch.Generator(device).manual_seed(seed)``.

    Make a new one for each batch. The rows of a rank may end before those of others, so that a generator that goes on
    to the next batch would have other states on the ranks.

    Args:
        model: the model, distributed or not.
        batch: a batch as the loader that ``to_distributed`` returned has yielded it.
        seed: the seed, the same on all ranks.
        copies: the number of entries that the first dim of a draw has for each row, one row after the other.

    Raises:
        PlanError: if the batch is not the loader's under data parallelism; later by a draw whose first dim does not
            have this rank's rows.

    Example::

        generator = mw.sampling_generator(model, batch, seed=number)
        for _ in range(32):
            probabilities = model(input_ids=tokens).logits[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], 1)
    """
    # A clone, since torch hands an operation the Python object of a generator only if torch has made it itself.
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed).clone_state()
    if (runtime := find_runtime(model)) is not None and (dp := runtime.mesh.dp).size > 1:
        if (rows := HeldRows.of(batch, dp)) is None:
            raise PlanError(
                f"mw.sampling_generator does not know which rows of the global batch rank {dp.rank} of dp={dp.size} "
                "has: no tensor of the batch is the loader's. Pass the batch as the loader yielded it; its copies "
                "may be padded or repeated afterwards"
            )
        draw_rows_from(generator, RowDraws(rows, copies))
    return generator


def global_mean(model: nn.Module, loss: Tensor, count: Tensor | int) -> Tensor:
    """Return the mean of a loss over the global batch, in value and gradient, given the mean that this rank computed.

    Every data-parallel rank must call ``global_mean`` once per loss, before ``backward``. On one process it returns
    the loss unchanged, so a program may always call it. A loss that the model itself returns needs no such call; see
    docs/losses.md.

    Args:
        model: the model that ``to_distributed`` or ``DataParallel`` returned.
        loss: the mean over this rank's rows or labels, as a scalar.
        count: the number of those rows or labels; if it is 0, the value of the loss is ignored.

    Returns:
        The sum over the ranks of ``loss * count``, divided by the sum of ``count``; the same on every rank.

    Raises:
        ValueError: if the model is not distributed, or the loss is not a scalar.

    Example::

        batch = next(iter(loader))
        labels = batch.pop("labels")
        loss = weighted_cross_entropy(model(**batch).logits, labels)
        loss = mw.global_mean(model, loss, count=(labels != -100).sum())
        loss.backward()
    """
    runtime = runtime_of(model)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"global_mean(model, loss, count) takes a scalar loss, the mean over this rank's rows or labels, not "
            f"{found}: pass loss.mean()"
        )
    if (uneven := runtime.features.find(UnevenBatches)) is not None:
        uneven.stop()
    if runtime.mesh.tokens.size > 1:
        counts = torch.as_tensor(count, device=loss.device).reshape(1)
        mean = GlobalMean(runtime.mesh.tokens, gradients=runtime.loss_gradients)
        loss = mean.of_means(loss.reshape(1), counts).reshape(loss.shape)
    if (watch := runtime.features.find(Watch)) is not None:
        watch.saw_loss(loss)
    return loss
