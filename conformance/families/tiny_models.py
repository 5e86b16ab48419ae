"""Tiny models of every type in transformers' mappings, with a batch for each."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto import modeling_auto

from conformance.families import expert_models, models
from conformance.families.tiny_batches import Batch, Batches
from conformance.families.tiny_configs import Shrinker, Words
from meshwright_tools.verification.float64_modules import in_float64, run_experts_in_float64

_NAMES = {
    "causal-lm": "CAUSAL_LM",
    "image-text": "IMAGE_TEXT_TO_TEXT",
    "sequence-classification": "SEQUENCE_CLASSIFICATION",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "audio-text": "MULTIMODAL_LM",
}
MAPPINGS = tuple(_NAMES)
_IMAGE_WORDS = [f"IMGIMG{'ABCDEFGHIJ'[i // 10]}{'ABCDEFGHIJ'[i % 10]}Z" for i in range(16)]
# Code that counts 13 words for each window of 100 frames.
_WINDOWS_OF_SOUND = {"audio_config.n_window": 50, "audio_config.n_window_infer": 100}
# Facts that a type's default config lacks and its structure does not show.
FIELDS: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "chameleon": {
        "vocabulary_map": {"<image>": 96, **{word: 70 + i for i, word in enumerate(_IMAGE_WORDS)}}
    },
    "codegen": {"n_head": 8},  # its fused rows are in four parts, each with heads for both ranks
    "cohere_compass": {"text_config.rope_parameters": models.DENSE["cohere_compass_text"]["rope_parameters"]},
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"], "vision_config.sam_config.downsample_channels": [64, 64],
    },
    "dots3_note": {
        "text_config.swa_num_attention_heads": 4, "text_config.swa_num_key_value_heads": 4,
        "text_config.swa_q_lora_rank": 16, "text_config.swa_kv_lora_rank": 16, "text_config.swa_head_dim": 16,
        "text_config.swa_qk_nope_head_dim": 8, "text_config.swa_v_head_dim": 16,
    },
    "diffusion_gemma": {
        "text_config.num_experts": 4, "text_config.top_k_experts": 2, "text_config.moe_intermediate_size": 32,
    },
    "emu3": {
        "vocabulary_map": {
            "<image>": 96, "<|extra_200|>": 95, **{f"<|visual token {i:06}|>": 70 + i for i in range(16)},
        }
    },
    "fun_asr_nano": {"adaptor_config.intermediate_size": 16},
    "granite4_vision": {
        "deepstack_layer_map": [(0, 0), (1, 1)], "spatial_target_layers": [1], "downsample_rate": "1/2",
    },
    "lilt": {"hidden_size": 48},
    "llama4": {"vision_config.intermediate_size": 256},
    # The tower halves the sizes of images at this layer, which it must have.
    "minicpmv4_6": {"insert_layer_id": 0},
    "minicpmv4_7": {"insert_layer_id": 0},
    "mllama": {"vision_config.intermediate_layers_indices": [0], "vision_config.vision_output_dim": 128},
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark": {"out_hidden_size": 256},
    "nemotron_h_omni": {"vision_config.video_temporal_patch_size": 2},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 80},
    "qwen3_asr": _WINDOWS_OF_SOUND,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 80} | _WINDOWS_OF_SOUND,
    "qwen4_exp": {f"text_config.{name}": value for name, value in expert_models.EXPERTS["qwen4_exp_text"].items()}
    | {"text_config.indexer_head_dim": 16},
    "reformer": {"axial_pos_embds": False},
    "unlimited_ocr": {
        "text_config.mlp_layer_types": ["dense", "sparse"], "vision_config.sam_config.downsample_channels": [64, 64],
    },
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip
_LARGEST = 20_000_000  # parameters of a model that is still tiny
_PLAINEST = {"every_kind": False}  # the way whose error says the most
_WAYS: tuple[dict[str, bool], ...] = (
    {}, {"fills": True}, _PLAINEST, {"every_kind": False, "fills": True}, {"every_kind": False, "twice": True},
)  # fmt: skip


def types_of(mapping: str) -> dict[str, str]:
    """Return the types of a mapping, and the class of each."""
    found = _names(mapping)
    if mapping == "audio-text":  # the types of the multimodal mapping that see no images
        found = {name: kind for name, kind in found.items() if name not in _names("image-text")}
    return {name: kind if isinstance(kind, str) else kind[0] for name, kind in sorted(found.items())}


def _class_of(mapping: str, model_type: str) -> Any:
    kind = _names(mapping)[model_type]
    return getattr(transformers, kind if isinstance(kind, str) else kind[0])


def _names(mapping: str) -> Mapping[str, Any]:
    return getattr(modeling_auto, f"MODEL_FOR_{_NAMES[mapping]}_MAPPING_NAMES")


@dataclass(frozen=True)
class Tiny:
    """A way to build a tiny model, and a batch from which it computes a loss."""

    kind: type
    config: PretrainedConfig
    batch: Batch
    trains: bool = True  # whether the model is in training mode; some draw random numbers there
    freezes_statistics: bool = False  # whether its batch norms use the statistics that they have
    gathers_logits: bool = False  # whether its forward reads the logits, so that the program gathers them

    def build(self) -> nn.Module:
        """Return the model, always with the same random weights."""
        model: nn.Module = _build(self.kind, self.config).train(self.trains)
        for module in model.modules() if self.freezes_statistics else ():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return model


class UnbuiltError(Exception):
    """Raised if no tiny model of a type can be built here, or no batch is found for it."""


def tiny(mapping: str, model_type: str) -> Tiny:
    """Return a tiny model of a type, and a batch.

    Raises:
        UnbuiltError: if there is none.
    """
    why: Exception | None = None
    try:
        kind = _class_of(mapping, model_type)
        if kind.forward is nn.Module.forward:  # it generates with several models, of which one trains
            configs = vars(CONFIG_MAPPING[model_type]()).values()
            parts = (getattr(config, "model_type", "") for config in configs)
            return tiny(mapping, next(part for part in parts if part in _names(mapping)))
        default = _default(kind, model_type, mapping)
        fields = FIELDS.get(model_type, {})
        if not isinstance(default, CONFIG_MAPPING[model_type]):  # the decoder's config alone
            fields = {name.removeprefix("text_config."): value for name, value in fields.items()}
    except Exception as error:  # the defaults of some configs cannot be built, for reasons of any type
        raise UnbuiltError(_words(error)) from error
    for way in (*_WAYS, None):
        words = Words()
        try:
            config = _known(model_type) if way is None else Shrinker(words, fields=fields, **way).tiny(default)
            prepare(config)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
            if size > _LARGEST:
                raise ValueError(f"the tiny model has {size} parameters")
            with in_float64():
                model = _build(kind, config)
                batch = Batches(model, words, mapping).first()
                trains = _is_alike(model.train(), batch)
                if not trains and not _is_alike(model.eval(), batch):
                    raise ValueError("its forward draws random numbers in evaluation too")
                return Tiny(kind, config, batch, trains=trains)
        except Exception as error:  # configs and models raise errors of any type
            if why is None or way == _PLAINEST:
                why = error
    raise UnbuiltError(_words(why)) from why


def _words(error: Exception | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _default(kind: Any, model_type: str, mapping: str) -> PretrainedConfig:
    default = CONFIG_MAPPING[model_type]()
    needed = kind.config_class
    if needed is not None and not isinstance(default, needed):
        default = next((v for v in vars(default).values() if isinstance(v, needed)), default)
    if mapping == "causal-lm" and hasattr(default, "is_decoder"):
        default.is_decoder = True
    media = mapping.removesuffix("-text").replace("image", "vision")
    for name, spec in getattr(default, "sub_configs", {}).items():
        if name.startswith(media) and getattr(default, name, None) is None:  # a tower that is optional
            setattr(default, name, getattr(spec, "config_class", spec)())
    return default


def _known(model_type: str) -> PretrainedConfig:
    """Return the config of another sweep, whose table has the type."""
    if model_type not in expert_models.EXPERTS and model_type not in models.DENSE:
        raise ValueError("no other sweep has the type")
    fields = expert_models.EXPERTS.get(model_type, {})
    sizes = models.known_fields(model_type, expert_models.SIZES) if fields else {}
    return models.tiny_config(model_type, **sizes, **fields)


def prepare(config: PretrainedConfig) -> None:
    """Let a config and those in it have a word for padding, and no cache."""
    for owner in (config, *(v for v in vars(config).values() if isinstance(v, PretrainedConfig))):
        owner._experts_implementation = "eager"  # torch's grouped matrix multiplication has no float64
        owner.use_cache = False
        if getattr(owner, "pad_token_id", None) is None:
            owner.pad_token_id = 0
        if getattr(owner, "is_encoder_decoder", False) and getattr(owner, "decoder_start_token_id", None) is None:
            owner.decoder_start_token_id = 0


def _build(kind: Any, config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    model = kind(copy.deepcopy(config)).double()  # some models change their config
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(parameter.dtype) * 0.05)
    run_experts_in_float64(model)
    return model.eval()


def _is_alike(model: Any, batch: Batch) -> bool:
    """Return whether two forward passes with other random numbers give one loss."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            found.append(model(**batch).loss.item())
    return found[0] == found[1]
