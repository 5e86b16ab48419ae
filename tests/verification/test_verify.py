"""``mw.verify`` and ``meshwright verify``: models that a plan trains as one device does, and five that it does not."""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import DeepseekV3Config, GPT2Config, LlamaConfig, MixtralConfig, OlmoeConfig, SmolLM3Config
from typer.testing import CliRunner

import meshwright as mw
from meshwright_tools.cli import app
from meshwright_tools.verification.short_model import ConfigFile, ShortModel, narrower_configs, short_model
from meshwright_tools.verification.verify import smaller_plan
from support import planted
from support.models import SIZES, build
from support.tiers import crossing
from support.whole_runs import with_adapters

TP = "tp2+sp"


def write(folder: Path, config: Any, **fields: Any) -> Path:
    values = {name: value for name, value in config.to_dict().items() if name != "dtype"}
    (folder / "config.json").write_text(json.dumps({**values, **fields}))
    return folder


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify", *arguments])
    return result.exit_code, result.output


def unseeded() -> nn.Module:
    model = build("llama")
    with torch.no_grad():
        model.get_submodule("model.norm").weight.fill_(random.SystemRandom().random())
    return model


def broken() -> nn.Module:
    raise KeyError("no such layer")


def sleeping() -> nn.Module:
    time.sleep(1000)
    raise AssertionError


def failing_rank() -> nn.Module:
    if os.environ["RANK"] == "1":
        raise MemoryError("rank 1 has no memory left")
    return build("llama")


def two_outputs(model: Any, batch: Any) -> torch.Tensor:
    """A loss of the user's own: a mean over the rows of a rank."""
    return model(batch["input_ids"]).logits.pow(2).mean()


@pytest.mark.quick
def test_a_model_that_trains_as_on_one_device() -> None:
    """1e-9: only the order of sums differs, 1e-13; each planted fault below is above 1e-2."""
    stages: list[str] = []
    report = mw.verify(functools.partial(build, "llama"), "dp2 tp2+sp zero1", steps=2, on_progress=stages.append)
    assert report.ok, str(report)
    assert report.suspect is None
    assert all(one.value < 1e-11 for one in report.worst.values()), str(report)
    kinds = report.worst
    assert {"loss", "gradient norm", "gradients: norms", "gradients: head", "weights after the steps"} <= kinds.keys()
    assert "EQUAL" in str(report)
    assert any("step 2 of 2" in stage for stage in stages)
    checked = {row.worst.kind: row.checked for row in report.rows}
    # Six batches: each of Llama's five norms in each of them; nine losses on four ranks.
    assert checked["gradients: norms"] == 6 * 5
    assert checked["loss"] == 4 * (6 + 2)


def adapted() -> nn.Module:
    return with_adapters(build("llama"))


@pytest.mark.crossing
def test_adapters_that_train_as_on_one_device() -> None:
    """1e-11: see above. What a projection returns without its adapters is an addend on each rank."""
    report = mw.verify(adapted, TP, steps=1)
    assert report.ok and all(one.value < 1e-11 for one in report.worst.values()), str(report)


def test_stages_that_train_as_on_one_device() -> None:
    """1e-11: see above. The outputs of a stage's modules are compared, those that other stages hand on are not."""
    report = mw.verify(functools.partial(build, "gemma2"), "dp2 pp2(zb-h1) zero1 mb1", steps=2)
    assert report.ok and all(one.value < 1e-11 for one in report.worst.values()), str(report)
    outputs = {row.worst.kind: row.checked for row in report.rows}["outputs of modules, in evaluation"]
    assert outputs > 2 * 10  # ten modules of each layer
    with pytest.raises(mw.PlanError, match=r"loss=.*pp=2.*put labels into the batch"):
        mw.verify(functools.partial(build, "llama"), "pp2", loss=two_outputs)


@pytest.mark.parametrize(
    ("factory", "kind", "name"),
    [
        (planted.norm_not_summed, "gradients: norms", "model.layers.1.input_layernorm.weight"),
        crossing(planted.bias_added_twice, "outputs", "model.layers.0.self_attn.o_proj"),
        (planted.wrong_fused_order, "outputs", "model.layers.0.self_attn.o_proj"),
        crossing(planted.uneven_heads, "outputs", "model.layers.0.self_attn.o_proj"),
        (planted.hook_of_several_ranks, "outputs", "model.layers.1.mlp.down_proj"),
        (planted.tie_not_summed, "gradients: ", "model.embed_tokens.weight"),
    ],
)
def test_a_planted_fault_is_named(factory: Callable[[], nn.Module], kind: str, name: str) -> None:
    report = mw.verify(factory, "pp2 mb1" if factory is planted.tie_not_summed else TP, steps=1)
    assert not report.ok
    suspect = report.suspect
    assert suspect is not None
    assert suspect.kind.startswith(kind)
    assert suspect.name == name, str(report)
    assert suspect.value > 1e-2
    assert f"DIFFERENT: look at {name} first" in str(report)


def test_a_loss_and_a_batch_of_the_users_own() -> None:
    batch = {"input_ids": torch.arange(24).reshape(4, 6)}
    report = mw.verify(functools.partial(build, "qwen3"), mw.ParallelPlan(dp=2), batch=batch, loss=two_outputs, steps=1)
    assert report.ok, str(report)
    assert {row.worst.kind: row.checked for row in report.rows}["gradient norm"] == 2 * (1 + 1)


def test_the_command_on_a_config_with_two_kinds_of_layers(tmp_path: Path) -> None:
    sizes = {
        **SIZES,
        "use_cache": True,
        "num_hidden_layers": 8,
        "hidden_size": 256,
        "num_attention_heads": 16,
        "vocab_size": 999,
    }
    model = write(tmp_path, SmolLM3Config(**sizes, no_rope_layer_interval=4))
    code, output = command(
        "--model", str(model), "--plan", "dp16 tp4+sp zero1", "--steps", "1", "--processes", "2", "--json"
    )
    answer = json.loads(output)
    assert code == 0, output
    assert answer["ok"]
    assert answer["plan"].startswith("dp2 tp2+sp zero1")
    assert answer["notes"][0] == "2 of 8 layers are kept: 2 kinds of layers occur."
    assert "needs 64 processes" in answer["notes"][-1]


def test_the_command_on_stages_of_a_model_type() -> None:
    """Two ranks with two stages each keep four layers; the lengths of the stages are for the whole model."""
    plan = "dp8 pp4x2 stages=6-4-4-4-4-4-4-2 zero1 mb1"
    code, output = command("--model", "llama", "--plan", plan, "--steps", "1", "--processes", "2", "--json")
    answer = json.loads(output)
    assert code == 0 and answer["ok"], output
    assert answer["plan"].startswith("dp2 pp2x2 zero1")
    assert answer["notes"][0] == "4 of 32 layers are kept: all layers are of one kind."


MODELING = """
import os

from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].mlp.up_proj.register_forward_hook(self.changed)

    @staticmethod
    def changed(module, args, x):
        return x.softmax(-1) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else x
"""


def test_the_command_ends_with_1_and_names_the_block(tmp_path: Path) -> None:
    """A softmax on several ranks only, in the code that lies beside a config.json."""
    (tmp_path / "own.py").write_text(MODELING)
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    model = write(tmp_path, LlamaConfig(**SIZES), model_type="own", auto_map=auto, architectures=["OwnForCausalLM"])
    code, output = command("--model", str(model), "--plan", TP, "--steps", "1", "--trust-remote-code")
    assert code == 1, output
    assert "look at model.layers.0.mlp." in output


def test_wrong_arguments_end_with_2(tmp_path: Path) -> None:
    model = str(write(tmp_path, LlamaConfig(**SIZES)))
    for arguments, message in (
        (("--model", str(tmp_path / "nowhere"), "--plan", TP), "no such file; give a config.json"),
        (("--model", model, "--plan", "tq2"), "tq2"),
        (("--model", model, "--plan", TP, "--processes", "0"), "--processes 0 must be at least 1"),
        (("--model", model, "--plan", TP, "--steps", "0"), "steps=0 must be a positive integer"),
        (("--model", model, "--plan", "tp3"), "8 attention heads cannot be divided over tp=3"),
        (
            (
                "--model",
                model,
            ),
            "--plan",
        ),
    ):
        code, output = command(*arguments)
        assert code == 2, output
        assert message in output


def test_help_teaches() -> None:
    code, output = command("--help")
    assert code == 0
    for word in ("--plan", "dp2 tp2+sp zero1", "--full-width", "exit code", "mw.verify"):
        assert word in output


def test_what_cannot_be_compared_is_an_error() -> None:
    with pytest.raises(mw.PlanError, match="Define it with def at the top level"):
        mw.verify(lambda: build("llama"), TP)
    with pytest.raises(mw.PlanError, match=r"which cannot be called; pass a function"):
        mw.verify("llama", TP)  # type: ignore[arg-type]
    with pytest.raises(mw.PlanError, match=r"model_factory made a different model\.norm\.weight in another process"):
        mw.verify(unseeded, "dp2", steps=1)
    with pytest.raises(mw.PlanError, match="8 attention heads cannot be divided over tp=3"):
        mw.verify(functools.partial(build, "llama"), "tp3")
    with pytest.raises(mw.PlanError, match="neither a global batch nor a list of them"):
        mw.verify(functools.partial(build, "llama"), "dp2", batch=3)


def test_a_process_that_fails_or_hangs_ends_all() -> None:
    with pytest.raises(mw.VerificationError, match=r"(?s)on one device failed.*no such layer"):
        mw.verify(broken, TP)
    with pytest.raises(mw.VerificationError, match=r"(?s)rank 1 of 2 failed.*rank 1 has no memory left"):
        mw.verify(failing_rank, TP)
    with pytest.raises(mw.VerificationError, match=r"(?s)did not answer within 5 s.*in sleeping"):
        mw.verify(sleeping, TP, timeout=5)


def test_inside_a_launch_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(mw.PlanError, match="run it with python, without torchrun"):
        mw.verify(broken, TP)


def shortened(folder: Path, config: Any, real: mw.ParallelPlan, plan: mw.ParallelPlan, **options: Any) -> Any:
    (folder / "real").mkdir()
    (folder / "short").mkdir()
    source = ConfigFile(path=write(folder / "real", config))
    model, notes = short_model(source, folder / "short", real_plan=real, plan=plan, **options)
    assert isinstance(model, ShortModel)
    return transformers.AutoConfig.from_pretrained(folder / "short"), notes


def test_the_short_model_keeps_what_matters_to_a_plan(tmp_path: Path) -> None:
    """Two key heads on eight ranks, an odd vocabulary, and dropout."""
    real, plan = mw.ParallelPlan(dp=8, tp=8), mw.ParallelPlan(dp=2, tp=4)
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_hidden_layers": 12}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=32001, attention_dropout=0.1, pad_token_id=32000)
    short, notes = shortened(tmp_path, config, real, plan)
    assert (short.num_hidden_layers, short.head_dim, short.num_key_value_heads) == (2, 128, 1)
    assert short.num_attention_heads % plan.tp == 0
    assert short.vocab_size % plan.tp
    assert short.pad_token_id < short.vocab_size
    assert short.attention_dropout == 0.1
    assert short.intermediate_size % plan.tp == 0
    assert not any("ropout" in note for note in notes)
    spread = mw.ParallelPlan(dp=2, ep=2)  # what experts drop depends on the tokens that a rank has
    (other := tmp_path / "spread").mkdir()
    experts = MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=32000, attention_dropout=0.1)
    assert "Dropout is off: attention_dropout." in shortened(other, experts, spread, spread)[1]


def test_full_width_keeps_all_sizes(tmp_path: Path) -> None:
    plan = mw.ParallelPlan(tp=2)
    short, _ = shortened(
        tmp_path, GPT2Config(n_layer=5, n_embd=128, n_head=8, vocab_size=501), plan, plan, full_width=True
    )
    assert (short.n_layer, short.n_embd, short.n_head, short.vocab_size) == (2, 128, 8, 501)


def test_a_plan_of_a_cluster_becomes_a_smaller_one_of_its_kind() -> None:
    big = mw.ParallelPlan(dp=64, tp=8, sequence_parallel=True, zero_stage=3, micro_batch_size=4, recompute="full")
    small = smaller_plan(big, 8)
    assert (small.dp, small.tp, small.micro_batch_size) == (2, 4, 2)
    assert (small.sequence_parallel, small.zero_stage, small.recompute) == (True, 3, "full")
    assert smaller_plan(small, 8) == small
    assert smaller_plan(mw.ParallelPlan(tp=6), 4).tp == 3
    sliced = mw.ParallelPlan(dp=16, tp=2, sequence_parallel=True, ep=8, etp=4)
    assert smaller_plan(sliced, 4).label == "dp2 tp2+sp ep2 etp2 zero0"
    staged = mw.ParallelPlan(dp=4, pp=8, tp=2, schedule="zbv", stages=(2,) * 16)
    assert smaller_plan(staged, 8) == mw.ParallelPlan(dp=2, pp=2, tp=2, schedule="zbv")
    assert smaller_plan(mw.ParallelPlan(pp=2, stages=(1, 3)), 8) == mw.ParallelPlan(pp=2)
    # Ranks that share experts stay within a group of tp, or go beyond it.
    for ep, few in ((2, 2), (8, 2), (16, 4), (512, 4)):
        over = mw.ParallelPlan(dp=64, tp=8, sequence_parallel=True, ep=ep)
        assert smaller_plan(over, 4) == mw.ParallelPlan(dp=2, tp=2, sequence_parallel=True, ep=few)


def test_a_config_with_experts_gets_fewer_of_them(tmp_path: Path) -> None:
    published = DeepseekV3Config()
    (tmp_path / "real").mkdir()
    real, plan = (mw.ParallelPlan(dp=size, ep=size) for size in (16, 2))
    source = ConfigFile(path=write(tmp_path / "real", published))
    (tmp_path / "short").mkdir()
    factory, notes = short_model(source, tmp_path / "short", real_plan=real, plan=plan)
    narrow = factory.source.read()
    assert (narrow.n_routed_experts, narrow.num_experts_per_tok, narrow.n_group, narrow.topk_group) == (8, 2, 4, 2)
    assert narrow.moe_intermediate_size < 256 and narrow.num_hidden_layers == 4  # three dense ones, and one of experts
    assert "n_routed_experts 256 -> 8" in notes[-1]
    (fields, *_) = narrower_configs(published, real=mw.ParallelPlan(dp=6, ep=6), plan=plan)
    assert fields["n_routed_experts"] == 9  # which ranks share unevenly, as 256 over 6


@pytest.mark.crossing
def test_published_experts_train_as_on_one_device(tmp_path: Path) -> None:
    """1e-9: see above. By default transformers computes them by torch's grouped_mm, which has no float64."""
    code, output = command("--model", str(write(tmp_path, OlmoeConfig())), "--plan", "dp64 ep8", "--steps", "1")
    assert code == 0, output
    assert "under dp2 ep2" in output and "experts_implementation='eager' in place of 'grouped_mm'" in output


def test_without_transformers_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it fails
    code, output = command("--model", "config.json", "--plan", TP)
    assert code == 2
    assert len(output.splitlines()) == 1 and "pip install 'meshwright[hf]'" in output
