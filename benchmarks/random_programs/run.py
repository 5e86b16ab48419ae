"""Runs a random program: unchanged on one process, or with ``to_distributed`` under its plan.

Both runs use the same code, except where a user would write something else for a distributed run: the call itself, our
clipping by the global norm, ``no_sync``, and how whole weights are read.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import meshwright as mw
from benchmarks.random_programs.draw import Program
from meshwright.faults.together import on_first_rank
from support.exact import Float64
from support.logs import logged
from support.models import FAMILIES, SIZES

STEPS, EVENT = 4, 2  # unfreezing, writing and resuming happen before step EVENT
WORDS, CLASSES = 97, 3


@dataclass
class Numbers:
    """The results of a run, for comparison; all tensors are whole and in one-device form."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    said: list[Any] = field(default_factory=list)  # what the program reads and prints
    weights: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def run(program: Program, *, distributed: bool) -> Numbers:
    """Train a few steps, and return the results."""
    with logged(level=logging.WARNING) as warnings, Float64():
        numbers = _Run(program, distributed).train()
    numbers.warnings = warnings
    return numbers


class _Run:
    def __init__(self, program: Program, distributed: bool):
        self.program, self.distributed = program, distributed
        self.numbers = Numbers()
        self.activations: list[Tensor] = []
        self.is_first = not distributed or dist.get_rank() == 0
        self.model: Any = build(program)
        if program.batch == "packed" and not distributed:
            # With a cache, transformers on one device lets packed documents attend to each other.
            self.model.config.use_cache = False
        if program.freezing in ("before", "thaw"):
            self._train_only_last_layer()
        self.before = list(self.model.parameters())
        self._hook(is_after=False)
        self.average: Any = self._averaged() if program.average == "before" else None
        self.optimizer: Any = _optimizer(program, self.model)
        torch.manual_seed(program.seed)
        self.loader: Any = DataLoader(rows(program), batch_size=program.rows, shuffle=True)
        if distributed:
            self._distribute()
        self.scheduler = (
            torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS) if program.schedule == "cosine" else None
        )
        self._hook(is_after=True)
        if program.average == "after":
            self.average = self._averaged()
        elif program.average == "by hand":
            self.average = copy.deepcopy(self.model)

    def train(self) -> Numbers:
        step = passes = 0
        count = 2 if self.program.accumulation in ("by hand", "no_sync") else 1
        while step < STEPS:
            for batch in self.loader:
                passes += 1
                is_last = passes % count == 0
                with self._context(is_last):
                    loss = self._loss(batch)
                    self.numbers.losses.append(loss.item())
                    if self.program.hook == "auxiliary loss":
                        loss = loss + 1e-3 * self._auxiliary()
                    (loss / count).backward()
                if not is_last:
                    continue
                self._step(step)
                step += 1
                if step == STEPS:
                    break
                if step == EVENT:
                    self._event()
        self.numbers.weights = self._whole(self.model)
        if self.average is not None:
            inner = self.average.module if isinstance(self.average, AveragedModel) else self.average
            self.numbers.average = self._whole(inner)
        return self.numbers

    # ---- the parts of a program

    def _distribute(self) -> None:
        program = self.program
        plan = program.plan + (" ga2" if program.accumulation == "plan" else "")
        config = mw.ToDistributedConfig(gather_logits=program.loss == "own")
        self.model, self.optimizer, self.loader = mw.to_distributed(
            self.model, self.optimizer, self.loader, plan=plan, config=config
        )

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        program = self.program
        self.activations.clear()
        if program.loss == "own counts":
            count = (batch["labels"][:, 1:] != -100).sum()
            loss = self.model(**batch, num_items_in_batch=count).loss
        elif program.loss == "own":
            logits = self.model(**batch).logits
            loss = nn.functional.cross_entropy(
                logits[:, :-1].reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1)
            )
        else:
            loss = self.model(**batch).loss
        if program.regulariser != "none":
            chosen = [p for p in self.model.parameters() if p.ndim == 1 or program.regulariser == "all"]
            loss = loss + 1e-3 * sum((p**2).sum() for p in chosen)
        return loss

    def _auxiliary(self) -> Tensor:
        loss = self.activations[0].pow(2).mean()
        return mw.global_mean(self.model, loss, len(self.activations[0])) if self.distributed else loss

    def _context(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        if self.program.accumulation == "no_sync" and self.distributed and not is_last:
            return mw.no_sync(self.model)
        return contextlib.nullcontext()

    def _step(self, step: int) -> None:
        program, numbers = self.program, self.numbers
        if program.write == "gradient" and step == EVENT:
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, 0.01).detach()
        if program.reading == "gradient norm":
            squares = [(p.grad**2).sum() for p in self.model.parameters() if p.grad is not None]
            numbers.said.append(sum(squares).item())  # type: ignore[union-attr]
        if program.clipping == "ours":
            numbers.norms.append(mw.clip_grad_norm_(self.model, 0.5).item())
        elif program.clipping != "none":
            numbers.norms.append(torch.nn.utils.clip_grad_norm_(self.before, 0.5).item())
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        if program.zeroing == "model":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=program.zeroing == "optimizer")
        if isinstance(self.average, AveragedModel):
            self.average.update_parameters(self.model)
        elif self.average is not None:
            with torch.no_grad():
                for ours, theirs in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    ours.mul_(0.9).add_(theirs, alpha=0.1)
        self._read()

    def _event(self) -> None:
        program = self.program
        if program.freezing == "thaw":
            for parameter in self.model.parameters():
                parameter.requires_grad_(True)
        elif program.freezing == "freeze":
            self._train_only_last_layer()
        if program.write == "clamp":
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.clamp_(-0.05, 0.05)
        elif program.write == "load_state_dict":
            self.model.load_state_dict(build(program, seed=5).state_dict())
        if program.evaluation == "loss":
            self.model.eval()
            with torch.no_grad():
                self.numbers.said.append(self.model(**_collated(program)).loss.item())
            self.model.train()
        elif program.evaluation == "generate":
            self.model.eval()
            ids = _collated(program)["input_ids"][:, :4]
            self.numbers.said.append(self.model.generate(ids, max_new_tokens=4, do_sample=False).tolist())
            self.model.train()
        if program.resume == "files":
            self._resume()

    def _read(self) -> None:
        reading, said = self.program.reading, self.numbers.said
        if reading == "parameter count":
            said.append(sum(p.numel() for p in self.model.parameters()))
        elif reading == "weight norm":
            said.append(sum((p.detach() ** 2).sum() for p in self.model.parameters()).item())  # type: ignore[union-attr]
        elif reading == "state_dict":
            said.append(sum(x.double().abs().sum().item() for x in self.model.state_dict().values()))
        elif reading == "copy":
            said.append(self._evaluated(copy.deepcopy(self.model)))

    def _evaluated(self, model: Any) -> float:
        model.eval()
        with torch.no_grad():
            return model(**_collated(self.program)).loss.item()

    def _resume(self) -> None:
        """Save, change the options, and load, as a restarted script does; does nothing without a plan."""
        if not self.distributed:
            return
        with tempfile.TemporaryDirectory() as folder:
            place = Path(on_first_rank(lambda: folder))
            mw.save_weights(self.model, place / "weights")
            mw.save_optimizer(self.model, self.optimizer, place / "optimizer")
            with torch.no_grad():
                for group in self.optimizer.param_groups:
                    group["lr"] = 0.123
            mw.load_weights(self.model, place / "weights")
            mw.load_optimizer(self.model, self.optimizer, place / "optimizer")
            dist.barrier()

    def _hook(self, *, is_after: bool) -> None:
        hook = self.program.hook
        layer = self.model.get_submodule("model.layers.0") if not is_after else None
        if hook == ("gradient, after" if is_after else "gradient, before"):
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(lambda grad: grad * 0.5)
        if layer is not None and hook in ("activation", "auxiliary loss"):
            layer.register_forward_hook(lambda module, args, output: self.activations.append(_first(output)))

    def _train_only_last_layer(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("layers.1" in name or "score" in name)

    def _averaged(self) -> AveragedModel:
        return AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def _whole(self, model: Any) -> dict[str, Tensor]:
        state = mw.full_state_dict(model) if self.distributed else model.state_dict()
        return {name: x.detach().clone() for name, x in state.items()} if self.is_first else {}


def build(program: Program, *, seed: int = 0) -> nn.Module:
    """Return the model of a program, in float64 and with random parameters; other options have stock defaults."""
    import transformers

    config_class, model_class, traits = FAMILIES[program.family]
    sizes = {name: size for name, size in SIZES.items() if name != "use_cache"}
    options = {**sizes, **traits, "num_key_value_heads": program.kv_heads, "tie_word_embeddings": program.is_tied}
    kind: Any = model_class
    if program.head != "causal":
        suffix = "ForSequenceClassification" if program.head == "sequence" else "ForTokenClassification"
        kind = getattr(transformers, model_class.__name__.replace("ForCausalLM", suffix))
        options["num_labels"] = CLASSES
        options["classifier_dropout"] = 0.0  # dropout masks differ from those on one device, by design
    torch.manual_seed(seed)
    model: Any = kind(config_class(**options)).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    if program.recompute:
        model.gradient_checkpointing_enable()
    return model


def rows(program: Program) -> list[dict[str, Tensor]]:
    """Return the data: 5 full batches and a smaller one, for any number of rows per batch."""
    generator = torch.Generator().manual_seed(program.seed)
    length, examples = program.length, []
    for index in range(program.rows * 5 + program.rows // 2):
        ids = torch.randint(3, WORDS, (length,), generator=generator)
        example = {"input_ids": ids, "labels": ids.clone()}
        example["labels"][: index % 5] = -100
        if program.batch == "padded":
            mask = torch.ones_like(ids)
            mask[length - index % 4 :] = 0
            example["attention_mask"] = mask
            example["input_ids"] = ids.masked_fill(mask == 0, 0)
            example["labels"] = example["labels"].masked_fill(mask == 0, -100)
        elif program.batch == "packed":
            border = 3 + index % 5
            example["position_ids"] = torch.cat([torch.arange(border), torch.arange(length - border)])
        if program.head == "sequence":
            example["labels"] = ids[0] % CLASSES
        elif program.head == "token":
            example["labels"] = (ids % CLASSES).masked_fill(example["labels"] == -100, -100)
        examples.append(example)
    return examples


def _collated(program: Program) -> dict[str, Tensor]:
    return torch.utils.data.default_collate(rows(program)[: program.rows])


def _optimizer(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    parameters: Any = list(model.parameters())
    if program.groups == 2:
        parameters = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
    if program.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
    kind = torch.optim.AdamW if program.optimizer == "adamw" else torch.optim.Adagrad
    return kind(parameters, lr=1e-3)


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
