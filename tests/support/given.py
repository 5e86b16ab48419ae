"""What stands before the fragments in the docs: the names and files that a reader's own script would have by then.

A block of the docs that begins with ``<!-- given: model, optimizer as opt -->`` runs after
``from support.given import model, optimizer as opt``. Each name is built when it is asked for, and the names of one
block fit together: the optimizer is that of the model. ``FILES`` makes what a block expects in its folder.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset as HubDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, TrainingArguments
from transformers.distributed import DistributedConfig

import meshwright as mw
import meshwright_hf
from meshwright.mesh.axes import Axis
from support import anatomies, clm_script, hybrid_models, vision_models, words
from support.models import build

__all__ = ["DataLoader", "DistributedConfig", "LlamaForCausalLM", "meshwright_hf", "mw", "torch"]

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = {"vocab_size": 97, "num_key_value_heads": 2, "max_position_embeddings": 64, **SIZES}
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}

LLAMA_3_70B = {
    **LLAMA_3_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


def rows(count: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(3, 97, (count, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def my_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class TwoMatrices(nn.Module):
    """A module as ``self`` in one of its own methods."""

    def __init__(self) -> None:
        super().__init__()
        self.w0 = nn.Parameter(torch.ones(4, 8))


class Script:
    """The objects of one script, built when they are asked for."""

    rows, my_loss = staticmethod(rows), staticmethod(my_loss)
    collate = None  # torch's own
    loss_fn = staticmethod(nn.functional.mse_loss)
    files = ("train.json",)
    dp = Axis("dp", size=1, rank=0)

    @cached_property
    def config(self) -> LlamaConfig:
        return LlamaConfig(**CONFIG)

    @cached_property
    def model(self) -> PreTrainedModel:
        torch.manual_seed(0)
        return LlamaForCausalLM(self.config)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    @cached_property
    def scheduler(self) -> Any:
        return torch.optim.lr_scheduler.LinearLR(self.optimizer)

    @cached_property
    def dataset(self) -> list[dict[str, Tensor]]:
        return rows(64)

    @cached_property
    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=16, shuffle=True)

    @cached_property
    def batch(self) -> dict[str, Tensor]:
        """Of a rank whose rows are those of all others."""
        return next(iter(DataLoader(self.dataset, batch_size=4)))

    @cached_property
    def plan(self) -> mw.ParallelPlan:
        return mw.ParallelPlan(dp=2, tp=2, sequence_parallel=True, zero_stage=1)

    @cached_property
    def args(self) -> TrainingArguments:
        return TrainingArguments(
            "out", use_cpu=True, max_steps=2, logging_steps=1, per_device_train_batch_size=4, report_to="none",
            disable_tqdm=True,
        )  # fmt: skip

    @cached_property
    def distributed(self) -> tuple[Any, Any, Any]:
        config = mw.ToDistributedConfig(plan=self.plan)
        return mw.to_distributed(self.model, self.optimizer, self.loader, config=config)

    @cached_property
    def distributed_model(self) -> Any:
        return self.distributed[0]

    @cached_property
    def distributed_loader(self) -> Any:
        return self.distributed[2]

    @cached_property
    def distributed_config(self) -> mw.ToDistributedConfig:
        return mw.ToDistributedConfig(plan=self.plan)

    @cached_property
    def plan_without_zero(self) -> mw.ParallelPlan:
        return mw.ParallelPlan(dp=2, tp=2, sequence_parallel=True)

    # A module of no kind in particular

    @cached_property
    def regression(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(6, 2)

    @cached_property
    def x(self) -> Tensor:
        return torch.ones(4, 6)

    @cached_property
    def y(self) -> Tensor:
        return torch.zeros(4, 2)

    # Tensors on meshes

    @cached_property
    def data(self) -> Tensor:
        return torch.arange(24.0).reshape(4, 6)

    @cached_property
    def mesh(self) -> mw.ProcessMesh:
        return mw.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "tp"])

    @cached_property
    def mesh0(self) -> mw.ProcessMesh:
        return mw.ProcessMesh([0, 1], dim_names=["dp"])

    @cached_property
    def mesh1(self) -> mw.ProcessMesh:
        return mw.ProcessMesh([2, 3], dim_names=["dp"])

    @cached_property
    def line(self) -> mw.ProcessMesh:
        return mw.ProcessMesh([3, 1, 0, 2], dim_names=["x"])

    @cached_property
    def grid(self) -> mw.ProcessMesh:
        return mw.ProcessMesh([[3, 1], [0, 2]], dim_names=["a", "b"])

    @cached_property
    def module(self) -> nn.Module:
        return TwoMatrices()

    @cached_property
    def own_decoder(self) -> nn.Module:
        """Phi-3 with its fused projection under another name."""
        model = build("phi3")
        for layer in model.model.layers:
            layer.self_attn.qkv = layer.self_attn.qkv_proj
            del layer.self_attn.qkv_proj
        return model

    @cached_property
    def qwen3_moe(self) -> nn.Module:
        return anatomies.build("qwen3_moe")

    @cached_property
    def qwen3_vl(self) -> nn.Module:
        return vision_models.build("qwen3_vl")

    @cached_property
    def vision_loader(self) -> Any:
        return vision_models.loader("qwen3_vl", [(1, 1), (1, 1)])

    @cached_property
    def qwen3_5(self) -> nn.Module:
        return hybrid_models.build("qwen3_5_text").float()

    @cached_property
    def deepseek(self) -> nn.Module:
        return anatomies.build("deepseek_v3")

    # Engines of DeepSpeed

    @cached_property
    def engine(self) -> Any:
        """It has taken a step."""
        engine = self._engine("ds.json")
        engine.backward(engine(**self.batch).loss)
        engine.step()
        return engine

    @cached_property
    def universal_engine(self) -> Any:
        settings = json.loads(Path("ds.json").read_text())
        return self._engine({**settings, "checkpoint": {"load_universal": True}})

    def _engine(self, config: Any) -> Any:
        from meshwright_hf.deepspeed import initialize

        return initialize(model=self.model, config=config, dataloader=self.loader, plan=mw.ParallelPlan(dp=2, tp=2))[0]

    # Packing and streams

    @cached_property
    def tokenised(self) -> HubDataset:
        return HubDataset.from_dict({"input_ids": [list(range(3, 3 + length)) for length in range(5, 90)]})

    @cached_property
    def tokenised_stream(self) -> Any:
        return self.tokenised.to_iterable_dataset(num_shards=3)


_script = Script()


def fresh() -> None:
    """Let the names that follow be those of another script."""
    global _script
    _script = Script()


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(Script, name):
        raise AttributeError(name)
    return getattr(_script, name)


# Files


def _config(path: Path, config: dict[str, Any]) -> None:
    path.write_text(json.dumps(config))


def _folder_with_config(path: Path, config: dict[str, Any]) -> None:
    path.mkdir()
    _config(path / "config.json", config)


def _checkpoint(path: Path) -> None:
    Script().model.save_pretrained(path)
    words.tokenizer().save_pretrained(path)


def _copy(path: Path, source: str | Path) -> None:
    shutil.copy(source, path)


TINY = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **CONFIG, "num_hidden_layers": 1}
WITH_EXPERTS = {
    **TINY,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}

# The script of one device.
TRAIN = """\
from support.given import loader, model, optimizer, torch

for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
PARALLEL = """\
from support.given import loader, model, mw, optimizer

model, optimizer, loader = mw.to_distributed(model, optimizer, loader)
for batch in loader:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MY_PACKAGE = """\
from dataclasses import dataclass

from transformers import LlamaConfig, LlamaForCausalLM


@dataclass
class SmallConfig:
    layers: int
    width: int


class MyDecoder(LlamaForCausalLM):
    def __init__(self, sizes: SmallConfig) -> None:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
        config = {"num_hidden_layers": sizes.layers, "hidden_size": sizes.width, "vocab_size": 97}
        super().__init__(LlamaConfig(**config, **heads))
"""

FILES: dict[str, Callable[[Path], Any]] = {
    "Llama-3-8B": partial(_folder_with_config, config=LLAMA_3_8B),
    "Llama-3-70B": partial(_folder_with_config, config=LLAMA_3_70B),
    "config.json": partial(_config, config=TINY),
    "with_experts.json": partial(_config, config=WITH_EXPERTS),
    "DIR": partial(_folder_with_config, config=TINY),
    "checkpoint": _checkpoint,
    "ds.json": partial(_config, config=DEEPSPEED | ADAM),
    "ds_without_optimizer.json": partial(_config, config=DEEPSPEED),
    "one_device.py": lambda path: path.write_text(TRAIN),
    "parallel.py": lambda path: path.write_text(PARALLEL),
    "my_package.py": lambda path: path.write_text(MY_PACKAGE),
    ".git": lambda path: subprocess.run(["git", "init", "--quiet", str(path.parent)], check=True),
    ".pre-commit-config.yaml": partial(_copy, source=Path(__file__).parents[2] / ".pre-commit-config.yaml"),
    "run_clm.py": partial(_copy, source=clm_script.__file__),
    "text.txt": partial(words.write_text, lines=60),
    "lines.json": lambda path: path.write_text("".join(json.dumps({"number": i}) + "\n" for i in range(600))),
}
