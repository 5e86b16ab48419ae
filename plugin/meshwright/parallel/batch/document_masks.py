"""Keep packed documents apart: transformers finds their ends in ``position_ids``, but only without a cache."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.parallel.batch.schema import CACHES
from meshwright.parallel.method_chain import arguments

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
