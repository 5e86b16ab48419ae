"""Cuts features of a tower that a decoder adds between its layers, where each rank has some of the tokens or layers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from meshwright.errors import PlanError
from meshwright.parallel.autograd_graph import tensors_in
from meshwright.parallel.collectives import share
from meshwright.parallel.method_chain import arguments
from meshwright.parallel.sequence_parts import Parted
from meshwright.parallel.tensor_parallel.sequence_parallel import SequenceSharding
from meshwright.roles import Decoder
from meshwright.roles.decoder import owner_of_layers

_BEFORE_LAYERS = ("inputs_embeds", "attention_mask")


class TowerFeatures:
    """A hook on the module that runs the layers, which cuts the features that it gets beside the embeddings.

    They are known if a mask of the tokens, ``[B, S]``, is True in as many places as there are features: then the module
    adds them to the hidden states of these tokens. Other features are refused, since how to cut them is not known.

    Args:
        decoder: the decoder, with towers.
        axis: the axis that cuts what the layers compute, for messages.
        sequence: how the ranks of tp share the tokens; None if each has all of them.
        region: what knows the tokens of this rank of cp; None without context parallelism.
        is_staged: whether the layers are spread over the stages of a pipeline.
        of_layers: the names of what the layers themselves are given, such as the result of an encoder, which reaches
            them whatever this rank has of the tokens and layers.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        axis: str,
        sequence: SequenceSharding | None,
        region: Parted | None,
        is_staged: bool,
        of_layers: Set[str],
    ):
        self.axis, self.sequence, self.region, self.is_staged = axis, sequence, region, is_staged
        self._added: list[_Features] = []  # those of the running stage
        owner = owner_of_layers(decoder)
        self._of_layers = of_layers
        self._owner, self._signature = type(owner).__name__, inspect.signature(owner.forward)
        owner.register_forward_pre_hook(self._enter, with_kwargs=True)

    def end_stage(self) -> None:
        """Check that the layers of a stage have got all features, since the stages after it have none.

        Raises:
            PlanError: if some features belong to layers of later stages.
        """
        added, self._added = self._added, []
        if any(len(features.read) < len(features) for features in added):
            raise PlanError(
                f"{self._owner} adds features of a tower after layers that are not in the first stage, which alone has "
                "them. Give the first stage more layers: use fewer stages (ParallelPlan.pp), or pp=1"
            )

    def _enter(
        self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._added = []
        given = arguments(self._signature, args, kwargs)
        features = {
            n: value for n, value in given.items() if n not in {*_BEFORE_LAYERS, *self._of_layers} and _has_reals(value)
        }
        if not features:
            return None
        name, mask = _mask(given, [x for value in features.values() for x in tensors_in(value)])
        if mask is None or (self.is_staged and not all(type(value) is list for value in features.values())):
            raise PlanError(
                f"{self._owner} is given {', '.join(features)} beside the embeddings, which it may add between its "
                f"layers. ParallelPlan.{self.axis} > 1 cuts what its layers compute, and a rank would add features of "
                f"other layers or tokens. Use {self.axis}=1"
            )
        places = self._own(mask.flatten().cumsum(0).view(mask.shape) * mask)  # from 1; 0 for tokens without a feature
        own = places[places > 0] - 1
        changed: dict[str, Any] = {name: places > 0}
        for n, value in features.items():
            changed[n] = tree_map_only(Tensor, lambda x: self._of_own_tokens(x, own), value)
            if self.is_staged:
                changed[n] = _Features(changed[n])
                self._added.append(changed[n])
        positional = tuple(changed.get(n, x) for n, x in zip(self._signature.parameters, args, strict=False))
        return positional, {n: changed.get(n, x) for n, x in kwargs.items()}

    def _own(self, places: Tensor) -> Tensor:
        if self.region is not None:
            places = self.region.parts.take(places, 1)
        return places if self.sequence is None else self.sequence.split(places.unsqueeze(-1)).squeeze(-1)

    def _of_own_tokens(self, features: Tensor, own: Tensor) -> Tensor:
        # Each rank of tp has the whole gradient of the embeddings, and so of what a tower adds to them.
        whole = features if self.sequence is None else share(features, self.sequence.axis)
        return whole[own]


class _Features(list[Tensor]):
    """Features for several layers, which remembers those that were read."""

    def __init__(self, features: list[Tensor]):
        super().__init__(features)
        self.read: set[object] = set()

    def __getitem__(self, index: Any) -> Any:
        self.read.add(index)
        return super().__getitem__(index)


def _has_reals(value: object) -> bool:
    # A number, such as a count of labels, is no feature.
    return any(x.is_floating_point() and x.ndim for x in tensors_in(value))


def _mask(given: Mapping[str, object], features: list[Tensor]) -> tuple[str, Tensor | None]:
    """Return the mask of the tokens that have features, and its name; None if it is not known."""
    tokens = next((x for n in ("inputs_embeds", "input_ids") if isinstance(x := given.get(n), Tensor)), None)
    masks = [(n, x) for n, x in given.items() if isinstance(x, Tensor) and x.dtype == torch.bool]
    masks = [(n, x) for n, x in masks if tokens is not None and x.shape == tokens.shape[:2]]
    # The host waits for the number of tokens once, however many features there are.
    if len(masks) == 1 and {(x.ndim, *x.shape[:1]) for x in features} == {(2, int(masks[0][1].sum()))}:
        return masks[0]
    return "", None
