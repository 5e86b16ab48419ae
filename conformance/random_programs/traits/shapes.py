"""Traits of the model's config: families, heads, tied embeddings and every kind of rope."""

from __future__ import annotations

from typing import Any

from conformance.random_programs.trait import TOLD, Trait

TRAITS: list[Trait] = []
add = TRAITS.append

for _family in ("qwen3", "gemma2", "phi3", "olmo2", "qwen2", "mistral"):
    add(Trait(name=_family, kind="family", values={"family": _family}, without=frozenset({"rope"})))

# transformers has no heads of olmo2 but that of the causal LM.
_NOT_CAUSAL = frozenset({"olmo2", "batch", "collator", "loss", "keyword", "factor", "evaluation", "tied"})
add(
    Trait(
        name="sequence classification",
        kind="head",
        may=TOLD,
        without=_NOT_CAUSAL | {"padded right"},
        values={"head": "ForSequenceClassification"},
        config={"num_labels": 3},
        example=lambda example, _: example.update(labels=example["input_ids"][0] % 3),
    )
)
add(
    Trait(
        name="token classification",
        kind="head",
        may=TOLD,
        without=_NOT_CAUSAL,
        values={"head": "ForTokenClassification"},
        config={"num_labels": 3, "classifier_dropout": 0.0},  # dropout masks differ from one device's by design
        example=lambda example, _: example.update(
            labels=(example["input_ids"] % 3).masked_fill(example["labels"] == -100, -100)
        ),
    )
)
add(Trait(name="tied embeddings", kind="tied", config={"tie_word_embeddings": True}, without=frozenset({"head"})))
add(Trait(name="one key/value head", kind="kv", may=TOLD, config={"num_key_value_heads": 1}))
add(Trait(name="rows of 11 tokens", kind="length", values={"length": 11}))
for _rows in (1, 3, 5):
    add(Trait(name=f"batches of {_rows}", kind="rows", may=TOLD, values={"rows": _rows}))
add(Trait(name="a smaller last batch", kind="tail", may=TOLD, values={"has_tail": True}))


def _rope(kind: str, length: int = 64, **fields: Any) -> dict[str, Any]:
    """Return the config of a rope; models whose longest position is 6 leave the trained range in every batch."""
    return {
        "max_position_embeddings": length,
        "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **fields},
    }


_LONG = {"factor": 4.0, "original_max_position_embeddings": 6}
for _kind, _config in {
    "linear": _rope("linear", factor=2.0),
    "yarn": _rope("yarn", **_LONG),
    "llama3": _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **_LONG),
    "dynamic": _rope("dynamic", length=6, factor=2.0),
    "longrope": _rope("longrope", short_factor=[1.0, 1.0], long_factor=[1.5, 3.0], **_LONG),
}.items():
    add(
        Trait(
            name=f"rope {_kind}",
            kind="rope",
            may=TOLD if _kind in ("dynamic", "longrope") else frozenset({"equal"}),
            config=_config,
            without=frozenset({"family"}),
        )
    )
