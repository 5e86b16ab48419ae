"""A decoder is described from its config alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from conformance.families.models import DENSE, model_class, model_types, tiny_config
from meshwright.errors import PlanError
from meshwright.roles import Role, plan_for
from meshwright_plan.answers.notes import warnings_of
from meshwright_plan.job.candidate import Job
from meshwright_plan.job.layer_shape import COMPARED
from meshwright_plan.job.shapes import ModelShape, describe
from meshwright_plan.machine.hardware import Cluster, device
from meshwright_plan.search.search import search
from meshwright_plan.search.space import Space

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def test_parameters_of_known_models() -> None:
    """The published parameter counts, from the sizes alone."""
    assert describe(LLAMA).parameters == 8_030_261_248
    seventy = {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672}
    assert describe({**LLAMA, **seventy}).parameters == 70_553_706_496


def test_roles_add_up() -> None:
    shape = describe(LLAMA)
    assert sum(shape.roles.values()) == shape.parameters


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "olmo2", "phi3"])
def test_parameters_are_those_of_transformers(family: str) -> None:
    """Every supported family, built on the meta device, has exactly the parameters that its config says."""
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = transformers.AutoConfig.for_model(family, **sizes, intermediate_size=160, vocab_size=96, pad_token_id=0)
    if hasattr(config, "head_dim"):
        config.head_dim = 16
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert describe(config).parameters == sum(p.numel() for p in model.parameters())


# Dense decoders that the planner does not describe, and what it says of them.
UNPLANNED = dict.fromkeys(("minicpm3", "moshi", "youtu"), "the planner does not know the sizes")
UNPLANNED |= dict.fromkeys(("gemma4_text", "gemma4_unified_text"), "heads of its layers")
UNPLANNED |= {"bart": "not a decoder", "whisper": "not a decoder"}
UNPLANNED |= dict.fromkeys(  # decoders of encoder-decoder families, whose configs name their sizes so
    ("bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart"),
    "no num_hidden_layers",
)


@pytest.mark.parametrize("family", sorted(DENSE.keys() & set(model_types())))
def test_every_family_that_runs_is_described_or_refused(family: str) -> None:
    """Tolerance 2.5 %: biases and small norms weigh in a tiny model; a gate too many or too few is 15 % of one."""
    # A width of the embeddings' own, which nobody uses, is left out.
    config = tiny_config(family, **({"word_embed_proj_dim": 32} if family == "opt" else {}))
    if family in UNPLANNED:
        with pytest.raises(PlanError, match=UNPLANNED[family]):
            describe(config)
        return
    with torch.device("meta"):
        model = model_class(family)(config)
    roles = {plan_for(model).role_of(name) for name, _ in model.named_modules()}
    shape = describe(config)
    assert shape.runs[0].gated == (not roles.isdisjoint({Role.GATE, Role.GATE_UP}))
    # Its head has a matrix and a norm of its own, which is little of a real one.
    extra = 32 * 32 + 64 if family == "modernbert-decoder" else 0
    assert shape.parameters + extra == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.025)
    stated = config.to_dict()
    default = type(config)().tie_word_embeddings
    assert describe({name: x for name, x in stated.items() if name != "tie_word_embeddings"}).tied == default


def test_the_families_that_were_compared_are_those_that_are_known() -> None:
    assert DENSE.keys() - UNPLANNED.keys() == COMPARED


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "own"}, "model_type='own' is unknown"),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}, "names code of its own"),
    ],
)
def test_what_is_assumed_of_an_unknown_model_is_told(change: dict[str, Any], said: str) -> None:
    """It is a warning, which text, JSON and page show; what speaks of experts or latent attention is an error."""
    cluster, job = Cluster(device=device("h100"), gpus=8), Job(seq_len=4096, global_batch=8)
    found = [
        search(Space(shape=describe({**LLAMA, **more}), cluster=cluster, job=job), explains=False)
        for more in (change, {})
    ]
    assert said in warnings_of(found[0])[0] and "8,030,261,248 parameters" in warnings_of(found[0])[0]
    assert not warnings_of(found[1])
    for more in ({"moe_top_k": 4}, {"expert_width": 512}, {"kv_lora_rank": 8}):
        with pytest.raises(PlanError, match=r"does not know the sizes.*(experts|latent)"):
            describe({**LLAMA, **change, "model_type": "own", **more})


@pytest.mark.parametrize("name", ["SequenceClassification", "TokenClassification", "QuestionAnswering", "CausalLM"])
def test_the_head_of_a_classifier_is_counted_as_it_is(name: str) -> None:
    """But for its bias, of at most 3 elements."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.AutoConfig.for_model("qwen3", **sizes, intermediate_size=96, vocab_size=96, num_labels=3)
    with torch.device("meta"):
        model = getattr(transformers, f"AutoModelFor{name}").from_config(config)
    fields = {**config.to_dict(), "architectures": [type(model).__name__]}
    of_class = describe(config, architecture=type(model).__name__)
    parameters = sum(p.numel() for p in model.parameters())
    assert of_class == describe(fields, name="qwen3") and parameters - of_class.parameters in range(4)


def test_reads_dict_object_file_and_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    class Config:
        def to_dict(self) -> dict[str, Any]:
            return LLAMA

    expected = describe(LLAMA, name="m")
    for source in (Config(), tmp_path, tmp_path / "config.json", str(tmp_path)):
        assert describe(source, name="m") == expected
    assert describe(tmp_path).name == tmp_path.name


def test_window_shortens_attention() -> None:
    plain = describe(LLAMA)
    windowed = describe({**LLAMA, "model_type": "mistral", "sliding_window": 1024})
    assert describe({**LLAMA, "sliding_window": 1024}) == plain  # which Llama's code does not look at
    mixed = describe(
        {
            **LLAMA,
            "model_type": "mistral",
            "sliding_window": 1024,
            "layer_types": ["sliding_attention", "full_attention"] * 16,
        }
    )
    assert plain.runs[0].attended(8192) == 4096.5
    assert windowed.runs[0].attended(8192) < 1024 < mixed.runs[0].attended(8192) < 4096
    assert windowed.runs[0].attended(512) == plain.runs[0].attended(512)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "bert"}, "not a decoder"),
        ({"is_encoder_decoder": True}, "not a decoder"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"hidden_size": -1}, "hidden_size=-1"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"num_attention_heads": 24}, "num_attention_heads=24"),
        ({"num_key_value_heads": 5}, "kv_heads=5"),
        ({"num_local_experts": 8}, "mixture-of-experts"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000 is more than 1024"),
        ({"text_config": {"num_hidden_layers": 10**12}}, "num_hidden_layers=10+ is more than 1024"),
        ({"num_local_experts": 10**9}, "num_local_experts=10+ is more than 65536"),
        ({"hidden_size": 10**39}, "hidden_size=10+ must be"),
        ({"layer_types": [1]}, r"'layer_types'\[0\] is 1"),
        ({"model_type": ["llama"]}, "'model_type' is a list of 1"),
        ({"head_dim": [16]}, "head_dim=a list of 1"),
        ({"sliding_window": "x"}, "sliding_window='x'"),
        ({"max_position_embeddings": "x", "model_type": "gpt2"}, "max_position_embeddings"),
    ],
)
def test_bad_configs_are_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        describe({**LLAMA, **change})


def test_a_key_that_is_there_twice_counts_as_from_pretrained_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA)[:-1] + ', "num_hidden_layers": 3}')
    assert describe(path).runs[0].count == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not a JSON file of a model"),
        ('{"vocab_size": 1' + "0" * 400 + "}", "401 characters after .vocab_size"),
        ("[1]", "JSON object"),
        (None, "no such file"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(PlanError, match=said):
        describe(path)


def test_sizes_are_checked_on_the_shape_too() -> None:
    with pytest.raises(PlanError, match="layers=0"):
        ModelShape.of(name="m", layers=0, hidden=8, heads=1, kv_heads=1, head_dim=8, ffn=8, vocab=8)
