"""Runs a decoder's forward on tensors without values, to see what it does without computing it.

The modes of such a pass say what the host reads in place of values, and run the operations on meta tensors.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Distribution
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.layout.packed_weights import packed_modules
from meshwright.parallel.batch.schema import example
from meshwright.parallel.fake_passes.known_values import KnownValues
from meshwright.parallel.foreign_hooks import without_foreign_hooks
from meshwright.roles import Role
from meshwright.roles.blocks.experts import is_experts, routed_modules
from meshwright.temporarily import temporarily

_LOGGER = logging.getLogger(__name__)
_FAKE_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")

_META = torch.device("meta")
# The forms of results, by the operation and the forms of its arguments. All passes of a process share them, since
# nothing else decides them, and torch computes many by a chain of Python functions.
_FORMS: dict[Any, tuple[Any, ...]] = {}


def run_without_values(
    model: nn.Module | Facts,
    *,
    rows: int,
    length: int,
    instead: str,
    labels: tuple[int, ...] | None = None,
    options: Mapping[str, object] | None = None,
    watch: AbstractContextManager[object] | None = None,
    source: int | None = None,
    is_done: Callable[[], bool] | None = None,
) -> Any:
    """Run a decoder on token ids and labels without values, and return its output.

    The pass runs on meta tensors; if that fails, or autocast is on, which leaves meta tensors as they are, on torch's
    fake tensors, which take two to four times as long.

    Args:
        model: the decoder, with or without memory, or its facts. It is not changed.
        rows: the number of rows.
        length: the number of tokens in each row.
        labels: the shape of the labels; None for none.
        instead: the plan to use if the decoder cannot be run in this way, for the message.
        options: more arguments of forward.
        watch: a mode that sees the operations of the pass.
        source: the number of tokens for an encoder before the decoder; see :func:`example`.
        is_done: a function that returns whether the pass has shown what the caller asks, so that errors after this do
            not matter; the output of such a pass is None.

    Raises:
        PlanError: if the decoder cannot be run in this way.
    """
    facts = Facts.of(model)
    run = functools.partial(
        _run, facts, rows=rows, length=length, labels=labels, options=options or {}, watch=watch, source=source,
        is_done=is_done,
    )  # fmt: skip
    return _without_values(facts.model, lambda: run(MetaMode()), lambda: run(ReadAsZero()), instead)


def run_again_without_values(
    model: nn.Module, batch: Mapping[str, object], *, instead: str, watch: AbstractContextManager[object]
) -> None:
    """Run a module on the arguments of a call, as if they had no values, with its hooks.

    Args:
        model: the module, with or without memory. It is not changed.
        batch: the arguments of its forward by name.
        instead: what to use if the module cannot be run in this way, for the message.
        watch: a mode that sees the operations of the pass.

    Raises:
        PlanError: if the module cannot be run in this way.
    """

    def on_meta() -> None:
        with MetaMode(), _stand_ins(model), watch:
            model(**batch)

    def with_known_values() -> None:
        with _stand_ins(model), KnownValues(batch) as known, watch:
            model(**known.batch)

    _without_values(model, on_meta, with_known_values, instead)


def _without_values(model: nn.Module, on_meta: Callable[[], Any], on_fake: Callable[[], Any], instead: str) -> Any:
    """Run a model on meta tensors, or on fake tensors if that fails."""
    try:
        if not torch.is_autocast_enabled("cpu"):
            return on_meta()
    except PlanError:
        raise
    except Exception:  # perhaps torch has no kernel for meta tensors, or the program asks for their device
        _LOGGER.debug("a pass on meta tensors failed", exc_info=True)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), temporarily(_FAKE_LOGGER, disabled=True):  # logs attempts
            return on_fake()
    except PlanError:
        raise
    except Exception as why:
        raise PlanError(
            f"{type(model).__name__} could not be run on tensors without values, which shows what runs before and "
            f"after its layers ({type(why).__name__}: {why}). Use {instead}"
        ) from why


@contextlib.contextmanager
def _stand_ins(model: nn.Module | Facts) -> Iterator[None]:
    """Put others in the place of weights, and of functions and modules that read values. Inside of a mode."""
    facts = Facts.of(model)
    packed = list(packed_modules(facts))
    with fake_values(facts), _unchecked_distributions(), _plain_flex(), temporarily(torch.utils, swap_tensors=_swap):
        for _, module, packing in packed:
            module.forward = functools.partial(_packed, module, packing.shape)
        for module in list(_routed(facts)):
            module.forward = _experts  # not a step, which would stay: fake_values undoes what is set in a module
        yield


def _run(
    facts: Facts,
    mode: ReadAsZero,
    *,
    rows: int,
    length: int,
    labels: tuple[int, ...] | None,
    options: Mapping[str, object],
    watch: AbstractContextManager[object] | None,
    source: int | None,
    is_done: Callable[[], bool] | None,
) -> Any:
    """Run a decoder in a mode, on one kind of inputs after the other until it ends without an error.

    The arguments are those of :func:`run_without_values`.
    """
    model = facts.model
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(_stand_ins(facts))
        stack.enter_context(_without_hooks(model))
        # The program's hooks may keep or count what they get, in objects that nothing puts back.
        stack.enter_context(without_foreign_hooks(x for x in facts.names if x is not model))
        if watch is not None:
            stack.enter_context(watch)
        signature = inspect.signature(model.forward)
        inputs = example(signature, rows=rows, length=length, source=source)
        if labels is not None and "labels" in signature.parameters:
            inputs["labels"] = torch.zeros(labels, dtype=torch.int64)
        why: Exception | None = None
        towers = _inputs_of_towers(model, signature, rows)
        for of_tower, has_types, truth in itertools.product(towers, (False, True), (False, True)):
            # Some models ask for the types of tokens in training only, and some assert a fact about values.
            asked = [n for n in signature.parameters if n.endswith("token_type_ids") and n in str(why)]
            if (has_types and not asked) or (truth and not isinstance(why, AssertionError)):
                continue
            types = {name: torch.zeros(rows, length, dtype=torch.int64) for name in asked if has_types}
            try:
                with torch.enable_grad(), temporarily(mode, truth=truth):
                    return model(**{**inputs, **of_tower, **types, **options})
            except PlanError:
                raise
            except Exception as error:
                if is_done is not None and is_done():
                    return None
                why = why or error
        assert why is not None
        raise why


def _inputs_of_towers(model: nn.Module, signature: inspect.Signature, rows: int) -> Iterator[dict[str, Tensor]]:
    """Yield what the towers of a forward may ask for: nothing if they need not run, images of one frame or of several,
    or sound as features or as samples.
    """
    dtype, number = next(model.parameters()).dtype, functools.partial(number_in_configs, model)
    pixels, main = signature.parameters.get("pixel_values"), getattr(model, "main_input_name", None)
    if pixels is None or pixels.default is not pixels.empty:
        yield {}
    if pixels is not None:
        channels, side = number("num_channels") or 3, number("image_size") or 224
        image = torch.zeros(rows, channels, side, side, dtype=dtype)
        yield {"pixel_values": image}
        yield {"pixel_values": image[:, None]}
    if main == "input_features":
        bins, frames = number("num_mel_bins") or number("input_feat_per_channel") or 80, number("max_source_positions")
        features = torch.zeros(rows, bins, 2 * frames if frames else 128, dtype=dtype)
        yield {main: features}
        yield {main: features.mT}
    elif main == "input_values":
        yield {main: torch.zeros(rows, 4096, dtype=dtype)}


@contextlib.contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Leave out that distributions check their values."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Leave out the forward hooks of the whole model, which may expect an output that this pass does not have."""
    before = dict(model._forward_hooks)
    model._forward_hooks.clear()
    try:
        yield
    finally:
        model._forward_hooks.update(before)


def _routed(facts: Facts) -> Iterator[nn.Module]:
    """Yield the experts that are called with tokens and a router's two choices for each, and return tokens."""
    yield from filter(is_experts, facts.names)
    for _, module, role in routed_modules(facts):
        takes_choices = len(inspect.signature(module.forward).parameters) == 3
        if role is Role.EXPERTS and takes_choices and not is_experts(module):
            yield module


def _swap(x: Tensor, other: Tensor, swap: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors) -> None:
    """Let a forward cast a module to the dtype that it has, which torch does by a swap of fake tensors."""
    if x.dtype != other.dtype:
        swap(x, other)


def _plain_flex() -> contextlib.AbstractContextManager[object]:
    """Let transformers run another attention in place of FlexAttention, whose operator no dispatch mode can follow."""
    module = sys.modules.get("transformers.integrations.flex_attention")
    name = "compile_friendly_flex_attention"
    return temporarily(module, **{name: _attended}) if hasattr(module, name) else contextlib.nullcontext()


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    enable_gqa: bool = False,
    return_lse: bool = False,
    return_aux: object = None,
    **_: object,
) -> Any:
    """Return attention without a mask, in the forms of FlexAttention."""
    output = F.scaled_dot_product_attention(query, key, value, enable_gqa=enable_gqa)
    sums = output[..., 0].float()
    if return_aux is not None:
        return output, SimpleNamespace(lse=sums)
    return (output, sums) if return_lse else output


def _packed(module: nn.Module, shape: torch.Size, x: Tensor) -> Tensor:
    """Stand in place of a projection with a packed weight, whose library reads the values."""
    return F.linear(x, x.new_empty(shape), module._parameters["bias"])


def _experts(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Stand in place of experts, whose shapes depend on the values that route each token."""
    return x.clone()


@contextlib.contextmanager
def fake_values(model: nn.Module | Facts) -> Iterator[None]:
    """Replace all parameters and buffers by ones without values, and undo all that the pass sets in the modules and
    the config.

    Must run inside a FakeTensorMode, whose tensors are on the CPU then, or a MetaMode.
    """
    made: dict[int, Tensor] = {}
    owners: list[dict[Any, Any]] = []
    facts = Facts.of(model)
    if (config := getattr(facts.model, "config", None)) is not None:
        owners.append(vars(config))  # where a head keeps what kind of problem its first labels show
    for module in facts.names:
        owners += (module._parameters, module._buffers, module._forward_hooks, vars(module))
    before = [(owner, dict(owner)) for owner in owners]
    try:
        for owner, values in before:
            for name, value in values.items():
                if not isinstance(value, Tensor):
                    continue
                if id(value) not in made:
                    fake = torch.empty(value.shape, dtype=value.dtype, device="cpu")
                    is_parameter = isinstance(value, nn.Parameter)
                    made[id(value)] = nn.Parameter(fake, value.requires_grad) if is_parameter else fake
                owner[name] = made[id(value)]
        yield
    finally:
        for owner, values in before:
            for name in owner.keys() - values.keys():  # what the pass has kept, such as frequencies of longrope
                del owner[name]
            owner.update(values)


def number_in_configs(model: Any, name: str) -> int | None:
    """Return a positive number of the model's config, or of the first config inside of it that has one of this name."""
    configs = [model.config]
    for config in configs:
        value = vars(config).get(name)
        if isinstance(value, list | tuple) and value:
            value = value[0]
        if isinstance(value, int) and value > 0:
            return value
        configs += [inner for inner in vars(config).values() if hasattr(inner, "to_dict")]
    return None


class ReadAsZero(TorchDispatchMode):
    """Lets the host read a tensor as zero, such as rotary embeddings that look at the longest position.

    Attributes:
        truth: what a fact about values is read as.
    """

    def __init__(self) -> None:
        super().__init__()
        self.truth = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap each call for a compiler that does not run here

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return self.truth if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0
        if func is torch.ops.aten.split_with_sizes.default and not any(args[1]):  # numbers of tokens, read as zero
            args = (args[0], [args[0].shape[args[2] if len(args) > 2 else 0], *args[1][1:]], *args[2:])
        return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


class MetaMode(ReadAsZero):
    """Runs every operation on meta tensors, in a quarter to a half of the time of torch's FakeTensorMode.

    A tensor with values takes part as one without, so nothing is written into it. Unlike fake tensors, the results say
    that they are on the meta device, autocast does not cast them, and some operations have no kernel for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._without: dict[int, tuple[Tensor, Tensor]] = {}  # the tensors with values, which keep their numbers

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        takes_device, is_functional = _traits(func)
        args = tuple(map(self._meta, args))
        kwargs = {name: self._meta(x) for name, x in kwargs.items()} if kwargs else kwargs
        if takes_device:
            kwargs["device"] = _META
        if not is_functional:
            return func(*args, **kwargs)
        key = (func, torch.get_default_dtype(), *map(_form, args), *kwargs, *map(_form, kwargs.values()))
        if (forms := _FORMS.get(key)) is None:
            result = func(*args, **kwargs)
            if forms := _own_forms(result, (*args, *kwargs.values())):
                _FORMS[key] = forms
            return result
        made = [torch.empty_strided(shape, stride, dtype=dtype, device=_META) for shape, stride, dtype in forms]
        return made[0] if len(made) == 1 else tuple(made)

    def _meta(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            if x.is_meta:
                return x
            if id(x) not in self._without:
                self._without[id(x)] = x, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_META)
            return self._without[id(x)][1]
        return [self._meta(inner) for inner in x] if isinstance(x, list | tuple) else x


@functools.cache
def _traits(func: Any) -> tuple[bool, bool]:
    """Return whether an operation has an argument for the device, and whether its result is new memory."""
    schema = func._schema
    is_aliased = schema.is_mutable or any(returned.alias_info for returned in schema.returns)
    return any(argument.name == "device" for argument in schema.arguments), not is_aliased


def _form(x: Any) -> Any:
    """Return what an argument adds to the form of a result, with the type of a number: 1 and 1.0 are equal."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype
    return tuple(map(_form, x)) if isinstance(x, list) else (type(x), x)


def _own_forms(result: Any, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the forms of the tensors that an operation returns; None if they are not all new tensors."""
    made = result if isinstance(result, tuple) else (result,)
    if not made or not all(isinstance(x, Tensor) for x in made) or (isinstance(result, tuple) and len(made) == 1):
        return None
    memory = {x.untyped_storage()._cdata for x in tree_leaves(given) if isinstance(x, Tensor)}
    return None if any(x.untyped_storage()._cdata in memory for x in made) else tuple(map(_form, made))
