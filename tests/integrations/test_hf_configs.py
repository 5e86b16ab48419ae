"""``register()``, what it takes over and what it refuses, and plans in a config.json; all in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

import meshwright as mw
import meshwright_hf
from meshwright.choose.given_plan import plan_in_model
from meshwright.roles.registry import plan_for
from meshwright_hf import distributed_config
from support.construction import assert_equal
from support.models import build, tokens

pytestmark = pytest.mark.quick

SP = DistributedConfig(tp_size=1, enable_sequence_parallel=True)


@pytest.fixture(autouse=True)
def leave_transformers_as_it_was() -> Iterator[None]:
    yield
    meshwright_hf.unregister()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the number of processes that the launcher says there are; none of them is started."""

    def set_world(size: int) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(size))

    return set_world


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("checkpoint")
    build("llama").save_pretrained(path)
    return str(path)


def state_of_transformers() -> dict[str, Any]:
    return {**vars(PreTrainedModel), "styles": dict(ALL_PARALLEL_STYLES)}


def load(path: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, **{"distributed_config": SP, **options})


def test_importing_takes_nothing_of_the_stack() -> None:
    code = (
        "import sys, meshwright_hf; dir(meshwright_hf)\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'deepspeed', 'trl', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'registre'"):
        meshwright_hf.registre  # noqa: B018


def test_a_plain_import_is_enough() -> None:
    code = (
        "import meshwright_hf as hf\n"
        "assert callable(hf.accelerate.prepare) and callable(hf.datasets.pack_dataset)\n"
        "assert issubclass(hf.MeshwrightTrainer, hf.MeshwrightTrainerMixin)\n"
        "assert hf.trainer.MeshwrightTrainer is hf.MeshwrightTrainer\n"
        "import sys; assert 'trl' not in sys.modules and 'deepspeed' not in sys.modules\n"
        "assert callable(hf.deepspeed.initialize)\n"
        "assert all(hasattr(hf, name) for name in hf.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_register_is_explicit_and_reversible() -> None:
    before = state_of_transformers()
    meshwright_hf.register()
    meshwright_hf.register(take_over="all")  # a second call replaces the first
    during = state_of_transformers()
    assert {"meshwright_partial_norm", "meshwright_vocab_head"} <= set(during["styles"])
    changed = {name for name in during if during[name] is not before.get(name)} - {"styles"}
    assert changed == {
        "prepare_distribute_model",
        "maybe_distribute_model",
        "_load_pretrained_model",
        "_finalize_model_loading",
        "_load_and_finalize_distributed_pretrained_model",
    }
    meshwright_hf.unregister()
    meshwright_hf.unregister()
    assert state_of_transformers() == before
    with pytest.raises(ValueError, match="take_over='tp'"):
        meshwright_hf.register(take_over="tp")  # type: ignore[arg-type]
    assert state_of_transformers() == before


def test_unregister_does_not_undo_what_another_library_did(monkeypatch: pytest.MonkeyPatch) -> None:
    meshwright_hf.register()
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(lambda *_: None))
        with pytest.raises(RuntimeError, match=r"something else has replaced PreTrainedModel\._load_pretrained_model"):
            meshwright_hf.unregister()
    meshwright_hf.unregister()


def test_a_config_is_translated(world: Any) -> None:
    world(8)
    asked = DistributedConfig(tp_size=4, dp_replicate_size=2, enable_sequence_parallel=True, tp_plan="auto")
    plan = distributed_config.options_for(asked).plan
    assert plan == mw.ParallelPlan(dp=2, tp=4, sequence_parallel=True)
    assert distributed_config.options_for(DistributedConfig(tp_plan="auto")).plan == mw.ParallelPlan(tp=8)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"pp_size": 2}, ["tp_size=2 x pp_size=2 x fsdp_size=1 x dp_replicate_size=1 needs 4 processes"]),
        ({"ep_size": 2, "ep_implementation": "all_reduce"}, ["ep_implementation='all_reduce'", "leave it 'auto'"]),
        ({"ep_plan": {"a": "b"}}, ["DistributedConfig.ep_plan={'a': 'b'}"]),
        ({"fsdp_cpu_offload": True}, ["DistributedConfig.fsdp_cpu_offload=True", "set it False"]),
        ({"fsdp_mixed_precision": True}, ["DistributedConfig.fsdp_mixed_precision=True", "torch.autocast"]),
        ({"fsdp_plan": {"model": "free_full_weight"}}, ["DistributedConfig.fsdp_plan"]),
        ({"tp_plan": {"lm_head": "colwise"}}, ["tp_plan={'lm_head': 'colwise'}", "ShardingPlan", "register_plan"]),
        ({"tp_plan": {}}, ["tp_plan={}", "leave tp_plan=None"]),
        ({"tp_size": 4}, ["tp_size=4 x pp_size=1 x fsdp_size=1 x ", "needs 4 processes, but 2 were launched"]),
        ({"tp_size": 1, "fsdp_size": 2, "dp_replicate_size": 2}, ["needs 4 processes, but 2 were launched"]),
    ],
)
def test_what_cannot_be_honoured_is_named(fields: dict[str, Any], names: list[str], world: Any) -> None:
    world(2)
    with pytest.raises(mw.PlanError) as error:
        distributed_config.options_for(DistributedConfig(**{"tp_size": 2, **fields}))
    assert all(name in str(error.value) for name in names), error.value


def test_hybrid_sharding_is_refused_by_both_names(world: Any) -> None:
    world(4)
    with pytest.raises(mw.PlanError, match=r"fsdp_size=2, dp_replicate_size=2\) is not supported.*set fsdp_size=4"):
        distributed_config.options_for(DistributedConfig(fsdp_size=2, dp_replicate_size=2))


def test_pp_size_is_pp(world: Any) -> None:
    world(4)
    asked = DistributedConfig(pp_size=2, tp_size=2, enable_sequence_parallel=True)
    expected = mw.ParallelPlan(pp=2, tp=2, sequence_parallel=True, micro_batch_size=1)
    assert distributed_config.options_for(asked).plan == expected


def test_ep_size_is_ep(world: Any) -> None:
    world(2)
    over_dp = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="all_to_all")
    assert distributed_config.options_for(over_dp).plan == mw.ParallelPlan(dp=2, zero_stage=3, ep=2)
    for sp in (False, True):
        over_tp = DistributedConfig(tp_size=2, ep_size=2, enable_sequence_parallel=sp)
        assert distributed_config.options_for(over_tp).plan == mw.ParallelPlan(tp=2, sequence_parallel=sp, ep=2)


def test_fsdp_is_zero_3(world: Any) -> None:
    world(4)
    asked = DistributedConfig(fsdp_size=2, tp_size=2, enable_sequence_parallel=True)
    expected = mw.ParallelPlan(dp=2, tp=2, sequence_parallel=True, zero_stage=3)
    assert distributed_config.options_for(asked).plan == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "cpu"}, "device_map='cpu' and distributed_config"),
        ({"ignore_mismatched_sizes": True}, "ignore_mismatched_sizes=True .* leave it False"),
        ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, "quanti"),
        ({"distributed_config": {"pp_size": 2}}, r"pp_size=2 x .*needs 2 processes, but 1 were launched"),
        ({"distributed_config": mw.ToDistributedConfig(weights="other")}, "weights='other' and the path of"),
        ({"distributed_config": mw.ToDistributedConfig()}, "picking a plan needs the size of a batch"),
    ],
)
def test_options_of_from_pretrained_that_do_not_go_together(
    options: dict[str, Any], message: str, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meshwright_hf.register()
    with pytest.raises((ValueError, ImportError), match=message):
        load(checkpoint, **options)


def test_weights_that_are_no_files(checkpoint: str, tmp_path: Path) -> None:
    meshwright_hf.register()
    model = build("llama")
    with pytest.raises(mw.PlanError, match=r"state_dict= .*deferred_init"):
        type(model).from_pretrained(None, config=model.config, state_dict={}, distributed_config=SP)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(mw.CheckpointError, match="pickle file"):
        load(str(tmp_path))


def test_an_adapter_is_refused(checkpoint: str, tmp_path: Path) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), LoraConfig(target_modules=["q_proj"]))
    model.peft_config["default"].base_model_name_or_path = checkpoint
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path) is not None
    meshwright_hf.register()
    with pytest.raises(mw.PlanError, match="an adapter cannot be loaded into a model that is already distributed"):
        load(str(tmp_path))


def test_a_decoder_without_its_head(checkpoint: str) -> None:
    stock = AutoModel.from_pretrained(checkpoint)
    meshwright_hf.register()
    model = AutoModel.from_pretrained(checkpoint, distributed_config=SP)
    assert_equal(mw.full_state_dict(model), stock.state_dict())


def test_one_process(checkpoint: str) -> None:
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    meshwright_hf.register()
    model, info = load(checkpoint, output_loading_info=True)
    assert not model.training and not any(info.values())
    ids = tokens(2, 7)
    with torch.no_grad():
        # To the bit: on one rank nothing is split.
        assert torch.equal(model(input_ids=ids).logits, stock(input_ids=ids).logits)
    assert mw.plan_of(model) == mw.ParallelPlan()
    with pytest.raises(mw.AlreadyDistributedError, match="distributed by an earlier call"):
        mw.to_distributed(model)


def test_an_optimizer_that_comes_later(checkpoint: str) -> None:
    meshwright_hf.register()
    model = load(checkpoint, distributed_config=mw.ParallelPlan())
    optimizer = torch.optim.AdamW(model.parameters())

    def refused(message: str, optimizer: Any = optimizer, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            mw.to_distributed(model, optimizer, config=mw.ToDistributedConfig(**options))

    refused("ParallelPlan.tp=2, but the model was distributed with tp=1", plan=mw.ParallelPlan(tp=2))
    refused("ToDistributedConfig.weights cannot change a model", weights=checkpoint)
    refused("ToDistributedConfig.sequence_parallel=True, but", sequence_parallel=True)
    refused("parameters are not the model's", torch.optim.AdamW(build("llama").parameters()))
    plan = mw.ParallelPlan(gradient_accumulation_steps=2, zero_stage=1)
    model(input_ids=tokens(2, 7), labels=tokens(2, 7)).loss.backward()
    refused("shards gradients, but the model already has some", plan=plan)
    model.zero_grad()
    mw.to_distributed(model, optimizer, config=mw.ToDistributedConfig(plan=plan))
    assert mw.plan_of(model) == plan
    refused("with an optimizer; leave this call out, or build a new model")


@pytest.mark.parametrize(
    "plan",
    [
        mw.ParallelPlan(pp=2, schedule="interleaved", chunks=2, stages=(1, 3, 2, 2), micro_batch_size=1),
        mw.ParallelPlan(pp=4, dp=2, schedule="zbv", zero_stage=1, gradient_accumulation_steps=8),
    ],
    ids=str,
)
def test_a_plan_with_stages_travels_too(plan: mw.ParallelPlan, tmp_path: Path, world: Any) -> None:
    model = build("llama")
    meshwright_hf.save_plan(model, plan)
    model.save_pretrained(tmp_path)
    world(plan.world_size)
    assert plan_in_model(AutoModelForCausalLM.from_pretrained(tmp_path), mw.ToDistributedConfig()) == plan


def test_a_plan_travels_with_the_model(tmp_path: Path, world: Any) -> None:
    model = build("llama")
    plan = mw.ParallelPlan(dp=2, tp=2, sequence_parallel=True, zero_stage=1)
    meshwright_hf.save_plan(model, plan)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["meshwright"]
    assert saved == {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1}

    # It is no reason to distribute anything, registered or not.
    meshwright_hf.register()
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(read.model.embed_tokens.weight, "meshwright")

    # Found, and of another number of processes than there are: both, and where it is.
    for config in (mw.ToDistributedConfig(), None):
        with pytest.raises(mw.PlanError, match=rf'"meshwright" in the config of {tmp_path}.*= 4 processes, but 1 were'):
            mw.to_distributed(read, config=config)
    with pytest.raises(mw.PlanError, match="= 4 processes, but 1 were"):
        load(str(tmp_path), distributed_config=mw.ToDistributedConfig())
    # An explicit plan goes first.
    assert mw.plan_of(mw.to_distributed(read, config=mw.ToDistributedConfig(plan=mw.ParallelPlan()))[0]).tp == 1
    assert mw.plan_of(load(str(tmp_path))).tp == 1

    meshwright_hf.save_plan(read.config, mw.ParallelPlan(recompute="full"))
    built = type(read)(read.config)
    assert mw.plan_of(mw.to_distributed(built)[0]) == mw.ParallelPlan(recompute="full")
    meshwright_hf.save_plan(model)
    assert "meshwright" not in model.config.to_diff_dict()


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ([1], "must be an object"),
        ({"tp": 1, "sp": True}, "a plan has no field 'sp'; write sequence_parallel=True. Its fields are dp, tp"),
        ({"tp": "two"}, "ParallelPlan.tp must be a positive integer, not 'two'"),
        ({"pp": 2, "stages": [1, 1]}, "= 2 processes, but 1 were"),
        ({"pp": 2, "stages": [2]}, "one number of layers for each stage"),
    ],
)
def test_an_unsound_plan_in_a_config(saved: Any, message: str) -> None:
    model = build("llama")
    model.config.meshwright = saved
    with pytest.raises(mw.PlanError, match=rf'(?s)"meshwright" in the config of .*({message})'):
        mw.to_distributed(model)


def test_roles_travel_with_the_model(tmp_path: Path) -> None:
    roles = mw.ShardingPlan(roles={**mw.decoder_roles(), "model.extra": mw.Role.NORM})
    model = build("llama")
    meshwright_hf.save_plan(model, sharding_plan=roles)
    model.save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert dict(plan_for(read).roles) == dict(roles.roles)
    read.config.meshwright = {"roles": {"model.norm": "nrom"}}
    with pytest.raises(mw.PlanError, match=r"unknown roles: model.norm: 'nrom'; use one of layer"):
        plan_for(read)


@pytest.mark.parametrize(
    "arguments", [({"tp": 2}, mw.ParallelPlan()), (torch.nn.ReLU(), mw.ParallelPlan()), (None, {"tp": 2})]
)
def test_save_plan_takes_a_model_and_a_plan(arguments: tuple[Any, Any]) -> None:
    owner, plan = arguments
    with pytest.raises(mw.PlanError, match="save_plan takes a"):
        meshwright_hf.save_plan(build("llama") if owner is None else owner, plan)
