"""Packed rows of models that call a flash attention package, which takes borders of documents in place of a mask.

transformers finds the borders in ``position_ids`` if a call has one row. In a call of several rows the documents would
see each other, and so the numbers would depend on how many rows a rank, a micro-batch or a stage has in a call.
So the borders of the rows are added to the call here, as ``cu_seq_lens_q`` and its companions.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.parallel.batch.document_rows import Documents
from meshwright.parallel.batch.schema import BORDERS
from meshwright.parallel.method_chain import BatchStep, StepOrder, add_step
from meshwright.temporarily import temporarily

logger = logging.getLogger(__name__)

_PIP = {
    "flash_attention_2": "pip install flash-attn --no-build-isolation",
    "flash_attention_3": "build it in the folder hopper of github.com/Dao-AILab/flash-attention",
    "flash_attention_4": "pip install flash-attn-4",
}


def is_flash(stock: Callable[..., object]) -> bool:
    """Return whether an attention function is the one by which transformers calls flash attention packages."""
    module = sys.modules.get("transformers.integrations.flash_attention")
    return module is not None and stock is module.flash_attention_forward


def flash_implementation(modules: Iterable[nn.Module]) -> str | None:
    """Return the name of the flash attention package that some of a model's modules call; None if they call none."""
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:
        return None
    functions = transformers.ALL_ATTENTION_FUNCTIONS
    names = (getattr(getattr(x, "config", None), "_attn_implementation", None) for x in modules)
    found: str | None = next((name for name in names if name in functions and is_flash(functions[name])), None)
    return found


def flash_function(implementation: str) -> Callable[..., Tensor]:
    """Return the function that transformers calls for an attention implementation.

    Raises:
        PlanError: if its package is not installed, or cannot be loaded.
    """
    load = sys.modules["transformers.modeling_flash_attention_utils"].lazy_import_flash_attention
    try:
        found: Callable[..., Tensor] | None = load(implementation)[0][0]
    except (ImportError, ValueError, OSError) as error:
        cure = _PIP.get(implementation, "pip install kernels")
        raise PlanError(
            f"attn_implementation={implementation!r} cannot be loaded on this machine "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]}). To install it: {cure}. Or load the model "
            "with attn_implementation='sdpa', which runs torch's own flash kernels"
        ) from error
    if found is None:
        raise PlanError(
            f"attn_implementation={implementation!r} has no function for training (flash_attn_func). Load the model "
            "with attn_implementation='sdpa', which runs torch's own flash kernels"
        )
    return found


def borders_at(places: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Return the options by which transformers tells a package where documents begin.

    Args:
        places: where each document begins among the tokens of all rows, and the end.
        device: the device of the tokens.
    """
    borders = torch.tensor(places, dtype=torch.int32)
    longest = int(borders.diff().max())
    borders = borders.to(device)
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}


class FlashRows(BatchStep):
    """The step of a model's forward that tells a flash attention package where the documents of several rows begin.

    Args:
        model: the model.
        logs: whether this process says that documents are kept apart.
        parts_tokens: whether a rank has a part of the tokens of a row, so that attention cannot read positions. Some
            models make their masks without positions, too.
    """

    order = StepOrder.BORDERS

    def __init__(self, model: nn.Module, *, logs: bool, parts_tokens: bool):
        super().__init__(model)
        self.now: Documents | None = None
        self._parts_tokens = parts_tokens
        self._logs, self._checked = logs, set[str]()
        self._takes_any = any(x.kind is x.VAR_KEYWORD for x in self.signature.parameters.values())

    @classmethod
    def over(cls, facts: Facts, towers: Collection[nn.Module], *, logs: bool, parts_tokens: bool) -> None:
        """Add the step to a model that calls a flash attention package.

        Args:
            facts: what the model shows.
            towers: its towers, whose tokens are not those of the documents.
            logs: see the class.
            parts_tokens: see the class.
        """
        model = facts.model
        beside = [tower for tower in towers if tower is not model]
        inside = {module for tower in beside for module in facts.inside(tower)}
        if flash_implementation(module for module in facts.names if module not in inside) is None:
            return
        step = cls(model, logs=logs, parts_tokens=parts_tokens)
        add_step(model, step)
        for tower in beside:  # some models pass all options of a call on to their towers
            tower.register_forward_pre_hook(step.without_borders, with_kwargs=True)
        for module, name in facts.names.items():
            if hasattr(module, "is_causal") and module not in inside:
                module.register_forward_pre_hook(partial(step.check_attention, name), with_kwargs=True)

    def without_borders(
        self, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Return the arguments of a tower without the borders of documents, if they were added here."""
        if self.now is None:
            return None
        return args, {name: x for name, x in kwargs.items() if name not in BORDERS}

    def check_attention(
        self, name: str, attention: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        """Raise if the borders do not reach an attention."""
        if self.now is None or name in self._checked:
            return
        self._checked.add(name)
        if "cu_seq_lens_q" not in kwargs:
            raise self._refusal(f"{name} ({type(attention).__name__}) is not told where documents begin")

    def __call__(self, *args: object, **kwargs: object) -> object:
        batch = self.batch_of(args, kwargs)
        documents = self._documents(batch) if batch.get("cu_seq_lens_q") is None else None
        if documents is not None:
            batch |= self._borders_of(documents)
        with temporarily(self, now=documents):
            return self.method(**batch)

    def _documents(self, batch: Mapping[str, Any]) -> Documents | None:
        mask = batch.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            documents = Documents.of(batch)
            if documents is None or not (documents.rows > 1 or self._parts_tokens):
                return None
            _check_first_positions(batch["position_ids"], documents)
            return documents
        documents = Documents.of({name: x for name, x in batch.items() if name != "attention_mask"})
        # A row without padding is packed or not, depending on the other rows of its call.
        if documents is not None and any(
            documents.has_several(row) for row, is_full in enumerate(mask.bool().all(1).tolist()) if is_full
        ):
            raise PlanError(
                "position_ids begin anew within a row, and attention_mask is given too, of which flash attention reads "
                "one or the other. Leave attention_mask out, since the row has no padding"
            )
        return None

    def _borders_of(self, documents: Documents) -> dict[str, Any]:
        if not self._takes_any:
            raise self._refusal(f"{type(self.model).__name__} takes no cu_seq_lens_q")
        if self._logs and documents.rows > 1:
            self._logs = False
            logger.warning(
                "the rows have several documents, which the stock %s lets see each other under flash attention if a "
                "call has several rows. They are kept apart here, as in calls of one row each",
                type(self.model).__name__,
            )
        starts = [row * documents.length + start for row, start, _ in documents.spans]
        return borders_at([*starts, documents.rows * documents.length], next(self.model.parameters()).device)

    def _refusal(self, what: str) -> PlanError:
        return PlanError(
            f"the rows of a call have several documents, and {what}, so flash attention would let the documents see "
            "each other. Without cp, use ParallelPlan(micro_batch_size=1). Or load the model with "
            "attn_implementation='sdpa'"
        )


def _check_first_positions(positions: Tensor, documents: Documents) -> None:
    """Raise a PlanError if positions begin anew at another place than 0, which transformers takes for no border."""
    of_rows = positions[0] if positions.ndim == 3 else positions
    of_rows = of_rows.expand(documents.rows, -1).cpu()
    first = next((int(of_rows[row, start]) for row, start, _ in documents.spans if of_rows[row, start]), None)
    if first is not None:
        raise PlanError(
            f"position_ids jump to {first} within a row, or begin there. In a call of one row transformers takes only "
            "position 0 for the first token of a document, if flash attention runs. Let the positions of each document "
            "begin at 0, or load the model with attn_implementation='sdpa'"
        )
