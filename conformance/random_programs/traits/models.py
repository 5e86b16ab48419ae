"""Traits of the model's modules: objects at two places, parametrizations, and weights that are computed."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

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
        build=lambda run: _wrap(run, "mlp"),
        without=frozenset({"sharing"}),
    )
)
