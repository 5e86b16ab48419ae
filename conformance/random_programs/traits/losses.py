"""Traits of the loss: losses of the program's own, factors on the model's loss, and keywords of the model's call."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from conformance.random_programs.trait import SPLIT, TOLD, Trait
from conformance.random_programs.traits.forwards import first_of

if TYPE_CHECKING:
    from conformance.random_programs.run import Run

TRAITS: list[Trait] = []
add = TRAITS.append

_WHOLE = {"gather_logits": True}
_OWN = frozenset({"head", "keyword"})
Batch = dict[str, Any]


def _logits(run: Run, batch: Batch, *, has_labels: bool = False) -> Tensor:
    return run.model(**{name: x for name, x in batch.items() if has_labels or name != "labels"}).logits


def _token_losses(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Return each token's loss; 0 where there is no label."""
    return functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), reduction="none", **options
    ).view(len(labels), -1)


def _mean(run: Run, batch: Batch, **options: Any) -> Tensor:
    logits = _logits(run, batch, has_labels=options.pop("has_labels", False))
    losses = _token_losses(logits, batch["labels"], **options)
    return losses.sum() / (batch["labels"][:, 1:] != -100).sum().clamp(min=1)


def _sum(run: Run, batch: Batch) -> Tensor:
    return _token_losses(_logits(run, batch), batch["labels"]).sum() / 100


def _mean_of_rows(run: Run, batch: Batch) -> Tensor:
    losses = _token_losses(_logits(run, batch), batch["labels"])
    counts = (batch["labels"][:, 1:] != -100).sum(-1).clamp(min=1)
    return (losses.sum(-1) / counts).mean()


def _weighted(run: Run, batch: Batch) -> Tensor:
    losses = _token_losses(_logits(run, batch), batch["labels"])
    weights = (batch["input_ids"][:, 1:] % 3 + 1).double()
    return (losses * weights).sum() / weights.sum()


def _distilled(run: Run, batch: Batch) -> Tensor:
    """Compare with a fixed teacher's distribution over all tokens."""
    logits = _logits(run, batch)
    teacher = functional.one_hot(batch["input_ids"] * 5 % 97, 97).double() * 2
    return functional.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")


def _z_loss(run: Run, batch: Batch) -> Tensor:
    output = run.model(**batch)
    return output.loss + 1e-2 * output.logits.logsumexp(-1).pow(2).mean()


def _contrastive(run: Run, batch: Batch) -> Tensor:
    """Tell each row from the others of its batch (InfoNCE)."""
    rows = run.all_rows(functional.normalize(_logits(run, batch).mean(1), dim=-1))
    return functional.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)))


def _contrastive_beside(run: Run, batch: Batch) -> Tensor:
    output = run.model(**batch)
    rows = run.all_rows(functional.normalize(output.logits.mean(1), dim=-1))
    return output.loss + 0.1 * functional.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)))


def _advantages(run: Run, batch: Batch) -> Tensor:
    """Weight rows by rewards that are normalised over the batch, as policy gradients do."""
    rewards = run.all_rows(batch["input_ids"][:, 0].double())
    advantages = (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-3)
    return (advantages[:, None] * run.all_rows(_token_losses(_logits(run, batch), batch["labels"]))).mean()


def _preferred(run: Run, batch: Batch) -> Tensor:
    """Prefer the first half of the batch to the second, as DPO does."""
    losses = run.all_rows(_token_losses(_logits(run, batch), batch["labels"]).sum(-1))
    half = len(losses) // 2
    return -functional.logsigmoid(0.1 * (losses[half : 2 * half] - losses[:half])).mean() if half else losses.mean()


for _name, _loss in {
    "own loss without labels": _mean,
    "own loss with labels": lambda run, batch: _mean(run, batch, has_labels=True),
    "own loss with label smoothing": lambda run, batch: _mean(run, batch, label_smoothing=0.1),
    "sum of token losses": _sum,
    "mean of the rows' means": _mean_of_rows,
    "weighted tokens": _weighted,
    "distillation": _distilled,
    "z-loss beside the model's": _z_loss,
    "contrastive": _contrastive,
    "contrastive beside the model's": _contrastive_beside,
    "normalised advantages": _advantages,
    "preferences": _preferred,
}.items():
    add(
        Trait(
            name=_name,
            kind="loss",
            may=TOLD,
            warns="global_mean",
            loss=_loss,
            by_design=SPLIT if _name == "weighted tokens" else "",
            options=_WHOLE,
            is_local=True,
            without=_OWN | {"rope dynamic", "collator: all rows in one"},
        )
    )


def _declared(run: Run, batch: Batch) -> Tensor:
    """Average an own loss as the docs tell users to: by ``mw.global_mean``."""
    losses = _token_losses(_logits(run, batch), batch["labels"])
    count = (batch["labels"][:, 1:] != -100).sum()
    return run.global_mean(losses.sum() / count.clamp(min=1), count)


add(
    Trait(
        name="own loss with global_mean",
        kind="loss",
        may=TOLD,
        loss=_declared,
        options=_WHOLE,
        without=_OWN | {"collator: all rows in one"},
    )
)


# ---- factors on the loss


def _count(batch: Batch) -> Tensor:
    return (batch["labels"] != -100).sum()


for _name, _factor in {
    "loss * n / N": lambda run, batch, loss: loss * _count(batch) / 40,
    "loss * rows": lambda run, batch, loss: loss * len(batch["input_ids"]) / 3,
    "loss * tokens": lambda run, batch, loss: loss * batch["input_ids"].numel() / 50,
    "weight by the first token": lambda run, batch, loss: loss * (1 + batch["input_ids"][0, 0] / 97),
    "weight by the labels": lambda run, batch, loss: loss * (batch["labels"].double().mean().abs() / 50),
}.items():
    add(
        Trait(
            name=_name,
            kind="factor",
            may=TOLD,
            by_design=SPLIT if _name in ("loss * rows", "loss * tokens") else "",  # often equal on all ranks
            factor=_factor,
            is_local=True,
            without=frozenset({"head"}),
        )
    )
for _name, _factor in {
    "loss / 3": lambda run, batch, loss: loss / 3,
    "a weight that falls with the step": lambda run, batch, loss: loss / (1 + run.step),
    "loss ** 2": lambda run, batch, loss: loss**2,
    "logarithm of the loss": lambda run, batch, loss: loss.log(),
    "loss clamped from below": lambda run, batch, loss: loss.clamp(min=0.1) * 2,
}.items():
    add(Trait(name=_name, kind="factor", factor=_factor))


# ---- keywords of the model's call


def _keywords(run: Run, batch: Batch, **values: Any) -> Tensor:
    return run.model(**{**batch, **values}).loss


def _without_ids(batch: Batch) -> Batch:
    return {name: x for name, x in batch.items() if name != "input_ids"}


def _shifted(batch: Batch) -> Tensor:
    return functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()


def _ignored(run: Run, batch: Batch) -> Tensor:
    labels = batch["labels"].masked_fill(batch["labels"] == -100, -1)
    return _keywords(run, batch, labels=labels, ignore_index=-1)


def _shifted_count(batch: Batch) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


for _name, _loss in {
    "ignore_index=-1": _ignored,
    "ignore_index=5": lambda run, batch: _keywords(run, batch, ignore_index=5, labels=batch["labels"].clamp(min=5)),
    "label_smoothing": lambda run, batch: _keywords(run, batch, label_smoothing=0.1),
    "num_items_in_batch": lambda run, batch: _keywords(run, batch, num_items_in_batch=_shifted_count(batch)),
    "num_items_in_batch, a number": lambda run, batch: _keywords(
        run, batch, num_items_in_batch=int(_shifted_count(batch))
    ),
    "num_items_in_batch, of labels": lambda run, batch: _keywords(run, batch, num_items_in_batch=_count(batch)),
    "num_items_in_batch, rows": lambda run, batch: _keywords(run, batch, num_items_in_batch=len(batch["labels"])),
    "num_items_in_batch, 30": lambda run, batch: _keywords(run, batch, num_items_in_batch=30),
    "shift_labels": lambda run, batch: _keywords(run, batch, shift_labels=_shifted(batch)),
    "logits_to_keep=0": lambda run, batch: _keywords(run, batch, logits_to_keep=0),
    "return_dict=False": lambda run, batch: run.model(**batch, return_dict=False)[0],
    "inputs_embeds": lambda run, batch: (
        run.model(inputs_embeds=run.model.get_input_embeddings()(batch["input_ids"]), **_without_ids(batch)).loss
    ),
    "positional input_ids": lambda run, batch: run.model(batch["input_ids"], **_without_ids(batch)).loss,
    "two passes": lambda run, batch: (run.model(**batch).loss + run.model(**batch).loss) / 2,
}.items():
    _with = {"inputs permuted by a hook"} if _name in ("inputs_embeds", "positional input_ids") else set()
    add(
        Trait(
            name=_name,
            kind="keyword",
            may=TOLD,
            loss=_loss,
            is_local=_name.startswith("num_items_in_batch, "),
            without=frozenset({"head", "loss", *_with}),
        )
    )


# ---- terms beside the loss


def _penalty(run: Run, batch: Batch, loss: Tensor, *, is_all: bool) -> Tensor:
    chosen = [p for p in run.model.parameters() if p.ndim == 1 or is_all]
    return loss + 1e-3 * sum((p**2).sum() for p in chosen)


_SEEN = "activations of the first layer"


def _watch(run: Run) -> None:
    run.memory[_SEEN] = []
    run.layers[0].register_forward_hook(lambda module, args, output: run.memory[_SEEN].append(first_of(output)))


def _auxiliary(run: Run, batch: Batch, loss: Tensor, *, is_declared: bool) -> Tensor:
    seen = run.memory[_SEEN]
    if not seen:  # on a rank without this layer
        return loss
    term = seen[-1].pow(2).mean()
    rows = len(seen[-1])
    seen.clear()
    return loss + 1e-3 * (run.global_mean(term, rows) if is_declared else term)


for _what in ("norms", "all weights"):
    add(
        Trait(
            name=f"penalty on {_what}",
            kind="term",
            may=TOLD,
            factor=functools.partial(_penalty, is_all=_what == "all weights"),
            without=frozenset({"factor"}),
        )
    )
for _declares in (True, False):
    add(
        Trait(
            name=f"a term of activations, {'with' if _declares else 'without'} global_mean",
            kind="term",
            may=TOLD,
            warns="sees this rank's|runs once for each micro-batch" + ("" if _declares else "|global_mean"),
            is_local=True,
            build=_watch,
            factor=functools.partial(_auxiliary, is_declared=_declares),
            without=frozenset({"factor", "recompute", "two passes", "a copy of the model"}),
        )
    )


def _moved(module: nn.Module, args: Any, output: Any) -> Any:
    output["loss"] = output["loss"] * 2
    return output


add(
    Trait(
        name="a hook that sets the loss",
        kind="hook",
        may=TOLD,
        build=lambda run: run.model.register_forward_hook(_moved),
        without=frozenset({"return_dict=False", "loss", "evaluation", "a copy of the model"}),
    )
)
