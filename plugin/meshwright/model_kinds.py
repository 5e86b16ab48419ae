"""Recognise models that are not just a decoder by their transformers config, and say what works for them instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MODALITIES = ("vision_config", "audio_config", "speech_config", "video_config")
_ENCODER_DECODERS = frozenset({"bart", "prophetnet", "t5", "whisper"})
_ENCODERS = frozenset(
    {"albert", "bert", "bert-generation", "big_bird", "camembert", "clip", "cpmant", "data2vec-text", "deberta",
     "deberta-v2", "dinov2", "distilbert", "electra", "ernie", "hubert", "layoutlm", "longformer", "megatron-bert",
     "modernbert", "mpnet", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "siglip", "vit",
     "wav2vec2", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"}
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelKind:
    """A kind of model that is no decoder, or has more than a decoder.

    Args:
        what: the kind, with the config field that shows it.
        why: the reason why the planner does not support it.
        instead: what works instead of a picked plan, as code.
    """

    what: str
    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}; {self.instead}"


def kind_of(config: object) -> ModelKind | None:
    """Return the kind of model that a config describes; None for a decoder, dense or with experts, or an unknown kind.

    Args:
        config: a transformers config, or its dict.

    Example:
        >>> kind_of({"model_type": "bert"}).what
        "an encoder, not a decoder (model_type='bert')"
    """
    fields = _fields(config)
    if fields.get("is_encoder_decoder") or fields.get("model_type") in _ENCODER_DECODERS:
        return ModelKind(
            what=f"an encoder-decoder, not a decoder (model_type={fields.get('model_type')!r})",
            why="the planner has no estimate for an encoder beside the decoder",
            instead="give a plan: plan='dp2', plan='dp2 zero3' if memory is short, or 'tp2+sp' if tp divides its heads",
        )
    if modality := next((name for name in _MODALITIES if fields.get(name)), None):
        return ModelKind(
            what=f"a multimodal model ({modality})",
            why="its config does not show the sizes of its towers",
            instead=(
                "give a plan: plan='tp2+sp', plan='dp2 zero3' or plan='pp2'; or train its language model alone: "
                "AutoModelForCausalLM.from_config(config.get_text_config())"
            ),
        )
    if fields.get("model_type") in _ENCODERS:
        return ModelKind(
            what=f"an encoder, not a decoder (model_type={fields.get('model_type')!r})",
            why="the planner has estimates for decoders only",
            instead="give a plan: plan='dp2', plan='dp2 zero3' if memory is short, or 'tp2+sp' if tp divides its heads",
        )
    return None


def _fields(config: object) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if config is None or not hasattr(config, "to_dict"):
        return {}
    found: Mapping[str, Any] = config.to_dict()
    return found
