"""Tries what the program brought into the parts that tp cuts, and leaves whole what the trial does not show equal.

The project's tests show that tp computes the libraries' families exactly. Nothing shows this of a class, a function or
a combination of the program's own (:mod:`meshwright.roles.brought`). So before any weight is cut, one part of each kind
runs on a few random tokens, forward and backward, whole and cut over the ranks (:mod:`meshwright.parallel.rehearsal`).

The weights are random, in float64. What differs in an output or a gradient by more than roundings of float32 stays
whole; a layer that itself mixes tokens under sp, and what holds experts, is an error. Parameters, buffers, hooks and
random states are as before the trial. The program's hooks do not run in it, since they may count calls: under tp they
get whole values by construction (``parallel/forward/user_hooks.py``), and a block with hooks inside stays whole.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.context.token_trial import check_tokens_apart
from meshwright.distribute.decide import with_roles
from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.faults.together import texts_of_all
from meshwright.features.decision import Decision
from meshwright.mesh.axes import Mesh
from meshwright.parallel.foreign_hooks import hooks_of, hooks_of_all_modules, is_foreign, source_of
from meshwright.parallel.rehearsal import RandomValues, TriedPart, calls_of, differs, untouched
from meshwright.parallel.tensor_parallel.structure import DecoderStructure
from meshwright.progress import is_first_rank
from meshwright.roles import ShardingPlan
from meshwright.roles.brought import Brought, kind_of
from meshwright.roles.linear_kernel import in_features
from meshwright.roles.registry import keep_whole, routes_tokens

logger = logging.getLogger(__name__)

_ROWS = 2


def brought_into(decision: Decision) -> str:
    """Return what the program brought into the parts that tp cuts, for :func:`rehearsed`; "" for nothing."""
    structure = decision.structure
    if not isinstance(structure, DecoderStructure) or decision.plan.tp == 1:
        return ""
    own: dict[str, list[str]] = {}
    inside = (m for owner in structure.routed for m in structure.facts.inside(owner) if m is not owner)
    routed = next((source_of(hook) for m in inside for hook in hooks_of(m) if is_foreign(hook)), "")
    every = "".join(f"{source_of(hook)}" for hook in hooks_of_all_modules()[:1])
    for block in structure.blocks if not every else ():
        if hooks := [hook for m in block.inside for hook in hooks_of(m) if is_foreign(hook)]:
            own[source_of(hooks[0])] = [*own.get(source_of(hooks[0]), ()), *block.names]
    found = _Brought(structure).found()
    return json.dumps([every, routed, found, own]) if every or routed or found or own else ""


def rehearsed(decision: Decision, mesh: Mesh, device: torch.device, brought: list[str]) -> Decision:
    """Return a decision with the parts whole that a trial over the ranks of tp does not show equal.

    Every rank must make the call, before weights are cut. Under cp, what a trial of some tokens does not show equal is
    refused.

    Args:
        decision: how the plan would cut the decoder.
        mesh: the axes.
        device: the device of the ranks' weights.
        brought: what :func:`brought_into` returned on each rank.

    Raises:
        PlanError: on every rank, if a part computes something else that cannot stay whole.
    """
    structure = decision.structure
    if decision.context is not None and structure is not None:
        check_tokens_apart(structure, device)
    if not isinstance(structure, DecoderStructure) or mesh.tp.size == 1:
        return decision
    rehearsal = _Rehearsal(structure, mesh, device)
    if hooked := _hooked_inside(structure, brought):
        decision = with_roles(decision, keep_whole(structure.roles, structure.facts, hooked))
        structure = decision.structure
        assert isinstance(structure, DecoderStructure)
        rehearsal.structure = structure
    roles = rehearsal.of_words(rehearsal.of_layers(structure.roles))
    return decision if roles is structure.roles else with_roles(decision, roles)


def _hooked_inside(structure: DecoderStructure, brought: list[str]) -> list[str]:
    """Return the names of what stays whole, so that hooks of the program inside of it see whole values.

    Args:
        structure: the decoder's structure.
        brought: what :func:`brought_into` returned on each rank. What is to be tried must be equal on all ranks, since
            they try it together.

    Raises:
        PlanError: on every rank, if one has hooks on all modules of torch, or inside of what routes tokens to experts,
            or if the program brought something else on another rank.
    """
    reports = [json.loads(text or '["", "", [], {}]') for text in brought]
    of_ranks: list[set[tuple[str, ...]]] = [{tuple(one) for one in theirs} for _, _, theirs, _ in reports]
    every_one = {one for theirs in of_ranks for one in theirs}
    if differing := sorted(one for one in every_one if not all(one in theirs for theirs in of_ranks)):
        raise PlanError(
            f"{differing[0][0]} ({differing[0][1]}) is not the same on all ranks, and each rank runs a part of it. "
            "Change it on all ranks alike, or use ParallelPlan(tp=1)"
        )
    if routed := next((text for _, text, *_ in reports if text), ""):
        raise PlanError(
            f"a hook inside of a module that routes tokens to experts ({routed}) would see this rank's tokens only. "
            "Register it on the module around the experts, or use ParallelPlan(tp=1)"
        )
    if every := next((text for text, *_ in reports if text), ""):
        raise PlanError(
            f"a hook on all modules of torch ({every}) would see this rank's parts of activations, since tp cuts them. "
            "Register it on the modules that it needs: module.register_forward_hook(hook); or use ParallelPlan(tp=1)"
        )
    found: dict[str, list[str]] = {}
    for *_, hooks_of_rank in reports:
        for source, of_source in hooks_of_rank.items():
            found.setdefault(source, []).extend(of_source)
    names = list(dict.fromkeys(name for own in found.values() for name in own))
    if names and is_first_rank():
        source, of_first = next(iter(found.items()))
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        logger.warning(
            "hooks of the program (%s) are inside of what tp cuts. So that they see whole values, %s%s stays whole on "
            "every rank, which is exact, but saves neither memory nor time for %.0f %% of the weights. Hooks on the "
            "block or the layer cost less",
            source, of_first[0], others, _share(structure.facts, names),
        )  # fmt: skip
    return names


def _share(facts: Facts, names: Iterable[str]) -> float:
    """Return the share of the decoder's weights that some modules have, in percent."""
    inside = facts.parameters_inside(*(facts.modules[name] for name in names))
    return 100 * sum(p.numel() for p in inside) / sum(p.numel() for p in facts.parameters_inside(facts.model))


class _Brought:
    """What the program brought into the parts of one decoder."""

    def __init__(self, structure: DecoderStructure):
        self.structure, self.facts, self.names = structure, structure.facts, structure.facts.names
        self.brought = Brought()
        self._inside: dict[nn.Module, list[str]] = {}

    def inside(self, module: nn.Module) -> list[str]:
        """Return the names of what the program brought into a module, in it."""
        if module not in self._inside:
            self._inside[module] = self.brought.inside(module)
        return self._inside[module]

    def found(self) -> list[list[str]]:
        """Return what the program brought into the parts that are tried: its place, and its class and line."""
        structure = self.structure
        others = (m for m in (structure.head, structure.final_norm) if m is not None)
        parts = dict.fromkeys((*structure.layers, *structure.embeddings, *others))
        return [
            [f"{self.names[module]}.{inner}".rstrip("."), self.brought.source_of(module.get_submodule(inner))]
            for module in parts
            for inner in self.inside(module)
        ]


class _Rehearsal(_Brought):
    """The trials of one decoder's parts."""

    def __init__(self, structure: DecoderStructure, mesh: Mesh, device: torch.device):
        super().__init__(structure)
        self.mesh, self.device = mesh, device
        self._length = 2 * mesh.tp.size

    def of_words(self, roles: ShardingPlan) -> ShardingPlan:
        """Try the embeddings and the head, and return the roles with those whole that differ."""
        structure, names = self.structure, self.names
        heads = () if structure.head is None else (structure.head,)
        for module in (*structure.embeddings, *heads):
            if not (own := self.inside(module)):
                continue
            part = TriedPart(
                modules={names[module]: module},
                arguments=self._hidden_states if module in heads else self._words,
                beside={names[structure.layers[0]]: nn.Identity()} | (self._embedding() if module in heads else {}),
                dtype=next(module.parameters()).dtype,
            )
            if why := self._differs(part, roles):
                self._say(_Kept((names[module],), module.get_submodule(own[0]), why))
                roles = keep_whole(roles, self.facts, (names[module],))
        return roles

    def _words(self, values: RandomValues) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (values.words(self.structure.embedding.num_embeddings, _ROWS, self._length),), {}

    def _hidden_states(self, values: RandomValues) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert self.structure.head is not None
        return (values.normal((_ROWS, self._length, in_features(self.structure.head))),), {}

    def _embedding(self) -> dict[str, nn.Module]:
        """Return a stand-in for the embedding by its name; without memory, so that it draws no random numbers."""
        return {self.names[self.structure.embedding]: nn.Embedding(self.mesh.tp.size, 1, device="meta")}

    def of_layers(self, roles: ShardingPlan) -> ShardingPlan:
        """Try a layer of each kind, and return the roles with the parts of layers whole that differ."""
        norm = self.structure.final_norm if self.structure.is_sequence_parallel else None
        if norm is not None and not self.inside(norm):
            norm = None
        kinds: dict[object, list[nn.Module]] = {}
        for index, layer in enumerate(dict.fromkeys(self.structure.layers)):
            if self.inside(layer) or (norm is not None and not index):
                kinds.setdefault(kind_of(layer, index), []).append(layer)
        if not kinds:
            return roles
        calls = self._calls([layers[0] for layers in kinds.values()])
        whole: list[str] = []
        for layers in kinds.values():
            whole += self._whole_in(layers, norm, calls[layers[0]], roles)
        return keep_whole(roles, self.facts, whole) if whole else roles

    def _calls(self, layers: list[nn.Module]) -> dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]:
        model = self.facts.model
        with untouched(model, self.device):
            try:
                found = calls_of(model, layers, rows=_ROWS, length=self._length, instead="ParallelPlan(tp=1)")
            except PlanError:
                found = {}
        hidden = torch.empty(_ROWS, self._length, self.structure.embedding.embedding_dim, device="meta")
        return {layer: found.get(layer, ((hidden,), {})) for layer in layers}  # a pass may leave layers out

    def _whole_in(
        self, layers: list[nn.Module], norm: nn.Module | None, call: tuple[Any, Any], roles: ShardingPlan
    ) -> list[str]:
        """Return the names of what stays whole in layers of one kind, or of the layers themselves."""
        layer, name = layers[0], self.names[layers[0]]
        modules = {name: layer} | ({} if norm is None else {self.names[norm]: norm})
        dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32)
        part = TriedPart(modules=modules, arguments=lambda v: v.arguments(call), beside=self._embedding(), dtype=dtype)
        if not (why := self._differs(part, roles)):
            return []
        owners = self._owners(layer, name) | ({} if norm is None else {self.names[norm]: norm})
        chosen = list(owners)
        if chosen and not self._differs(part, keep_whole(roles, self.facts, chosen)):
            for one in owners if len(owners) > 1 else ():
                others = [other for other in chosen if other != one]
                if not self._differs(part, keep_whole(roles, self.facts, others)):
                    chosen = others
        elif self.structure.is_sequence_parallel:
            source = self.brought.source_of(next(iter(owners.values()), layer))
            raise PlanError(
                f"{name} ({source}) computes something else where each rank has its own tokens between the "
                f"blocks, as sequence parallelism cuts them: {why}. On one device it sees all tokens. Use tp without "
                "sequence parallelism: ParallelPlan(tp=2), or in words plan='tp2'"
            )
        else:
            owners, chosen = {name: layer}, [name]
        whole: list[str] = []
        for one in chosen:
            inside = one == name or one.startswith(f"{name}.")
            names = tuple(self.names[other] + one.removeprefix(name) for other in layers) if inside else (one,)
            self._say(_Kept(names, owners[one], why))
            whole += names
        return whole

    def _owners(self, layer: nn.Module, name: str) -> dict[str, nn.Module]:
        """Return the parts of a layer that the program brought something into, each with the first such module.

        A part is a block, or a module outside of the blocks.
        """
        blocks = [block.name for block in self.structure.blocks if f"{block.name}.".startswith(f"{name}.")]
        found: dict[str, nn.Module] = {}
        for inner in filter(None, self.inside(layer)):
            full = f"{name}.{inner}"
            around = next((block for block in blocks if block != name and f"{full}.".startswith(f"{block}.")), full)
            found.setdefault(around, layer.get_submodule(inner))
        return found

    def _differs(self, part: TriedPart, roles: ShardingPlan) -> str | None:
        """Return on every rank how the part differs on the first rank on which it does; None if it does on none."""
        is_cut = self.structure.is_sequence_parallel
        why = differs(part, roles, self.mesh, self.device, sequence_parallel=is_cut)
        return next(filter(None, texts_of_all(why or "")), None)

    def _say(self, kept: _Kept) -> None:
        """Say what stays whole, and refuse it where that is not exact."""
        modules = [self.facts.modules[name] for name in kept.names]
        name, others, source = kept.names[0], len(kept.names) - 1, self.brought.source_of(kept.own)
        if any(map(routes_tokens, modules)):
            raise PlanError(
                f"{name} ({source}) computes something else over the ranks of tp than on one device: "
                f"{kept.why}. With experts inside it cannot stay whole. Use ParallelPlan(tp=1)"
            )
        if not is_first_rank():
            return
        logger.warning(
            "%s (%s)%s computes something else over the ranks of tp than on one device: %s. It stays whole on every "
            "rank, which is exact, but saves neither memory nor time for %.0f %% of the weights. To cut it, let it use "
            "each channel by itself, or use ParallelPlan(tp=1)",
            name, source, f" and {others} more" if others else "", kept.why,
            _share(self.facts, kept.names),
        )  # fmt: skip


@dataclass(frozen=True)
class _Kept:
    """Modules of one kind that stay whole: their names, what the program brought into the first, and why."""

    names: tuple[str, ...]
    own: nn.Module
    why: str
