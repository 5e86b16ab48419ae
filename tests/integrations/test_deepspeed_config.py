"""What ``meshwright_hf.deepspeed`` reads, fills in and refuses; no ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.affine import ParamAffineMap

import meshwright as mw
from meshwright.layout.row_layout import RowLayout
from meshwright.parallel.tensor_parallel.structure import describe
from meshwright.roles import plan_for
from meshwright_hf.deepspeed import deepspeed_mpu, initialize
from meshwright_hf.deepspeed.complete_config import complete_config, read_config
from meshwright_hf.deepspeed.engine import check_norms, holds_first
from meshwright_hf.deepspeed.universal import affine_map
from support.models import FAMILIES, build

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
PLAN = mw.ParallelPlan(dp=2, tp=2)


def complete(config: dict[str, Any], plan: mw.ParallelPlan = PLAN, **options: Any) -> dict[str, Any]:
    base = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    options = {"device": CPU, "has_optimizer": True, **options}
    return complete_config({**base, **config}, plan, build("llama"), **options)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "AutoTP": ({"tensor_parallel": {"autotp_size": 2}}, r"tensor_parallel.*ParallelPlan\.tp"),
    "AutoEP": ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, r"expert_parallel.*plan='dp2 ep2 zero1'"),
    "Ulysses": ({"sequence_parallel_size": 2}, r"sequence_parallel_size=2.*ParallelPlan\.sequence_parallel"),
    "hybrid engine": ({"hybrid_engine": {"enabled": True}}, "hybrid_engine"),
    "elasticity": ({"elasticity": {"enabled": True}}, "elasticity"),
    "fp16 on CPU": ({"fp16": {"enabled": True}}, r"fp16\.enabled.*bf16"),
    "MiCS": ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, r"zero_optimization\.mics_shard_size=2"),
    "stage 0": ({"zero_optimization": {"stage": 0}}, r"zero_optimization\.stage=0.*ParallelPlan\.tp=2"),
    "summed gradients": ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op='sum'"),
    "two optimizers": ({"optimizer": {"type": "AdamW"}}, r"optimizer\.type='AdamW'.*pass one"),
    "a batch of all processes": (
        {"train_batch_size": 8, "gradient_accumulation_steps": 1},
        r"train_batch_size=8.*train_micro_batch_size_per_gpu=2.*gradient_accumulation_steps=1 x dp=2 = 4",
    ),
    "a negative batch": ({"train_micro_batch_size_per_gpu": -1}, r"train_micro_batch_size_per_gpu=-1.*positive"),
    "an auto that nothing tells": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
        r"scheduler\.params\.warmup_num_steps",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(mw.PlanError, match=message):
        complete(config)


def test_an_optimizer_that_mixes_elements_is_refused_on_shards_only() -> None:
    lamb = {"optimizer": {"type": "Lamb"}}
    with pytest.raises(mw.PlanError, match=r"optimizer\.type='Lamb'.*tp=2"):
        complete(lamb, has_optimizer=False)
    complete(lamb, mw.ParallelPlan(dp=4), has_optimizer=False)


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ({"zero_stage": 1}, {"zero_optimization": {"stage": 2}}),
        ({"micro_batch_size": 4}, {"train_micro_batch_size_per_gpu": 2}),
        ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 2}),
    ],
)
def test_a_plan_that_contradicts_the_configuration_names_both(field: dict[str, int], config: dict[str, Any]) -> None:
    (name,) = field
    with pytest.raises(mw.PlanError, match=rf"{name}=.*differ|.*differ.*{name}") as error:
        complete(config, mw.ParallelPlan(dp=2, tp=2, **field))
    assert f"ParallelPlan.{name}" in str(error.value)


def test_any_two_sizes_of_a_batch_tell_the_third() -> None:
    auto = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}

    def sizes(config: dict[str, Any], plan: mw.ParallelPlan = PLAN, **options: Any) -> tuple[int, int]:
        found = complete(config, plan, **options)
        return found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]

    assert sizes({"train_batch_size": 16, "gradient_accumulation_steps": "auto"}) == (2, 4)
    assert sizes({**auto, "train_batch_size": 16, "gradient_accumulation_steps": 4}) == (2, 4)
    assert sizes({**auto, "train_batch_size": "auto"}, rows=3) == (3, 1)
    assert sizes(auto, mw.ParallelPlan(dp=2, tp=2, gradient_accumulation_steps=4), rows=3) == (3, 4)
    with pytest.raises(mw.PlanError, match="train_micro_batch_size_per_gpu is not known"):
        sizes(auto)
    with pytest.raises(mw.PlanError, match=r"gives 3 row.*batch_size.* = 4"):
        sizes({}, rows=3)


def test_auto_values_are_those_of_transformers() -> None:
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero = {"stage": 3, **dict.fromkeys(names, "auto")}
    found = complete(
        {
            "zero_optimization": zero,
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto"},
            "gradient_clipping": "auto",
            "train_batch_size": "auto",
        }
    )
    assert [found["zero_optimization"][name] for name in names] == [32 * 32, int(0.9 * 32 * 32), 320]
    assert not found["bf16"]["enabled"] and not found["fp16"]["enabled"]
    assert found["gradient_clipping"] == 1.0
    assert "train_batch_size" not in found  # DeepSpeed multiplies by dp itself
    adam = complete({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, has_optimizer=False)
    assert adam["optimizer"]["params"]["torch_adam"]  # nothing to compile on a CPU


def test_reads_a_file_and_leaves_a_dict_alone(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    given = {"zero_optimization": {"stage": 1}}
    path.write_text(json.dumps(given))
    read_config(given)["zero_optimization"]["stage"] = 3
    assert read_config(path) == read_config(str(path)) == given == {"zero_optimization": {"stage": 1}}
    path.write_text('{"bf16": {}, "bf16": {}}')
    with pytest.raises(mw.PlanError, match="'bf16' is there twice"):
        read_config(path)
    with pytest.raises(mw.PlanError, match=r"none\.json"):
        read_config(tmp_path / "none.json")


def test_a_call_that_fails_changes_nothing() -> None:
    model = build("llama")
    before = {name: id(p) for name, p in model.named_parameters()}
    plan = mw.ParallelPlan()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    with pytest.raises(mw.PlanError, match="4 processes"):
        initialize(model=model, config=config, plan=PLAN)
    with pytest.raises(mw.PlanError, match="config and config_params"):
        initialize(model=model, config=config, config_params=config, plan=plan)
    with pytest.raises(mw.PlanError, match=r"takes model=.*NoneType"):
        initialize(config=config, plan=plan)
    with pytest.raises(mw.PlanError, match="none yet"), deepspeed_mpu(plan):
        raise AssertionError("the block must not run")
    next(model.parameters()).ds_id = 0
    with pytest.raises(mw.AlreadyDistributedError, match=r"zero\.Init"):
        initialize(model=model, config=config, plan=plan)
    assert before == {name: id(p) for name, p in model.named_parameters()}
    assert torch.distributed.is_initialized() is False


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_affine_maps_cut_and_merge_as_the_layouts_do(family: str, tp: int) -> None:
    model = build(family, num_key_value_heads=2)
    structure = describe(model, plan_for(model), tp=tp, sequence_parallel=True)
    for name, parameter in model.named_parameters():
        layout = structure.parameters[name]
        rows = layout.over("tp")
        full = torch.randn(parameter.shape)
        cut = {rank: rows.take(full, rank) for rank in range(tp)}
        stored = json.loads(json.dumps(affine_map(layout).to_dict()))
        maps = ParamAffineMap.from_dict(stored)
        maps.validate_coverage()
        merged = maps.rebuild(cut)
        assert torch.equal(merged.narrow(rows.dim, 0, rows.size) if full.ndim else merged, full), name
        if merged.shape == full.shape:
            assert all(torch.equal(maps.extract(full, rank), cut[rank]) for rank in range(tp)), name


def test_each_row_counts_on_one_rank() -> None:
    shared = RowLayout(0, 4, (((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),)))
    assert [holds_first(shared, rank) for rank in range(4)] == [True, False, True, False]
    assert [holds_first(RowLayout.padded(5, 4), rank) for rank in range(3)] == [True] * 3
    # A rank with a head of its own and one of another's; and one that holds a head twice.
    mixed = RowLayout(0, 3, (((0, 1), (1, 2)), ((1, 2), (2, 3))))
    assert holds_first(mixed, 1) is None
    assert holds_first(RowLayout(0, 2, (((0, 1), (0, 1)), ((1, 2), (1, 2)))), 0) is None
    with pytest.raises(mw.PlanError, match=r"k_proj.*tp=2.*ParallelPlan\.tp"):
        check_norms({"k_proj": mixed})
