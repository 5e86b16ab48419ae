"""The page of all models fits its data, and the sweep that writes it finds a planted fault."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import transformers

from conformance.families.reach import PLANS
from conformance.families.reach_page import DATA, PAGE, counts, from_json, render, table_of
from conformance.families.tiny_configs import LAYERS, Shrinker, Words
from conformance.families.tiny_models import MAPPINGS, types_of
from support.tiers import crossings

VERSIONS, ROWS = from_json(DATA.read_text())
HAS_SAME_TYPES = VERSIONS["transformers"] == transformers.__version__  # another version, other rows
FAULT = """
from unittest import mock
from meshwright.parallel.gradients.buckets import Bucket
from conformance.families.reach import run_type
with mock.patch.object(Bucket, "average_copies", lambda self, flat, tp: None):
    print(run_type("causal-lm", "llama", ["tp2+sp"])["tp2+sp"].status)
"""
SLOW = """
import time
from conformance.families import reach
from conformance.families.tiny_batches import Batches
reach._TO_BUILD, Batches.first = 1, lambda batches: time.sleep(3)
print(reach.run_type("causal-lm", "llama", ["pp2"])["pp2"].reason)
"""
# A dense decoder, one with two kinds of layers, a model with images, a classifier and a plan that is refused.
SOME = [
    ("causal-lm", "qwen3", PLANS, "equal"),
    ("causal-lm", "lfm2", ("dp2 zero3", "tp2+sp", "pp2"), "equal"),
    ("image-text", "llava", PLANS, "equal"),
    ("sequence-classification", "llama", ("tp2+sp",), "equal"),
    ("causal-lm", "jetmoe", ("tp2+sp",), "refused"),
]


def test_page_is_rendered_from_its_data() -> None:
    assert PAGE.read_text() == render(VERSIONS, ROWS)


def test_counts_of_the_page_are_those_of_its_rows() -> None:
    cells = table_of(PAGE.read_text())
    assert len(cells) == len(ROWS) == sum(sum(of_plan.values()) for of_plan in counts(ROWS).values()) // len(PLANS)
    for (mapping, plan), found in counts(ROWS).items():
        column = [row[PLANS.index(plan)] for (owner, _), row in cells.items() if owner == mapping]
        assert column.count("equal") == found["equal"], (mapping, plan)
        assert len(column) == sum(found.values())


@pytest.mark.skipif(not HAS_SAME_TYPES, reason="the page is of another version of transformers")
def test_page_has_every_type() -> None:
    assert {(row.mapping, row.model_type) for row in ROWS} == {(m, t) for m in MAPPINGS for t in types_of(m)}


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2", "jamba"])
def test_tiny_config_has_each_kind_of_layer(family: str) -> None:
    default = transformers.CONFIG_MAPPING[family]()
    tiny = Shrinker(Words(), every_kind=False).tiny(default)
    before, after = default.get_text_config(), tiny.get_text_config()
    assert LAYERS <= after.num_hidden_layers <= 5
    assert set(getattr(after, "layer_types", None) or ()) == set(getattr(before, "layer_types", None) or ())


@pytest.mark.parametrize(("mapping", "family", "plans", "status"), crossings(SOME, one_in=2))
def test_sweep_compares_some_types(
    mapping: str, family: str, plans: tuple[str, ...], status: str, preloaded_python: Path
) -> None:
    code = f"from conformance.families.reach import run_type; print(run_type({mapping!r}, {family!r}, {plans!r}))"
    found = subprocess.run([preloaded_python, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.count(f"status='{status}'") == len(plans), found


@pytest.mark.crossing
def test_sweep_finds_a_planted_fault(preloaded_python: Path) -> None:
    """A fault: under sp the gradients of norms are not summed over the ranks."""
    found = subprocess.run([preloaded_python, "-c", FAULT], capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == "differs", found


@pytest.mark.crossing
def test_search_for_a_batch_that_takes_too_long_ends(preloaded_python: Path) -> None:
    """An error of a config lets the search go on with another one; the alarm, which comes once, must end it."""
    found = subprocess.run([preloaded_python, "-c", SLOW], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "no model and batch within 1 s", found
