"""The routers of a model: which ones its load-balancing loss is computed from, and how a recomputed layer makes their
choices again.

A router's scores may have other rounding when they are computed again, where a kernel is not deterministic, and in
bfloat16 many scores are equal or nearly so. Another choice would give a wrong gradient, and ranks that share experts
would send other numbers of rows than in the forward pass. So the choices of ``torch.topk`` are kept, k numbers for each
token and layer, and what was chosen is read from the scores at these places. The scores keep their gradient.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.facts import Facts
from meshwright.parallel.fake_passes.observe import Watcher, hooked
from meshwright.parallel.method_chain import ChainStep
from meshwright.parallel.saved_tensors import Replay, ReplayWindow
from meshwright.temporarily import temporarily

LOSS_FUNCTION = "load_balancing_loss_func"  # the global name by which the forward of transformers' models calls it
OPTION = "output_router_logits"  # the argument, or the field of the config, that asks for the loss
ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass(frozen=True, kw_only=True)
class RouterRecord:
    """The routers from which a model's forward computes its load-balancing loss, and where the output has it.

    Args:
        modules: the name of each router, and the place of the logits in the tuple that it returns; None for no tuple.
        num_experts: the number of experts that the forward passes to the loss.
        top_k: the number of experts of each token that the forward passes to the loss.
        loss: the name of the load-balancing loss in the model's output.
        logits: the name of the routers' logits in the model's output.
    """

    modules: tuple[tuple[str, int | None], ...]
    num_experts: int
    top_k: int
    loss: str
    logits: str

    @property
    def size(self) -> int:
        """How many numbers the statistics of the routers are."""
        return 2 * self.num_experts + 1


def forward_with_router_loss(model: nn.Module) -> FunctionType | None:
    """Return the code of a model's forward that calls transformers' load-balancing loss; None if none does."""
    for kind in type(model).__mro__:
        forward = inspect.unwrap(vars(kind).get("forward", object))
        if isinstance(forward, FunctionType) and LOSS_FUNCTION in forward.__code__.co_names:
            stock = forward.__globals__.get(LOSS_FUNCTION)
            return forward if stock and list(inspect.signature(stock).parameters) == ARGUMENTS else None
    return None


class RouterWatcher(Watcher):
    """Sees what the modules of a model return, and what its load-balancing loss is given.

    Args:
        facts: what a model with such a loss shows. The pass must ask for the loss.
    """

    def __init__(self, facts: Facts):
        self._facts = facts

    def begin(self) -> None:
        """See Watcher."""
        self._returned: list[tuple[Tensor, str, int | None]] = []
        self._number = torch.zeros(())
        self._given: tuple[object, object, object] = (None, None, None)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See Watcher."""
        forward = forward_with_router_loss(self._facts.model)
        assert forward is not None
        inner = [(module, name) for module, name in self._facts.names.items() if name]
        handles = [module.register_forward_hook(functools.partial(self._look, name)) for module, name in inner]
        with hooked(handles), temporarily(sys.modules[forward.__module__], **{LOSS_FUNCTION: self._loss}):
            yield

    def _look(self, name: str, module: nn.Module, args: object, output: object) -> None:
        values = enumerate(output) if isinstance(output, tuple) else [(None, output)]
        self._returned.extend((x, name, place) for place, x in values if isinstance(x, Tensor))

    def _loss(
        self, gate_logits: object, num_experts: object = None, top_k: object = 2, attention_mask: object = None
    ) -> Tensor:
        """Take the arguments of the load-balancing loss, and return a number in its place."""
        self._given = gate_logits, num_experts, top_k
        return self._number

    def record(self, output: object) -> RouterRecord | None:
        """Return the record of a pass with this output; None if a router or a place in the output is not known."""
        logits, num_experts, top_k = self._given
        if not isinstance(logits, tuple) or not isinstance(output, MutableMapping):
            return None
        found = {id(x): (name, place) for x, name, place in reversed(self._returned)}  # the innermost module ends first
        named = {id(x): name for name, x in output.items()}
        if not all(id(x) in found for x in logits) or not {id(self._number), id(logits)} <= named.keys():
            return None
        assert isinstance(num_experts, int) and isinstance(top_k, int)
        return RouterRecord(
            modules=tuple(found[id(x)] for x in logits),
            num_experts=num_experts,
            top_k=top_k,
            loss=named[id(self._number)],
            logits=named[id(logits)],
        )


class ReplayedBlock(ChainStep):
    """The ``forward`` of a module with a router and experts, which makes the choices of the forward pass again.

    Args:
        replay: the choices.
    """

    def __init__(self, replay: Replay):
        self.replay = replay

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self.replay.now is None:
            return self.method(*args, **kwargs)
        with _ChosenOnce(self.replay.now):
            return self.method(*args, **kwargs)


class _ChosenOnce(TorchFunctionMode):
    """Takes the choices of ``topk`` from a window, and the values from the scores at these places."""

    def __init__(self, window: ReplayWindow):
        super().__init__()
        self.window = window

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)

        def choose() -> Tensor:
            with torch.no_grad():
                indices: Tensor = func(*args, **kwargs).indices
                return indices

        scores = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        indices = self.window.find(choose)
        return torch.return_types.topk((scores.gather(dim, indices), indices))
