"""``verify`` with models that see images, whose batches the user gives, and with hybrids."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import meshwright as mw
from meshwright_tools.cli import app
from support import hybrid_models, vision_models

TP = "tp2+sp"


@pytest.mark.crossing
@pytest.mark.parametrize("family", ["qwen3_vl", "llava"])
def test_a_model_that_sees_images_is_verified_with_a_batch(family: str) -> None:
    batch = vision_models.collate(family, vision_models.samples(family, (1, 1, 1, 1)))
    report = mw.verify(functools.partial(vision_models.build, family), TP, batch=batch, steps=2)
    assert report.ok, str(report)
    assert "gradients: other matrices" in report.worst  # of the tower


@pytest.mark.crossing
@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2"])
def test_a_hybrid_is_verified(family: str) -> None:
    """Inside of a mixer that is cut by heads, a rank has addends, which are no outputs to compare."""
    report = mw.verify(functools.partial(hybrid_models.build, family), TP, steps=2)
    assert report.ok, str(report)


def test_the_command_says_how_to_verify_a_model_that_sees_images(tmp_path: Path) -> None:
    fields: dict[str, Any] = vision_models.config_of("qwen3_vl").to_dict()
    (tmp_path / "config.json").write_text(json.dumps({name: x for name, x in fields.items() if name != "dtype"}))
    result = CliRunner().invoke(app, ["verify", "--model", str(tmp_path), "--plan", TP])
    assert result.exit_code == 2 and "mw.verify(function, plan, batch=...)" in result.output
