"""Traits of unusual parameters, names and heads, and of PEFT's adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from conformance.random_programs.trait import TOLD, Trait

if TYPE_CHECKING:
    from conformance.random_programs.run import Run

TRAITS: list[Trait] = []
add = TRAITS.append


def _draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.1


# ---- parameters of unusual shapes, kinds and names, which a hook on an MLP uses


class _Scale(nn.Module):
    """Scales and shifts an MLP's output by parameters that a function makes and reads."""

    def __init__(self, inner: nn.Module, make: Any, use: Any):
        super().__init__()
        self.inner, self.use = inner, use
        make(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.inner(x))  # type: ignore[no-any-return]


def _register(name: str, value: Tensor) -> Any:
    return lambda module: module.register_parameter(name, nn.Parameter(value.clone()))


def _two_views(module: nn.Module) -> None:
    """Keep two parameters in one flat tensor, as libraries of flat parameters do."""
    flat = torch.cat([_draw(32), 1 + _draw(32)])
    module.shift, module.scale = nn.Parameter(flat[:32]), nn.Parameter(flat[32:])


def _list(module: nn.Module) -> None:
    module.parts = nn.ParameterList([nn.Parameter(_draw(32)), nn.Parameter(1 + _draw(32))])


def _dict(module: nn.Module) -> None:
    module.parts = nn.ParameterDict({"a b": nn.Parameter(_draw(32)), "ü/": nn.Parameter(1 + _draw(32))})


def _buffer_with_gradient(module: nn.Module) -> None:
    module.register_buffer("scale", torch.ones(32, dtype=torch.float64))
    module.register_parameter("absent", None)
    module.register_parameter("shift", nn.Parameter(_draw(32)))


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (16, 2)).contiguous())


_KINDS: dict[str, tuple[Any, Any]] = {
    "a number": (_register("scale", torch.tensor(1.1, dtype=torch.float64)), lambda m, x: x * m.scale),
    "one element": (_register("scale", torch.ones(1, dtype=torch.float64)), lambda m, x: x * m.scale),
    "no elements": (_register("empty", torch.zeros(0, dtype=torch.float64)), lambda m, x: x + m.empty.sum()),
    "three dims": (_register("scale", 1 + _draw(2, 4, 4)), lambda m, x: x * m.scale.flatten()),
    "a matrix": (_register("mix", torch.eye(32, dtype=torch.float64) + _draw(32, 32)), lambda m, x: x @ m.mix),
    "a transposed matrix": (
        _register("mix", (torch.eye(32, dtype=torch.float64) + _draw(32, 32)).t()),
        lambda m, x: x @ m.mix,
    ),
    "never used": (_register("spare", _draw(3, 5)), lambda m, x: x),
    "used in training only": (_register("scale", 1 + _draw(32)), lambda m, x: x * m.scale if m.training else x),
    "a vector over tokens": (_register("places", 1 + _draw(12)), lambda m, x: x * m.places[: x.shape[1], None]),
    "complex": (
        _register("turn", torch.ones(16, dtype=torch.complex128)),
        lambda m, x: torch.view_as_real(_complex(x) * m.turn).flatten(-2),
    ),
    "two in one tensor": (_two_views, lambda m, x: x * m.scale + m.shift),
    "in a list": (_list, lambda m, x: x * m.parts[1] + m.parts[0]),
    "in a table": (_dict, lambda m, x: x * m.parts["ü/"] + m.parts["a b"]),
    "beside a buffer": (_buffer_with_gradient, lambda m, x: x * m.scale + m.shift),
    "called grad": (_register("grad", 1 + _draw(32)), lambda m, x: x * m.grad),
    "called data": (_register("data", 1 + _draw(32)), lambda m, x: x * m.data),
    "called weight": (_register("weight", 1 + _draw(32)), lambda m, x: x * m.weight),
    "called lora_A": (_register("lora_A", 1 + _draw(32)), lambda m, x: x * m.lora_A),
    "called experts": (_register("experts", 1 + _draw(4, 32)), lambda m, x: x * m.experts.mean(0)),
    "with a sign in its name": (_register("größe 1/2", 1 + _draw(32)), lambda m, x: x * getattr(m, "größe 1/2")),
}


def _scale_mlp(run: Run, kind: tuple[Any, Any]) -> None:
    layer = run.layers[-1]
    layer.mlp = _Scale(layer.mlp, *kind)


for _name, _kind in _KINDS.items():
    add(
        Trait(
            name=f"a parameter: {_name}",
            kind="adapter",
            may=TOLD,
            place="mlp",
            build=lambda run, kind=_kind: _scale_mlp(run, kind),  # type: ignore[misc]
            without=frozenset({"sharing", "average", "load_state_dict", *({"length"} if "tokens" in _name else ())}),
        )
    )


def _not_contiguous(run: Run) -> None:
    """Keep weights column by column."""
    for parameter in run.model.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.t().contiguous().t()


def _in_one_tensor(run: Run) -> None:
    """Make all weights views of one flat tensor, as apex and old FSDP do."""
    parameters = list(run.model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view_as(parameter)


def _tied_by_storage(run: Run) -> None:
    """Let the biases of two layers be two parameters of one memory."""
    run.layers[-1].mlp.down_proj.bias = nn.Parameter(run.layers[0].mlp.down_proj.bias.detach())


def _in_plain_list(run: Run) -> None:
    """Keep the layers' norms also in a list, which torch does not see."""
    run.model.kept = [layer.input_layernorm for layer in run.layers]


def _of_numbers(run: Run) -> None:
    run.model.register_parameter("count", nn.Parameter(torch.arange(4), requires_grad=False))


def _renamed(run: Run) -> None:
    """Know a layer by a second name."""
    run.model.model.last_layer = run.layers[-1]


for _name, _build in {
    "weights column by column": _not_contiguous,
    "all weights in one tensor": _in_one_tensor,
    "two biases in one memory": _tied_by_storage,
    "norms also in a plain list": _in_plain_list,
    "a parameter of whole numbers": _of_numbers,
    "a layer of two names": _renamed,
}.items():
    _conflicts = {"sharing", "tied", "parametrization", "average", "load_state_dict", "a copy of the model", "change"}
    if _name == "a parameter of whole numbers":  # of which torch has no norm, no gradient and no product with 0.9
        _conflicts |= {"write", "freezing", "schedule", "a histogram of weights", "how much weights move"}
        _conflicts |= {"norms of groups", "the norm of each .data"}
    add(Trait(name=_name, kind="storage", may=TOLD, build=_build, without=frozenset(_conflicts | {"olmo2", "family"})))


# ---- heads


def _answers(example: dict[str, Any], index: int) -> None:
    del example["labels"]
    example["start_positions"], example["end_positions"] = torch.tensor(index % 5), torch.tensor(5 + index % 5)


def _number(example: dict[str, Any], index: int) -> None:
    example["labels"] = torch.tensor(index / 7, dtype=torch.float64)


def _several(example: dict[str, Any], index: int) -> None:
    example["labels"] = torch.tensor([index % 2, index % 3 == 0, 1], dtype=torch.float64)


def _class(example: dict[str, Any], index: int) -> None:
    example["labels"] = torch.tensor(index % 3)


_OF_ROWS = frozenset(
    {
        "batch", "collator", "loss", "keyword", "factor", "term", "evaluation", "generation", "tied", "accumulation",
        "loader", "class", "parametrization", "module hook", "reading", "family", "change", "hook",
    }
)  # fmt: skip
for _name, _head, _example, _config in (
    ("answers in a text", "ForQuestionAnswering", _answers, {}),
    ("a number for each row", "ForSequenceClassification", _number, {"num_labels": 1}),
    ("several labels for each row", "ForSequenceClassification", _several, {"num_labels": 3}),
    (
        "a class, with dropout set to 0",
        "ForSequenceClassification",
        _class,
        {"num_labels": 3, "classifier_dropout": 0.0},
    ),
):
    add(
        Trait(
            name=_name,
            kind="head",
            may=TOLD,
            values={"head": _head},
            config=_config,
            example=_example,
            without=_OF_ROWS,
        )
    )


# ---- PEFT


def _adapted(**options: Any) -> Any:
    def make(model: Any) -> Any:
        import peft

        kind = options.pop("kind", "LoraConfig") if "kind" in options else "LoraConfig"
        torch.manual_seed(11)
        config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
        options["kind"] = kind
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False).double()
        return _redrawn(adapted)

    return make


def _redrawn(model: nn.Module) -> nn.Module:
    """Draw the adapters anew, since many begin as zeros."""
    generator = torch.Generator().manual_seed(13)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.02)
    return model


_ALL = ["q_proj", "v_proj", "down_proj", "gate_proj"]
_PEFT: dict[str, dict[str, Any]] = {
    "LoRA": {"r": 4, "target_modules": _ALL},
    "LoRA of all linears": {"r": 4, "target_modules": "all-linear"},
    "LoRA with a bias": {"r": 4, "target_modules": ["q_proj", "o_proj"], "lora_bias": True},
    "LoRA and biases": {"r": 4, "target_modules": ["q_proj", "o_proj"], "bias": "all"},
    "LoRA of ranks by pattern": {"r": 4, "target_modules": _ALL, "rank_pattern": {"down_proj": 2}},
    "LoRA of one layer": {"r": 4, "target_modules": _ALL, "layers_to_transform": [1]},
    "rsLoRA": {"r": 4, "target_modules": _ALL, "use_rslora": True},
    "DoRA": {"r": 4, "target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "LoRA and a saved head": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "LoRA and a saved norm": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "LoRA and trained words": {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": [3, 90]},
    "LoRA of words": {"r": 4, "target_modules": ["embed_tokens", "q_proj"]},
    "LoRA of the head": {"r": 4, "target_modules": ["lm_head", "q_proj"]},
    "LoRA of a weight": {"r": 4, "target_modules": [], "target_parameters": ["mlp.down_proj.weight"]},
    "aLoRA": {"r": 4, "target_modules": ["q_proj", "v_proj"], "alora_invocation_tokens": [5]},
    "LoHa": {"kind": "LoHaConfig", "r": 4, "target_modules": ["q_proj", "down_proj"]},
    "LoKr": {"kind": "LoKrConfig", "r": 4, "target_modules": ["q_proj", "down_proj"]},
    "OFT": {"kind": "OFTConfig", "r": 0, "oft_block_size": 8, "target_modules": ["q_proj"]},
    "IA3": {"kind": "IA3Config", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "VeRA": {"kind": "VeraConfig", "r": 4, "target_modules": ["q_proj"]},
    "trained words": {"kind": "TrainableTokensConfig", "token_indices": [3, 90]},
    "norms tuned": {"kind": "LNTuningConfig", "target_modules": ["input_layernorm"]},
    "prompts": {"kind": "PromptTuningConfig", "num_virtual_tokens": 3},
    "prefixes": {"kind": "PrefixTuningConfig", "num_virtual_tokens": 3},
}
_NO_PEFT = frozenset(
    {
        "sharing", "adapter", "class", "parametrization", "head", "tied", "average", "load_state_dict", "write",
        "change", "phi3", "state", "batch-wide", "module hook", "reading", "freezing", "hook", "generation", "term",
        "keyword", "schedule", "made", "gradients", "storage", "an activation", "collator", "loss", "resume",
        "optimizer", "family",
    }
)  # fmt: skip
for _name, _options in _PEFT.items():
    add(Trait(name=f"PEFT: {_name}", kind="adapter", may=TOLD, model=_adapted(**_options), without=_NO_PEFT))
