"""Batches with images and other inputs besides tokens: which rows their parts belong to, and who runs the towers."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor

import meshwright as mw
from harness import WorkerError
from meshwright.context.record import record_context
from meshwright.parallel.batch.schema import BatchSchema
from meshwright.roles import find_decoder
from support.anatomies import IMAGE, LENGTH, build, collate, llama, loader, samples
from support.exact import Float64
from support.models import SIZES, tokens
from support.whole_runs import assert_equals_one_process, train_whole


def test_micro_batches_take_the_images_of_their_rows() -> None:
    batch = collate(samples("qwen2_vl", 3))
    batch["position_ids"] = torch.arange(3 * 3 * LENGTH).view(3, 3, LENGTH)
    first, second = BatchSchema(batch).split(2)
    assert [len(piece["pixel_values"]) for piece in (first, second)] == [16, 32 + 16]
    for name, dim in (("pixel_values", 0), ("image_grid_thw", 0), ("input_ids", 0), ("position_ids", 1)):
        assert torch.equal(torch.cat([first[name], second[name]], dim), batch[name])
    assert first["position_ids"].shape == (3, 1, LENGTH)


def test_a_batch_without_rows_and_a_square_mask_are_split_by_rows() -> None:
    ids = torch.arange(16).view(4, 4)
    assert [len(piece["input_ids"]) for piece in BatchSchema({"input_ids": ids[:0], "labels": ids[:0]}).split(2)] == [
        0,
        0,
    ]
    mask = torch.arange(64).view(4, 4, 4) % 3 == 0  # [rows, tokens, tokens], with as many tokens as rows
    first, second = BatchSchema({"input_ids": ids, "labels": ids, "attention_mask": mask}).split(2)
    assert torch.equal(torch.cat([first["attention_mask"], second["attention_mask"]]), mask)


def test_images_of_unknown_rows_are_refused() -> None:
    batch = collate(samples("llava", 4))
    with pytest.raises(mw.PlanError, match=r"pixel_values has shape \(3, 3, 8, 8\) in a batch of 4 rows.*one image"):
        BatchSchema({**batch, "pixel_values": batch["pixel_values"][:3]}).split(2)
    batch = collate(samples("qwen2_vl", 4))
    with pytest.raises(mw.PlanError, match=r"image_grid_thw has shape \(3, 3\)"):
        BatchSchema({**batch, "image_grid_thw": batch["image_grid_thw"][:3]}).split(2)
    ids = torch.arange(16).view(4, 4)
    ragged = torch.nested.nested_tensor([torch.ones(n, 2) for n in (1, 2, 3, 4)], layout=torch.jagged)
    for x, form in ((torch.eye(4).to_sparse(), r"shape \(4, 4\)"), (ragged, "rows of several lengths")):
        with pytest.raises(mw.PlanError, match=f"graph has {form} in a batch of 4 rows"):
            BatchSchema({"input_ids": ids, "labels": ids, "graph": x}).split(2)


def step_with_embeddings_on_one_rank() -> None:
    """The rank with embeddings does not gather the weights of the embedding."""
    model, _, _ = mw.to_distributed(llama(), plan="dp2 zero3")
    ids = torch.zeros(2, 3, dtype=torch.int64)
    given = {"inputs_embeds": torch.zeros(2, 3, SIZES["hidden_size"])} if torch.distributed.get_rank() else {}
    model(**(given or {"input_ids": ids}), labels=ids)


def test_embeddings_on_one_rank_are_an_error(pool2: Any) -> None:
    with pytest.raises(WorkerError, match=r"inputs besides token ids.*inputs_embeds"):
        pool2.run(step_with_embeddings_on_one_rank)


def with_numbers_as_mask(module: Any, args: Any, given: dict[str, Any]) -> Any:
    mask = given["visual_pos_masks"]
    return args, {**given, "visual_pos_masks": None if mask is None else mask.int()}


def step_with_features_between_layers(plan: dict[str, Any], after: list[int], *, has_mask: bool = True) -> None:
    tower = {"depth": 2, "hidden_size": 16, "num_heads": 4, "intermediate_size": 24, "patch_size": 4}
    tower["out_hidden_size"] = SIZES["hidden_size"]
    rotary = {"rope_type": "default", "mrope_section": [1, 1, 0]}
    config = transformers.Qwen3VLConfig(
        vision_config={**tower, "num_position_embeddings": 16, "deepstack_visual_indexes": after},
        text_config={**SIZES, "head_dim": 4, "rope_parameters": rotary},
        image_token_id=IMAGE, video_token_id=IMAGE - 1, vision_start_token_id=IMAGE - 2,
    )  # fmt: skip
    model = transformers.Qwen3VLForConditionalGeneration(config)
    if not has_mask:
        model.model.language_model.register_forward_pre_hook(with_numbers_as_mask, with_kwargs=True)
    model = mw.to_distributed(model, plan=mw.ParallelPlan(**plan))[0]
    batch = collate(samples("qwen2_vl", 2))
    model.train()(**{**batch, "pixel_values": batch["pixel_values"].float()})


@pytest.mark.parametrize("plan", [{"pp": 2}, {"cp": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_features_of_unknown_tokens_that_enter_between_layers_are_refused(plan: dict[str, Any], pool2: Any) -> None:
    kind, said = pool2.run_expecting_error(step_with_features_between_layers, plan, [0], has_mask=False)[0]
    assert kind == "PlanError" and "deepstack_visual_embeds" in said and f"Use {next(iter(plan))}=1" in said


def step_with_features_of_unknown_layers(plan: dict[str, Any], after: list[int]) -> None:
    """The config does not say how many layers add features."""
    with mock.patch("meshwright.roles.family_hints._LISTS_OF_FEATURES", ()):
        step_with_features_between_layers(plan, after)


def test_features_of_layers_after_the_first_stage_are_refused(pool2: Any) -> None:
    kind, said = pool2.run_expecting_error(step_with_features_of_unknown_layers, {"pp": 2}, [0, 1])[0]
    assert kind == "PlanError" and "not in the first stage" in said
    for kind, said in pool2.run_expecting_error(step_with_features_between_layers, {"pp": 2}, [0, 1]):
        assert kind == "PlanError" and "the first stage alone has" in said and "smaller pp" in said


def calls_of_towers(name: str) -> int:
    with Float64():
        model = mw.to_distributed(build(name), plan=mw.ParallelPlan(pp=2, gradient_accumulation_steps=2))[0]
        calls = []
        for tower in find_decoder(model).towers:
            tower.register_forward_pre_hook(lambda *_: calls.append(1))
        model(**collate(samples(name, 4))).loss.backward()
    return len(calls)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_the_first_stage_alone_runs_the_tower(name: str, pool2: Any) -> None:
    assert pool2.run(calls_of_towers, name) == [2, 0]


def with_torchs_attention() -> Any:
    """A tower whose last attention is torch's, which reads the weight of a module that it does not call."""
    tower = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 24}
    config = transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig(**tower, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(**SIZES),
        image_token_id=IMAGE,
        vision_feature_select_strategy="full",
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).double().train()
    for name, parameter in model.named_parameters():  # no loss uses the head, whose gradient is rounding
        parameter.requires_grad_(not name.endswith("k_proj.bias") and "vision_tower.head" not in name)
    return model


def train_torchs_attention(plan: dict[str, Any] | None) -> dict[str, Tensor]:
    with Float64():
        return train_whole(with_torchs_attention(), plan, functools.partial(loader, "llava"))


@pytest.mark.parametrize("plan", [{"dp": 2, "zero_stage": 3}, {"pp": 2}], ids=str)
def test_a_tower_with_torchs_attention(plan: dict[str, Any], pool2: Any) -> None:
    assert_equals_one_process(pool2.run(train_torchs_attention, plan), train_torchs_attention(None))


def sounds() -> torch.utils.data.DataLoader[dict[str, Tensor]]:
    """Two batches of two rows, each with a sound of four tokens."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for ids in tokens(4, LENGTH, vocab_size=IMAGE):
        ids[2:6] = IMAGE
        sound = torch.randn(8, 16, generator=generator)
        frames, labels = torch.ones(16, dtype=torch.long), ids.masked_fill(ids == IMAGE, -100)
        rows.append({"input_ids": ids, "labels": labels, "input_features": sound, "feature_attention_mask": frames})
    return torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


def train_with_sounds(plan: dict[str, Any] | None) -> dict[str, Tensor]:
    """A tower whose code reads the weight of its table of positions."""
    tower = {"encoder_layers": 2, "encoder_attention_heads": 4, "d_model": 16, "encoder_ffn_dim": 24}
    config = transformers.Qwen2AudioConfig(
        audio_config={**tower, "num_mel_bins": 8, "max_source_positions": 8},
        text_config={**SIZES, "model_type": "qwen2"},
        audio_token_index=IMAGE,
    )
    torch.manual_seed(0)
    with Float64():
        return train_whole(transformers.Qwen2AudioForConditionalGeneration(config).double(), plan, sounds)


def test_a_tower_that_reads_the_weight_of_another_module(pool2: Any) -> None:
    assert_equals_one_process(pool2.run(train_with_sounds, {"dp": 2, "zero_stage": 3}), train_with_sounds(None))


def step_that_leaves_out_a_layer(*, has_images: bool) -> None:
    """The first rank alone has images, or both have, and a layer attends to them."""
    text = {**SIZES, "num_hidden_layers": 4, "cross_attention_layers": [2], "pad_token_id": 0}
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_global_layers": 1}
    tower |= {"attention_heads": 2, "image_size": 8, "patch_size": 4, "max_num_tiles": 1, "vision_output_dim": 32}
    config = transformers.MllamaConfig(
        vision_config={**tower, "supported_aspect_ratios": [[1, 1]], "intermediate_layers_indices": [0]},
        text_config={**text, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        image_token_index=IMAGE,
    )
    model = transformers.MllamaForConditionalGeneration(config)
    model = mw.to_distributed(model, plan=mw.ParallelPlan(dp=2, zero_stage=3))[0].train()
    ids = tokens(1, LENGTH, vocab_size=IMAGE)
    batch = {"input_ids": ids, "labels": ids}
    if has_images or torch.distributed.get_rank() == 0:
        sizes = {"aspect_ratio_ids": torch.ones(1, 1).long(), "aspect_ratio_mask": torch.ones(1, 1, 1).long()}
        seen = torch.ones(1, LENGTH, 1, 1).long()
        batch |= {"pixel_values": torch.ones(1, 1, 1, 3, 8, 8), **sizes, "cross_attention_mask": seen}
    model(**batch).loss.backward()


def test_a_layer_that_only_some_ranks_would_gather_is_refused(pool2: Any) -> None:
    pool2.run(step_that_leaves_out_a_layer, has_images=True)
    said = pool2.run_expecting_error(step_that_leaves_out_a_layer, has_images=False)
    assert said[1][0] == "PlanError" and "layers.2." in said[1][1] and "was left out" in said[1][1]


class WithSegments(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, segments: Tensor, **more: Any) -> Any:
        return super().forward(input_ids, attention_mask=attention_mask, **more)


class WithMask(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **more: Any) -> Any:
        return super().forward(input_ids, attention_mask=attention_mask, labels=labels, **more)


def test_arguments_that_forward_requires_are_recorded_or_named() -> None:
    config = transformers.LlamaConfig(**SIZES)
    record = record_context(find_decoder(WithMask(config)))
    assert record.token_dims.keys() == record.arguments.keys()
    with pytest.raises(mw.PlanError, match=r"required positional argument: 'segments'.*ParallelPlan\(cp=1\)"):
        record_context(find_decoder(WithSegments(config)))
