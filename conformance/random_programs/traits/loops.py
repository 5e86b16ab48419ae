"""Traits of the training loop: clipping, accumulation, freezing, hooks, evaluation and resuming."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

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


# ---- hooks on the gradients of parameters


def _each_trained(run: Run) -> list[nn.Parameter]:
    return [parameter for parameter in run.model.parameters() if parameter.requires_grad]


def _on_each(change: Callable[[Tensor], Tensor]) -> Callable[[Run], None]:
    def install(run: Run) -> None:
        for parameter in _each_trained(run):
            parameter.register_hook(change)

    return install


def _on_words(change: Callable[[Tensor], Tensor]) -> Callable[[Run], None]:
    return lambda run: run.model.get_input_embeddings().weight.register_hook(change)


def _after_each(change: Callable[[Any], object]) -> Callable[[Run], None]:
    def hook(parameter: Tensor) -> None:
        change(parameter.grad)

    def install(run: Run) -> None:
        for parameter in _each_trained(run):
            parameter.register_post_accumulate_grad_hook(hook)

    return install


def _together(run: Run) -> None:
    register_multi_grad_hook(_each_trained(run), lambda grads: run.say(sum(grad is not None for grad in grads)))


def _without_old_words(grad: Tensor) -> Tensor:
    """Train the new words alone, whose rows are the last."""
    grad = grad.clone()
    grad[:90] = 0
    return grad


for _index, (_name, _install) in enumerate(
    {
        "new words alone, by rows": _on_words(_without_old_words),
        "new words alone, by a mask": _on_words(lambda grad: grad * (torch.arange(97) >= 90)[:, None]),
        "gradients over their norm": _on_each(lambda grad: grad / (grad.norm() + 1)),
        "gradients minus their mean": _on_each(lambda grad: grad - grad.mean()),
        "gradients halved when summed": _after_each(lambda grad: grad.mul_(0.5)),
        "gradients clipped when summed": _after_each(lambda grad: grad.clamp_(-1e-4, 1e-4)),
        "gradients clipped by each norm": _after_each(lambda grad: grad.div_(grad.norm() + 1)),
        "a hook of all gradients": _together,
    }.items()
):
    _more = {"sharing", "parametrization", "tied", "head"} | ({"freezing"} if "words" in _name else set())
    for _when, _point in (("before", "build"), (("after", "ready"), ("in step 1", "event"))[_index % 2]):
        add(
            Trait(
                name=f"hook {_when}: {_name}",
                kind="hook",
                may=TOLD,
                tells="hook|gradient",
                without=frozenset(_more),
                **{_point: _install},  # type: ignore[arg-type]
            )
        )


# ---- errors that the loop catches


def _mark(example: dict[str, Any], index: int) -> None:
    """Begin one row with a token that no other has."""
    if index == 1:
        example["input_ids"] = torch.cat([torch.tensor([2]), example["input_ids"][1:]])


def _fail(run: Run, batch: dict[str, Any], *, is_late: bool) -> Tensor:
    """Raise for the batch with the marked row, before the forward pass or after it."""
    is_bad = bool((batch["input_ids"] == 2).any())
    if is_bad and not is_late:
        raise IndexError("a bad row")
    loss: Tensor = run.model(**batch).loss
    if is_bad:
        raise RuntimeError("out of memory")
    return loss


for _what, _error in {"a bad row": IndexError, "out of memory": RuntimeError, "any error": Exception}.items():
    add(
        Trait(
            name=f"{_what} is skipped",
            kind="loss",
            may=TOLD,
            tells="skip|caught",
            values={"skips": (_error,)},
            example=_mark,
            loss=functools.partial(_fail, is_late=_error is RuntimeError),
            without=frozenset({"head", "keyword", "accumulation", "rows", "tail", "term", "batch-wide"}),
        )
    )


class _Skipped(Exception):
    """Leaves a batch out."""


def _skip_easy(run: Run, batch: dict[str, Any]) -> Tensor:
    """Leave out the first batch with a smaller loss than the first one has."""
    loss: Tensor = run.model(**batch).loss
    if loss.item() < run.memory.setdefault("largest loss", loss.item()):
        run.memory["largest loss"] = 0.0
        raise _Skipped
    return loss


add(
    Trait(
        name="a batch with a small loss is skipped",
        kind="loss",
        may=TOLD,
        values={"skips": (_Skipped,)},
        loss=_skip_easy,
        without=frozenset({"head", "keyword", "accumulation", "state"}),
    )
)
