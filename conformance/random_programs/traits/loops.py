"""Traits of the training loop: clipping, accumulation, freezing, hooks, evaluation and resuming."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import meshwright as mw
from conformance.random_programs.trait import TOLD, Trait
from meshwright.faults.together import on_first_rank

if TYPE_CHECKING:
    from conformance.random_programs.run import Run

TRAITS: list[Trait] = []
add = TRAITS.append

add(Trait(name="no clipping", kind="clipping", values={"clips": False}))
add(
    Trait(
        name="torch's clipping of a list made before",
        kind="clipping",
        may=TOLD,
        build=lambda run: run.memory.update(parameters=list(run.model.parameters())),
        clip=lambda run: torch.nn.utils.clip_grad_norm_(run.memory["parameters"], 0.5),
        without=frozenset({"sharing", "parametrization", "adapter", "state"}),
    )
)
add(
    Trait(
        name="torch's clipping after the call",
        kind="clipping",
        may=TOLD,
        clip=lambda run: torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5),
    )
)

add(Trait(name="accumulation by hand", kind="accumulation", values={"passes": 2}))
add(Trait(name="accumulation with no_sync", kind="accumulation", values={"passes": 2, "has_no_sync": True}))
add(Trait(name="micro-batches", kind="accumulation", may=TOLD, words="ga2"))

add(
    Trait(
        name="gradient checkpointing",
        kind="recompute",
        may=TOLD,
        build=lambda run: run.model.gradient_checkpointing_enable({"use_reentrant": False}),
    )
)
add(
    Trait(
        name="reentrant gradient checkpointing",
        kind="recompute",
        may=TOLD,
        build=lambda run: run.model.gradient_checkpointing_enable({"use_reentrant": True}),
        without=frozenset({"freezing"}),
    )
)

add(Trait(name="eval mode", kind="mode", may=TOLD, build=lambda run: run.model.eval(), without=frozenset({"state"})))
add(
    Trait(
        name="eval mode after the call",
        kind="mode",
        may=TOLD,
        ready=lambda run: run.model.eval(),
        without=frozenset({"state"}),
    )
)
add(Trait(name="eval mode after a step", kind="mode", may=TOLD, event=lambda run: run.model.eval()))


# ---- freezing


def _train_last_layer(run: Run) -> None:
    last = f"layers.{len(run.layers) - 1}."
    for name, parameter in run.model.named_parameters():
        parameter.requires_grad_(last in name or "score" in name)


def _thaw(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.requires_grad_(True)


def _freeze_embedding(run: Run) -> None:
    run.model.get_input_embeddings().weight.requires_grad_(False)


_NOT_FROZEN = frozenset({"sharing"})
add(Trait(name="frozen before", kind="freezing", build=_train_last_layer, without=_NOT_FROZEN))
add(Trait(name="thawed during the run", kind="freezing", build=_train_last_layer, event=_thaw, without=_NOT_FROZEN))
add(Trait(name="frozen during the run", kind="freezing", event=_train_last_layer, without=_NOT_FROZEN))
add(Trait(name="a frozen embedding", kind="freezing", build=_freeze_embedding))


# ---- hooks on gradients


def _halve_gradients(run: Run) -> None:
    for parameter in run.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad: grad * 0.5)


add(Trait(name="a hook on gradients, before", kind="hook", build=_halve_gradients))
add(Trait(name="a hook on gradients, after", kind="hook", ready=_halve_gradients))


def _fill_gradients(run: Run) -> None:
    if run.step == 1:
        for parameter in run.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 0.01).detach()


def _scale_gradients(run: Run) -> None:
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


add(Trait(name="gradients of the program", kind="gradients", may=TOLD, gradients=_fill_gradients))
add(Trait(name="gradients scaled in place", kind="gradients", may=TOLD, gradients=_scale_gradients))


add(Trait(name="model.zero_grad", kind="zeroing", values={"zeroing": "model"}))
add(Trait(name="set_to_none=False", kind="zeroing", may=TOLD, values={"zeroing": "zeros"}))


# ---- evaluation and resuming


def _generate(run: Run) -> None:
    was_training = run.model.training
    run.model.eval()
    ids = run.batch()["input_ids"][:, :4]
    run.say(run.model.generate(ids, max_new_tokens=4, do_sample=False).tolist())
    run.model.train(was_training)


add(
    Trait(
        name="evaluation",
        kind="evaluation",
        may=TOLD,
        event=lambda run: run.say(run.evaluate(run.model)),
        without=frozenset({"head"}),
    )
)
add(Trait(name="generate", kind="generation", may=TOLD, event=_generate, without=frozenset({"head", "rope", "rows"})))


def _resume(run: Run) -> None:
    """Save, change the options, and load, as a restarted script does; does nothing without a plan."""
    if not run.distributed:
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(on_first_rank(lambda: folder))
        mw.save_weights(run.model, place / "weights")
        mw.save_optimizer(run.model, run.optimizer, place / "optimizer")
        with torch.no_grad():
            for group in run.optimizer.param_groups:
                group["lr"] = 0.123
        mw.load_weights(run.model, place / "weights")
        mw.load_optimizer(run.model, run.optimizer, place / "optimizer")
        dist.barrier()


def _checkpoint(run: Run) -> None:
    """Save all of the run in one commit, spoil the weights, and load; does nothing without a plan."""
    if not run.distributed:
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(on_first_rank(lambda: folder))
        mw.save_checkpoint(place, run.model, run.optimizer)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.zero_()
        mw.load_checkpoint(place, run.model, run.optimizer)
        dist.barrier()


add(Trait(name="resumed from files", kind="resume", may=TOLD, event=_resume))
add(Trait(name="resumed from a checkpoint", kind="resume", may=TOLD, event=_checkpoint))
