"""Mixers: modules in which tokens meet by a convolution or a recurrence, such as Mamba and the gated delta net."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.layout.row_layout import RowLayout
from meshwright.roles.blocks.block import Block
from meshwright.roles.blocks.experts import Experts, roles_of_experts
from meshwright.roles.blocks.head_layout import HeadLayout
from meshwright.roles.blocks.mixer_kinds import MixerHeads, MixerKind, attribute, kind_of_mixer
from meshwright.roles.blocks.mlp import Mlp
from meshwright.roles.decoder import Decoder, find_decoder, hidden_size
from meshwright.roles.family_hints import hinted_roles, hints_of, roles_inside
from meshwright.roles.linear_kernel import in_features, is_projection, out_features
from meshwright.roles.roled_model import RoledModel
from meshwright.roles.sharding_plan import BlockPart, Role, ShardingPlan


class Mixer(Block):
    """A mixer of a known kind, of which each rank has some heads.

    A mixer of another kind, or whose heads the ranks cannot share, stays whole: a layer calls it with hidden states, so
    it is exact if it is given those of all tokens.

    Attributes:
        kind: the kind of mixer.
    """

    rows: ClassVar = {}  # the kind has them, by the names of the weights
    returns_projected = True

    kind: MixerKind

    def __init__(self, roled: RoledModel, name: str, tp: int):
        super().__init__(roled, name, tp)
        if not self.wide_norms:
            return
        [(norm, rows)] = self.wide_norms
        width = getattr(norm, "group_size", rows.size // getattr(norm, "n_groups", 1))
        self.groups = HeadLayout(heads=self._heads.layout.heads, kv_heads=rows.size // width, head_dim=1, tp=tp)
        if rows.local_size % width == 0:  # each rank has whole groups
            self.wide_norms = ()

    def divide(self, by_role: Mapping[Role, nn.Module]) -> None:
        found = kind_of_mixer(self.module)
        if found is None:
            raise PlanError(
                f"{self.roled.plan.source} gives {self.name!r} the role {Role.MIXER.value}, but it is a "
                f"{type(self.module).__name__}, and the parts of its weights are not known. Give it Role.WHOLE"
            )
        self.kind, self._heads = found, MixerHeads(found, self.module, self.tp)
        self._local = {name: self._heads.rows(parts).local_size for name, parts in found.sizes.items()}

    def rows_of(self, name: str, role: Role, size: int) -> RowLayout:
        if role.part is BlockPart.ROW:
            return self._heads.rows(self.kind.reads)
        own = name.removeprefix(f"{self.name}.")
        key = self.kind.key_of(own)
        parts = None if key is None else {**self.kind.rows, **self.kind.rows_by_group}.get(key)
        if key is None or parts is None:
            return super().rows_of(name, role, size)
        rows = self._heads.rows(parts, by_group=key in self.kind.rows_by_group)
        found = attribute(self.module, own)
        if isinstance(found, Tensor) and found.ndim > 2:  # the weight of a convolution, or values by head
            rows = RowLayout(found.shape.index(rows.size), rows.size, rows.spans)
        return rows

    def localise(self, rank: int) -> None:
        super().localise(rank)
        for name, size in self._local.items():
            owner, _, own = name.rpartition(".")
            if attribute(self.module, name) is not None:
                setattr(self.module.get_submodule(owner), own, size)
        for name, parts in self.kind.rows.items():
            rows, found = self._heads.rows(parts), attribute(self.module, name)
            if isinstance(found, nn.Conv1d):
                found.in_channels = found.out_channels = found.groups = rows.local_size
            elif isinstance(found, Tensor) and not isinstance(found, nn.Parameter):
                cut = RowLayout(found.shape.index(rows.size), rows.size, rows.spans)
                setattr(self.module, name, cut.take(found, rank))
        norm = attribute(self.module, self.kind.group_norm or "")
        if self.groups is not None and hasattr(norm, "group_size"):
            norm.group_size = self._heads.rows(self.kind.reads).local_size // self.groups.num_local_kv_heads

    @classmethod
    def claim(cls, module: nn.Module, hidden: int, hinted: Mapping[str, Role]) -> dict[str, Role]:
        modules = list(module.modules())
        projections = [m for m in modules if is_projection(m)]
        is_mixer = (
            any(isinstance(m, nn.Conv1d) for m in modules)
            and any(in_features(m) == hidden for m in projections)
            and any(out_features(m) == hidden for m in projections)
        )
        if is_mixer and (kind := kind_of_mixer(module)) is not None:
            return {"": Role.MIXER} | _roles(module, kind, hidden)
        # A list is not called, and of experts each rank must take its own tokens alone.
        is_called = not isinstance(module, nn.ModuleList | nn.ModuleDict) and not any(map(roles_of_experts, modules))
        return {"": Role.WHOLE} if is_mixer and is_called and not hinted else {}


def _roles(mixer: nn.Module, kind: MixerKind, hidden: int) -> dict[str, Role]:
    roles = dict.fromkeys(kind.shared, Role.SHARED) | dict.fromkeys(kind.norms, Role.HEAD_NORM)
    for name in (*kind.rows, *kind.rows_by_group):
        found = attribute(mixer, name)
        reads_input = isinstance(found, nn.Module) and is_projection(found) and in_features(found) == hidden
        roles[name] = Role.MIXER_INPUT if reads_input else Role.MIXER_INNER
    if kind.group_norm is not None:
        roles[kind.group_norm] = Role.INNER_NORM
    roles |= dict.fromkeys(kind.outputs, Role.MIXER_OUTPUT)
    return {name: role for name, role in roles.items() if _has_weights(attribute(mixer, name))}


def _has_weights(found: object) -> bool:
    return isinstance(found, nn.Parameter) or (isinstance(found, nn.Module) and any(True for _ in found.parameters()))


def keep_undivided(facts: Facts, plan: ShardingPlan, tp: int) -> ShardingPlan:
    """Return a plan in which mixers stay whole whose heads ``tp`` ranks cannot share."""
    mixers = {name: module for name, module in facts.modules.items() if plan.role_of(name) is Role.MIXER}
    whole = {
        f"{name}.{inner}".rstrip("."): Role.WHOLE
        for name, mixer in mixers.items()
        if (kind := kind_of_mixer(mixer)) is not None and MixerHeads(kind, mixer, tp=1).layout.heads % tp
        for inner, _ in facts.named_inside(mixer)
    }
    return ShardingPlan(roles={**plan.roles, **whole}, source=plan.source) if whole else plan


def mixers_of(model: nn.Module | Facts, decoder: Decoder | None = None) -> dict[str, nn.Module]:
    """Return the mixers inside of a decoder's layers, by name; none if the model has no decoder.

    Args:
        model: the whole model, with all of its weights, or its facts.
        decoder: its parts; None to find its layers here.
    """
    facts = Facts.of(model)
    has_states = keeps_states(facts.model)
    if not (has_states or any(isinstance(module, nn.Conv1d) for module in facts.names)):
        return {}
    try:
        decoder = decoder or find_decoder(facts)
    except PlanError:
        return {}
    if not isinstance(decoder.embedding, nn.Embedding):
        return {}
    hidden = hidden_size(decoder.layers, decoder.embedding)
    found = {mixer for layer in decoder.layers for mixer in _outermost(layer, hidden)}
    if has_states:
        hints = hints_of(facts.model)
        found |= {mixer for layer in decoder.layers for mixer in recurrences(layer, hidden, hints).values()}
    return {name: module for module, name in facts.names.items() if module in found}


def keeps_states(model: nn.Module) -> bool:
    """Return whether a model of transformers says that it keeps states, such as those of recurrences."""
    types = getattr(getattr(model, "config", None), "layer_types", None) or ()
    return bool(getattr(model, "_is_stateful", False)) or "linear_attention" in types


def recurrences(layer: nn.Module, hidden: int, hints: Mapping[str, Role]) -> dict[str, nn.Module]:
    """Return the modules of a layer that may mix tokens without a convolution, in a model that keeps states, by name.

    These have projections from and to the width of the hidden states, and are no attention with a mask, MLP or experts.
    """
    hinted = hinted_roles(layer, hints)
    named = layer.named_children()
    return {name: child for name, child in named if _may_recur(child, hidden, roles_inside(name, hinted))}


def _may_recur(module: nn.Module, hidden: int, hinted: Mapping[str, Role]) -> bool:
    modules = list(module.modules())
    projections = [] if is_projection(module) else [m for m in modules if is_projection(m)]
    return (
        any(in_features(m) == hidden for m in projections)
        and any(out_features(m) == hidden for m in projections)
        and not has_attention(module)
        and not Mlp.claim(module, hidden, hinted)
        and not any(kind.claim(m, hidden, {}) for m in modules for kind in (Mixer, Mlp, Experts))
    )


def has_attention(mixer: nn.Module) -> bool:
    """Return whether a mixer holds an attention, which takes a mask; transformers gives each this mark."""
    return any(hasattr(module, "is_causal") for module in mixer.modules())


def _outermost(module: nn.Module, hidden: int) -> Iterator[nn.Module]:
    for child in module.children():
        if Mixer.claim(child, hidden, {}):
            yield child
        else:
            yield from _outermost(child, hidden)
