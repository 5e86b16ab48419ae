"""Steps one of the Trainer's optimizers under plans, with the gradients of one device, and compares the weights."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import meshwright as mw
from meshwright.errors import OptimizerMismatchError
from meshwright.layout.tensor_layout import layout_of
from meshwright.optim.elementwise import Reads, reads_of
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright_hf.trainer.checks import REFUSED_OPTIMIZERS

PLANS = ("dp2 zero1", "tp2+sp", "dp2 zero3")
EQUAL = "equal"
_STEPS = 5
_TARGETS = ["q_proj", "k_proj", "mlp"]  # the modules of low-rank gradients


@dataclass
class Record:
    """What was found of one name.

    Args:
        name: the value of ``TrainingArguments.optim``.
        kind: the class of the optimizer.
        reads: what it reads to update an element.
        missing: why the Trainer cannot make or step it here; empty if it can.
        cells: by plan, "equal", or what else was found.
    """

    name: str
    kind: str = ""
    reads: str = ""
    missing: str = ""
    cells: dict[str, str] = field(default_factory=dict)

    @property
    def passes(self) -> bool:
        return all(cell == EQUAL or cell.startswith("refused") for cell in self.cells.values())


def check(name: str) -> Record:
    """Compare one optimizer under each plan with one device. Every rank must make the call; rank 0 has compared."""
    record = Record(name)
    if (why := REFUSED_OPTIMIZERS.get(name)) is not None:
        return dataclasses.replace(
            record, cells=dict.fromkeys(PLANS, f"refused: optim={name!r} {why.partition(';')[0]}")
        )
    try:
        model = _model()
        optimizer = _optimizer(name, model)
        inner = getattr(optimizer, "optimizer", optimizer)
        record.kind = f"{type(inner).__module__.partition('.')[0]}.{type(inner).__name__}"
        found = {reads for reads in reads_of(optimizer) if isinstance(reads, Reads)}
        record.reads = Reads.PARAMETER if Reads.PARAMETER in found else Reads.ELEMENT if found else ""
    except NotImplementedError as error:  # the Trainer's own word on the name, where there are several ranks
        return dataclasses.replace(record, cells=dict.fromkeys(PLANS, f"refused by the Trainer: {error}"))
    except Exception as error:  # of any type: the library is missing, or the Trainer or the optimizer refuses a setting
        return dataclasses.replace(record, missing=_short(error))
    try:
        expected: dict[str, Tensor] | str = _train(model, optimizer)
    except Exception as error:  # of any type: the optimizer cannot step on this machine
        expected = _short(error)
    for plan in PLANS:
        record.cells[plan] = _cell(name, plan, expected)
    if isinstance(expected, str) and not all(cell.startswith("refused") for cell in record.cells.values()):
        return dataclasses.replace(record, missing=expected, cells={})
    return record


def _cell(name: str, plan: str, expected: dict[str, Tensor] | str) -> str:
    model = _model()
    try:
        model, optimizer, _ = mw.to_distributed(model, _optimizer(name, model), plan=plan)
    except OptimizerMismatchError as error:
        why = re.search(r"one parameter at a time: (.*?)\. If it updates", str(error))
        return f"refused: {why[1] if why else _short(error)}"
    if isinstance(expected, str):
        return expected
    actual = _train(model, optimizer)
    differences = [
        float((actual[key] - value).abs().max() / value.abs().max()) for key, value in expected.items() if actual
    ]
    # To the bit: the gradients are equal, so nothing is summed in another order.
    return EQUAL if not any(differences) else f"differs by {max(differences):.1e}"


def _model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=2, **sizes)).train()


def _optimizer(name: str, model: nn.Module) -> Optimizer:
    low_rank: dict[str, Any] = {"optim_target_modules": _TARGETS} if "galore" in name or "apollo" in name else {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = TrainingArguments(output_dir=folder, optim=name, use_cpu=True, report_to=[], **low_rank)
        made: Optimizer = Trainer(model=model, args=args).create_optimizer()
    return made


def _train(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the weights after some steps with gradients that are the same under every plan."""
    if callable(train := getattr(optimizer, "train", None)):
        train()
    generator = torch.Generator().manual_seed(1)
    for step in range(_STEPS):
        for parameter in model.parameters():
            layout = getattr(parameter, "meshwright", None)
            shape = parameter.shape if layout is None else layout.shape
            whole = 10.0**-step * torch.randn(shape, generator=generator)
            with reading_shards():
                parameter.grad = whole if layout is None else layout_of(parameter).take(whole)
        optimizer.step()
        optimizer.zero_grad()
    if callable(evaluate := getattr(optimizer, "eval", None)):
        evaluate()
    return mw.full_state_dict(model)


def _short(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".splitlines()[0].replace("|", "/").strip(": ")
    return text if len(text) < 90 else f"{text[:87]}..."
