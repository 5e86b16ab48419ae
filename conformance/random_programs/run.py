"""Runs a random program: unchanged on one process, or with ``to_distributed`` under its plan.

Both runs use the same code, except where a user would write something else for a distributed run: the call itself, our
clipping by the global norm, ``no_sync``, ``global_mean``, and how whole weights are read.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, default_collate

import meshwright as mw
from conformance.random_programs.draw import Program
from support.exact import Float64
from support.logs import logged
from support.models import FAMILIES, SIZES

STEPS = 2  # events happen between them
WORDS = 97
FULL_BATCHES = 2
MOST_SKIPPED = 20  # batches that end with an error
TIMEOUT = 25.0  # seconds until Meshwright itself ends a program whose ranks wait for one another


@dataclass
class Numbers:
    """The results of a run, for comparison; all tensors are whole and in one-device form."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    said: list[Any] = field(default_factory=list)  # what the program reads and prints
    weights: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    moved: float = 0.0  # the largest change of a weight since the start
    plan: str = ""  # the label of the plan that was in force at the end


def run(program: Program, *, distributed: bool) -> Numbers:
    """Train a few steps, and return the results."""
    torch.manual_seed(program.seed)
    with logged(level=logging.WARNING) as warnings, Float64():
        numbers = Run(program, distributed).train()
    numbers.warnings = warnings
    return numbers


class Run:
    """One run of a program; traits change its model, data and loop through this object.

    Args:
        program: the program.
        distributed: whether to run it under its plan.
    """

    SETTINGS: ClassVar[dict[str, Any]] = {  # what ``Trait.values`` may set, and the plain loop's values
        "family": "llama",
        "head": "ForCausalLM",
        "length": 12,
        "rows": 4,  # of a batch
        "has_tail": False,
        "passes": 1,  # before each step
        "has_no_sync": False,
        "clips": True,
        "zeroing": "optimizer",
        "uses_cache_on_one": True,
        "skips": (),  # errors upon which the loop goes on with the next batch
    }

    def __init__(self, program: Program, distributed: bool):
        self.program, self.distributed, self.traits = program, distributed, program.traits
        self.settings = self.SETTINGS | {name: x for trait in self.traits for name, x in trait.values.items()}
        self.numbers, self.memory = Numbers(), dict[str, Any]()
        self.step, self.average, self.scheduler = 0, None, None
        self.current: dict[str, Any] = {}
        self.model: Any = self.new_model()
        if not distributed and not self.settings["uses_cache_on_one"]:
            self.model.config.use_cache = False
        self._call("build")
        self.optimizer: Any = None if self._is("has_no_optimizer") else self.new_optimizer()
        torch.manual_seed(program.seed)
        self.loader: Any = self._new_loader()
        self._call("before")
        self.start = {name: x.detach().clone() for name, x in self.model.state_dict().items()}
        if distributed:
            self._distribute()
        self._call("ready")

    def train(self) -> Numbers:
        """Train, and return what the program printed and learnt."""
        passes, failed, count = 0, 0, self.settings["passes"]
        while self.step < STEPS:
            for batch in self.loader:
                passes += 1
                self.current = batch
                is_last = passes % count == 0
                try:
                    with self._context(is_last):
                        loss = self._loss(batch)
                        self.numbers.losses.append(loss.item())
                        (loss / count).backward()
                except self.settings["skips"] as error:
                    failed += 1  # a program that skips each batch has an end, without a step
                    if failed > MOST_SKIPPED and type(error).__module__ == mw.errors.__name__:
                        raise
                    continue
                if is_last:
                    self._step()
                if self.step == STEPS:
                    break
        self._finish()
        return self.numbers

    # ---- what traits use

    @property
    def layers(self) -> Any:
        return self.model.model.layers

    def say(self, value: Any) -> None:
        """Record what the program prints."""
        self.numbers.said.append(value)

    def new_model(self, *, seed: int = 0) -> Any:
        """Return the stock model of the program, in float64 and with random parameters."""
        return _build(self.program, self.settings, seed)

    def new_optimizer(self) -> torch.optim.Optimizer:
        """Return the program's optimizer over the weights that the model has now."""
        make = self._only("optimizer") or (lambda model: torch.optim.AdamW(list(model.parameters()), lr=1e-3))
        return make(self.model)

    def distribute_optimizer(self) -> None:
        """Pass the optimizer to a second call, as for a model that was distributed without one."""
        if self.distributed:
            self.model, self.optimizer, _ = mw.to_distributed(self.model, self.optimizer)

    def global_mean(self, value: Tensor, count: Any) -> Tensor:
        """Average over the rows of all ranks, as the docs tell users to."""
        return mw.global_mean(self.model, value, count) if self.distributed else value

    def all_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks, as the docs tell users to take them for what mixes the rows of a batch."""
        return mw.gather_rows(rows, self.model) if self.distributed else rows

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """The function that makes a batch of examples."""
        return self._only("collate") or default_collate

    def batch(self) -> dict[str, Any]:
        """Return a batch for evaluation, the same on all ranks."""
        return self.collate(_examples(self.program, self.settings)[: self.settings["rows"]])

    def evaluate(self, model: Any) -> float:
        """Return the loss of a batch in eval mode."""
        was_training = model.training
        model.eval()
        with torch.no_grad():
            loss = model(**self.batch()).loss.item()
        model.train(was_training)
        return loss

    # ---- the loop

    def _distribute(self) -> None:
        options: dict[str, Any] = {"timeout_s": TIMEOUT}
        for trait in self.traits:
            options |= trait.options
        optimizer = None if self._is("has_no_optimizer") else self.optimizer
        self.model, distributed, self.loader = mw.to_distributed(
            self.model, optimizer, self.loader, plan=self.program.words, config=mw.ToDistributedConfig(**options)
        )
        self.optimizer = self.optimizer if optimizer is None else distributed

    def _loss(self, batch: dict[str, Any]) -> Tensor:
        own = self._only("loss")
        loss = own(self, batch) if own is not None else self.model(**batch).loss
        for trait in self.traits:
            if trait.factor is not None:
                loss = trait.factor(self, batch, loss)
        return loss

    def _context(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        if self.settings["has_no_sync"] and self.distributed and not is_last:
            return mw.no_sync(self.model)
        return contextlib.nullcontext()

    def _step(self) -> None:
        self._call("gradients")
        clip = self._only("clip")
        if clip is not None:
            self.numbers.norms.append(clip(self).item())
        elif self.settings["clips"]:
            self.numbers.norms.append(mw.clip_grad_norm_(self.model, 0.5).item())
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.settings["zeroing"] == "model":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=self.settings["zeroing"] == "optimizer")
        self.step += 1
        self._call("stepped")
        if self.step == 1:
            self._call("event")

    def _finish(self) -> None:
        numbers = self.numbers
        numbers.weights = self._whole(self.model)
        if self.average is not None:
            is_wrapped = isinstance(self.average, AveragedModel)
            numbers.average = self._whole(self.average.module if is_wrapped else self.average)
        if self.distributed:
            numbers.plan = mw.plan_of(self.model).label
        known = {name: x for name, x in numbers.weights.items() if x.numel() and name in self.start}
        changes = [(x - self.start[name]).abs().max().item() for name, x in known.items()]
        numbers.moved = max(changes, default=0.0)

    def _whole(self, model: Any) -> dict[str, Tensor]:
        state = mw.full_state_dict(model) if self.distributed else model.state_dict()
        is_first = not self.distributed or dist.get_rank() == 0
        return {name: x.detach().clone() for name, x in state.items()} if is_first else {}

    # ---- the traits of this program

    def _call(self, point: str) -> None:
        for trait in self.traits:
            function = getattr(trait, point)
            if function is not None:
                function(self)

    def _only(self, point: str) -> Callable[..., Any] | None:
        """Return the one function that replaces a part of the plain loop, if a trait has it."""
        found = [function for trait in self.traits if (function := getattr(trait, point)) is not None]
        return found[0] if found else None

    def _is(self, attribute: str) -> bool:
        return any(getattr(trait, attribute) for trait in self.traits)

    def _new_loader(self) -> Any:
        examples = _examples(self.program, self.settings)
        dataset = (self._only("dataset") or list)(examples)
        if (make := self._only("loader")) is not None:
            return make(self, dataset)
        return DataLoader(dataset, batch_size=self.settings["rows"], shuffle=True, collate_fn=self.collate)


def _build(program: Program, settings: dict[str, Any], seed: int) -> nn.Module:
    import transformers

    config_class, model_class, traits = FAMILIES[settings["family"]]
    options: dict[str, Any] = {**SIZES, **traits, "num_hidden_layers": program.layers}
    for trait in program.traits:
        options |= trait.config
    kind: Any = getattr(transformers, model_class.__name__.replace("ForCausalLM", settings["head"]))
    torch.manual_seed(seed)
    model: Any = kind(config_class(**options)).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    for trait in program.traits:
        model = model if trait.model is None else trait.model(model)
    return model


def _examples(program: Program, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the data: a few full batches and perhaps a smaller one, with labels that are missing unevenly."""
    generator = torch.Generator().manual_seed(program.seed)
    rows, examples = settings["rows"], []
    for index in range(rows * FULL_BATCHES - (rows + 1) // 2 * settings["has_tail"]):
        ids = torch.randint(3, WORDS, (settings["length"],), generator=generator)
        example = {"input_ids": ids, "labels": ids.clone()}
        example["labels"][: index % 5] = -100
        for trait in sorted(program.traits, key=lambda trait: trait.kind == "head"):  # heads read the labels last
            if trait.example is not None:
                trait.example(example, index)
        examples.append(example)
    return examples
