"""Keeps packed documents apart: finds their borders, and makes each document a row of its own in mixers, which take no
mask.

transformers finds the documents of a packed row in ``position_ids`` and makes a mask for attention. A mixer takes no
mask, and the computation in torch ignores the borders that the kernels for GPUs take. So each document becomes a row
of its own while a mixer runs, padded on the right, where a causal module does not look. Documents of similar lengths
run in one call, so that at most half of a row is padding.

Documents are those that attention keeps apart. A step of the model's forward finds them, inside of micro-batches,
stages and cp; layers that backward runs again find those of their forward pass in the same windows as the choices of
routers (``parallel/saved_tensors.py``).
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.faults.memory_digest import has_values
from meshwright.parallel.autograd_graph import in_backward
from meshwright.parallel.batch.schema import BORDERS, CACHES, TOKENS
from meshwright.parallel.method_chain import BatchStep, ChainStep, StepOrder, add_step, arguments
from meshwright.parallel.saved_tensors import Replay
from meshwright.roles.blocks import has_attention, keeps_states
from meshwright.temporarily import temporarily

logger = logging.getLogger(__name__)

_CACHES = ("use_cache", *CACHES, "cache_params")
_CURE = "Give each document a row of its own: leave out Packing, and pad the rows with an attention_mask"


@dataclass(frozen=True)
class Documents:
    """The documents of the rows of a batch.

    Args:
        rows: the number of rows.
        length: the number of tokens of each row.
        spans: the row of each document, and where the document begins and ends in it, in order.
    """

    rows: int
    length: int
    spans: tuple[tuple[int, int, int], ...]
    _made: dict[tuple[int, torch.device], tuple[list[Tensor], Tensor]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Documents | None:
        """Return the documents that attention keeps apart in a forward call with these arguments; None if it does not.

        The host waits for the device here, as in transformers' own check.
        """
        positions, mask = batch.get("position_ids"), batch.get("attention_mask")
        if not isinstance(positions, Tensor) or any(batch.get(name) not in (None, False) for name in _CACHES):
            return None
        if positions.ndim == 3 and len(positions) == 4:  # those of text, and those in time, height and width
            positions = positions[0]
        if positions.ndim != 2 or (isinstance(mask, Tensor) and mask.ndim == 2):
            return None
        begins = (positions.diff(dim=-1) != 1).cpu()
        if not begins.any():
            return None
        length = positions.shape[1]
        tokens = next((x for name in TOKENS if (x := batch.get(name)) is not None), positions)
        spans: list[tuple[int, int, int]] = []
        for row, begin in enumerate(begins.expand(len(tokens), -1)):
            borders = [0, *(begin.nonzero()[:, 0] + 1).tolist(), length]
            spans += ((row, start, stop) for start, stop in pairwise(borders))
        return cls(len(tokens), length, tuple(spans))

    def has_several(self, row: int) -> bool:
        """Return whether a row has more than one document."""
        return sum(own == row for own, _, _ in self.spans) > 1

    def are_joined_by(self, mask: Tensor) -> bool:
        """Return whether a mask of attention for all tokens, ``[B, heads, L, L]``, lets a document see another one.

        The host waits for the device here.
        """
        if mask.ndim != 4 or mask.shape[-2:] != (self.length, self.length):
            return False
        row, start = next((row, start) for row, start, _ in self.spans if start)
        seen = mask[min(row, len(mask) - 1), 0, start, start - 1]
        return bool(seen if mask.dtype is torch.bool else seen == 0)

    def as_rows(self, length: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
        """Return where the tokens of each document lie among those of all rows, and the way back.

        Args:
            length: the number of tokens of each row; those after the documents belong to the last one.
            device: the device of the result.

        Returns:
            For each group of documents the places of their tokens, ``[documents, tokens]``, among the flattened rows;
            and for each token of the flattened rows its place among those of all groups.
        """
        if (length, device) not in self._made:
            groups: dict[int, list[tuple[int, int, int]]] = {}
            for row, start, stop in self.spans:
                size = (length if stop == self.length else stop) - start
                groups.setdefault((size - 1).bit_length(), []).append((row * length + start, size, row))
            places, back, done = [], torch.empty(self.rows * length, dtype=torch.int64), 0
            for group in groups.values():
                starts, sizes = torch.tensor([[start, size] for start, size, _ in group]).unbind(1)
                steps = torch.arange(int(sizes.max()))
                own = starts[:, None] + torch.minimum(steps, sizes[:, None] - 1)  # padding repeats the last token
                is_real = steps < sizes[:, None]
                back[own[is_real]] = (torch.arange(own.numel()).view_as(own) + done)[is_real]
                places.append(own.to(device))
                done += own.numel()
            self._made[length, device] = places, back.to(device)
        return self._made[length, device]


class RowDocuments:
    """The documents of the batch that runs now, for the mixers of one model.

    Args:
        model: the model, whose mixers get a step each.
        mixers: the mixers, by name.
        logs: whether this process says that documents are kept apart.

    Attributes:
        replay: what keeps the documents for layers that backward runs again; None if nothing does.
    """

    replay: Replay | None = None

    def __init__(self, model: nn.Module, mixers: Mapping[str, nn.Module], *, logs: bool):
        self.now: Documents | None = None
        self.mixers, self._logs, self._is_known = mixers, logs, False
        self._checked: set[str] = set()  # the attentions whose masks have been looked at
        self._name = type(model).__name__

    @classmethod
    def over(cls, model: nn.Module, mixers: Mapping[str, nn.Module], *, logs: bool) -> RowDocuments | None:
        """Add the steps to a model and its mixers; return None if attention alone mixes its tokens."""
        if not (mixers or keeps_states(model)):
            return None
        documents = cls(model, mixers, logs=logs)
        add_step(model, FindDocuments(model, documents))
        for name, mixer in mixers.items():
            add_step(mixer, DocumentsAsRows(name, documents))
        inside = {module for mixer in mixers.values() for module in mixer.modules()}
        for name, module in model.named_modules():
            if hasattr(module, "is_causal") and module not in inside:
                check = partial(documents.check_attention, name, inspect.signature(module.forward))
                module.register_forward_pre_hook(check, with_kwargs=True)
        return documents

    def check_attention(
        self,
        name: str,
        signature: inspect.Signature,
        attention: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> None:
        """Raise if an attention lets the documents see each other, as where a model makes its mask without positions.

        Flash kernels take the positions themselves, and masks in other forms are functions of them.
        """
        if self.now is None or name in self._checked:
            return
        mask = arguments(signature, args, kwargs).get("attention_mask")
        if isinstance(mask, Tensor) and not has_values(mask):
            return
        self._checked.add(name)
        if mask is None:
            kernel = getattr(getattr(attention, "config", None), "_attn_implementation", None)
            leaks = kernel in ("sdpa", "eager")
        else:
            leaks = isinstance(mask, Tensor) and self.now.are_joined_by(mask)
        if leaks:
            raise PlanError(
                f"the rows have several documents, and the mask of {name} ({type(attention).__name__}) lets them see "
                f"each other, since {self._name} makes it without position_ids. {_CURE}"
            )

    def begin(self) -> None:
        """Note that a batch has several documents in a row.

        Raises:
            PlanError: if they cannot be kept apart.
        """
        if self._is_known:
            return
        if not self.mixers:
            raise PlanError(
                f"the rows have several documents, and {self._name} keeps states over tokens in a form that is not "
                f"known here, so the documents might leak into each other. {_CURE}"
            )
        for name, mixer in self.mixers.items():
            if has_attention(mixer):
                raise PlanError(
                    f"the rows have several documents, and {name} ({type(mixer).__name__}) has a convolution over "
                    f"tokens inside of an attention, so the documents would leak into each other. {_CURE}"
                )
        self._is_known = True
        if self._logs:
            logger.warning(
                "the rows have several documents, which the stock %s lets leak into each other in %d modules such as "
                "%s. They are kept apart here: each document is a row of its own there, so the numbers are those of "
                "separate documents",
                self._name,
                len(self.mixers),
                next(iter(self.mixers)),
            )

    def of_layer(self) -> Documents | None:
        """Return the documents of the layer that runs now, or that backward runs again."""
        if self.replay is not None and self.replay.now is not None:
            return self.replay.now.find(lambda: self.now)
        if in_backward() and self._is_known:
            raise PlanError(
                f"backward runs layers of {self._name} again, and it is not known which documents their rows had. "
                "Use ParallelPlan(recompute='full'), or gradient_checkpointing_enable with use_reentrant=False, "
                f"without ToDistributedConfig.compile. Or: {_CURE}"
            )
        return self.now


class FindDocuments(BatchStep):
    """The step of a model's forward that finds the documents of its batch.

    Args:
        model: the model.
        packed: where the mixers find them.
    """

    order = StepOrder.DOCUMENTS

    def __init__(self, model: nn.Module, packed: RowDocuments):
        super().__init__(model)
        self.packed = packed
        config, parameters = getattr(model, "config", None), self.signature.parameters
        has_cache = hasattr(getattr(config, "get_text_config", lambda: config)(), "use_cache")
        takes_any = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
        self._takes_cache = "use_cache" in parameters or (takes_any and has_cache)

    def __call__(self, *args: object, **kwargs: object) -> object:
        batch = self.batch_of(args, kwargs)
        if (documents := Documents.of(batch)) is not None:
            self.packed.begin()
            if self._takes_cache:  # by default a model makes one, which would get the states of single documents
                batch["use_cache"] = False
        with temporarily(self.packed, now=documents):
            return self.method(**batch)


class DocumentsAsRows(ChainStep):
    """The step of a mixer that gives each packed document a row of its own.

    Args:
        name: the name of the mixer, for messages.
        packed: the documents.
    """

    order = StepOrder.DOCUMENTS

    def __init__(self, name: str, packed: RowDocuments):
        self.name, self.packed = name, packed

    def __call__(self, *args: object, **kwargs: object) -> object:
        documents = self.packed.of_layer()
        if documents is None:
            return self.method(*args, **kwargs)
        given = {name: value for name, value in kwargs.items() if name not in BORDERS}
        hidden = hidden_states_in(args, given)
        if hidden is None or len(hidden) != documents.rows or hidden.shape[1] < documents.length:
            raise self._refusal(f"is given hidden states of shape {None if hidden is None else tuple(hidden.shape)}")
        shape = hidden.shape[:2]
        groups, back = documents.as_rows(shape[1], hidden.device)
        outputs = [self._run(places, shape, args, given) for places in groups]
        joined = torch.cat([_first_of(x).flatten(0, 1) for x in outputs])[back].view(*shape, -1)
        # Of several documents there is no last state, which follows the hidden states in some models.
        return (joined, *(None for _ in outputs[0][1:])) if isinstance(outputs[0], tuple) else joined

    def _run(self, places: Tensor, shape: torch.Size, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        own_args, own_kwargs = tree_map_only(
            Tensor, lambda x: _rows_of(x, places, shape) if is_of_tokens(x, shape) else x, (args, kwargs)
        )
        output = self.method(*own_args, **own_kwargs)
        x = _first_of(output)
        if not isinstance(x, Tensor) or x.shape[:2] != places.shape:
            raise self._refusal(f"returns {type(output).__name__} without hidden states")
        return output

    def _refusal(self, what: str) -> PlanError:
        return PlanError(
            f"the rows have several documents, and {self.name}, in which tokens meet without a mask, {what}, so it "
            f"cannot run on each document alone. {_CURE}"
        )


def _first_of(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _rows_of(x: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    return x.expand(*shape, *x.shape[2:]).flatten(0, 1)[places]


def is_of_tokens(x: Tensor, shape: torch.Size) -> bool:
    """Return whether a tensor has a value for each of ``[B, L]`` tokens, or for those of every row, ``[1, L]``."""
    return x.ndim > 1 and x.shape[0] in (1, shape[0]) and x.shape[1] == shape[1]


def hidden_states_in(args: object, kwargs: object) -> Tensor | None:
    """Return the first argument of a mixer that has a vector for each token; None if there is none."""
    return next(_vectors(tree_leaves((args, kwargs))), None)


def _vectors(values: list[object]) -> Iterator[Tensor]:
    return (x for x in values if isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point())


_LOOK = "find_packed_sequence_indices"  # transformers' check for packed documents
_own_look: list[Callable[[Tensor], Tensor | None]] = []  # transformers' function, while another takes its place


def keep_documents_apart(facts: Facts) -> None:
    """Turn off the key-value cache, which hides the documents of a packed row, in passes that do not decode.

    These are passes with labels, passes with gradients in training, and passes whose positions restart inside a row.
    Passes that are called with ``use_cache`` or ``past_key_values`` and passes of ``generate`` are unchanged.

    Without a cache transformers looks for documents in the positions, also in those that the model makes itself, and
    the host waits for the device. Of a batch without positions that pass does not look, as it does not with the cache.
    A model whose forward only passes ``use_cache`` on, as many that see images do, has a decoder inside that makes the
    cache.
    """
    for module in facts.names:
        signature = _signature(module)
        if signature is None or "use_cache" not in signature.parameters:
            continue
        if module is facts.model or _embeds(module, facts):
            hook = _WithoutCache(signature, _twice_in_cache(facts, module))
            module.register_forward_pre_hook(hook, with_kwargs=True)
            module.register_forward_hook(hook.look_again, always_call=True)
            return


def _signature(module: nn.Module) -> inspect.Signature | None:
    """Return the signature of a module's forward; None if it is a builtin function or compiled, which have none."""
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):
        return None


def _embeds(module: nn.Module, facts: Facts) -> bool:
    """Return whether a module has the embedding of a model's tokens."""
    with suppress(AttributeError, NotImplementedError):  # a module of no library, or a model that has none
        embedding = facts.model.get_input_embeddings()  # type: ignore[operator]
        return any(inside is embedding for inside in facts.inside(module))
    return False


class _WithoutCache:
    def __init__(self, signature: inspect.Signature, twice: list[str]):
        self._signature, self._twice = signature, twice

    def __call__(
        self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        given = arguments(self._signature, args, kwargs)
        _set_look(looks=True)  # another pass may be under way, or may have been interrupted
        if any(given.get(name) is not None for name in ("use_cache", *CACHES)):
            return None
        trains = model.training and torch.is_grad_enabled()
        if trains or given.get("labels") is not None or _begins_anew(given):
            if _is_cached(model):
                if self._twice:
                    raise PlanError(
                        f"{' and '.join(self._twice)} are one attention, and on one device the default use_cache=True "
                        "makes each of its places attend to the keys of the others. A plan trains without the cache, "
                        "so the results would differ. Set model.config.use_cache = False, on one device too"
                    )
                _set_look(looks=given.get("position_ids") is not None)
            return args, {**kwargs, "use_cache": False}
        return None

    def look_again(self, *_: object) -> None:
        """Give transformers its check back, after a pass."""
        _set_look(looks=True)


def _is_cached(model: nn.Module) -> bool:
    """Return whether the model makes a cache on one device, if the call does not say."""
    config = getattr(model, "config", None)
    if not hasattr(config, "use_cache") and callable(of_text := getattr(config, "get_text_config", None)):
        config = of_text(decoder=True)  # that of a model that sees images has one for the decoder inside
    is_cached = getattr(config, "use_cache", False)
    recomputes = getattr(model, "is_activation_checkpointing", None)
    if recomputes is None:  # the name in older versions of transformers; newer ones warn of it
        recomputes = getattr(model, "is_gradient_checkpointing", False)
    return bool(is_cached) and not recomputes


def _set_look(*, looks: bool) -> None:
    """Let transformers check for packed documents, or not. A traced function cannot change this."""
    masking = sys.modules.get("transformers.masking_utils")
    look = getattr(masking, _LOOK, None)
    if look is None or torch.compiler.is_compiling():
        return
    if look is not _no_documents:
        _own_look[:] = [look]
    setattr(masking, _LOOK, _own_look[0] if looks else _no_documents)


def _no_documents(position_ids: Tensor) -> None:
    """Take the place of transformers' check for packed documents."""


def _twice_in_cache(facts: Facts, model: nn.Module) -> list[str]:
    """Return the names of one attention that stands at several places, and so at one place of a cache."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in facts.named_inside(model):
        if hasattr(module, "layer_idx"):
            names.setdefault(module, []).append(name)
    return next((found for found in names.values() if len(found) > 1), [])


def _begins_anew(given: dict[str, object]) -> bool:
    """Return whether positions restart inside a row.

    This synchronises with the device, as transformers' own check does.
    """
    positions = given.get("position_ids")
    if not isinstance(positions, Tensor) or positions.ndim != 2 or given.get("attention_mask") is not None:
        return False
    return bool((positions.diff(dim=-1) != 1).any())
