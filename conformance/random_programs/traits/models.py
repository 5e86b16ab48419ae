"""Traits of the model's modules: objects at two places, computed weights, classes of the program, and heads by row."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput

from conformance.random_programs.trait import TOLD, Trait

if TYPE_CHECKING:
    from conformance.random_programs.run import Run

TRAITS: list[Trait] = []
add = TRAITS.append

_NO_COPY = frozenset({"average", "a copy of the model"})  # torch cannot copy these modules


def _share(run: Run, path: str) -> None:
    """Put the object at a path of the first layer into the last layer too."""
    owner, _, name = path.rpartition(".")
    first, last = run.layers[0], run.layers[-1]
    setattr(last.get_submodule(owner), name, getattr(first.get_submodule(owner), name))


for _what, _path in {
    "mlp": "mlp",
    "attention": "self_attn",
    "norm": "input_layernorm",
    "projection": "mlp.down_proj",
    "query weight": "self_attn.q_proj.weight",
}.items():
    _families = {"olmo2", "phi3", "gemma2"} if _what in ("norm", "query weight") else set()
    add(
        Trait(
            name=f"shared {_what}",
            kind="sharing",
            may=TOLD,
            config={"use_cache": False} if _what == "attention" else {},
            without=frozenset(_families | {"parametrization"}),
            build=lambda run, path=_path: _share(run, path),
        )
    )


def _share_layer(run: Run) -> None:
    run.layers[-1] = run.layers[0]


def _share_norms(run: Run) -> None:
    run.layers[0].post_attention_layernorm = run.layers[0].input_layernorm


add(
    Trait(
        name="shared layer",
        kind="sharing",
        may=TOLD,
        config={"use_cache": False},  # on one device both places would write to one cache
        build=_share_layer,
        without=frozenset({"parametrization"}),
    )
)
add(
    Trait(
        name="one norm twice in a layer",
        kind="sharing",
        may=TOLD,
        build=_share_norms,
        without=frozenset({"olmo2", "gemma2"}),
    )
)


class _Scaled(nn.Module):
    """A parametrization without state: a weight times a constant."""

    def forward(self, weight: Tensor) -> Tensor:
        return 0.9 * weight


class _Counted(nn.Module):
    """A parametrization with state: a weight that depends on how often it was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, weight: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return weight * (1 + 0.01 * self.count)


def _old_weight_norm(module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(module)


def _pruned(module: nn.Module) -> None:
    mask = torch.ones_like(module.weight)  # type: ignore[call-overload]
    mask.view(-1)[::3] = 0
    prune.custom_from_mask(module, "weight", mask)


for _name, _change in {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": _old_weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "prune": _pruned,
    "a scaled weight": lambda module: parametrize.register_parametrization(module, "weight", _Scaled()),
    "a counting weight": lambda module: parametrize.register_parametrization(module, "weight", _Counted()),
}.items():
    for _place in ("mlp.down_proj", "lm_head"):
        _conflicts = {"recompute", "evaluation", "resume", "load_state_dict", "freezing"} | _NO_COPY
        add(
            Trait(
                name=f"{_name} on {_place}",
                kind="parametrization",
                may=TOLD,
                place=_place,
                without=frozenset(_conflicts | ({"head", "tied", "gemma2"} if _place == "lm_head" else set())),
                build=lambda run, change=_change, place=_place: _at(run, place, change),  # type: ignore[misc]
            )
        )


def _at(run: Run, place: str, change: Any) -> None:
    """Change the module at a place, which is a path in the first layer or in the model."""
    owner = run.model if place == "lm_head" else run.layers[0]
    change(owner.get_submodule(place))


_NEW_NAMES = frozenset({"average", "load_state_dict"})  # which take the stock model's


def _adapter(run: Run) -> None:
    """Add a bottleneck beside the MLP, as adapters do, by a hook and new parameters."""
    layer = run.layers[0]
    torch.manual_seed(7)
    layer.down, layer.up = nn.Linear(32, 4, bias=False).double(), nn.Linear(4, 32, bias=False).double()
    layer.mlp.register_forward_hook(lambda module, args, out: out + layer.up(layer.down(args[0])))


add(Trait(name="an adapter by a hook", kind="adapter", may=TOLD, build=_adapter, without=_NEW_NAMES))


class _Wrapped(nn.Module):
    """A module of the user around a stock one."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(32, dtype=torch.float64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) * self.scale


def _wrap(run: Run, name: str) -> None:
    setattr(run.layers[-1], name, _Wrapped(getattr(run.layers[-1], name)))


add(
    Trait(
        name="a wrapped mlp",
        kind="adapter",
        may=TOLD,
        place="mlp",
        build=lambda run: _wrap(run, "mlp"),
        without=frozenset({"sharing"}),
    )
)


# ---- classes of the program's own, in the place of the libraries'


def _own(run: Run, path: str, forward: Any) -> None:
    """Give the modules at a path of all layers, or of the model, a subclass with another forward."""
    owners = run.layers if path in _IN_LAYERS else [run.model if path == "lm_head" else run.model.model]
    for owner in owners:
        module = owner if path == "layer" else owner.get_submodule(path)
        module.__class__ = _with_forward(type(module), forward)


def _with_forward(base: Any, forward: Any) -> Any:
    class Own(base):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return forward(self, base, *args, **kwargs)

    return Own


def _rounded(values: Tensor, step: Tensor) -> Tensor:
    """Round to multiples of a step, with the gradient of no rounding."""
    return values + ((values / step).round() * step - values).detach()


def _in_8_bits(values: Tensor) -> Tensor:
    return _rounded(values, values.detach().abs().amax(-1, keepdim=True) / 127 + 1e-9)


def _of_weight(change: Any) -> Any:
    """Return the forward of a linear layer with another weight."""
    return lambda module, base, x: functional.linear(x, change(module.weight), module.bias)


def _of_input(change: Any) -> Any:
    return lambda module, base, x: base.forward(module, change(x))


def _of_output(change: Any) -> Any:
    """Return the forward of any module with another output, which may be the first of a tuple."""

    def forward(module: Any, base: Any, *args: Any, **kwargs: Any) -> Any:
        output = base.forward(module, *args, **kwargs)
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    return forward


def _masked(module: Any, base: Any, x: Tensor) -> Tensor:
    return functional.linear(x, module.weight * module.mask, module.bias)


def _add_mask(run: Run) -> None:
    for layer in run.layers:
        weight = layer.mlp.down_proj.weight
        layer.mlp.down_proj.register_buffer("mask", (torch.arange(weight.numel()) % 3 > 0).view_as(weight).double())
    _own(run, "mlp.down_proj", _masked)


def _checkpointed(module: Any, base: Any, *args: Any) -> Any:
    return checkpoint(functools.partial(base.forward, module), *args, use_reentrant=False)


def _inner_of_mlp(change: Any) -> Any:
    """Return the forward of a gated MLP that changes what its last projection gets."""
    return lambda module, base, x: module.down_proj(change(module.act_fn(module.gate_proj(x)) * module.up_proj(x)))


def _swapped(x: Tensor) -> Tensor:
    return torch.cat(x.chunk(2, -1)[::-1], -1)


def _hashed(module: Any, base: Any, ids: Tensor) -> Tensor:
    """Look each word up twice, as embeddings of hashes do."""
    return 0.5 * (base.forward(module, ids) + base.forward(module, ids * 5 % 97))


def _of_table(change: Any) -> Any:
    return lambda module, base, ids: functional.embedding(ids, change(module.weight))


def _centred_norm(module: Any, base: Any, x: Tensor) -> Tensor:
    return base.forward(module, x - x.mean(-1, keepdim=True))


_PHI3, _OLMO2 = frozenset({"phi3"}), frozenset({"olmo2"})  # whose mlp, attention or norms have other names
_IN_LAYERS = {"mlp.down_proj", "mlp.gate_proj", "mlp", "self_attn", "self_attn.q_proj", "input_layernorm", "layer"}
_CLASSES: dict[str, dict[str, Any]] = {  # path -> what the class does -> its forward
    "mlp.down_proj": {
        "a weight rounded by its rows": _of_weight(lambda w: _rounded(w, w.detach().abs().amax(1, keepdim=True) / 7)),
        "a weight rounded by its largest": _of_weight(lambda w: _rounded(w, w.detach().abs().max() / 7)),
        "ternary weights": _of_weight(lambda w: _rounded(w, w.detach().abs().mean()).clamp(-1, 1)),
        "inputs in 8 bits": _of_input(_in_8_bits),
        "a standardised weight": _of_weight(lambda w: (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1)),
        "a norm of its inputs": _of_input(lambda x: functional.layer_norm(x, x.shape[-1:])),
        "its own checkpointing": _checkpointed,
        "clamped outputs": _of_output(lambda x: x.clamp(-0.02, 0.02)),
    },
    "mlp.gate_proj": {
        "rows over their norm": _of_weight(lambda w: functional.normalize(w, dim=-1)),
        "a softmax of its outputs": _of_output(lambda x: x.softmax(-1)),
    },
    "self_attn.q_proj": {
        "queries over their norm": _of_output(lambda x: functional.normalize(x, dim=-1)),
        "a weight in 8 bits": _of_weight(_in_8_bits),
    },
    "lm_head": {
        "rows of words over their norm": _of_weight(lambda w: functional.normalize(w, dim=-1)),
        "logits over their largest": _of_output(lambda x: x / (1 + x.detach().abs().amax(-1, keepdim=True))),
    },
    "mlp": {
        "a norm inside": _inner_of_mlp(lambda x: functional.layer_norm(x, x.shape[-1:])),
        "a gate for all channels": _inner_of_mlp(lambda x: x * x.mean(-1, keepdim=True).sigmoid()),
        "halves swapped inside": _inner_of_mlp(_swapped),
        "a clamp inside": _inner_of_mlp(lambda x: x.clamp(-0.05, 0.05)),
        "checkpointing of its own": _checkpointed,
    },
    "self_attn": {"outputs with a gate": _of_output(lambda x: x * x.mean(-1, keepdim=True).sigmoid())},
    "layer": {"outputs over their norm": _of_output(lambda x: functional.normalize(x, dim=-1) * 5)},
    "input_layernorm": {"centred inputs": _centred_norm},
    "norm": {"centred inputs at the end": _centred_norm},
    "embed_tokens": {
        "words minus their mean": _of_table(lambda w: w - w.mean(0)),
        "words over their norm": _of_table(lambda w: functional.normalize(w, dim=-1)),
        "words looked up twice": _hashed,
        "words times a constant": _of_output(lambda x: x * 3),
    },
}
for _path, _classes in _CLASSES.items():
    _conflicts = _PHI3 if _path in ("mlp", "mlp.gate_proj", "self_attn.q_proj") else frozenset()
    _conflicts |= {"head", "tied", "gemma2"} if _path == "lm_head" else {"olmo2"} if "input" in _path else set()
    for _name, _forward in _classes.items():
        add(
            Trait(
                name=f"own {_path}: {_name}",
                kind="class",
                may=TOLD,
                tells=_path.rpartition(".")[2],
                place=_path,
                build=lambda run, path=_path, forward=_forward: _own(run, path, forward),  # type: ignore[misc]
                without=_conflicts | {"sharing"},
            )
        )
add(
    Trait(
        name="own mlp.down_proj: a mask in a buffer",
        kind="class",
        may=TOLD,
        tells="down_proj",
        place="mlp.down_proj",
        build=_add_mask,
        without=frozenset({"sharing", "load_state_dict"}),
    )
)


class _Activation(nn.Module):
    """An activation of the program."""

    def __init__(self, function: Any):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def _activate(run: Run, activation: nn.Module) -> None:
    for layer in run.layers:
        layer.mlp.act_fn = activation


class _Tanh(nn.Module):
    """A norm without statistics (DyT): tanh of each channel, with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.weight = (nn.Parameter(torch.full(size, 0.5, dtype=torch.float64)) for size in ((1,), (32,)))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (self.slope * x).tanh()


for _name, _make in {
    "k winners": lambda: _Activation(lambda x: x * (x >= x.topk(16, -1).values[..., -1:])),
    "a softmax": lambda: _Activation(lambda x: x.softmax(-1)),
    "squared relu": lambda: _Activation(lambda x: x.relu() ** 2),
    "torch's softmax": lambda: nn.Softmax(-1),
    "torch's softplus": lambda: nn.Softplus(),
}.items():
    add(
        Trait(
            name=f"an activation: {_name}",
            kind="class",
            may=TOLD,
            tells="mlp",
            place="mlp.act_fn",
            build=lambda run, make=_make: _activate(run, make()),  # type: ignore[misc]
            without=_PHI3 | {"sharing"},
        )
    )


def _norms_of_own(run: Run) -> None:
    for layer in run.layers:
        layer.input_layernorm = _Tanh()


add(
    Trait(
        name="norms without statistics",
        kind="class",
        may=TOLD,
        tells="layernorm",
        place="input_layernorm",
        build=_norms_of_own,
        without=_OLMO2 | {"sharing", "load_state_dict"},
    )
)


# ---- heads and adapters that some rows run


class _HeadsByRow(nn.Module):
    """Two heads on a decoder, each for the rows of its task; the loss is the mean over rows."""

    def __init__(self, stock: Any):
        super().__init__()
        self.model, self.config = stock.model, stock.config
        torch.manual_seed(5)
        self.many, self.few = nn.Linear(32, 5).double(), nn.Linear(32, 3).double()

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def forward(self, input_ids: Tensor, labels: Tensor, **more: Any) -> Any:
        hidden = self.model(input_ids=input_ids, **more).last_hidden_state[:, -1]
        is_many, loss = labels % 4 == 0, hidden.sum() * 0
        for chosen, head in ((is_many, self.many), (~is_many, self.few)):
            if chosen.any():
                targets = labels[chosen] % head.out_features
                loss = loss + functional.cross_entropy(head(hidden[chosen]), targets, reduction="sum")
        return CausalLMOutput(loss=loss / len(labels))


add(
    Trait(
        name="heads by the task of each row",
        kind="head",
        may=TOLD,
        tells="many|few",
        model=_HeadsByRow,
        options={"loss_averages_over": "rows"},
        example=lambda example, _: example.update(labels=example["input_ids"][0]),
        without=frozenset(
            {"batch", "collator", "loss", "keyword", "factor", "term", "evaluation", "tied", "accumulation", "tail"}
        ),
    )
)


class _ByRow(nn.Module):
    """An MLP with one of two adapters for each row, by the sign of a hidden value."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        torch.manual_seed(6)
        self.first, self.second = nn.Linear(32, 32).double(), nn.Linear(32, 32).double()

    def forward(self, x: Tensor) -> Tensor:
        output, is_first = self.inner(x).clone(), x[:, 0, 0] > 0
        for chosen, adapter in ((is_first, self.first), (~is_first, self.second)):
            if chosen.any():
                output[chosen] = output[chosen] + adapter(x[chosen])
        return output


def _adapt_by_row(run: Run) -> None:
    run.layers[0].mlp = _ByRow(run.layers[0].mlp)


add(
    Trait(
        name="adapters by row",
        kind="adapter",
        may=TOLD,
        tells="mlp",
        place="mlp",
        build=_adapt_by_row,
        without=_NEW_NAMES | {"sharing", "all rows in one"},
    )
)
