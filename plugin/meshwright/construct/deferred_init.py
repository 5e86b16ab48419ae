"""``deferred_init``: build a module without allocating its parameters, and record how to compute them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

from meshwright.construct.init_recording import RecordedWindow, Tape, reserve

Arguments = tuple[Any, ...]  # of an operator
Options = dict[str, Any]

_ATTRIBUTE = "_meshwright_recipe"
_EMPTY = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}


_open: list[Recorder] = []  # those of the program's own blocks, not of models that are built again


@dataclass(frozen=True, eq=False)
class Recipe:
    """How to compute one deferred tensor.

    Args:
        tape: the recording.
        window: the tensor's place among the recorded storages.
        version: the tensor's version when recording ended; a later in-place change would be lost.
    """

    tape: Tape
    window: RecordedWindow
    version: int = 0

    @property
    def is_written(self) -> bool:
        """Whether anything initialised the tensor."""
        return self.tape.is_written(self.window)

    def is_current(self, tensor: Tensor) -> bool:
        """Return whether the tensor has not changed since recording ended, except for its dtype."""
        return tensor._version == self.version and tuple(tensor.shape) == self.window.size

    def compute(self, dtype: torch.dtype) -> Tensor:
        """Compute the whole tensor on the CPU."""
        return self.tape.replay(self.window).to(dtype)


def recipe_of(tensor: Tensor) -> Recipe | None:
    """Return the recipe that ``deferred_init`` left on a parameter; None if there is none."""
    return getattr(tensor, _ATTRIBUTE, None)


def forget_recipe(tensor: Tensor) -> None:
    """Remove the recipe of a parameter that has its values."""
    vars(tensor).pop(_ATTRIBUTE, None)


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Build a model without allocating its weights; ``to_distributed`` then allocates each rank's shard only.

    Inside the block, random numbers are drawn as usual and thrown away. The generators therefore advance as usual, and
    the weights that ``to_distributed`` makes are bitwise equal to those of a model built in one process with the same
    seed. After the block the parameters are on the meta device. Buffers, and parameters made from values
    (``torch.ones(n)``), are real throughout.

    Initialise all weights inside the block: ``to_distributed`` raises if they were changed after it. Parameters set by
    ``parameter.data = values`` after the block, and weights drawn on a device other than the CPU, are not deferred.

    Example::

        torch.manual_seed(0)
        with mw.deferred_init():
            model = LlamaForCausalLM(config)
        model, optimizer, loader = mw.to_distributed(model, optimizer, loader, config=...)
    """
    with record(Tape()) as recorder:
        _open.append(recorder)
        try:
            yield
        finally:
            _open.remove(recorder)


def is_deferring() -> bool:
    """Return whether the program is inside of ``deferred_init``."""
    return bool(_open)


@contextlib.contextmanager
def record(tape: Tape) -> Iterator[Recorder]:
    """Record initialisation inside the block; at its end, the deferred parameters get their recipes."""
    recorder = Recorder(tape)
    hook = register_module_parameter_registration_hook(recorder.register)
    try:
        with recorder:
            yield recorder
    finally:
        hook.remove()
    recorder.finish()


class Recorder(TorchDispatchMode):
    """Records operations on deferred tensors instead of running them.

    A deferred tensor is an ordinary CPU tensor on memory that is reserved and never touched. It is not on the meta
    device, where torch's and users' initialisers would return without drawing.
    """

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape
        self._parameters: dict[int, nn.Parameter] = {}
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}  # address -> number in the recording
        # Weak references keep the addresses from being used again, without keeping the memory.
        self._untouched: dict[int, StorageWeakRef] = {}

    def register(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Defer a parameter that is being registered, if it has no values yet."""
        if type(parameter) is not nn.Parameter or (address := _address(parameter)) is None:
            return  # a subclass may hold more than a meta tensor would
        if self._untouched.pop(address, None) is not None:
            self._defer(parameter.untyped_storage())
        if address in self._storages:
            self._parameters[id(parameter)] = parameter

    def adopt(self, tensor: Tensor) -> Tensor:
        """Return a new deferred tensor with the shape, strides and dtype of ``tensor``."""
        window = _window(tensor, -1)
        storage = reserve(window.num_bytes)
        self._defer(storage)
        return window.on(storage)

    def is_written(self, tensor: Tensor | None) -> bool:
        """Return whether a tensor has values or a recording of how to compute them."""
        return not self._is_deferred(tensor) or self.tape.is_written(self._window(tensor))  # type: ignore[arg-type]

    def finish(self) -> None:
        """Move the deferred parameters to the meta device, and fill other tensors that still use their memory."""
        for parameter in self._parameters.values():
            if self._is_deferred(parameter):  # its .data may have been replaced by real values
                window = self._window(parameter)
                meta = nn.Parameter(_on_meta(parameter.detach()), requires_grad=parameter.requires_grad)
                meta.__dict__.update(parameter.__dict__)
                # A tensor that something else refers to (an LSTM's flat weights) stays real, and is filled below.
                with contextlib.suppress(RuntimeError):
                    torch.utils.swap_tensors(parameter, meta)
                    setattr(parameter, _ATTRIBUTE, Recipe(self.tape, window, parameter._version))
                del meta
        self._parameters.clear()
        numbers = {number: StorageWeakRef(storage) for number, storage in self._storages.values()}
        self._storages.clear()
        for number, reference in numbers.items():
            if not reference.expired():
                storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                window = RecordedWindow(number, (storage.nbytes(),), (1,), 0, torch.uint8)
                if self.tape.is_written(window):
                    window.on(storage).copy_(self.tape.replay(window))

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Arguments = (), kwargs: Options | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and self._is_deferred(args[0]):
            # An adapter follows its layer to the meta device, where its values would be lost.
            kwargs = {**kwargs, "device": None} if kwargs.get("device") == torch.device("meta") else kwargs
        if _only_looks(func):
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        is_cpu = _device(args, kwargs).type == "cpu"
        if func._schema.name in _EMPTY:
            return self._empty(func, args, kwargs) if is_cpu else func(*args, **kwargs)
        if any(self._is_deferred(x) for x in tensors):
            return self._record(func, args, kwargs, is_recordable=is_cpu)
        for x in tensors:
            self._untouched.pop(_address(x), None)  # type: ignore[arg-type]
        return func(*args, **kwargs)

    def _empty(self, func: OpOverload, args: Arguments, kwargs: Options) -> Tensor:
        """Return a new tensor without values, which is deferred if the first argument is (as in ``empty_like``)."""
        is_like_deferred = bool(args) and self._is_deferred(args[0])
        form = func(*args, **{**kwargs, "device": torch.device("meta")})
        if kwargs.get("pin_memory") or form.layout is not torch.strided:
            result: Tensor = func(*args, **kwargs)
            return result
        if is_like_deferred:
            return self.adopt(form)
        window = _window(form, -1)
        tensor = window.on(reserve(window.num_bytes))
        self._untouched[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def _record(self, func: OpOverload, args: Arguments, kwargs: Options, *, is_recordable: bool) -> object:
        written = _written(func, args, kwargs)
        fresh = sum(value.alias_info is None for value in func._schema.returns)
        gives_values = any("Tensor" not in str(value.type) for value in func._schema.returns)
        if gives_values or (written and fresh) or not is_recordable or not all(map(self._is_deferred, written)):
            return self._compute(func, args, kwargs, written)
        try:
            args_, kwargs_ = tree_map_only(Tensor, _on_meta, tree_map_only(Generator, lambda _: None, (args, kwargs)))
            form = func(*args_, **({**kwargs_, "device": torch.device("meta")} if "device" in kwargs_ else kwargs_))
        except (NotImplementedError, RuntimeError):
            # The operator has no meta kernel, the result's shape depends on values, or the call raises in _compute too.
            return self._compute(func, args, kwargs, written)
        arguments = tree_map_only(Tensor, self._window_or_value, (args, kwargs))
        if written:
            self.tape.record(func, arguments, [self._window(x) for x in written])
            return form if form is None else written[0] if isinstance(form, Tensor) else tuple(written)
        made = {id(x): self.adopt(x) for x in tree_iter(form) if isinstance(x, Tensor)}
        self.tape.record(func, arguments, (), [self._window(x) for x in made.values()])
        return tree_map(lambda x: made.get(id(x), x), form)

    def _compute(self, func: OpOverload, args: Arguments, kwargs: Options, written: list[Tensor]) -> object:
        """Run an operation now, on values that are replayed for it and then dropped."""
        deferred = {id(x): x for x in tree_iter((args, kwargs)) if self._is_deferred(x)}
        values = {key: self.tape.replay(self._window(x)) for key, x in deferred.items()}
        args_, kwargs_ = tree_map(lambda x: values.get(id(x), x), (args, kwargs))
        result = func(*args_, **kwargs_)
        for x in written:
            if id(x) in values:
                arguments: object = ((self._window(x), values[id(x)]), {})
                self.tape.record(torch.ops.aten.copy_.default, arguments, [self._window(x)])
        originals = {id(value): deferred[key] for key, value in values.items()}
        return tree_map(lambda x: originals.get(id(x), x), result)

    def _defer(self, storage: torch.UntypedStorage) -> None:
        self._storages[storage._cdata] = (self.tape.add_storage(storage.nbytes()), storage)

    def _is_deferred(self, x: object) -> bool:
        return isinstance(x, Tensor) and _address(x) in self._storages

    def _window(self, x: Tensor) -> RecordedWindow:
        return _window(x, self._storages[x.untyped_storage()._cdata][0])

    def _window_or_value(self, x: Tensor) -> Tensor | RecordedWindow:
        return self._window(x) if self._is_deferred(x) else x


def _address(x: Tensor) -> int | None:
    """Return the address of a CPU tensor's storage, unique among live storages; None for other tensors."""
    return x.untyped_storage()._cdata if x.device.type == "cpu" and x.layout is torch.strided else None


def _device(args: Arguments, kwargs: Options) -> torch.device:
    """Return the device of an operation's result."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    return args[0].device if args and isinstance(args[0], Tensor) else torch.device("cpu")


def _only_looks(func: OpOverload) -> bool:
    """Return whether an operator only makes views of its arguments, without reading or writing values."""
    if torch.Tag.inplace_view in func.tags:
        return True
    aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _written(func: OpOverload, args: Arguments, kwargs: Options) -> list[Tensor]:
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[position] if position < len(args) else None)
            found += [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]
    return found


def _window(x: Tensor, storage: int) -> RecordedWindow:
    return RecordedWindow(storage, tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype)


def _on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
