"""MeshwrightTrainer under every plan equals the stock Trainer on one process.

Tolerance 1e-5 relative: float32 sums differ by about 1e-7 with their order, and 20 steps at a learning rate at which
training is stable amplify that less than 100 times (6e-7 measured at worst).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import (
    DataCollatorWithFlattening,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    TrainerCallback,
    default_data_collator,
)

import meshwright as mw
from meshwright.parallel.batch.mean_over_ranks import GlobalMean
from meshwright_hf import BalanceExperts, MeshwrightTrainer
from support.anatomies import build as build_anatomy
from support.logs import logged
from support.models import build
from support.parity import pool_for
from support.tiers import crossing, crossings
from support.trainers import Rows, Run, arguments, fresh_accelerate, make_trainer, run_trainer

TOLERANCE = 1e-5
STEPS = 20

PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "dp2+zero2": {"dp": 2, "zero_stage": 2},
    "tp2+sp x dp2+zero3": {"tp": 2, "dp": 2, "sequence_parallel": True, "zero_stage": 3},
}
PP2 = {"pp": 2, "gradient_accumulation_steps": 2}
# In float64, where only the order of sums differs: 4e-16 measured at worst, of which 20 steps leave less than 1e-10.
EXACT: dict[str, dict[str, Any]] = {
    "cp2 x dp2+zero1, ring": {"cp": 2, "dp": 2, "zero_stage": 1, "context": "ring"},
    "pp2 x cp2, ulysses": {**PP2, "cp": 2, "context": "ulysses"},
    "pp2 x dp2+zero1, zb-h1": {"pp": 2, "dp": 2, "zero_stage": 1, "schedule": "zb-h1", "micro_batch_size": 1},
}

FULL = {"max_steps": STEPS, "rows": 37, "evaluated": 11, "predicted": 7}


@functools.cache
def reference(**options: Any) -> Run:
    return run_trainer("unused", **options)


def largest_difference(actual: list[float], expected: list[float]) -> float:
    assert len(actual) == len(expected) > 0
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(actual, expected, strict=True))


def assert_same_training(actual: Run, expected: Run, tolerance: float = TOLERANCE) -> None:
    assert actual.epochs == expected.epochs and actual.learning_rates == expected.learning_rates
    differences = {
        "losses": largest_difference(actual.losses, expected.losses),
        "norms": largest_difference(actual.norms, expected.norms),
    }
    assert max(differences.values()) <= tolerance, differences


@pytest.mark.parametrize("name", crossings(PLANS | EXACT, but=["pp2 x dp2+zero1, zb-h1"], quick=["tp2+sp x dp2+zero3"]))
def test_20_steps_evaluation_and_predictions_equal_one_process(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    plan, options = (PLANS | EXACT)[name], {**FULL, "exact": name in EXACT}
    ranks = pool_for(plan, request).run(run_trainer, tmp_path, plan, **options, timeout=200)
    expected, tolerance = reference(**options), 1e-10 if name in EXACT else TOLERANCE
    for run in ranks:
        assert_same_training(run, expected, tolerance)
        # 11 and 7 rows, each once and in order, though neither is a multiple of the ranks or of the batch.
        assert run.metrics["eval_rows"] == 11 and run.metrics["eval_placed"] == expected.metrics["eval_placed"]
        assert largest_difference(list(run.metrics.values()), list(expected.metrics.values())) <= tolerance
        assert np.array_equal(run.label_ids, expected.label_ids)
        assert np.allclose(run.predictions, expected.predictions, rtol=0, atol=tolerance)


def run_misreading_counts(output_dir: Path, plan: dict[str, Any], **options: Any) -> Run:
    """The classic mistake: the Trainer's count is the global one on each rank, and the ranks' are added up."""
    with mock.patch.object(GlobalMean, "_items", lambda self, per_rank, valid: per_rank.sum()):
        return run_trainer(output_dir, plan, **options)


def run_with_rows_of_all_processes(output_dir: Path, plan: dict[str, Any], **options: Any) -> Run:
    """Another: predictions are gathered over all ranks, those with the same rows included."""
    with mock.patch(
        "meshwright_hf.trainer.trainer.gather_rows", lambda x, dp, as_objects: torch.cat([torch.atleast_1d(x)] * 2)
    ):
        return run_trainer(output_dir, plan, **options)


def test_wrong_answers_would_be_caught(pool2: Any, tmp_path: Path) -> None:
    expected = reference(max_steps=2)
    run = pool2.run(run_misreading_counts, tmp_path, {"dp": 2}, max_steps=2, timeout=200)[0]
    assert largest_difference(run.losses, expected.losses) > 0.4  # half the loss
    run = pool2.run(run_with_rows_of_all_processes, tmp_path, {"tp": 2}, max_steps=2, evaluated=11, timeout=200)[0]
    assert run.metrics["eval_rows"] == 22


def cross_entropy_of_sums(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A user's compute_loss_func: reads whole logits."""
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
    return loss / num_items_in_batch


def packed(features: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows of a rank as one, with positions that start anew."""
    return DataCollatorWithFlattening()([{name: x.tolist() for name, x in row.items()} for row in features])


class Unfreeze(TrainerCallback):
    """The head and the norms alone for two steps, then the last layer too, then everything."""

    STAGES: ClassVar = {0: ("lm_head", "norm"), 2: ("lm_head", "norm", "layers.1"), 4: ("",)}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, parameter in kwargs["model"].named_parameters():
            parameter.requires_grad_(any(part in name for part in self.STAGES[state.global_step // 2 * 2]))


def unfreezing() -> dict[str, Any]:
    return {"extra": {"callbacks": [Unfreeze()]}, "evaluated": 5}


# What else a Trainer is told, and the plan that makes it hardest; 6 steps each.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "label smoothing, lengths grouped, last batch dropped": (
        {"dp": 2},
        {
            "label_smoothing_factor": 0.1,
            "train_sampling_strategy": "group_by_length",
            "dataloader_drop_last": True,
        },
    ),
    "label smoothing in an evaluation of uneven batches": (
        {"dp": 2},
        # Rows have unlike numbers of labels, and of the last batch one rank has no row.
        {"label_smoothing_factor": 0.1, "evaluated": 9},
    ),
    "gradient checkpointing, no clipping, a stream, tokens counted": (
        {"dp": 2},
        {
            "gradient_checkpointing": True,
            "max_grad_norm": 0.0,
            "stream": True,
            "rows": 38,  # the last batch has a row for each rank: one that only keeps a rank in step would be counted
            "include_num_input_tokens_seen": "all",
        },
    ),
    "a loss function of the user's, odd rows, seeded data, tokens counted": (
        {"tp": 2, "sequence_parallel": True},
        {
            "extra": {"compute_loss_func": cross_entropy_of_sums},
            "rows": 13,
            "data_seed": 5,
            "include_num_input_tokens_seen": "all",
        },
    ),
    "tokens averaged per device, tied embeddings": (
        {"tp": 2},
        {"average_tokens_across_devices": False, "model": {"tie_word_embeddings": True}},
    ),
    "rows packed into one": ({"dp": 2}, {"extra": {"data_collator": packed}}),
    "SGD by a name, label smoothing, evaluation": (
        {"tp": 2, "sequence_parallel": True},
        {"optim": "sgd", "learning_rate": 0.1, "label_smoothing_factor": 0.1, "evaluated": 5},
    ),
    "unfreezing, sequence parallel": ({"tp": 2, "sequence_parallel": True}, unfreezing()),
    "unfreezing, zero1": ({"dp": 2, "zero_stage": 1}, unfreezing()),
    "unfreezing, zero3": ({"dp": 2, "zero_stage": 3}, unfreezing()),
    "unfreezing, pipeline": (PP2, unfreezing()),
    "pipeline, checkpointing, no clipping, a stream, packed rows, tokens averaged and counted, tied": (
        PP2,
        {
            "gradient_checkpointing": True,
            "max_grad_norm": 0.0,
            "stream": True,
            "extra": {"data_collator": packed},
            "average_tokens_across_devices": False,
            "include_num_input_tokens_seen": "all",
            "model": {"tie_word_embeddings": True},
            "label_smoothing_factor": 0.2,
            "evaluated": 5,
        },
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_keep_their_meaning(setting: str, pool2: Any, tmp_path: Path) -> None:
    plan, options = SETTINGS[setting]
    run, other = pool2.run(run_trainer, tmp_path, plan, max_steps=6, **options, timeout=200)
    expected = run_trainer(tmp_path / "one", max_steps=6, **options)
    assert_same_training(run, expected)
    assert other.losses == run.losses and other.norms == run.norms
    assert run.tokens_seen == expected.tokens_seen
    if run.metrics:
        assert largest_difference(list(run.metrics.values()), list(expected.metrics.values())) <= TOLERANCE


def with_router_logits(rows: list[Any]) -> dict[str, Any]:
    return {**default_data_collator(rows), "output_router_logits": True}


def run_routed(
    output_dir: Path, plan: dict[str, Any] | None, extra: dict[str, Any], *, smoothing: float = 0.1, **routed: Any
) -> Run:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, **{"router_aux_loss_coef": 1.0, **routed}))
    extra = {"model": model, "compute_metrics": None, **extra}  # its outputs are several
    return run_trainer(
        output_dir, plan, max_steps=2, label_smoothing_factor=smoothing, evaluated=5, rows=16, extra=extra
    )


def test_a_smoothed_loss_has_no_auxiliary_loss(pool2: Any, tmp_path: Path) -> None:
    """The stock Trainer hides the labels from the forward, which then adds nothing."""
    expected = run_routed(tmp_path, None, {}, output_router_logits=True)
    split = run_routed(tmp_path, {"gradient_accumulation_steps": 2}, {}, output_router_logits=True)
    ranks = pool2.run(run_routed, tmp_path, {"dp": 2}, {}, output_router_logits=True, timeout=200)
    for run in (split, *ranks):
        assert_same_training(run, expected)
        assert run.metrics["eval_loss"] == pytest.approx(expected.metrics["eval_loss"], rel=TOLERANCE)
    with pytest.raises(ValueError, match=r"write model.config.output_router_logits = True"):
        run_routed(tmp_path, {}, {"data_collator": with_router_logits})


def test_an_auxiliary_loss_is_that_of_the_stock_trainer(pool2: Any, tmp_path: Path) -> None:
    """The stock Trainer adds it once for each of two accumulated passes; half of it gives another norm."""
    expected = run_routed(tmp_path, None, {}, smoothing=0.0, output_router_logits=True)
    half = run_routed(tmp_path, None, {}, smoothing=0.0, output_router_logits=True, router_aux_loss_coef=0.5)
    assert abs(half.norms[0] / expected.norms[0] - 1) > 1e-3 and half.losses[0] < expected.losses[0] - 0.5
    options = {"smoothing": 0.0, "output_router_logits": True, "timeout": 200}
    for run in pool2.run(run_routed, tmp_path, {"dp": 2, "ep": 2}, {}, **options):
        assert_same_training(run, expected)
        assert run.metrics["eval_loss"] == pytest.approx(expected.metrics["eval_loss"], rel=TOLERANCE)


def run_balanced(output_dir: Path, plan: dict[str, Any]) -> tuple[list[float], list[int], list[float]]:
    """Losses, the tokens of each expert in the last step, and the biases that the callback moves."""
    callback, model = BalanceExperts(rate=0.05), build_anatomy("deepseek_v3").float()
    extra = {"model": model, "callbacks": [callback]}
    run = run_trainer(output_dir, plan, max_steps=3, rows=24, extra=extra)
    (counts,) = callback.counts.values()
    return run.losses, counts.tolist(), model.model.layers[1].mlp.gate.e_score_correction_bias.tolist()


def test_the_callback_balances_experts_as_on_one_process(pool2: Any, tmp_path: Path) -> None:
    losses, counts, biases = run_balanced(tmp_path, {})
    assert sum(counts) == 2 * 8 * 12 and biases != pytest.approx([0.0] * 4)  # two experts for each token of a step
    for found in pool2.run(run_balanced, tmp_path, {"dp": 2, "ep": 2}, timeout=200):
        assert found == (pytest.approx(losses, rel=TOLERANCE), counts, pytest.approx(biases))


def evaluate_by_own_loss(
    output_dir: Path, plan: dict[str, Any] | None, is_made_global: bool
) -> tuple[float, list[str]]:
    def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        targets = labels[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float() * 20, targets)
        return mw.global_mean(trainer.model, loss, (targets != -100).sum()) if plan and is_made_global else loss

    with fresh_accelerate(), logged("meshwright_hf") as said:
        args = arguments(output_dir, (plan or {}).get("dp", 1))
        data = {"train_dataset": Rows(4), "eval_dataset": Rows(9), "compute_loss_func": loss_of}
        trainer = make_trainer(args, plan, data=data)
        loss = trainer.evaluate()["eval_loss"]
        return loss, [text for text in said if "in an evaluation" in text]


def test_an_evaluation_by_a_loss_of_ones_own(pool2: Any, tmp_path: Path) -> None:
    """Equal by ``global_mean``; without it the mean of the ranks' means, which is another number and is said."""
    expected = evaluate_by_own_loss(tmp_path, None, False)[0]
    for loss, said in pool2.run(evaluate_by_own_loss, tmp_path, {"dp": 2}, True):
        assert loss == pytest.approx(expected, rel=TOLERANCE) and not said
    ranks = pool2.run(evaluate_by_own_loss, tmp_path, {"dp": 2}, False)
    assert all(np.isfinite(loss) and abs(loss / expected - 1) > 1e-3 for loss, _ in ranks)
    assert [len(said) for _, said in ranks] == [1, 0] and "2 rows with 22 labels" in ranks[0][1][0]


def mean_of_words(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A function that takes the count, and does not use it."""
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Dividing(MeshwrightTrainer):
    """Divides by the count itself, and does not multiply by the ranks."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        return cross_entropy_of_sums(model(**inputs), labels, num_items_in_batch)


class Keeping(Dividing):
    """Leaves the labels in the batch, so that the model computes a loss too."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        return cross_entropy_of_sums(model(**inputs), inputs["labels"], num_items_in_batch)


class Multiplying(MeshwrightTrainer):
    """Divides by the count, and multiplies as the Trainer does."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        loss = cross_entropy_of_sums(model(**inputs), labels, num_items_in_batch)
        return loss * (self.accelerator.num_processes // self.get_tp_size())


class Passing(MeshwrightTrainer):
    """Passes the count to the model itself."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        return model(**inputs, num_items_in_batch=num_items_in_batch).loss


class Scaling(MeshwrightTrainer):
    """Passes the count to the model, and multiplies as under DDP."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        loss = model(**inputs, num_items_in_batch=num_items_in_batch).loss
        return loss * self.accelerator.num_processes


class MultiplyingToo(MeshwrightTrainer):
    """As Multiplying, with labels from which the model computes a loss too."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        loss = cross_entropy_of_sums(model(**inputs), inputs["labels"], num_items_in_batch)
        return loss * (self.accelerator.num_processes // self.get_tp_size())


class Doubling(MeshwrightTrainer):
    """Half of what the Trainer computes."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch) * 2


def sum_where_there_is_one(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Does not read the count where nothing counts, as on one rank of a batch."""
    if not (labels != -100).any():
        return outputs.logits.sum() * 0
    return cross_entropy_of_sums(outputs, labels, num_items_in_batch)


PROGRAMS: list[tuple[Any, dict[str, Any]]] = [
    (Doubling, {}),
    (Passing, {}),
    (Multiplying, {}),
    (MultiplyingToo, {}),
    (MeshwrightTrainer, {"compute_loss_func": sum_where_there_is_one}),
    (MeshwrightTrainer, {"compute_loss_func": mean_of_words}),
]


def train_by_own_loss(output_dir: Path, plan: dict[str, Any] | None, kind: Any, extra: dict[str, Any]) -> Any:
    """Losses and norms of two steps, and what is said of uneven batches."""
    with fresh_accelerate(), logged() as said:
        args = arguments(output_dir, (plan or {}).get("dp", 1), max_steps=2)
        chosen = mw.ToDistributedConfig(plan=plan and mw.ParallelPlan(**plan))
        trainer = kind(build("llama"), args, train_dataset=Rows(16), meshwright=chosen, **extra)
        trainer.train()
        history = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        return [x for pair in history for x in pair], [text for text in said if "of an unknown kind" in text]


def train_by_own_losses(output_dir: Path, plan: dict[str, Any] | None) -> list[Any]:
    """What each of PROGRAMS gives, and the messages of those that are refused under a plan."""
    found: list[Any] = [train_by_own_loss(output_dir, plan, kind, extra) for kind, extra in PROGRAMS]
    for kind in (Dividing, Keeping, Scaling) if plan else ():
        with pytest.raises(ValueError) as error:
            train_by_own_loss(output_dir, plan, kind, {})
        found.append(str(error.value))
    return found


@pytest.mark.parametrize("plan", [{"dp": 2}, crossing({"dp": 2, "tp": 2})], ids=str)
def test_a_loss_divided_by_the_count_of_items(
    plan: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The factor of the Trainer is applied to what was divided by the count, and to nothing else."""
    *ranks_numbers, dividing, keeping, scaling = pool_for(plan, request).run(
        train_by_own_losses, tmp_path, plan, timeout=200
    )[0]
    expected = train_by_own_losses(tmp_path, None)
    for (_, extra), (numbers, said), (wanted, _) in zip(PROGRAMS, ranks_numbers, expected, strict=True):
        is_mean = extra.get("compute_loss_func") is mean_of_words
        # The ranks' means of unlike numbers of words give norms up to 6e-2 apart; a factor of 2 would be 1.
        assert largest_difference(numbers, wanted) <= (1e-1 if is_mean else TOLERANCE)
        assert len(said) == is_mean
    assert "Dividing.compute_loss reads num_items_in_batch" in dividing
    assert "Keeping.compute_loss reads num_items_in_batch" in keeping
    assert "Scaling.compute_loss passes num_items_in_batch to the model and reads" in scaling


def save_and_resume(output_dir: Path, plan: dict[str, Any], then: dict[str, Any], **options: Any) -> tuple[Run, Run]:
    """Six steps with a checkpoint in the middle, and the last three again from there."""
    whole = run_trainer(output_dir, plan, max_steps=6, save_strategy="steps", save_steps=3, **options)
    return whole, run_trainer(output_dir, then, max_steps=6, resume=str(output_dir / "checkpoint-3"), **options)


def last_three(run: Run) -> Run:
    """The steps after the checkpoint: a resumed run has the logs of those before from there."""
    return Run(run.losses[3:], run.norms[3:], run.learning_rates[3:], run.epochs[3:])


@pytest.mark.parametrize(
    ("plan", "then"),
    [
        ({"tp": 2, "sequence_parallel": True}, {"dp": 2, "zero_stage": 1}),
        crossing({"dp": 2}, {"tp": 2}),
        (PP2, {"dp": 2, "zero_stage": 1}),
        ({"dp": 2}, PP2),
        ({"cp": 2}, {"dp": 2, "zero_stage": 1}),
    ],
    ids=str,
)
def test_resuming_in_mid_epoch_gives_the_same_numbers_under_any_plan(
    plan: dict[str, Any], then: dict[str, Any], pool2: Any, tmp_path: Path
) -> None:
    whole, resumed = pool2.run(save_and_resume, tmp_path, plan, then, timeout=200)[0]
    expected = reference(max_steps=6)
    assert_same_training(whole, expected)
    assert_same_training(last_three(resumed), last_three(expected))
    # The weights are those of one device, which stock code reads.
    folder = tmp_path / "checkpoint-6"
    stock = {"config.json", "model.safetensors", "trainer_state.json", "training_args.bin"}
    assert stock <= {path.name for path in folder.iterdir()}
    LlamaForCausalLM.from_pretrained(folder)


def test_resuming_goes_on_with_the_dropout_masks(pool2: Any, tmp_path: Path) -> None:
    # Same plan, same sums: equal to the bit. Other masks change the losses by about 1e-3.
    # Rows grouped by length are shuffled by torch's own random state, which has to be that of the epoch's start.
    masked = {"model": {"attention_dropout": 0.3}, "train_sampling_strategy": "group_by_length"}
    for plan in ({"tp": 2}, PP2):
        for whole, resumed in pool2.run(save_and_resume, tmp_path / str(plan), plan, plan, **masked, timeout=200):
            assert len(resumed.losses) == 6 and (resumed.losses, resumed.norms) == (whole.losses, whole.norms)


@pytest.mark.parametrize("plan", [crossing({"tp": 2}), {"dp": 2, "zero_stage": 1}, PP2], ids=str)
def test_the_best_model_is_loaded_at_the_end(plan: dict[str, Any], pool2: Any, tmp_path: Path) -> None:
    options = {
        "max_steps": 8,
        "learning_rate": 3e-3,
        "rows": 8,
        "evaluated": 7,
        # The largest loss is that of the first evaluation, so that the best model is surely not the last one.
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
    }
    expected = run_trainer(tmp_path / "one", **options)
    folder = tmp_path / "planned"
    run = pool2.run(run_trainer, folder, plan, **options, timeout=200)[0]
    assert largest_difference(run.evaluations, expected.evaluations) <= TOLERANCE
    assert Path(run.best).name == Path(expected.best).name
    # The last evaluation is of the best weights, not of the last ones.
    best = max(run.evaluations)
    assert run.metrics["eval_loss"] == pytest.approx(best, rel=1e-6) and best > run.evaluations[-1] * 1.001
    assert len(list(folder.glob("checkpoint-*"))) <= 2
