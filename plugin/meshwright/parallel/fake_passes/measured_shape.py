"""Measures the layers and towers of a model by the live tensors of a pass without values, for the planner."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.errors import PlanError
from meshwright.parallel.fake_passes.example_images import ExampleImages, example_images, run_tower
from meshwright.parallel.fake_passes.fake_pass import fake_values
from meshwright.parallel.fake_passes.known_values import KnownValues
from meshwright.parallel.tensor_parallel.structure import describe
from meshwright.roles import Decoder, plan_for
from meshwright.roles.decoder import is_stack
from meshwright_plan.job.measured import Held, MeasuredLayer, MeasuredPart, PerToken, TowerShape


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations allocate inside this context, until the storages are freed.

    Works on fake and real tensors, on any device. It does not count an operation's temporary memory, nor what an
    allocator adds.

    Args:
        tensors: the tensors that exist before the context begins; each storage is counted once.

    Example:
        >>> with LiveBytes([]) as memory:
        ...     x = torch.ones(1000) + 1  # the ones are gone by now
        >>> memory.now, memory.peak
        (4000, 8000)
    """

    def __init__(self, tensors: Iterable[Tensor] = ()):
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is counted already."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key, size)

    def restart_peak(self) -> None:
        """Restart the peak from the current value."""
        self.peak = self.now

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self.add(leaf)
        return result


_DTYPES = (torch.bfloat16, torch.float32)
_SIZES_OF_TP = (2, 4, 8, 16)


@dataclasses.dataclass
class _MeasuredPass:
    """What a pass without values has shown of one layer's modules: the bytes that each saves, and its peaks."""

    saved: dict[str, int] = dataclasses.field(default_factory=dict)
    forward: dict[str, int] = dataclasses.field(default_factory=dict)
    backward: dict[str, int] = dataclasses.field(default_factory=dict)
    total: int = 0
    output: int = 0


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """Return what layers of the same memory have in common: modules, their settings, and the shapes of weights."""
    return tuple(
        (name, type(module), *((key, value) for key, value in vars(module).items() if _is_setting(key, value)))
        for name, module in layer.named_modules()
    ) + tuple((name, p.shape) for name, p in layer.named_parameters())


def _is_setting(name: str, value: object) -> bool:
    return isinstance(value, int | float | str) and "idx" not in name and "index" not in name


def _skips(layer: nn.Module, like: nn.Module, outputs: dict[nn.Module, bool]) -> Callable[..., Any]:
    """Return a forward that returns its input in the form in which an equal layer returned its result."""

    def forward(hidden_states: Tensor, *_: object, **__: object) -> Any:
        return (hidden_states,) if outputs[like] else hidden_states

    return forward


class _Meter:
    """Counts live bytes around the children of the layers, forward and backward.

    Args:
        layers: the layers.
        memory: the live bytes.
        skips: whether of layers of one kind only the first one runs, and the others return their input.
    """

    def __init__(self, layers: tuple[nn.Module, ...], memory: LiveBytes, *, skips: bool):
        self.memory, self.found = memory, dict[nn.Module, _MeasuredPass]()
        firsts: dict[object, nn.Module] = {}
        self._like = {layer: firsts.setdefault(_kind(layer), layer) if skips else layer for layer in layers}
        self._outputs: dict[nn.Module, bool] = {}
        for layer, like in self._like.items():
            if like is layer:
                self.found[layer] = _MeasuredPass()
            else:  # fake_values undoes what is set in a module
                layer.forward = _skips(layer, like, self._outputs)
        self._running: tuple[_MeasuredPass, str, int] | None = None  # in backward
        self._handles = [handle for layer in self.found for handle in self._watch(layer)]

    def of(self, layer: nn.Module) -> _MeasuredPass:
        """Return what was found of a layer, or of the first one of its kind."""
        return self.found[self._like[layer]]

    def remove(self) -> None:
        self._end_backward()
        for handle in self._handles:
            handle.remove()

    def _watch(self, layer: nn.Module) -> list[Any]:
        found, before = self.found[layer], [0]

        def enter_layer(*_: Any) -> None:
            before[0] = self.memory.now

        def leave_layer(_: nn.Module, __: Any, output: Any) -> None:
            self._outputs[layer] = isinstance(output, tuple)
            found.total, found.output = self.memory.now - before[0], sum(_storages(output))

        handles = [layer.register_forward_pre_hook(enter_layer), layer.register_forward_hook(leave_layer)]
        for name, child in layer.named_children():
            handles += self._watch_child(found, name, child)
        return handles

    def _watch_child(self, found: _MeasuredPass, name: str, child: nn.Module) -> list[Any]:
        start = [0]

        def enter(*_: Any) -> None:
            start[0] = self.memory.now
            self.memory.restart_peak()

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            own = sum(_storages(output))
            found.saved[name] = found.saved.get(name, 0) + self.memory.now - start[0] - own
            found.forward[name] = self.memory.peak - start[0]
            first = next((x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad), None)
            if first is not None:
                first.register_hook(lambda _: self._begin_backward(found, name))

        return [child.register_forward_pre_hook(enter), child.register_forward_hook(leave)]

    def _begin_backward(self, found: _MeasuredPass, name: str) -> None:
        self._end_backward()
        self._running = found, name, self.memory.now
        self.memory.restart_peak()

    def _end_backward(self) -> None:
        if self._running is not None:
            found, name, start = self._running
            found.backward[name] = self.memory.peak - start
            self._running = None


def _storages(output: Any) -> Iterable[int]:
    """Return the bytes of the memory of each tensor of an output, once if several share it."""
    made = [x.untyped_storage() for x in tree_leaves(output) if isinstance(x, Tensor)]
    return {storage._cdata: storage.nbytes() for storage in made}.values()


def needs_measuring(decoder: Decoder) -> bool:
    """Return whether a decoder has towers, or mixers in its layers, for which there are no formulas."""
    inside = (module for layer in decoder.layers for module in layer.modules())
    return bool(decoder.towers) or any(isinstance(module, nn.Conv1d) for module in inside)


def measured_layers(
    model: nn.Module, decoder: Decoder, images: ExampleImages | None, length: int
) -> list[tuple[MeasuredLayer, Held]]:
    """Return what each layer saves and needs, and the elements of its weights on a rank by the size of tp and by sp.

    Args:
        model: the model, without memory; its dtype is changed.
        decoder: its parts.
        images: an image for each row; None for rows of text.
        length: tokens of the shorter of two rows, whose difference shows what grows with a row.
    """
    lengths, passes = (length, 2 * length), []
    for dtype in _DTYPES:
        model.to(dtype)
        passes += [_run(model, decoder, _row(images, tokens, dtype)) for tokens in lengths]
        alone = _run(model, decoder, _row(images, lengths[1], dtype), saves=False)
        for whole, bare in zip(passes[-1], alone, strict=True):
            whole.forward = bare.forward
    layouts = _held(model, decoder)
    cut = layouts.get((2, True), {})
    found = []
    for index, layer in enumerate(decoder.layers):
        own = [p[index] for p in passes]
        parts = []
        for name, child in layer.named_children():
            if name not in own[0].saved:
                continue
            weights = list(child.parameters())
            parts.append(
                MeasuredPart(
                    cut=any(cut.get(id(w), (w.numel(), 0))[0] < w.numel() for w in weights),
                    is_norm=all(w.ndim < 2 for w in weights),
                    saved=_per_token([p.saved[name] for p in own], lengths),
                    forward=PerToken(each=(own[1].forward[name] / lengths[1], own[3].forward[name] / lengths[1])),
                    backward=_per_token([p.backward.get(name, 0) for p in own], lengths),
                )
            )
        between = _per_token([p.total - sum(p.saved.values()) for p in own], lengths)
        held = tuple(
            (key, tuple(sizes.get(id(w), (w.numel(), 0)) for w in layer.parameters())) for key, sizes in layouts.items()
        )
        found.append((MeasuredLayer(parts=tuple(parts), between=between), held))
    return found


def _per_token(of_pass: list[int], lengths: tuple[int, int]) -> PerToken:
    """Return the bytes per token from those of a short and a long row in each dtype."""
    lines = []
    for short, long in (of_pass[:2], of_pass[2:]):
        slope = max(0.0, (long / lengths[1] - short / lengths[0]) / (lengths[1] - lengths[0]))
        lines.append((short / lengths[0] - slope * lengths[0], slope))
    each, longer = zip(*lines, strict=True)
    return PerToken(each=each, longer=longer)


def _row(images: ExampleImages | None, length: int, dtype: torch.dtype) -> dict[str, Tensor]:
    if images is None:
        return {"input_ids": torch.zeros(1, length, dtype=torch.int64)}
    row = images.batch(1, length, dtype)
    return {name: x for name, x in row.items() if name != "labels"}


def _run(model: nn.Module, decoder: Decoder, row: dict[str, Tensor], *, saves: bool = True) -> list[_MeasuredPass]:
    embedded: list[Tensor] = []
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        fake_values(model),
        KnownValues(row) as known,
        torch.set_grad_enabled(saves),
        LiveBytes([*model.parameters(), *model.buffers(), *known.batch.values()]) as memory,
    ):
        meter = _Meter(decoder.layers, memory, skips=True)
        keep = decoder.embedding.register_forward_hook(lambda _, __, output: embedded.append(output))
        try:
            output = model(**known.batch)
            if saves:
                torch.autograd.grad(output.logits.sum(), embedded)
        except PlanError:
            raise
        except Exception as error:  # of any model's own forward, for which tensors without values may not do
            raise PlanError(
                f"{type(model).__name__} could not be run on tensors without values, which shows the memory of its "
                f"layers ({type(error).__name__}: {error}). Pass a plan: plan='dp2'"
            ) from error
        finally:
            keep.remove()
            meter.remove()
    return [meter.of(layer) for layer in decoder.layers]


def _held(model: nn.Module, decoder: Decoder) -> dict[tuple[int, bool], dict[int, tuple[int, int]]]:
    """Return (elements, elements of the whole if its gradient is a sum over tp) by tp, sp and the weight's id."""
    found: dict[tuple[int, bool], dict[int, tuple[int, int]]] = {(1, False): {}}
    for tp in _SIZES_OF_TP:
        for sp in (False, True):
            try:
                structure = describe(model, plan_for(model), tp=tp, sequence_parallel=sp)
            except PlanError:
                continue
            named = dict(model.named_parameters(remove_duplicate=False))
            found[tp, sp] = {
                id(named[name]): (layout.local_shape.numel(), named[name].numel() if layout.has_addends else 0)
                for name, layout in structure.parameters.items()
            }
    return found


def measured_tower(model: nn.Module, decoder: Decoder) -> tuple[TowerShape | None, ExampleImages | None]:
    """Return the weights beside the decoder and the memory of one image, and such an image; None if there are none."""
    own = [decoder.embedding, decoder.final_norm, decoder.head, *decoder.layers]
    inside = {id(p) for module in own if module is not None for p in module.parameters()}
    beside = {id(p): p.numel() for p in model.parameters() if id(p) not in inside}
    if not beside:
        return None, None
    shape = TowerShape(parameters=tuple(beside.values()))
    if not decoder.towers:
        return shape, None
    try:
        images = example_images(model)
        passes = []
        for dtype in _DTYPES:
            model.to(dtype)
            passes.append(_run_tower(model, decoder, images.in_dtype(dtype)))
    except PlanError as error:
        return dataclasses.replace(shape, image=str(error)), None
    pixels, saved, kept, backward = zip(*passes, strict=True)
    sizes = {"pixels": pixels, "saved": saved, "kept": kept, "backward": backward}
    return dataclasses.replace(shape, **sizes, tokens=images.tokens, image=images.text), images


def _run_tower(model: nn.Module, decoder: Decoder, inputs: Mapping[str, Tensor]) -> tuple[float, float, float, float]:
    """Return the bytes of ``pixels``, ``saved``, ``kept`` and ``backward`` of a tower."""
    stacks = [m for tower in decoder.towers for m in decoder.facts.inside(tower) if is_stack(decoder.facts, m)]
    layers = tuple(layer for stack in stacks for layer in stack.children())
    with FakeTensorMode(allow_non_fake_inputs=True), fake_values(model), KnownValues(inputs) as known:
        given = [x for x in known.batch.values() if isinstance(x, Tensor)]
        with LiveBytes([*model.parameters(), *model.buffers(), *given]) as memory, torch.enable_grad():
            start, meter = memory.now, _Meter(layers, memory, skips=False)
            output = run_tower(model, known.batch)
            meter.remove()
            made = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
            saved = memory.now - start
            memory.restart_peak()
            before, first = memory.now, next(decoder.towers[0].parameters())
            torch.autograd.grad([x.sum() for x in made], first, allow_unused=True)
            inside = sum(meter.of(layer).total - meter.of(layer).output for layer in layers)
            read = sum(x.untyped_storage().nbytes() for x in given)
            return read, saved, saved - inside, memory.peak - before
