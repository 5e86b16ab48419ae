"""Seq2SeqTrainer under plans: losses, generated tokens and their metrics are those of the stock trainer on one process.

Tolerance 1e-5: see test_trainer.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

import meshwright as mw
from meshwright_hf.trainer import MeshwrightTrainerMixin
from support.encoder_models import build
from support.models import tokens
from support.parity import pool_for
from support.tiers import crossing
from support.trainers import arguments, fresh_accelerate


class Planned(MeshwrightTrainerMixin, Seq2SeqTrainer):
    """Seq2SeqTrainer with a plan."""


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    """Return rows of unlike lengths, their labels, and what the decoder gets, which label smoothing needs."""
    ids = pad_sequence(rows, batch_first=True)
    labels = pad_sequence([row[: len(row) // 2] for row in rows], batch_first=True, padding_value=-100)
    shifted = torch.nn.functional.pad(labels.clamp(min=0)[:, :-1], (1, 0), value=1)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels, "decoder_input_ids": shifted}


def train(folder: Path, plan: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    """What a run logs, and what it generates for 7 rows."""
    rows = [x[: 6 + i % 5] for i, x in enumerate(tokens(12, 12))]
    with fresh_accelerate():
        model = build("t5, translations").float()
        options = {"max_steps": 3, "learning_rate": 1e-2, "predict_with_generate": True, **options}
        args = arguments(
            folder, (plan or {}).get("dp", 1), Seq2SeqTrainingArguments, generation_max_length=8, **options
        )
        # 5 rows in batches of 4: of the last row, the second rank of dp has none.
        data = {"train_dataset": rows, "eval_dataset": rows[:5], "data_collator": collate}
        data["compute_metrics"] = lambda found: {"sum": float(found.predictions.clip(0).sum())}
        kind, of_plan = (Seq2SeqTrainer, {}) if plan is None else (Planned, {"meshwright": mw.ParallelPlan(**plan)})
        trainer: Any = kind(model, args, **data, **of_plan)
        trainer.train()
        logs = [entry[name] for entry in trainer.state.log_history for name in ("loss", "grad_norm") if name in entry]
        found = trainer.evaluate() | {"logs": logs}
        return found | {"generated": trainer.predict(rows[:7], max_length=7, num_beams=2).predictions}


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ({"dp": 2, "zero_stage": 3}, {"label_smoothing_factor": 0.1}),
        crossing({"dp": 2, "tp": 2, "sequence_parallel": True}, {}),
    ],
    ids=str,
)
def test_equals_one_process(
    plan: dict[str, Any], options: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The stock trainer counts the loss of the last row as that of a full batch, so it is off by 4e-3 otherwise."""
    expected = train(tmp_path / "one", None, **options)
    assert len(np.unique(expected["generated"])) > 2
    for found in pool_for(plan, request).run(train, tmp_path, plan, **options, timeout=200):
        assert found["logs"] == pytest.approx(expected["logs"], rel=1e-5)
        assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
        assert found["eval_sum"] == expected["eval_sum"]
        assert np.array_equal(found["generated"], expected["generated"])
