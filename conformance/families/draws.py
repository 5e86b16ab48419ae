"""Types that draw at random in training, with the rates of their configs, under plans against one device.

python -m conformance.families.draws --results draws.jsonl
python -m conformance.families.draws --only bert --plan "dp2 zero3"

Five steps of AdamW in float64 with one seed: the losses and the norms of all steps, and the weights and the gradients
of the last one. A draw that is not that of one device changes a loss by a hundredth. The processes are those of
``conformance/families/reach.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import transformers
import typer
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.trainer_utils import set_seed

import meshwright as mw
from conformance.families.kept_results import ResultsFile, read
from conformance.families.parity import TOLERANCE
from conformance.families.tiny_batches import Batch, Batches
from conformance.families.tiny_configs import Shrinker, Words
from conformance.families.tiny_models import Tiny, prepare
from conformance.families.type_ranks import PATIENCE, Cell, first_line, run_ranks
from meshwright.parallel.losses.head_losses import find_loss
from meshwright.plan.text import parse_plan
from meshwright_tools.verification.float64_modules import in_float64
from support.exact import gradient_differences
from support.logs import logged

PLANS = (
    "dp2", "dp2 zero3", "tp2", "tp2+sp", "pp2 mb1", "cp2", "mb2", "dp2 recompute=full", "dp2 mb1", "dp2 tp2+sp zero1",
)  # fmt: skip
STATUSES = ("equal", "told", "refused", "differs", "crashes")
STEPS = 5


@dataclass(frozen=True)
class Drawing(Tiny):
    """A tiny model that draws, with what a training script adds to it."""

    adds: Callable[[nn.Module], nn.Module] = lambda model: model

    def build(self) -> nn.Module:
        torch.manual_seed(0)  # from which adapters are drawn
        return self.adds(super().build()).double().train()


def _with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_dropout=0.05, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config)  # type: ignore[arg-type]


def _with_noise(model: Any) -> nn.Module:
    from transformers.integrations.neftune import activate_neftune

    activate_neftune(model, 5.0)
    found: nn.Module = model
    return found


def _sound(samples: int) -> Batch:
    generator = torch.Generator().manual_seed(5)
    sound = torch.randn(2, samples, generator=generator, dtype=torch.float64)
    return {"input_values": sound, "labels": torch.randint(3, 30, (2, 5), generator=generator)}


def _images() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64)}


# The class of each type, and its batch: the mapping whose batches it takes, or a function.
TYPES: dict[str, tuple[str, str | Callable[[], Batch]]] = {
    "bert": ("BertForSequenceClassification", "sequence-classification"),
    "roberta": ("RobertaForSequenceClassification", "sequence-classification"),
    "deberta": ("DebertaForSequenceClassification", "sequence-classification"),
    "modernbert": ("ModernBertForSequenceClassification", "sequence-classification"),
    "gpt2": ("GPT2LMHeadModel", "causal-lm"),
    "opt": ("OPTForCausalLM", "causal-lm"),
    "bart": ("BartForConditionalGeneration", "seq2seq"),
    "t5": ("T5ForConditionalGeneration", "seq2seq"),
    "whisper": ("WhisperForConditionalGeneration", "seq2seq"),
    "vit_mae": ("ViTMAEForPreTraining", _images),
    "wav2vec2": ("Wav2Vec2ForCTC", functools.partial(_sound, 4800)),
    "phimoe": ("PhimoeForCausalLM", "causal-lm"),
    "distilbert": ("DistilBertForSequenceClassification", "sequence-classification"),
    "electra": ("ElectraForSequenceClassification", "sequence-classification"),
    "pegasus": ("PegasusForConditionalGeneration", "seq2seq"),
    "xlnet": ("XLNetForSequenceClassification", "sequence-classification"),
    "funnel": ("FunnelForSequenceClassification", "sequence-classification"),
    "speecht5": ("SpeechT5ForSpeechToText", functools.partial(_sound, 4800)),
}
_NARROW: dict[str, Any] = {"conv_dim": [32] * 7}
_FIELDS = {"speecht5": _NARROW, "wav2vec2": {"ctc_loss_reduction": "mean", **_NARROW}}  # a sum of rows is none of dp
# Programs that draw in what they add to a Llama.
ADDED: dict[str, Callable[[nn.Module], nn.Module]] = {"llama with LoRA": _with_lora, "llama with NEFTune": _with_noise}


def drawing(name: str) -> Drawing:
    """Return a tiny model of a type with the rates of its default config, and a batch of four rows."""
    model_type, words = name.partition(" ")[0], Words()
    kind, batch = TYPES.get(name, ("LlamaForCausalLM", "causal-lm"))
    config = Shrinker(words, draws=True, fields=_FIELDS.get(name, {})).tiny(CONFIG_MAPPING[model_type]())
    prepare(config)
    found = Drawing(getattr(transformers, kind), config, {})
    with in_float64():
        rows = Batches(found.build().eval(), words, batch).first() if isinstance(batch, str) else batch()
    rows = {key: torch.cat([x, x.flip(0)]) for key, x in rows.items()}
    return dataclasses.replace(found, batch=rows, adds=ADDED.get(name, found.adds))


@dataclass
class Numbers:
    """The losses and norms of a run, the gradients of its last step and its weights after it."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def trained(model: Drawing, plan: str | None) -> Numbers:
    """Train a model on one device or under a plan; every rank must make the call, and rank 0 has the tensors."""
    built: Any = model.build()
    optimizer: Any = torch.optim.AdamW([p for p in built.parameters() if p.requires_grad], lr=1e-3)
    batches: Any = [{key: x.roll(step, 0) for key, x in model.batch.items()} for step in range(STEPS)]
    if plan is not None:
        given: Any = parse_plan(plan)
        stock = getattr(built, "get_base_model", lambda: built)()
        averages_over = None if find_loss(stock) else "labels" if "input_ids" in model.batch else "rows"
        config = mw.ToDistributedConfig(
            plan=mw.ParallelPlan(**given), timeout_s=PATIENCE, loss_averages_over=averages_over
        )
        built, optimizer, batches = mw.to_distributed(built, optimizer, batches, config=config)
    set_seed(7)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in batches:
        optimizer.zero_grad()
        loss = built(**batch).loss
        loss.backward()
        gradients = mw.full_gradients(built) if plan is not None else _gradients(built)
        clip: Any = mw.clip_grad_norm_ if plan is not None else _clip
        losses += [loss.item(), float(clip(built, 1.0))]
        optimizer.step()
    weights = mw.full_state_dict(built) if plan is not None else built.state_dict()
    return Numbers(losses, gradients, {name: x for name, x in weights.items() if x.is_floating_point()})


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _clip(model: nn.Module, most: float) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), most)


def compare(model: Drawing, plan: str) -> Cell:
    """Compare a type under a plan with one device; all ranks must make the call, and only rank 0 compares."""
    with in_float64():
        with logged(level=logging.WARNING) as said:
            try:
                actual = trained(model, plan)
            except mw.PlanError as error:
                return Cell("refused", reason=first_line(error))
        if dist.is_initialized() and dist.get_rank() > 0:
            return Cell("equal")
        expected = trained(model, None)
    found = {
        f"{what} of step {i // 2}": abs(x / y - 1)
        for i, (x, y) in enumerate(zip(actual.losses, expected.losses, strict=True))
        for what in [("loss", "norm")[i % 2]]
    }
    found |= gradient_differences(actual.gradients, expected.gradients)
    found |= {f"weight {name}": x for name, x in gradient_differences(actual.weights, expected.weights).items()}
    worst = max(found, key=lambda name: math.inf if math.isnan(found[name]) else found[name])
    if found[worst] <= TOLERANCE:
        return Cell("equal", found[worst])
    first = next(name for name, value in found.items() if not value <= TOLERANCE)
    return Cell("told", found[worst], said[0]) if said else Cell("differs", found[worst], first)


def run(name: str, plans: list[str]) -> dict[str, Cell]:
    """Return the cell of each plan for a type."""
    torch.set_num_threads(1)  # a forked process cannot use the threads of this one
    model = drawing(name)
    found: dict[str, Cell] = {}
    while left := [plan for plan in plans if plan not in found]:
        count = _ranks_of(left[0])
        alike = [plan for plan in left if _ranks_of(plan) == count]
        found |= run_ranks(functools.partial(compare, model), alike, count=count)
    return {plan: found[plan] for plan in plans}


def _ranks_of(plan: str) -> int:
    given: Any = parse_plan(plan)
    return math.prod(mw.ParallelPlan(**given).dims.shape)


def main(
    only: Annotated[list[str] | None, typer.Option(help="a type; may be given several times")] = None,
    plan: Annotated[list[str] | None, typer.Option(help="a plan; may be given several times")] = None,
    results: ResultsFile = None,
) -> None:
    """Compare types that draw at random with themselves on one device, on local processes.

    Exits with status 1 if a type differs without a word or crashes.
    """
    warnings.filterwarnings("ignore")
    for name in mw.__all__:
        getattr(mw, name)  # loads its module here, once, in place of in each fork
    kept = read([results]) if results is not None and results.exists() else {}
    counts: Counter[str] = Counter()
    for name in only or [*TYPES, *ADDED]:
        programs = {f"{name}: {words}": words for words in plan or PLANS}
        missing = [words for program, words in programs.items() if program not in kept]
        cells = {f"{name}: {words}": asdict(cell) for words, cell in (run(name, missing) if missing else {}).items()}
        if results is not None:
            with results.open("a") as file:
                file.writelines(json.dumps({program: cell}) + "\n" for program, cell in cells.items())
        counts.update(cell["status"] for program, cell in (kept | cells).items() if program in programs)
        for program, cell in cells.items():
            print(program, cell["status"], cell["difference"] or "", cell["reason"], flush=True)
    print(", ".join(f"{counts[status]} {status}" for status in STATUSES))
    raise typer.Exit(1 if counts["differs"] + counts["crashes"] else 0)


if __name__ == "__main__":
    typer.run(main)
