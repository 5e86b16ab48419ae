"""``verify`` compares a model's training under a plan, shrunk to one machine, with its training on one device."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.choose.given_plan import resolve_plan
from meshwright.errors import PlanError
from meshwright.plan.config import ParallelPlan, PlanLike, ToDistributedConfig
from meshwright_tools.verification.batch_cases import given_cases
from meshwright_tools.verification.comparison_report import Report, summarise
from meshwright_tools.verification.local_processes import Tell, run_together, start_server
from meshwright_tools.verification.program import Factory, LossFunction, Program, run_one_device, run_rank


def smaller_plan(plan: ParallelPlan, processes: int) -> ParallelPlan:
    """Return the plan or, if it needs more than ``processes`` processes, a smaller plan of the same kind.

    Every axis and option of the plan stays; the sizes of the axes shrink, dp and pp first. dp and pp shrink to 2, and
    tp to its largest divisor that fits or, if none fits, to its smallest divisor above 1. So the result may need more
    than ``processes`` processes: at least 4 with dp and tp, and 14 with dp and tp=7. etp shrinks to 2, and ep becomes
    the largest size that these axes allow. The model of a verification has fewer layers, so stages of given lengths
    become even.

    Example:
        >>> smaller_plan(ParallelPlan(dp=64, tp=8, sequence_parallel=True), 4).tp
        2
    """
    # One of the few layers of a verification is recomputed, and the others are not.
    plan = dataclasses.replace(plan, stages=None, recomputed_layers=plan.recomputed_layers and 1)
    if plan.world_size <= processes:
        return plan
    small: dict[str, Any] = {name: min(plan.sizes[name], 2) for name in ("dp", "pp")}
    most = processes // math.prod(small.values())
    sizes = [size for size in range(2, plan.tp + 1) if plan.tp % size == 0] or [1]
    small["tp"] = max((size for size in sizes if size <= most), default=sizes[0])
    smaller = dataclasses.replace(
        plan,
        ep=1,
        etp=1,
        gradient_accumulation_steps=min(plan.gradient_accumulation_steps, 2),
        micro_batch_size=plan.micro_batch_size and min(plan.micro_batch_size, 2),
        **small,
    )
    # As before, the ranks that share experts are those of one tp group, or of several.
    largest = smaller.world_size if plan.ep * plan.etp > plan.tp else smaller.tp
    for etp in (2, 1) if plan.etp > 1 else (1,):
        for ep in range(min(plan.ep, largest // etp), 0, -1):
            with contextlib.suppress(PlanError):
                return dataclasses.replace(smaller, ep=ep, etp=etp)
    return smaller


def verify(
    model_factory: Factory,
    plan: PlanLike,
    *,
    batch: object = None,
    loss: LossFunction | None = None,
    steps: int = 3,
    seed: int = 0,
    perturb: bool = True,
    config: ToDistributedConfig | None = None,
    timeout: float = 600.0,
    on_progress: Callable[[str], None] | None = None,
    notes: tuple[str, ...] = (),
) -> Report:
    """Train a model under a plan and on one device, and compare everything that should be equal.

    Both programs run in float64 on processes of this machine: first one process with stock torch, then one process per
    rank of the plan, over gloo. The comparison covers the outputs of modules and the logits in evaluation; the loss,
    the gradient norm and each parameter's gradient for each batch at the initial weights; the loss and the norm for
    each optimizer step (AdamW, clipped); and the weights after the last step. Call verify under
    ``if __name__ == "__main__":``, since the processes import the script.

    Args:
        model_factory: a function that returns the one-device model. The function is pickled, so define it at the top
            level of a file. Keep the model small: each process holds it in float64.
        plan: the parallel plan: a ParallelPlan, the planner's words ("dp2 tp2+sp zero1"), a dict of its fields, or the
            path of a plan file.
        batch: a global batch for ``model(**batch)``, or a list of global batches; by default token batches that
            distributed programs get wrong (uneven rows, odd lengths, padding, packed documents, accumulation).
        loss: a function of the model and a batch that returns the loss; by default the loss that the model returns.
        steps: the number of optimizer steps.
        seed: the seed of the weights and the tokens.
        perturb: whether to add noise to all parameters of one dim: norms of ones and biases of zeros hide errors.
        config: other options of ``to_distributed``; the plan in them is replaced.
        timeout: seconds for each of the two programs (under the plan, and on one device).
        on_progress: a function that receives a few words at each stage.
        notes: sentences to print below the table.

    Returns:
        The report. A difference does not raise: ``report.ok`` is false, and ``report.suspect`` names the module or the
        parameter to look at first.

    Raises:
        PlanError: if the model cannot run the plan, an argument is wrong, or the factory does not make the same model
            in each process.
        VerificationError: if a process raised another error, ended or did not answer in time.

    Example::

        def small_model():
            return LlamaForCausalLM(LlamaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=97, ...))

        if __name__ == "__main__":
            report = mw.verify(small_model, "dp2 tp2+sp zero1")
            print(report)
            assert report.ok
    """
    started = time.monotonic()
    tell: Tell = on_progress or (lambda text: None)
    plan = resolve_plan(plan)
    _check(model_factory, steps)
    if plan.reduce_dtype is not None:
        raise PlanError(
            f"verify compares numbers to 1e-10, and ParallelPlan.reduce_dtype={plan.reduce_dtype!r} rounds gradients "
            "to 8 bits of precision; leave it out, and verify the rest of the plan"
        )
    if plan.pp > 1 and loss is not None:
        raise PlanError(
            f"verify(loss=...) under ParallelPlan.pp={plan.pp}: the backward pass runs inside the model's forward, so "
            "the loss must be the model's own. Leave loss out and put labels into the batch, or use pp=1"
        )
    if batch is not None:
        given_cases(batch)
    # The check of replicas is off, since the comparison itself finds replicas that differ, parameter by parameter.
    config = dataclasses.replace(config or ToDistributedConfig(), plan=plan, timeout_s=timeout, check_replicas_every=0)
    if batch is None and config.num_items_in_batch == "auto":
        config = dataclasses.replace(config, num_items_in_batch="global")  # what token_cases counts
    start_server([getattr(inspect.unwrap(getattr(model_factory, "func", model_factory)), "__module__", "")])
    with tempfile.TemporaryDirectory(prefix="meshwright-verify-") as folder:
        program = Program(
            factory=model_factory, plan=plan, config=config, batch=batch, loss=loss, steps=steps, seed=seed,
            perturb=perturb, folder=Path(folder),
        )  # fmt: skip
        ((name, changes),) = run_together(run_one_device, 1, program, timeout=timeout, tell=tell)

        def tell_more(text: str) -> None:
            tell(f"{plan.world_size} process(es): {text}")

        found = run_together(run_rank, plan.world_size, program, timeout=timeout, tell=tell_more)
    return Report(
        model=name,
        plan=plan.label,
        processes=plan.world_size,
        rows=summarise(one for rank in found for one in rank),
        seconds=time.monotonic() - started,
        notes=(*notes, *changes),
    )


def _check(model_factory: object, steps: int) -> None:
    if not callable(model_factory):
        raise PlanError(
            f"model_factory is {type(model_factory).__name__}, which cannot be called; pass a function that returns "
            "the model, since each process makes its own"
        )
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise PlanError(f"steps={steps!r} must be a positive integer")
    if "WORLD_SIZE" in os.environ:
        raise PlanError(
            f"this program was launched as {os.environ['WORLD_SIZE']} process(es), but verify starts the processes of "
            "the plan itself; run it with python, without torchrun or meshwright launch"
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise PlanError(
            "verify was called while a process that it started imported this script; call verify under "
            'if __name__ == "__main__":'
        )
    main = sys.modules.get("__main__")
    if getattr(model_factory, "__module__", "") == "__main__" and not hasattr(main, "__file__"):
        raise PlanError(
            "model_factory is defined in a notebook or an interactive session, which the processes cannot import; put "
            "it into a .py file beside the notebook and import it"
        )
