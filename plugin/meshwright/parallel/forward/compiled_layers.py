"""torch.compile for a distributed model: compiles the layers between collectives, and nothing of the runtime.

The runtime's hooks communicate, and pass state from one hook to the next. A traced graph would freeze this state. So
dynamo skips all code of this package: a graph ends where a hook runs, and the next graph begins after it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from meshwright.compiling import active_backend, allow_variants, is_compiled_function, pause_compiling
from meshwright.errors import PlanError
from meshwright.parallel.method_chain import ChainStep, StepOrder, add_step
from meshwright.parallel.tensor_parallel.block_boundary import BlockHooks
from meshwright.plan.fields import nearest
from meshwright.roles import Decoder

Restore = Callable[[], object]

logger = logging.getLogger(__name__)


class CompilableLayers:
    """The layers of a distributed model, which are compiled on request.

    Args:
        layers: the layers.
        refusal: why the layers cannot be compiled, with the cure; None if they can.
        is_model_traceable: whether ``torch.compile(model)`` may compile the code around the layers too.
    """

    def __init__(self, layers: Iterable[nn.Module], *, refusal: str | None, is_model_traceable: bool):
        self.layers, self.refusal, self.is_model_traceable = list(layers), refusal, is_model_traceable
        self.blocks: list[BlockHooks] = []
        self._is_prepared = self._is_compiled = self._was_refused = False

    def compile(self, **options: Any) -> None:
        """Compile each layer's forward, once.

        Args:
            options: the arguments of ``torch.compile``.

        Raises:
            PlanError: if the plan's layers cannot be compiled.
        """
        check_compile_options(options, has_collectives=bool(self.blocks))
        if self.refusal is not None:
            raise PlanError(self.refusal)
        if self._is_compiled:
            return
        self._is_compiled = True
        self._prepare()
        for layer in self.layers:
            add_step(layer, _CompiledForward(options))

    def compile_if_possible(self, **options: Any) -> None:
        """Compile each layer's forward, or log once why the model runs eagerly."""
        if self.refusal is None:
            self.compile(**options)
        else:
            self._warn_of_refusal()

    def check_forward(self, model: nn.Module) -> None:
        """Raise a PlanError if the program has compiled a model's forward, inside which the runtime's hooks would run.

        Args:
            model: the model, or a module that holds the layers.
        """
        if is_compiled_function(vars(model).get("forward")) and not self.is_model_traceable:
            raise PlanError(
                "model.forward was replaced by a function that torch.compile made, and would trace the plan's "
                "collectives; write model.compile(...) instead of model.forward = torch.compile(model.forward, ...)"
            )

    def enter_model(self) -> Restore:
        """Begin a forward pass of the model: inside ``torch.compile(model)``, compile the layers and nothing else.

        The code around the layers keeps logits sharded, counts labels and draws seeds, which dynamo cannot trace.

        Returns:
            A function that ends the pass.
        """
        backend = active_backend()
        if backend is None:
            if any(layer._compiled_call_impl is not None for layer in self.layers):  # the program's layer.compile()
                self._follow_program()
            return _nothing
        if self.is_model_traceable:
            return _nothing
        self.compile_if_possible(backend=backend)
        return pause_compiling()

    def _follow_program(self) -> None:
        """Make layers that the program has compiled one graph for each block, or run them eagerly if they cannot be."""
        if self.refusal is None:
            self._prepare()
            return
        self._warn_of_refusal()
        for layer in self.layers:
            layer._compiled_call_impl = None

    def _warn_of_refusal(self) -> None:
        if not self._was_refused:
            self._was_refused = True
            logger.warning("torch.compile has no effect, and the model runs eagerly: %s", self.refusal)

    def _prepare(self) -> None:
        """Make each block one graph up to its output projection, however its layer is compiled."""
        if not self._is_prepared:
            self._is_prepared = True
            allow_variants(module for layer in self.layers for module in layer.modules())
            for block in self.blocks:
                block.prepare_to_compile()


def check_compile_options(options: object, has_collectives: bool = False) -> None:
    """Raise if compile_options are no arguments of torch.compile, or name no backend of it.

    Args:
        options: the value.
        has_collectives: whether the code to compile has collectives, at which a graph ends.
    """
    if not isinstance(options, Mapping):
        raise PlanError(f"compile_options={options!r} must be a dict, for example {{'backend': 'inductor'}}")
    known = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    for name in options:
        if name not in known:
            near = nearest(str(name), known)
            raise PlanError(
                f"compile_options has {name!r}, which torch.compile does not take; "
                f"{f'write {near!r}' if near else 'remove it'}. It takes {', '.join(known)}"
            )
    backend = options.get("backend", "inductor")
    if isinstance(backend, str) and backend not in (backends := torch.compiler.list_backends(exclude_tags=())):
        near, usual = nearest(backend, backends), ", ".join(torch.compiler.list_backends())
        raise PlanError(
            f"compile_options={{'backend': {backend!r}}} is not a backend of torch.compile; "
            f"{f'write {near!r}' if near else 'remove it'}. Usual backends are {usual}"
        )
    if has_collectives and options.get("fullgraph"):
        raise PlanError(
            "torch.compile(fullgraph=True): under tensor parallelism a graph ends at each collective; leave "
            "fullgraph out"
        )


def layers_of(decoder: nn.Module, structure: Decoder | None) -> list[nn.Module]:
    """Return the layers of a decoder, which ``compile="layers"`` compiles one by one."""
    return list(outermost_layers(decoder) if structure is None else structure.layers)


def outermost_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of a model's outermost module lists."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from outermost_layers(child)


class _CompiledForward(ChainStep):
    """A layer's forward, compiled at its first call."""

    order = StepOrder.COMPILED

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self._compiled: Callable[..., object] | None = None

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self._compiled is None:
            self._compiled = torch.compile(self.method, **self.options)
        return self._compiled(*args, **kwargs)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_compiled": None}  # a copy compiles the method of its own layer


def _nothing() -> None:
    pass
