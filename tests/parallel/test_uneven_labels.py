"""Labels that a model is not given, for a loss of the program's own: ranks with unequal numbers of them are told."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import ElectraConfig, ElectraForPreTraining

import meshwright as mw
from meshwright_hf.accelerate import Accelerator
from meshwright_hf.trainer import MeshwrightTrainer
from support.logs import logged
from support.models import build, tokens
from support.short_programs import next_words, smoothed
from support.trainers import arguments, fresh_accelerate

DP = {"dp": 2}
LENGTH = 12


def warnings_of_a_loop(program: str) -> list[str]:
    """What is logged while a hand-written loop trains on rows of one length with unlike numbers of labels."""
    with logged(level=logging.WARNING) as said:
        ids = tokens(8, LENGTH)
        labels = ids.clone()
        labels[::4] = -100  # of each batch of four, the first row: one of rank 0
        labels[::4, -1] = ids[::4, -1]
        dataset: Any = [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]
        if program in ("tuple", "slice"):
            dataset = torch.utils.data.TensorDataset(ids, labels)
        if program == "mask":
            dataset = [{"input_ids": x, "loss_mask": y != -100} for x, y in zip(ids, labels, strict=True)]
        if program == "padding":
            dataset = [{"input_ids": x.where(y != -100, 0)} for x, y in zip(ids, labels, strict=True)]
        loader: Any = torch.utils.data.DataLoader(dataset, batch_size=4)
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**DP))
        model, _, loader = mw.to_distributed(build("llama"), None, loader, config=config)
        if program == "copied":  # a program may train in eval mode, without dropout
            model.eval()
        if program == "rows gathered inside":  # of a forward pass, whose loss is of this rank's rows all the same
            embedding = model.get_input_embeddings()
            embedding.register_forward_hook(lambda _, __, x: x - 0.1 * mw.gather_rows(x).mean(0))
        for batch in loader:
            if program in ("tuple", "slice"):
                x, y = batch
                logits = model(x if program == "tuple" else x[:, :-1]).logits
                F.cross_entropy(logits[:, : LENGTH - 1].flatten(0, 1), y[:, 1:].flatten()).backward()
                continue
            if program == "copied":
                batch = {name: x.clone() for name, x in batch.items()}
            if program == "mask":
                logits = model(batch["input_ids"]).logits
                smoothed(logits, batch["input_ids"].masked_fill(~batch["loss_mask"], -100)).backward()
                continue
            if program == "padding":
                ids = batch["input_ids"]
                smoothed(model(ids).logits, ids.masked_fill(ids == 0, -100)).backward()
                continue
            if program == "dropped":
                del batch["labels"]
                model(**batch).logits.square().mean().backward()
                continue
            other: Any = 0
            if program == "of another model":  # whose own loss has as many labels on each rank
                ids = batch["input_ids"]
                other = smoothed(model(ids).logits, ids)
                model = mw.to_distributed(build("llama"), config=config)[0]
            logits = model(input_ids=batch["input_ids"], attention_mask=torch.ones_like(batch["input_ids"])).logits
            loss = smoothed(logits, batch["labels"])
            if program in ("corrected", "of another model"):
                loss = mw.global_mean(model, loss, next_words(batch))
            if program == "of another model" and dist.get_rank() == 0:
                gc.collect()  # the graph alone keeps the first model, on each rank as long
            (loss + other).backward()
    return [message for message in said if "global_mean" in message]


@pytest.mark.parametrize(
    "program",
    [
        "kept",
        "rows gathered inside",
        "tuple",
        "slice",
        "copied",
        "mask",
        "padding",
        "dropped",
        "corrected",
        "of another model",
    ],
)
def test_labels_that_the_model_was_not_given_are_counted(program: str, pool2: Any) -> None:
    """The loader yielded them; a program that has dropped them computes no loss from them."""
    first, second = pool2.run(warnings_of_a_loop, program)
    assert len(first) == int(program not in ("dropped", "corrected", "of another model")) and not second
    if first:
        counts = LENGTH, 2 * LENGTH - 2  # what torch divides by, or what has a gradient: no first label of a row
        assert "2 rows with {} labels or tokens that count on rank 0; 2 rows with {}".format(*counts) in first[0]


def weighted(model: Any, batch: Any, *, reduction: str = "mean") -> Any:
    """The loss of classes with weights, which torch divides by the sum of the weights of its labels."""
    labels = batch.pop("labels")
    weight = torch.tensor([1.0, 1.5])
    return F.cross_entropy(model(**batch).logits[:, -1, :2], labels, weight=weight, reduction=reduction).sum() / 2


class Weighted(MeshwrightTrainer):
    """The example of transformers' documentation for a loss of one's own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        return weighted(model, inputs)


def warnings_of_weights(folder: Path, program: str) -> list[str]:
    """What is logged while a Trainer or a loop trains on as many rows of other classes on each rank."""
    labels = torch.tensor([0, 0, 1, 1] if program != "equal" else [0, 1, 1, 0])
    dataset: Any = [{"input_ids": x, "labels": y} for x, y in zip(tokens(4, LENGTH), labels, strict=True)]
    with fresh_accelerate(), logged(level=logging.WARNING) as said:
        if program == "Trainer":
            args = arguments(folder, 2, max_steps=1, gradient_accumulation_steps=1)
            Weighted(build("llama"), args, train_dataset=dataset, meshwright=mw.ParallelPlan(**DP)).train()
            return said
        if program == "plain":
            model, _, loader = mw.to_distributed(
                build("llama"), None, torch.utils.data.DataLoader(dataset, batch_size=4), plan=mw.ParallelPlan(**DP)
            )
            for batch in loader:
                weighted(model, batch).backward()
            return said
        accelerator = Accelerator(cpu=True, plan=DP)
        model, loader = accelerator.prepare(build("llama"), torch.utils.data.DataLoader(dataset, batch_size=2))
        for batch in loader:
            loss = weighted(model, batch, reduction="sum" if program == "sum" else "mean")
            accelerator.backward(mw.global_mean(model, loss, 2) if program == "corrected" else loss)
    return said


@pytest.mark.parametrize(
    ("program", "expected"),
    [("Trainer", 1), ("plain", 1), ("accelerate", 1), ("equal", 0), ("sum", 0), ("corrected", 0)],
)
def test_weights_of_labels_are_compared(program: str, expected: int, pool2: Any, tmp_path: Path) -> None:
    first, second = (
        [text for text in said if "global_mean" in text] for said in pool2.run(warnings_of_weights, tmp_path, program)
    )
    assert len(first) == expected and not second
    if first:  # the Trainer shuffles the rows
        sums = "2 rows with 2 labels, by their weights on rank 0; 2 rows with 3 labels, by their weights on rank 1"
        assert (sums if program != "Trainer" else "labels, by their weights") in first[0]


class Dropping(torch.nn.Module):
    """Leaves a layer out, as the layerdrop of Wav2Vec2 does at random on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, *, drops: bool) -> torch.Tensor:
        """Return the result of all layers, or of all but the second."""
        for index, layer in enumerate(self.layers):
            x = x if drops and index == 1 else layer(x)
        return x


def gradients_of_dropping(steps: int) -> dict[str, torch.Tensor]:
    model, *_ = mw.to_distributed(Dropping(), plan=mw.ParallelPlan(**DP))
    rank = torch.distributed.get_rank()
    for _ in range(steps):
        model(torch.ones(2, 4) + rank, drops=rank == 1).square().mean().backward()
    return mw.full_gradients(model)


def test_a_rank_that_drops_a_layer_compares_after_its_gradients(pool2: Any) -> None:
    """In another order than on the other rank, the reductions would wait for each other for ever."""
    found = pool2.run(gradients_of_dropping, 2)[0]
    model = Dropping()
    for rank in (0, 1):
        model(torch.ones(2, 4) + rank, drops=rank == 1).square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)  # the sum of two steps' means over two ranks


def warnings_of_electra(length: int) -> list[str]:
    """What is logged where a head averages over the tokens of the mask, of which rank 1 has fewer."""
    sizes = {"hidden_size": 16, "embedding_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = tokens(2, LENGTH)
    lengths = torch.tensor([[LENGTH], [length]])[torch.distributed.get_rank()]
    with logged(level=logging.WARNING) as said:
        model = ElectraForPreTraining(ElectraConfig(**sizes, vocab_size=97, intermediate_size=16))
        model, *_ = mw.to_distributed(model, plan=mw.ParallelPlan(**DP))
        mask = (torch.arange(LENGTH) < lengths).long().expand_as(ids)
        model(input_ids=ids, attention_mask=mask, labels=ids % 2).loss.backward()
    return [message for message in said if "global_mean" in message]


def test_a_head_that_averages_over_the_mask_is_told_of(pool2: Any) -> None:
    (first,), second = pool2.run(warnings_of_electra, 5)
    assert f"2 rows with {2 * LENGTH} labels" in first and "2 rows with 10 labels" in first and not second
    assert pool2.run(warnings_of_electra, LENGTH) == [[], []]


def warnings_of_pairs(program: str) -> list[str]:
    """What is logged while a loop computes cross-entropies of as many classes as its rank has rows, four times."""
    with logged(level=logging.WARNING) as said:
        model, *_ = mw.to_distributed(Dropping(), plan=mw.ParallelPlan(**DP))
        for step in range(4):
            features = model(torch.randn(4, 4), drops=False)
            if program == "gathered":
                features = mw.gather_rows(features)
            labels = torch.arange(len(features))
            scores = features if program == "classes" else features @ features.T
            F.cross_entropy(scores, labels.flip(0) if program == "classes" and step == 2 else labels).backward()
    return [message for message in said if "number the 4 rows" in message]


@pytest.mark.parametrize(("program", "expected"), [("pairs", 1), ("gathered", 0), ("classes", 0)])
def test_a_contrastive_loss_of_a_ranks_rows_is_told_of(program: str, expected: int, pool2: Any) -> None:
    first, second = pool2.run(warnings_of_pairs, program)
    assert len(first) == expected and not second


def backward_with_hooks(reduction: str) -> float:
    """Train with hooks on saved tensors that unpack each once, as those that offload activations do."""
    kept: dict[int, Any] = {}
    model: Any = mw.to_distributed(build("llama"), plan="dp2")[0]
    logits, labels = model(input_ids=tokens(4, LENGTH)).logits[:, 0], torch.arange(4)

    def pack(x: Any) -> int:
        kept[len(kept)] = x
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, kept.pop):
        loss = F.cross_entropy(logits, labels, reduction=reduction)
    loss.backward()
    assert not kept
    return loss.item()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_tensors_that_can_be_unpacked_once_are_left_to_backward(reduction: str, pool2: Any) -> None:
    assert all(loss > 0 for loss in pool2.run(backward_with_hooks, reduction))
