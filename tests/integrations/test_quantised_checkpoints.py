"""Quantised checkpoints that each rank reads its part of: bit for bit what a rank keeps of a model loaded whole."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import meshwright as mw
import meshwright_hf
from meshwright.checkpoint.one_device import safetensors_file
from meshwright.parallel.shards.stand_in import reading_shards
from support.models import build, labels_for, tokens
from support.tiers import crossings

pytest.importorskip("bitsandbytes", reason="the environment of the oldest versions has no bitsandbytes")

import bitsandbytes

from support.quantised import WIDE, quantised  # it needs bitsandbytes

KINDS = ["nf4", "fp4", "nf4, double", "nf4 in bfloat16", "8 bits", "not quantised"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for kind in KINDS:
        model = build("llama", **WIDE) if kind == "not quantised" else quantised(kind)
        model.save_pretrained(folder / kind)
    return {kind: folder / kind for kind in KINDS}


@contextlib.contextmanager
def registered() -> Iterator[list[int]]:
    """Make ``from_pretrained`` read parts; yields the numbers of bytes that are read."""
    read, sizes = safetensors_file.read_into, list[int]()

    def counting(file: Any, offset: int, memory: memoryview) -> None:
        sizes.append(memory.nbytes)
        read(file, offset, memory)

    meshwright_hf.register()
    safetensors_file.read_into = counting
    try:
        yield sizes
    finally:
        safetensors_file.read_into = read
        meshwright_hf.unregister()


def load(path: Path, plan: str, how: str) -> Any:
    """Load a base, and distribute it with adapters, drawn after the base was built, or alone."""
    torch.manual_seed(5)
    if how == "distributed_config":
        return AutoModelForCausalLM.from_pretrained(path, distributed_config=plan).train()
    with mw.deferred_init() if "deferred" in how else contextlib.nullcontext():
        model: Any = AutoModelForCausalLM.from_pretrained(path)
        if "adapters" in how:
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
            config = LoraConfig(target_modules="all-linear", init_lora_weights="gaussian")
            model = get_peft_model(model, config)
    assert ("deferred" in how) == all(parameter.is_meta for parameter in model.parameters())
    return mw.to_distributed(model, plan=plan)[0].train()


def contents(model: Any) -> dict[str, Any]:
    """All that a rank has of a model's weights and their statistics."""
    found: dict[str, Any] = {}
    with reading_shards():
        for name, module in model.named_modules():
            state = getattr(module._parameters.get("weight"), "quant_state", None)
            owners = {
                "": {**module._parameters, **module._buffers},
                ".weight": {key: getattr(module._parameters.get("weight"), key, None) for key in ("SCB", "CB")},
                ".state": {} if state is None else vars(state),
            }
            for place, owner in owners.items():
                found |= {f"{name}{place}.{key}": value for key, value in owner.items() if value is not None}
        return {k: x.detach().as_subclass(Tensor).clone() if isinstance(x, Tensor) else x for k, x in found.items()}


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor: packed into a float dtype it may have NaN, and NaN stands in place of other stages'."""
    return x.contiguous().view(-1).view(torch.uint8)


def assert_same(actual: Any, expected: Any, name: str) -> None:
    assert type(actual) is type(expected), name
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype and actual.device == expected.device, name
        assert actual.shape == expected.shape and torch.equal(bits(actual), bits(expected)), name
    elif not hasattr(expected, "absmax"):  # the second statistics
        assert actual == expected, name
    else:
        for key, value in vars(expected).items():
            assert_same(getattr(actual, key), value, f"{name}.{key}")


def losses(model: Any) -> Tensor:
    ids = tokens(4, 11)
    loss = model(input_ids=ids, labels=labels_for(ids)).loss
    loss.backward()
    return torch.tensor(loss.item())


def read_both(path: Path, plan: str, how: str) -> int:
    """Compare a model that is read by parts with one that is loaded whole; returns the bytes that this rank read."""
    whole = load(path, plan, "adapters" if "adapters" in how else "alone")
    bitsandbytes.functional.name2qmap.clear()  # as in a process that has quantised nothing
    with registered() as sizes:
        model = load(path, plan, how)
    assert not any(codes.is_meta for codes in bitsandbytes.functional.name2qmap.values())
    expected, actual = contents(whole), contents(model)
    assert actual.keys() == expected.keys() and len(actual) > 30
    for name, value in expected.items():
        assert_same(actual[name], value, name)
    assert torch.equal(losses(model), losses(whole))
    of_whole, of_parts = mw.full_gradients(whole), mw.full_gradients(model)
    assert of_parts.keys() == of_whole.keys()
    for name, value in of_whole.items():
        assert_same(of_parts[name], value, f"the gradient of {name}")
    return sum(sizes)


CASES = [
    ("nf4, double", "tp2+sp", "deferred, adapters"),
    ("8 bits", "pp2", "distributed_config"),
    ("nf4", "dp2 zero3", "deferred, adapters"),
    ("nf4 in bfloat16", "tp2", "distributed_config"),
    ("fp4", "tp2+sp", "distributed_config"),
    ("8 bits", "tp2", "deferred, adapters"),
    ("not quantised", "tp2+sp", "deferred, adapters"),
]


@pytest.mark.parametrize(("kind", "plan", "how"), crossings(CASES, but=CASES[:2]))
def test_parts_are_those_of_the_whole(kind: str, plan: str, how: str, checkpoints: dict[str, Path], pool2: Any) -> None:
    size = sum(x.nbytes for name, x in load_file(checkpoints[kind] / "model.safetensors").items() if "layers" in name)
    beside = 2 * 97 * 128 * 4 + 128 * 4  # the embedding and the head, in float32, and the last norm
    for read in pool2.run(read_both, checkpoints[kind], plan, how):
        # Half of the layers. A rank of tp reads whole statistics: for 0.5 bytes of a value 0.063, or 0.016 in 8 bits.
        assert read <= (1 if plan.startswith("dp") else 0.57) * size + beside, (read, size)


def refuse(path: Path, what: str) -> None:
    with registered():
        given: dict[str, Any] = {"on the way": BitsAndBytesConfig(load_in_4bit=True)}
        if what == "torchao":
            from torchao.quantization import Int8WeightOnlyConfig

            given = {what: TorchAoConfig(Int8WeightOnlyConfig())}
        options = {"quantization_config": given[what]} if what in given else {}
        if what == "read plainly":
            mw.load_weights(build("llama", **WIDE), path)
        AutoModelForCausalLM.from_pretrained(path, distributed_config="tp2", **options)


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("on the way", "not quantised", "PlanError: .*bitsandbytes would quantise as they are loaded.*save_pretrained"),
        ("torchao", "not quantised", "PlanError: .*quantised by torchao.*Load it whole on each rank"),
        ("text", "nf4", rf"CheckpointError: .*{Q_PROJ} is packed in the model, but has no .*bitsandbytes__"),
        ("absmax", "nf4", rf"CheckpointError: .*{Q_PROJ}.*is packed in the model, but has the shape"),
        ("storage", "nf4 in bfloat16", r"CheckpointError: .*quantised to torch.bfloat16 in the checkpoint"),
        ("read plainly", "8 bits", r"CheckpointError: .*quantised to torch.int8 in the checkpoint, torch.float32 in"),
        ("rows", "8 bits", r"CheckpointError: .*no number for each row in .*SCB"),
    ],
)
def test_other_checkpoints_are_refused_on_all_ranks(
    what: str, kind: str, said: str, checkpoints: dict[str, Path], pool2: Any, tmp_path: Path
) -> None:
    config = json.loads((checkpoints[kind] / "config.json").read_text())
    tensors = load_file(checkpoints[kind] / "model.safetensors")
    if what == "text":
        del tensors[f"{Q_PROJ}.quant_state.bitsandbytes__nf4"]
    elif what == "absmax":
        tensors[f"{Q_PROJ}.absmax"] = tensors[f"{Q_PROJ}.absmax"][:-1].clone()
    elif what == "storage":
        config["quantization_config"]["bnb_4bit_quant_storage"] = "uint8"
    elif what == "rows":
        tensors[f"{Q_PROJ.removesuffix('weight')}SCB"] = torch.ones(3)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for kind_of_error, message in pool2.run_expecting_error(refuse, tmp_path, what):
        assert re.search(said, f"{kind_of_error}: {message}", re.DOTALL), message
