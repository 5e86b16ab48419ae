"""Collects why causal-LM types that are not dense decoders are refused: a PlanError, raised before anything changes."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn
from transformers import CONFIG_MAPPING

from conformance.families.models import model_class, tiny_config
from meshwright.errors import PlanError, UncoveredParameterError
from meshwright.parallel.tensor_parallel.structure import describe
from meshwright.roles import plan_for

MIXTURE = "mixture of experts"
_MULTIMODAL = "multimodal: a tower for images or sound beside the decoder"

# Types whose default config cannot be built by this version of transformers, so only their kind is known.
_UNBUILT = {
    "dbrx": MIXTURE,
    "dots1": MIXTURE,
    "lfm2_moe": MIXTURE,
    "gemma4_assistant": "drafts for another model, whose keys and values it reads",
    "gemma4_unified_assistant": "drafts for another model, whose keys and values it reads",
    "reformer": "attention by hashing, with reversible layers",
}
# Kind -> the names of parameters that only models of this kind have, and dense decoders do not.
_KINDS = {
    _MULTIMODAL: r"vision|audio|image|speech|codec|img_",
    MIXTURE: r"expert|router|moe",
    "state space, linear attention or convolution over tokens": (
        r"mamba|A_log|conv1d|linear_attn|rg_lru|time_decay|\.conv\.|mlstm|short_conv|sconv"
    ),
    "encoder with a language-model head": r"attention\.self\.query|attentions\.\d|rel_attn|word_embeddings|self_att\.",
}


@dataclass(frozen=True)
class Refusal:
    """A family that is refused.

    Args:
        kind: the kind of model, which is not a dense decoder.
        message: the first line of the error, or the first parameter without a role.
    """

    family: str
    kind: str
    message: str


def kind_of_type(family: str) -> str:
    """Return what kind of model a family is, from the names of its parameters."""
    model = _on_meta(family)
    return _UNBUILT.get(family, _MULTIMODAL) if model is None else _kind(model)


def refusal(family: str) -> Refusal | None:
    """Return why ``to_distributed`` refuses a family; None if it accepts the family."""
    model = _on_meta(family)
    if model is None:
        return Refusal(
            family, _UNBUILT.get(family, _MULTIMODAL), "transformers builds no model from its default config"
        )
    kind = _kind(model)
    try:
        describe(model, plan_for(model), tp=2, sequence_parallel=True)
    except UncoveredParameterError as error:
        return Refusal(family, kind, f"no role for {error.names[0]} and {len(error.names) - 1} more")
    except PlanError as error:
        return Refusal(family, kind, str(error).split("\n")[0])
    return None


def _on_meta(family: str) -> nn.Module | None:
    """Return a model of the family on the meta device, if possible of the default config, with all kinds of layers."""
    for make in (lambda: CONFIG_MAPPING[family](), lambda: tiny_config(family)):
        try:
            with torch.device("meta"):
                model: nn.Module = model_class(family)(make())
                return model
        except Exception:  # families raise errors of any type
            continue
    return None


def _kind(model: nn.Module) -> str:
    names = "\n".join(name for name, _ in model.named_parameters())
    return next((kind for kind, pattern in _KINDS.items() if re.search(pattern, names)), "another structure")
