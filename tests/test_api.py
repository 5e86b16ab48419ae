"""The public surface: a change to it is a decision, so it is written down here too."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

import meshwright as mw
import meshwright_plan
import meshwright_tools

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]

PUBLIC = {
    "AlreadyDistributedError",
    "ChainedOptimizer",
    "Checkpoint",
    "CheckpointError",
    "DataParallel",
    "DivergenceError",
    "HeldMemory",
    "ItemCountError",
    "LoaderOptions",
    "MemoryOfRanks",
    "OptimizerMismatchError",
    "OutOfVocabularyError",
    "ParallelDims",
    "ParallelPlan",
    "Partial",
    "PeerFailedError",
    "PlanError",
    "Preemption",
    "ProcessMesh",
    "Replicate",
    "Role",
    "Shard",
    "ShardingPlan",
    "StaticStep",
    "TokenDispatcher",
    "ToDistributedConfig",
    "UncoveredParameterError",
    "UninitialisedParameterError",
    "UnreadableTensorError",
    "VerificationError",
    "balance_experts",
    "clip_grad_norm_",
    "decoder_roles",
    "deferred_init",
    "expert_counts",
    "full_gradients",
    "full_state_dict",
    "fused_allreduce_gradients",
    "gather_rows",
    "global_mean",
    "infer_plan",
    "load_checkpoint",
    "load_optimizer",
    "load_weights",
    "log_values",
    "memory_of",
    "no_sync",
    "plan_of",
    "register_dispatcher",
    "register_plan",
    "reshard",
    "save_checkpoint",
    "save_optimizer",
    "save_weights",
    "sampling_generator",
    "shard_dataloader",
    "shard_optimizer",
    "shard_tensor",
    "to_distributed",
    "to_static",
    "verify",
    "wait_for_checkpoints",
}


def test_names() -> None:
    assert set(mw.__all__) == PUBLIC
    assert all(inspect.getdoc(getattr(mw, name)) for name in PUBLIC)


def test_signatures() -> None:
    assert list(inspect.signature(mw.to_distributed).parameters) == [
        "model",
        "optimizer",
        "dataloader",
        "device_num",
        "node_num",
        "config",
        "plan",
        "loader",
    ]
    assert list(inspect.signature(mw.ParallelPlan).parameters) == [
        "dp",
        "tp",
        "cp",
        "context",
        "ulysses",
        "ep",
        "etp",
        "pp",
        "schedule",
        "chunks",
        "stages",
        "sequence_parallel",
        "zero_stage",
        "micro_batch_size",
        "gradient_accumulation_steps",
        "recompute",
        "recomputed_layers",
        "reduce_dtype",
        "offload",
        "dtype",
    ]
    for configuration in (mw.ParallelPlan, mw.ToDistributedConfig, mw.ShardingPlan, mw.ParallelDims):
        kinds = {p.kind for p in inspect.signature(configuration).parameters.values()}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def test_errors_of_use_are_value_errors_and_those_between_ranks_are_not() -> None:
    between_ranks = {"DivergenceError", "PeerFailedError", "VerificationError"}
    for name in (name for name in PUBLIC if name.endswith("Error")):
        kind = RuntimeError if name in between_ranks else ValueError
        assert issubclass(getattr(mw, name), kind), name


def test_imports_of_the_package_and_of_its_planner_are_cheap() -> None:
    heavy = {"torch", "numpy", "transformers", "accelerate", "datasets", "deepspeed", "meshwright_hf", "matplotlib",
             "pandas"}  # fmt: skip
    code = f"import sys, meshwright, meshwright_tools.plan_page; print(sorted(sys.modules.keys() & {heavy!r}))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_examples_in_docstrings() -> None:
    attempted = 0
    for package in (mw, meshwright_plan, meshwright_tools):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            result = doctest.testmod(importlib.import_module(module.name))
            assert result.failed == 0, module.name
            attempted += result.attempted
    assert attempted > 10


def test_tests_that_the_docs_name_exist() -> None:
    tests = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    docs = "".join(path.read_text() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
    named = set(re.findall(r"(test_\w+\.py)::(test_\w+)", docs))
    assert len(named) > 80
    assert [name for file, name in named if f"def {name}(" not in tests[file].read_text()] == []
    assert [path for path in re.findall(r"tests/[\w/]+\.py", docs) if not (ROOT / path).exists()] == []


def test_the_version_is_that_of_the_newest_notes_or_comes_after_them() -> None:
    notes = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\d\S*)", notes, re.MULTILINE)
    assert newest is not None
    if "\n## Unreleased\n" in notes:
        assert Version(mw.__version__).is_devrelease and Version(mw.__version__) > Version(newest[1])
    else:
        assert mw.__version__ == newest[1]


def test_each_package_names_its_files() -> None:
    lacking = {}
    for package in [*ROOT.glob("plugin/**/__init__.py"), *ROOT.glob("integrations/**/__init__.py")]:
        text = ast.get_docstring(ast.parse(package.read_text())) or ""
        if names := [f.name for f in package.parent.glob("*.py") if f != package and f.name not in text]:
            lacking[str(package.relative_to(ROOT))] = names
    assert not lacking


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for path in (*ROOT.glob("plugin/**/*.py"), *ROOT.glob("integrations/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(places) > 300
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
