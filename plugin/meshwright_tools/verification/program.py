"""The training program that runs twice: under the plan, and on one device with stock torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.checkpoint.one_device.whole_tensors import full_gradients, full_state_dict
from meshwright.distribute.to_distributed import to_distributed
from meshwright.errors import PlanError
from meshwright.faults.together import values_of_all
from meshwright.layout.tensor_layout import is_held
from meshwright.mesh.packed_values import pack, unpack
from meshwright.optim.clip_grad_norm import clip_grad_norm_
from meshwright.optim.runtime import runtime_of
from meshwright.parallel.batch.document_rows import RowDocuments
from meshwright.parallel.losses.head_losses import find_loss
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright.progress import is_first_rank
from meshwright.random_states import seed_all
from meshwright.roles.adapters import without_wrappers
from meshwright.roles.blocks import mixers_of
from meshwright_tools.verification.batch_cases import Case, given_cases, token_cases
from meshwright_tools.verification.comparison_report import Difference, kinds_of
from meshwright_tools.verification.float64_modules import in_float64, run_experts_in_float64
from meshwright_tools.verification.module_outputs import ModuleOutputs, Output, output_differences

Factory = Callable[[], nn.Module]
LossFunction = Callable[[nn.Module, object], Tensor]  # takes the model and a batch
Tell = Callable[[str], None]

LEARNING_RATE = 1e-3
MAX_NORM = 0.5
_NOISE = 0.1  # standard deviation of the noise on norms and biases


@dataclass(frozen=True, kw_only=True)
class Program:
    """The training program; it is pickled and sent to each process.

    Args:
        factory: the function that makes the model.
        plan: the parallel plan.
        config: the other options of ``to_distributed``.
        batch: the user's global batch or batches; None for the batches of ``token_cases``.
        loss: a function of the model and a batch; None for the loss that the model returns.
        steps: the number of optimizer steps.
        seed: the seed of the weights and the tokens.
        perturb: whether to add noise to parameters of one dim, since norms of ones and biases of zeros hide errors.
        folder: the directory of the results on one device.
    """

    factory: Factory
    plan: ParallelPlan
    config: ToDistributedConfig
    batch: object
    loss: LossFunction | None
    steps: int
    seed: int
    perturb: bool
    folder: Path

    def model(self) -> nn.Module:
        """Return the model, with the same weights in every process."""
        random.seed(self.seed)
        torch.manual_seed(self.seed)
        model = self.factory()
        if not isinstance(model, nn.Module):
            raise PlanError(
                f"model_factory returned {type(model).__name__}, but verify trains a torch.nn.Module; return the model"
            )
        model = model.double().train()
        if self.perturb:
            generator = torch.Generator().manual_seed(self.seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1 and not parameter.is_meta:
                        parameter.add_(torch.randn(parameter.shape, generator=generator) * _NOISE)
        return model

    def cases(self, model: nn.Module) -> tuple[Case, ...]:
        if self.batch is not None:
            return given_cases(self.batch)
        return token_cases(model, self.plan, self.seed)

    def loss_of(self, model: nn.Module, batch: Any, case: Case) -> Tensor:
        if self.loss is not None:
            return self.loss(model, batch)
        output = model(**batch, **case.options)
        loss = output if isinstance(output, Tensor) else output["loss"] if isinstance(output, dict) else None
        loss = getattr(output, "loss", output[0] if isinstance(output, tuple) else None) if loss is None else loss
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise PlanError(
                f"{type(model).__name__} returned no loss for a batch of {', '.join(batch)}; put labels into the "
                "batch, or pass a function that returns a loss: "
                "verify(model_factory, plan, loss=loss_of_model_and_batch)"
            )
        return loss


@dataclass(frozen=True)
class Numbers:
    """The numbers of one step.

    Args:
        loss: the sum of the losses of the step's batches.
        norm: the norm of all gradients.
        gradients: the whole gradient of each parameter; on rank 0 only.
    """

    loss: float
    norm: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Start:
    """The weights and outputs on one device before the first step."""

    kinds: dict[str, str]
    weights: dict[str, Tensor]
    outputs: dict[str, Output]
    logits: Tensor | None


class Training:
    """A model, its optimizer and its batches; one subclass runs them on one device, the other under a plan."""

    def __init__(self, program: Program, model: nn.Module, optimizer: torch.optim.Optimizer, cases: tuple[Case, ...]):
        self.program, self.model, self.optimizer, self.cases = program, model, optimizer, cases

    def batches(self) -> Iterator[tuple[Case, list[object]]]:
        """Yield the cases in turn, each with this process's rows."""
        raise NotImplementedError

    def numbers(self, case: Case, batches: list[object], *, has_gradients: bool) -> Numbers:
        raise NotImplementedError

    def evaluate(self) -> tuple[dict[str, Output], Tensor | None]:
        """Return the outputs of the modules and the logits for the whole first batch."""
        first = self.cases[0]
        batch = {name: value for name, value in first.batches[0].items() if name != "labels"}
        self.model.eval()
        outputs = ModuleOutputs(self.model)
        try:
            with torch.no_grad():
                logits = getattr(self.model(**batch, **first.options), "logits", None)
        finally:
            outputs.close()
            self.model.train()
        return outputs.seen, logits.clone() if isinstance(logits, Tensor) else None

    def backward(self, case: Case, batches: list[object]) -> float:
        total = 0.0
        for batch in batches:
            loss = self.program.loss_of(self.model, batch, case)
            loss.backward()
            total += loss.item()
        return total

    def _seed(self, moment: int) -> None:
        """Seed what a step draws, such as the masks of dropout, which are those of one device under the plan too."""
        seed = self.program.seed + moment
        seed_all(seed, seed)

    def first_passes(self) -> Iterator[tuple[Case, Numbers]]:
        """Yield each case with its numbers at the initial weights."""
        for case, batches in self.batches():
            self._seed(0)
            yield case, self.numbers(case, batches, has_gradients=True)
            self.optimizer.zero_grad()

    def steps(self) -> Iterator[Numbers]:
        """Run optimizer steps on the cases in turn, and yield the numbers of each step."""
        left = self.program.steps
        while left > 0:
            for case, batches in self.batches():
                if left > 0:
                    self._seed(left)
                    yield self.numbers(case, batches, has_gradients=False)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                left -= 1


class OneDevice(Training):
    """The training with stock torch in one process."""

    def batches(self) -> Iterator[tuple[Case, list[object]]]:
        for case in self.cases:
            yield case, list(case.batches)

    def numbers(self, case: Case, batches: list[object], *, has_gradients: bool) -> Numbers:
        loss = self.backward(case, batches)
        named = self.model.named_parameters() if has_gradients else ()
        gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        return Numbers(loss, norm.item(), gradients)


class Distributed(Training):
    """The training under the plan."""

    loader: Iterable[Any]
    has_global_loss: bool  # false for a user's loss of one rank's rows: its mean over ranks is compared

    def evaluate(self) -> tuple[dict[str, Output], Tensor | None]:
        with runtime_of(self.model).logits.gathering():
            outputs, logits = super().evaluate()
        # The layers of other pipeline stages return their input unchanged.
        held = {name for name, module in self.model.named_modules() if all(map(is_held, module.parameters()))}
        return {name: output for name, output in outputs.items() if name in held}, logits

    def batches(self) -> Iterator[tuple[Case, list[object]]]:
        rows = iter(self.loader)
        for case in self.cases:
            yield case, [next(rows) for _ in case.batches]
        assert next(rows, None) is None

    def numbers(self, case: Case, batches: list[object], *, has_gradients: bool) -> Numbers:
        loss = self.backward(case, batches)
        if not self.has_global_loss and dist.is_initialized():
            mean = torch.tensor(loss)
            dist.all_reduce(mean)
            loss = mean.item() / dist.get_world_size()
        gradients = full_gradients(self.model) if has_gradients else {}
        norm = clip_grad_norm_(self.model, MAX_NORM)
        return Numbers(loss, norm.item(), gradients)


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with two parameter groups, one with weight decay and one without, as most scripts have."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=LEARNING_RATE)


def run_one_device(program: Program, tell: Tell) -> tuple[str, tuple[str, ...]]:
    """Run the program on one device, and save its numbers in ``program.folder``.

    Returns:
        The name of the model's class, and sentences on what was changed in the model.
    """
    tell("one process")
    with in_float64():
        model = program.model()
        notes = run_experts_in_float64(model) + separate_documents(model)
        start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        training = OneDevice(program, model, optimizer_for(model), program.cases(model))
        outputs, logits = training.evaluate()
        kinds = kinds_of(model, program.config.sharding_plan)
        _save(program, "start", Start(kinds, start, outputs, logits))
        for i, (_, numbers) in enumerate(training.first_passes()):
            _save(program, f"case{i}", numbers)
        _save(program, "steps", list(training.steps()))
        _save(program, "weights", dict(model.state_dict()))
    return type(model).__name__, notes


def separate_documents(model: nn.Module) -> tuple[str, ...]:
    """Keep packed documents apart as a distributed model does; return a sentence if the stock model would not."""
    decoder = without_wrappers(model)[1]
    if RowDocuments.over(decoder, mixers_of(decoder), logs=False) is None:
        return ()
    return (
        "Packed documents are kept apart on one device too, although the stock model lets them leak into each other in "
        "its recurrences and convolutions.",
    )


def run_rank(program: Program, tell: Tell) -> list[Difference]:
    """Run this rank of the program under the plan, and return the differences from one device.

    Only rank 0 compares gradients and weights.
    """
    with in_float64():
        start: Start = _load(program, "start")
        tell("to_distributed")
        training = _distributed(program)
        _check_start(start, training.model)
        found = list(_evaluation(program, training, start, tell))
        for i, (case, numbers) in enumerate(training.first_passes()):
            tell(f"gradients: {case.name}")
            found += _step_differences(case.name, numbers, _load(program, f"case{i}"))
            if is_first_rank():
                found += _gradient_differences(case.name, numbers, _load(program, f"case{i}"), start.kinds)
        for i, (numbers, expected) in enumerate(zip(training.steps(), _load(program, "steps"), strict=True)):
            tell(f"step {i + 1} of {program.steps}")
            found += _step_differences(f"step {i + 1}", numbers, expected)
        weights = full_state_dict(training.model)
        if is_first_rank():
            where = f"after {program.steps} step(s)"
            for name, value in _load(program, "weights").items():
                if value.is_floating_point():
                    found.append(
                        Difference("weights after the steps", name, where, _difference(weights.get(name), value))
                    )
    return found


def _distributed(program: Program) -> Distributed:
    model = program.model()
    run_experts_in_float64(model)
    has_global_loss = (
        program.loss is None and find_loss(without_wrappers(model)[1], program.config.loss_averages_over) is not None
    )
    cases = program.cases(model)
    batches = [batch for case in cases for batch in case.batches]
    model, optimizer, loader = to_distributed(model, optimizer_for(model), batches, config=program.config)
    training = Distributed(program, model, optimizer, cases)
    training.loader, training.has_global_loss = loader, has_global_loss
    return training


def _check_start(start: Start, model: nn.Module) -> None:
    weights = full_state_dict(model)
    if not is_first_rank():
        return
    other = [n for n, value in start.weights.items() if n not in weights or not torch.equal(weights[n], value)]
    if other:
        raise PlanError(
            f"model_factory made a different {other[0]} in another process ({len(other)} of {len(start.weights)} "
            "weights differ), so the two programs cannot be compared; draw all weights from torch's global generator, "
            "which verify seeds, or from one that the factory seeds"
        )


def _evaluation(program: Program, training: Distributed, start: Start, tell: Tell) -> Iterator[Difference]:
    tell("outputs of modules")
    outputs, logits = training.evaluate()
    ranks = [outputs]
    if dist.is_initialized():
        ranks = values_of_all(outputs)
    if is_first_rank():
        yield from output_differences(start.outputs, ranks, program.plan)
    if start.logits is not None:
        value = float("inf") if logits is None else _difference(logits, start.logits)
        yield Difference("logits, in evaluation", "", "the first batch", value)


def _step_differences(where: str, actual: Numbers, expected: Numbers) -> Iterator[Difference]:
    for kind, one, other in (("loss", actual.loss, expected.loss), ("gradient norm", actual.norm, expected.norm)):
        yield Difference(kind, "", where, abs(one - other) / (abs(other) or 1.0))


def _gradient_differences(
    where: str, actual: Numbers, expected: Numbers, kinds: dict[str, str]
) -> Iterator[Difference]:
    # For a gradient that is zero up to rounding (a key's bias), the scale is the largest of all gradients.
    largest = max((float(gradient.abs().max()) for gradient in expected.gradients.values()), default=0.0)
    for name, kind in kinds.items():
        one, other = actual.gradients.get(name), expected.gradients.get(name)
        if one is None and other is None:
            continue
        like: Any = one if other is None else other
        one, other = (torch.zeros_like(like) if x is None else x for x in (one, other))
        scale = float(other.abs().max())
        yield Difference(kind, name, where, _difference(one, other, scale if scale > 1e-12 * largest else largest))


def _difference(actual: Tensor | None, expected: Tensor, scale: float | None = None) -> float:
    if actual is None or actual.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    scale = float(expected.abs().max()) if scale is None else scale
    return float((actual - expected).abs().max()) / (scale or 1.0)


def _save(program: Program, name: str, value: object) -> None:
    pack(value).numpy().tofile(program.folder / f"{name}.packed")


def _load(program: Program, name: str) -> Any:
    return unpack(torch.from_numpy(np.fromfile(program.folder / f"{name}.packed", dtype=np.uint8)))
