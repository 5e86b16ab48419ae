"""ZeRO stage 3: each rank keeps a 1/dp part of a layer's weights, which are gathered while the layer runs.

A unit is a decoder layer, or a module outside of the layers. Its parameters get their values before the unit's
forward pass and lose them afterwards. Meanwhile the next unit is gathered. Autograd saves a handle instead of a
weight, so backward needs no hooks of its own. The first handle that backward reads gathers the unit and releases
the previous unit. Activation checkpointing recomputes a layer without the layer's hooks, so the modules inside
have hooks too. A forward pass over units of n elements::

    compute      unit 1               unit 2               unit 3
    all-gather   unit 2 [n/dp]->[n]   unit 3 [n/dp]->[n]   ...
    whole        units 1 and 2        units 2 and 3        units 3 and 4; of all others this rank has [n/dp]

Every data-parallel rank must gather the same units in the same order. A unit apart, such as the head of a task, may run
on the ranks alone whose rows need it. So every rank gathers these units before the pass and keeps them until the
optimizer steps, and neither forward, backward nor recomputation gathers them; their gradients are reduced once backward
has ended. A tower, such as an encoder of images, runs only on the ranks whose rows have images. If not all have some,
the units beside the decoder are gathered before the pass in the same way.

torch's ``fully_shard`` serves other needs. It changes the class of every layer and makes the parameters
DTensors, which transformers' utilities, a user's optimizer with its state and our tensor layouts would all have to
handle. It keeps whole gradients under ``no_sync``. Its hooks add to ``.grad``, so the gradients of inner
micro-batches cannot be distinguished from those of ``backward()``. On gloo its reduce-scatter is an all-reduce (see
``start_reduce_scatter``). Meshwright's three stages share their buckets, masters, clipping and export.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.layout.packed_weights import PackedMatrix
from meshwright.layout.tensor_layout import TensorLayout, layout_of
from meshwright.mesh.axes import Mesh
from meshwright.optim.zero.flat_parameters import FlatShard, Float8Shard
from meshwright.optim.zero.segments import EqualSlices, sliced, stepped_over
from meshwright.optim.zero.units import read_weights, units_of
from meshwright.optim.zero.zero_optimizer import ShardedBucket
from meshwright.parallel import saved_tensors as saved
from meshwright.parallel.autograd_graph import in_backward
from meshwright.parallel.shards.stand_in import own_shape, reading_shards
from meshwright.parallel.tensor_parallel.float8 import WeightCast, weight_casts


class ShardedWeights:
    """The sharded weights of all units of a model.

    The object is built before the weights are made, so that a rank never needs all weights at once. :meth:`keep`
    shards one tensor after the other, and :meth:`attach` adds the hooks.

    Args:
        model: the model, with or without values; the constructor leaves it unchanged.
        layouts: the layout of each parameter's shard, by name.
        mesh: the axes.
        device: device of this rank's parts.
        beside: the modules that run on the ranks only that have inputs for them, and what is in them.
        apart: the modules that may run on some ranks only, whatever the inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        layouts: Mapping[str, TensorLayout],
        mesh: Mesh,
        device: torch.device,
        *,
        beside: Collection[nn.Module] = (),
        apart: Collection[nn.Module] = (),
        on_host: bool = False,
    ):
        of = {id(p): layouts.get(name) or TensorLayout.whole(p) for name, p in model.named_parameters()}
        axis_of = {key: stepped_over(layout, mesh) for key, layout in of.items()}
        casts = weight_casts(model)
        self._place: dict[int, tuple[FlatShard, int]] = {}
        self.steps: list[_Step] = []
        for module, recurse in units_of(model):
            # Libraries of packed weights keep them for backward themselves, so they would not be released.
            own = [
                p
                for p in module.parameters(recurse=recurse)
                if (p.is_floating_point() or p.is_complex()) and PackedMatrix.of(p) is None
            ]
            own = list(dict.fromkeys([*own, *([] if recurse else read_weights(module))]))
            new = [p for p in own if id(p) not in self._place]
            flats: list[FlatShard] = []
            for axis in dict.fromkeys(axis_of[id(p)] for p in new):
                for cast, some in _alike([p for p in new if axis_of[id(p)] is axis], casts):
                    kind = FlatShard if cast is None else partial(Float8Shard, cast=cast, tp=mesh.tp)
                    shapes = [of[id(p)].local_shape for p in some]
                    flats.append(kind(some, shapes, EqualSlices(axis), device, on_host=on_host))
            self._place |= {id(p): (flat, index) for flat in flats for index, p in enumerate(flat.parameters)}
            # A tied parameter is in a FlatShard of its first module, and its other modules gather that shard too.
            needed = list(dict.fromkeys(self._place[id(p)][0] for p in own))
            if needed:
                is_layer = recurse and module not in beside
                step = _Step(
                    self,
                    module,
                    needed,
                    len(self.steps),
                    is_beside=module in beside,
                    is_apart=module in apart,
                    is_layer=is_layer,
                )
                self.steps.append(step)
        self.flats = list(dict.fromkeys(flat for step in self.steps for flat in step.flats))
        together = {flat for step in self.steps if not step.is_apart for flat in step.flats}
        for flat in self.flats:
            flat.is_apart = flat not in together
        self._task = -1
        self._current: _Step | None = None
        self._is_uneven = False  # whether units beside the decoder are kept
        self._last_layer: _Step | None = None
        self._gathered: list[FlatShard] = []  # by backward
        self._lent_again: list[FlatShard] = []

    def keep(self, parameter: Tensor, local: Tensor) -> Tensor:
        """Keep this rank's part of a parameter's TP shard, and return a placeholder for the parameter.

        If the parameter is in no unit, return ``local``.
        """
        if id(parameter) not in self._place:
            return local
        flat, index = self._place[id(parameter)]
        return flat.keep(index, local)

    def attach(self, model: nn.Module) -> None:
        """Add the hooks that gather and release a model's weights, after :meth:`keep` was called for its parameters."""
        for step in self.steps:
            step.hook()

    def find_places(self) -> None:
        """Look up the place of each parameter again, after the parameters of the FlatShards were replaced."""
        self._place = {id(p): (flat, index) for flat in self.flats for index, p in enumerate(flat.parameters)}

    def guard(self) -> None:
        """Make each parameter a ``ShardedParameter`` of this rank's elements while its layer is not running."""
        for flat in self.flats:
            flat.take_back()  # a copied parameter still has the placeholder of the original model
            flat.guard()

    def train(self, parameters: list[nn.Parameter], *, on_host: bool = False) -> list[ShardedBucket]:
        """Return the buckets of newly trainable parameters, in the order in which backward finishes them.

        Parameters that were frozen when they were sharded are gathered and sharded again, so every rank must make the
        call.
        """
        new = {id(p) for p in parameters}
        for old in [flat for flat in self.flats if not flat.is_trained and any(id(p) in new for p in flat.parameters)]:
            parts = old.split()
            self._place |= {id(p): (part, index) for part in parts for index, p in enumerate(part.parameters)}
            for flats in (self.flats, *(step.flats for step in self.steps if old in step.flats)):
                position = flats.index(old)
                flats[position : position + 1] = parts
        trained = [flat for flat in reversed(self.flats) if any(id(p) in new for p in flat.parameters)]
        trained.sort(key=lambda flat: flat.is_apart)  # those are reduced last
        return [ShardedBucket(flat.bucket, flat.ownership, flat, on_host=on_host) for flat in trained]

    def layout(self, parameter: nn.Parameter) -> TensorLayout:
        """Return which elements of a parameter each rank keeps."""
        if id(parameter) not in self._place:
            return layout_of(parameter)
        flat, index = self._place[id(parameter)]
        return sliced(layout_of(parameter), flat.rows[index])

    def part(self, parameter: nn.Parameter) -> Tensor:
        """Return the elements of a parameter that this rank keeps, 1-d."""
        if id(parameter) not in self._place:
            return parameter.detach().reshape(-1)
        flat, index = self._place[id(parameter)]
        return flat.own(index).to(flat.dtype)

    def set_part(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Overwrite this rank's elements of a parameter, as :meth:`part` returns them."""
        if id(parameter) not in self._place:
            parameter.data.copy_(values.view(own_shape(parameter)))
            return
        flat, index = self._place[id(parameter)]
        flat.own(index).copy_(values)

    def changed(self) -> list[str]:
        """Return the names of the parameters that were frozen or thawed since they were sharded."""
        parameters = [(p, flat) for flat in self.flats for p in flat.parameters]
        return [layout_of(p).name for p, flat in parameters if p.requires_grad != flat.is_trained]

    def holds(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter's values are kept here, so that it has none while its layer is not running."""
        return id(parameter) in self._place

    def is_gathered(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter's values are on this rank, so that its module can run without communication."""
        return id(parameter) not in self._place or self._place[id(parameter)][0].is_full

    def lend_memory(self, parameter: nn.Parameter, values: Tensor | None) -> None:
        """Give a parameter memory to be copied into, until :meth:`take_back_memory`.

        Args:
            parameter: a parameter for which :meth:`holds` is True.
            values: this rank's TP shard, whose 1/dp part is kept; None to keep the present values.
        """
        flat, index = self._place[id(parameter)]
        if values is not None:
            flat.keep(index, values)
            flat.release()
        else:
            values = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        parameter.data = values

    def take_back_memory(self, parameter: nn.Parameter) -> None:
        """Undo :meth:`lend_memory`."""
        if self.holds(parameter):
            parameter.data = self.place_holder(parameter)

    def place_holder(self, parameter: nn.Parameter) -> Tensor:
        """Return the placeholder that a parameter holds while its layer is not running.

        The placeholder has the parameter's shape and allocates no memory.
        """
        flat, index = self._place[id(parameter)]
        return flat.stand_in.expand(flat.shapes[index])

    def reader_of_float8(self, parameter: nn.Parameter) -> Callable[[], tuple[Tensor, Tensor]] | None:
        """Return a function that returns a weight in float8 and its scale; None if it is gathered in its own dtype."""
        is_cast = isinstance(self._place.get(id(parameter), (None,))[0], Float8Shard)
        return partial(self._in_float8, parameter) if is_cast else None

    def _in_float8(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        flat, index = self._place[id(parameter)]
        assert isinstance(flat, Float8Shard)
        if in_backward():
            self.enter_backward(next(step for step in self.steps if flat in step.flats))
        return flat.weight(index)

    @contextlib.contextmanager
    def lent(self, module: nn.Module) -> Iterator[None]:
        """Give a module's weights their values inside this context, for programs that read them outside of its forward.

        Every rank must make the call. Backward gathers the weights again if autograd saved them in this context.
        """
        step = next((step for step in self.steps if step.module is module), None)
        if step is None:
            yield
            return
        step.enter()
        try:
            yield
        finally:
            step.leave()

    def keep_beside(self) -> None:
        """Gather the units beside the decoder, and keep them whole until :meth:`release`; a collective call."""
        self._keep(step for step in self.steps if step.is_beside)
        self._is_uneven, self._last_layer = True, None

    def keep_apart(self) -> None:
        """Gather the units apart, and keep them whole until :meth:`release`; a collective call."""
        self._keep(step for step in self.steps if step.is_apart)

    def _keep(self, steps: Iterable[_Step]) -> None:
        kept = dict.fromkeys(flat for step in steps for flat in step.flats)
        for flat in kept:
            with reading_shards():
                flat.take_over()
            flat.start()
        for flat in kept:
            flat.full()
            flat.is_kept = True

    def neighbour(self, step: _Step, direction: int) -> _Step | None:
        """Return the next step in a direction, 1 or -1, that gathers in its turn."""
        index = step.index + direction
        while 0 <= index < len(self.steps):
            if not self.steps[index].is_apart:
                return self.steps[index]
            index += direction
        return None

    def enter_layer(self, step: _Step) -> None:
        """Check that no layer is left out in a pass in which units beside the decoder are kept.

        Raises:
            PlanError: if this rank leaves out layers, such as the cross-attention to images, that others may run.
        """
        before, self._last_layer = self._last_layer, step
        if before is None or not self._is_uneven:
            return
        left_out = [other for other in self.steps[before.index + 1 : step.index] if other.is_layer]
        if left_out:
            name = layout_of(left_out[0].flats[0].parameters[0]).name
            raise PlanError(
                f"the layer with {name} was left out in a pass in which only some data-parallel ranks have inputs of "
                "towers, such as images. Under zero_stage=3 all ranks gather the weights of each layer together: give "
                "each rank's rows at least one image, or use zero_stage=2"
            )

    def release(self, *_: object) -> None:
        """Release all gathered weights, also those that are kept."""
        self._current, self._is_uneven = None, False
        for flat in self.flats:
            flat.release()

    @saved.unselected
    def enter_backward(self, step: _Step) -> None:
        """Gather a step's weights for backward, and release the weights that backward needed before."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._current, self._gathered = task, None, self.flats
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        # A unit that is kept may run on this rank alone, where it must neither gather another nor let go of one.
        if step is self._current or step.is_kept:
            return
        self._current = step
        before = self.neighbour(step, -1)
        ahead = before.flats if before is not None and before.is_awaited else []
        self._take_back()
        needed = [*step.flats, *ahead]
        for flat in self._gathered:
            if flat not in needed:
                flat.leave()
        self._gathered = needed
        step.gather(ahead)

    @saved.unselected
    def lend_again(self, step: _Step) -> None:
        """Give a step's parameters their values in backward, until backward reaches another step."""
        self.enter_backward(step)
        for flat in step.flats:
            if not flat.is_lent:
                flat.lend()
                self._lent_again.append(flat)

    def _take_back(self) -> None:
        for flat in self._lent_again:
            flat.take_back()
        self._lent_again = []

    def _end_backward(self) -> None:
        self._task, self._current = -1, None
        self._take_back()
        for flat in self.flats:
            flat.leave()
        self._gathered = []
        for step in self.steps:
            step.is_awaited = False


class _Step:
    """A unit: a module whose forward pass needs gathered weights.

    Args:
        weights: the sharded weights of the model.
        module: a decoder layer, or a module with parameters of its own outside of the layers.
        flats: the FlatShards of the parameters that the module needs.
        index: the module's place in the order of the model.
        is_beside: whether the module is beside the decoder, so that it runs on the ranks only that have inputs for it.
        is_apart: whether the module may run on some ranks only, whatever the inputs.
        is_layer: whether the module is a layer of the decoder.
    """

    def __init__(
        self,
        weights: ShardedWeights,
        module: nn.Module,
        flats: list[FlatShard],
        index: int,
        *,
        is_beside: bool,
        is_apart: bool,
        is_layer: bool,
    ):
        self.weights, self.module, self.flats, self.index = weights, module, flats, index
        self.is_beside, self.is_apart, self.is_layer = is_beside, is_apart, is_layer
        self.is_awaited = False  # backward will need the weights
        self._entered: list[tuple[bool, list[FlatShard], list[int]]] = []

    def hook(self) -> None:
        # The hooks are bound methods, which a copy of the model binds to its own step.
        # First, since the program's own hook may compute a weight from others (weight_norm, prune).
        self.module.register_forward_pre_hook(self.enter, prepend=True)
        self.module.register_forward_hook(self.leave, always_call=True)
        for flat in self.flats:
            flat.lend_again = partial(self.weights.lend_again, self)
        for inner in self.module.modules():
            if inner is not self.module and next(inner.parameters(recurse=False), None) is not None:
                inner.register_forward_pre_hook(self._enter_inside)

    @property
    def is_kept(self) -> bool:
        """Whether the weights are whole on every rank, so that the unit gathers nothing."""
        return (self.is_beside or self.is_apart) and all(flat.is_kept for flat in self.flats)

    def gather(self, ahead: list[FlatShard]) -> None:
        """Gather this step's weights, and start to gather the weights ``ahead``, which are needed next."""
        for flat in [*self.flats, *ahead]:
            flat.start()
        for flat in self.flats:
            flat.full()

    @saved.unselected
    def enter(self, *_: object) -> None:
        """Gather the weights, and give the parameters their values."""
        if in_backward():
            self.weights.enter_backward(self)
        else:
            if self.is_layer:
                self.weights.enter_layer(self)
            for flat in self.flats:
                with reading_shards():
                    flat.take_over()
            following = None if self.is_kept else self.weights.neighbour(self, 1)
            self.gather([] if following is None else following.flats)
        # A unit around this one, which shares a module with it, takes its own values back.
        lent = [flat for flat in self.flats if not flat.is_lent]
        for flat in lent:
            flat.lend()
        if torch.is_grad_enabled():
            saved.push(self._note)
            self.is_awaited |= not isinstance(self.module, nn.Embedding)  # its gradient needs only the token ids
        self._entered.append((torch.is_grad_enabled(), lent, self._moments()))

    def _enter_inside(self, module: nn.Module, args: tuple[object, ...]) -> None:
        if in_backward():
            self.weights.lend_again(self)

    @saved.unselected
    def leave(self, *_: object) -> None:
        """Take the values back; backward gathers them again."""
        if not self._entered:  # enter failed
            return
        is_pushed, lent, versions = self._entered.pop()
        if is_pushed:
            saved.pop()
        written = [now != before for now, before in zip(self._moments(), versions, strict=True)]
        for flat in lent:
            flat.take_back()
        # The last step keeps its gathered weights, since backward begins with this step.
        is_last = torch.is_grad_enabled() and self.weights.neighbour(self, 1) is None
        if not in_backward() and not is_last:
            for flat in lent:
                flat.leave()
        if any(written):
            parameters = [parameter for flat in self.flats for parameter in flat.parameters]
            name = layout_of(parameters[written.index(True)]).name
            raise PlanError(
                f"forward writes the weight {name} in place, but under zero_stage=3 it is gathered for the forward of "
                "its layer alone, so what was written would be lost. Use zero_stage=2, or write it in the training "
                "loop, between optimizer.step() and the next forward pass"
            )

    def _moments(self) -> list[int]:
        """Return the version counters of the parameters, which a write in place raises."""
        return [parameter._version for flat in self.flats for parameter in flat.parameters]

    def _note(self, tensor: Tensor) -> Callable[[], Tensor] | None:
        """Return the handle from which backward gets a view of a weight; None if the tensor is not a weight."""
        storage = tensor.untyped_storage()._cdata
        for flat in self.flats:
            if flat.holds(tensor, storage):
                return self._handle(flat, tensor)
        return None

    def _handle(self, flat: FlatShard, tensor: Tensor) -> Callable[[], Tensor]:
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()

        def view() -> Tensor:
            if in_backward():
                self.weights.enter_backward(self)
            return flat.full().as_strided(size, stride, offset)

        return view


def _alike(
    parameters: list[nn.Parameter], casts: Mapping[int, WeightCast]
) -> list[tuple[WeightCast | None, list[nn.Parameter]]]:
    """Return groups of parameters that one FlatShard can hold, each with how its weights are cast, if they are."""
    groups: dict[tuple[object, ...], tuple[WeightCast | None, list[nn.Parameter]]] = {}
    for parameter in parameters:
        cast = casts.get(id(parameter))
        groups.setdefault((parameter.dtype, parameter.requires_grad, cast), (cast, []))[1].append(parameter)
    return list(groups.values())
