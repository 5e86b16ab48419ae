"""Models whose checkpoints are published in another form: each rank reads what it holds, and a save writes that form.

Everything is compared bitwise, since nothing is computed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import meshwright as mw
import meshwright_hf
from meshwright.checkpoint.one_device import safetensors_file
from support.anatomies import MODELS, build
from support.construction import assert_equal
from support.tiers import crossings

CONFIGS: dict[str, dict[str, Any]] = {
    "tp2+sp ep2": {"tp_size": 2, "ep_size": 2, "enable_sequence_parallel": True},
}
PLANS = ["dp2 ep2", "dp2 ep2 zero3", "tp2+sp", "tp2+sp ep2", "pp2"]


def save_stock(name: str, folder: Path, **options: Any) -> Any:
    model = build(name).float()
    model.save_pretrained(folder, **options)
    return model


def load_and_save(plan: str, folder: Path, out: Path, how: str, options: dict[str, Any]) -> tuple[Any, int]:
    """Load a published checkpoint, save it again, and return the whole weights and the number of bytes read."""
    num_bytes = 0
    read = safetensors_file.read_into

    def counted(file: Any, offset: int, memory: memoryview) -> None:
        nonlocal num_bytes
        num_bytes += len(memory)
        read(file, offset, memory)

    with mock.patch.object(safetensors_file, "read_into", counted):
        if how == "from_pretrained":
            meshwright_hf.register()
            try:
                asked = DistributedConfig(**CONFIGS[plan]) if plan in CONFIGS else plan
                model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=asked)
            finally:
                meshwright_hf.unregister()
        else:
            config = AutoConfig.from_pretrained(folder)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            model = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=plan, weights=folder))[0]
    model.save_pretrained(out, **options)
    if how != "from_pretrained":
        mw.load_weights(model, folder)
    return mw.full_state_dict(model), num_bytes


def assert_same_files(ours: Path, stock: Path) -> None:
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in stock.iterdir())
    for path in stock.glob("*.safetensors"):
        assert_equal(load_file(ours / path.name), load_file(path))
    for path in stock.glob("*.index.json"):
        assert json.loads((ours / path.name).read_text()) == json.loads(path.read_text())


CASES = [(name, plan) for name in ("mixtral", "qwen3_moe", "deepseek_v3") for plan in PLANS]


@pytest.mark.parametrize(
    ("name", "plan"),
    crossings(
        CASES,
        but=[("qwen3_moe", "dp2 ep2 zero3"), ("mixtral", "tp2+sp ep2"), ("deepseek_v3", "pp2")],
        quick=[("qwen3_moe", "dp2 ep2")],
    ),
)
def test_a_published_checkpoint_is_read_and_written_back(name: str, plan: str, pool2: Any, tmp_path: Path) -> None:
    how = "from_pretrained" if plan in ("dp2 ep2", "pp2", "tp2+sp ep2") else "weights"
    options = {"max_shard_size": "20KB"} if plan == "dp2 ep2" else {}
    expected = save_stock(name, tmp_path / "stock", **options).state_dict()
    assert any(".experts.0." in key for file in (tmp_path / "stock").glob("*.safetensors") for key in load_file(file))
    (weights, first), (_, second) = pool2.run(load_and_save, plan, tmp_path / "stock", tmp_path / "ours", how, options)
    assert_equal(weights, {n: x for n, x in expected.items() if n in weights})
    assert weights.keys() == expected.keys()
    assert_same_files(tmp_path / "ours", tmp_path / "stock")
    if plan == "dp2 ep2":
        experts = sum(x.nbytes for key, x in expected.items() if ".experts." in key)
        others = sum(x.nbytes for x in expected.values()) - experts
        shares = (3 / 5, 2 / 5) if name == "qwen3_moe" else (1 / 2, 1 / 2)
        assert [first, second] == [others + share * experts for share in shares]


def load_in_bf16(folder: Path, names: dict[str, str]) -> Any:
    meshwright_hf.register()
    try:
        options = {"dtype": torch.bfloat16, "key_mapping": names, "distributed_config": "dp2 ep2"}
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    finally:
        meshwright_hf.unregister()
    return mw.full_state_dict(model)


def test_names_and_dtypes_are_those_that_transformers_gives(pool2: Any, tmp_path: Path) -> None:
    save_stock("deepseek_v3", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(
        {key.replace("model.layers", "net.blocks"): x for key, x in load_file(file).items()}, file, {"format": "pt"}
    )
    names = {"^net.blocks": "model.layers"}
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, key_mapping=names).state_dict()
    assert {x.dtype for x in stock.values()} == {torch.bfloat16, torch.float32}  # the bias of the router
    assert_equal(pool2.run(load_in_bf16, tmp_path, names)[0], stock)


def load_damaged(folder: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    mw.to_distributed(model, config=mw.ToDistributedConfig(plan="dp2 ep2", weights=folder))


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (r"\.1\..*\.0\.(gate|up)_proj", r"gate_up_proj: \[3, 32, 32\] in the checkpoint, \[4, 32, 32\] in the model"),
        (r"\.1\..*\.3\.gate_proj", r"7 tensor\(s\), such as model.layers.1.mlp.experts.0.* do not fit together"),
        (r"\.1\..*experts\.\d\.down_proj", r"lacks 1 parameter\(s\):\n  model.layers.1.mlp.experts.down_proj"),
    ],
)
def test_an_expert_that_a_file_lacks_is_an_error(lost: str, message: str, pool2: Any, tmp_path: Path) -> None:
    save_stock("deepseek_v3", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({key: x for key, x in load_file(file).items() if not re.search(lost, key)}, file, {"format": "pt"})
    for kind, text in pool2.run_expecting_error(load_damaged, tmp_path):
        assert kind == "CheckpointError" and re.search(message, text), text


def from_a_seed(plan: str) -> tuple[dict[str, torch.Tensor], int]:
    torch.manual_seed(5)
    with mw.deferred_init():
        model = MODELS["qwen3_moe"]()
    assert all(p.is_meta for name, p in model.named_parameters() if ".experts." in name)
    model = mw.to_distributed(model, plan=plan)[0]
    held = sum(p.meshwright.local_numel for name, p in model.named_parameters() if ".experts." in name)
    return mw.full_state_dict(model), held


@pytest.mark.parametrize("plan", ["dp2 ep2", "tp2+sp ep2"])
def test_experts_from_a_seed_are_those_of_one_device(plan: str, pool2: Any) -> None:
    """Five experts over two ranks, of which the second has two and padding."""
    torch.manual_seed(5)
    expected = MODELS["qwen3_moe"]().state_dict()
    (weights, *held), (_, *other) = pool2.run(from_a_seed, plan)
    assert_equal(weights, expected)
    assert held == other == [sum(x.numel() for name, x in expected.items() if ".experts." in name) * 3 / 5]
