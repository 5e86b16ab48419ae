"""Which elements of each parameter a rank's optimizer steps, which parameters it steps whole, and whether those that
several ranks step come out equal.

This is the only definition, under every plan: saving gathers the state by it, and loading slices the state by it.

A training engine may hold a model's weights and optimizer state in a form of its own. Such a model has no parts, and is
refused with an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.errors import CheckpointError, OptimizerMismatchError
from meshwright.faults.memory_digest import memory_digest
from meshwright.layout.row_layout import numel
from meshwright.layout.tensor_layout import TensorLayout, layout_if_any, layout_of
from meshwright.mesh.axes import Axis, Mesh
from meshwright.optim.chained import chain_of, members
from meshwright.optim.gradients import Gradients
from meshwright.optim.runtime import Runtime, find_runtime
from meshwright.parallel.collectives import all_gather
from meshwright.random_states import RandomStates


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """What this rank steps of one parameter.

    Args:
        layout: the elements of the parameter of which each rank has the state.
        key: the tensor of this rank's elements in ``optimizer.state``; None if it steps none.
        has_master: whether float32 copies are stepped in place of half-precision weights.
        masters: the elements of which each rank has the float32 copy.
        master: this rank's elements of the float32 copy; None if it has none.
        is_owned: whether one rank steps the whole parameter.
    """

    layout: TensorLayout
    key: Tensor | None
    has_master: bool
    masters: TensorLayout
    master: Tensor | None
    is_owned: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether every rank steps all of the parameter."""
        return not (self.layout.is_sharded or self.layout.is_staged)

    def layout_of_state(self, shape: Sequence[int]) -> TensorLayout:
        """Return the layout of a tensor of the state, which is not cut if it has a shape of its own."""
        if self.layout.shape == tuple(shape):
            return self.layout
        return self.layout.resized(torch.Size(shape)) if self.is_owned else TensorLayout(shape=torch.Size(shape))


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerParts:
    """This rank's parts of all parameters of an optimizer, by the parameters' one-device names.

    Args:
        optimizer: the optimizer without its wrapper.
        runtime: the model's runtime, or a runtime of a single rank if the model is not distributed.
        parts: the parts by name.
        groups: the names of each group's parameters.
    """

    optimizer: Optimizer
    runtime: Runtime
    parts: dict[str, Part]
    groups: list[list[str]]


def parts_of(model: nn.Module, optimizer: Optimizer) -> OptimizerParts:
    """Return this rank's part of each of an optimizer's parameters.

    Args:
        model: the optimizer's model, distributed or not. The state uses the model's parameter names.
        optimizer: an optimizer of parameters of this model.

    Raises:
        OptimizerMismatchError: if the optimizer belongs to another model.
        CheckpointError: if an engine holds the model's state.
    """
    check_no_engine(model)
    optimizer = unwrapped(optimizer)
    runtime = _common_runtime(model, optimizer)
    zero = runtime.gradients.zero
    if zero is not None:
        zero.take_over()
    groups = zero.groups if zero else [group["params"] for group in optimizer.param_groups]
    names = {id(p): name for name, p in model.named_parameters()}
    parts: dict[str, Part] = {}
    for parameter in (p for group in groups for p in group):
        name = names.get(id(parameter))
        if name is None:
            raise OptimizerMismatchError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's; pass the "
                "model and the optimizer that to_distributed returned"
            )
        parts[name] = _part(parameter, name, runtime.gradients)
    return OptimizerParts(
        optimizer=optimizer, runtime=runtime, parts=parts, groups=[[names[id(p)] for p in group] for group in groups]
    )


def check_no_engine(model: nn.Module) -> None:
    """Raise if an engine holds a model's state, since a save would contain only a part of it.

    Args:
        model: the model, or an engine around one, which Meshwright or the program itself has started.

    Raises:
        CheckpointError: if an engine holds the state; the message names the engine's own calls.
    """
    modules = list(model.modules())
    runtimes = map(find_runtime, modules)
    engine = next((runtime.engine for runtime in runtimes if runtime is not None and runtime.engine), None)
    if engine is None and _is_of_deepspeed(model, modules):
        engine = "DeepSpeed"
    if engine is not None:
        raise CheckpointError(
            f"{engine} holds this model's master weights and optimizer state in a form of its own, and a checkpoint "
            "without them could not resume the run. Call engine.save_checkpoint(folder) and "
            "engine.load_checkpoint(folder); docs/deepspeed.md says how to resume under another plan"
        )


def _is_of_deepspeed(model: nn.Module, modules: list[nn.Module]) -> bool:
    is_engine = any(kind.__module__.startswith("deepspeed.") for kind in type(model).__mro__)
    # ``parameters()`` would walk through all modules once more, while training waits for a save.
    parameters = (parameter for module in modules for parameter in module._parameters.values())
    return is_engine or any(hasattr(parameter, "ds_id") for parameter in parameters)  # partitioned by ZeRO-3


def _part(parameter: nn.Parameter, name: str, gradients: Gradients) -> Part:
    if layout_if_any(parameter) is None:
        layout = TensorLayout(shape=parameter.shape, name=name)
        return Part(layout=layout, key=parameter, has_master=False, masters=layout, master=parameter)
    masters, master = gradients.part_of(parameter)
    whole = gradients.whole if gradients.whole is not None and gradients.whole.has(parameter) else None
    layout, key = (masters, master) if whole is None else whole.part_of(parameter)
    return Part(
        layout=layout,
        key=key,
        has_master=gradients.dtype_of(parameter) != parameter.dtype,
        masters=masters,
        master=master,
        is_owned=whole is not None,
    )


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside of wrappers that have it as ``.optimizer``, such as accelerate's; or its chain."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return chain_of(optimizer)


def _common_runtime(model: nn.Module, optimizer: Optimizer) -> Runtime:
    of_model, of_optimizer = find_runtime(model), find_runtime(optimizer)
    is_of_another = of_optimizer is not None and of_optimizer is not of_model
    if of_model is not None and (is_of_another or (of_model.gradients.zero is not None and of_optimizer is None)):
        raise OptimizerMismatchError(
            "this optimizer was not distributed with the model; pass both as to_distributed returned them"
        )
    return of_model or of_optimizer or Runtime(mesh=Mesh())


_FEW = 2**16  # elements, which every rank may step beside its own
_SHARE = 1 / 16  # of the elements that a rank owns, as far as that is more


def owners_of(groups: Sequence[Sequence[nn.Parameter]], mesh: Mesh, gradients: Gradients) -> dict[int, tuple[int, ...]]:
    """Return the ranks that step each parameter of this stage, by its id. Each rank steps about equally many elements.

    A parameter's owner is the rank that has most of it between steps, as far as no rank steps more than its share by
    this rule. So little has to be sent, since most of a bucket's parameters lie in the segment of one rank. Of each
    group, all ranks of the stage step the smallest parameter, if it is small: the owner, which comes first, and the
    others to compare with it.

    Args:
        groups: the parameters of each group that are stepped whole.
        mesh: the ranks.
        gradients: which elements of the parameters each rank has between steps.
    """
    ranks = [rank for rank, place in enumerate(mesh.places) if place["pp"] == mesh.pp.rank]
    load = dict.fromkeys(ranks, 0)
    owners: dict[int, tuple[int, ...]] = {}
    held = [(p, layout_of(p).shape.numel()) for group in groups for p in group if layout_of(p).is_held]
    share = sum(size for p, size in held if p.requires_grad) / len(ranks)
    for parameter, size in sorted(held, key=lambda pair: (not pair[0].requires_grad, -pair[1])):
        layout, _ = gradients.part_of(parameter)
        parts = {rank: numel(layout.blocks(mesh.places[rank])) for rank in ranks}
        owner = max(ranks, key=lambda rank: (parts[rank], -load[rank]))
        if load[owner] + size > share:
            owner = min(ranks, key=lambda rank: load[rank])
        owners[id(parameter)] = (owner,)
        load[owner] += size
    sizes = {id(p): size for p, size in held if p.requires_grad and size}
    smallest = [min((p for p in group if id(p) in sizes), key=lambda p: sizes[id(p)], default=None) for group in groups]
    rest = max(_FEW, share * _SHARE)
    for parameter in sorted((p for p in smallest if p is not None), key=lambda p: sizes[id(p)]):
        rest -= sizes[id(parameter)]
        if rest >= 0:
            (owner,) = owners[id(parameter)]
            owners[id(parameter)] = (owner, *(rank for rank in ranks if rank != owner))
    return owners


Result = tuple[int, str | None, Tensor | None]


class ComparedSteps:
    """Finds out in each step whether an update of a parameter depends on more than that parameter.

    The results of ranks differ if an update, or a hook of the step, reads other parameters, since these are others on
    each rank. Draws of random numbers are found by the states of the generators.

    Args:
        device: the device of the parameters.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._states, self._on_device = RandomStates(), self._state_on_device()

    def begin(self) -> None:
        """Called before a step."""
        self._states, self._on_device = RandomStates(), self._state_on_device()

    def compare(self, optimizer: Optimizer, results: Sequence[Result], mesh: Mesh, ranks: Axis) -> None:
        """Compare the results of a step; every rank makes the call.

        Args:
            optimizer: the optimizer that has stepped.
            results: for each group its index, and the name and the values of the parameter that all ranks of this stage
                have stepped, if there is one.
            mesh: the mesh of the ranks.
            ranks: the axis of all ranks.

        Raises:
            OptimizerMismatchError: on every rank, if the results differ, or if a rank has drawn random numbers.
        """
        if ranks.size == 1:
            return
        nothing = torch.zeros((), dtype=torch.int64, device=self._device)
        own = [nothing if x is None else memory_digest(x).to(self._device) for *_, x in results]
        has_drawn = not (self._states.are_unchanged and torch.equal(self._on_device, self._state_on_device()))
        *found, draws = all_gather(torch.stack([*own, nothing + has_drawn]).view(1, -1), ranks).T.tolist()
        if any(draws):
            raise _error(optimizer, f"drew random numbers in its step on rank {draws.index(1)}")
        stages = [place["pp"] for place in mesh.places]
        for (group, name, _), digests in zip(results, found, strict=True):
            for rank, digest in enumerate(digests):
                first = stages.index(stages[rank])
                if digest != digests[first]:
                    raise _error(
                        optimizer,
                        f"made of {name or 'a parameter'}, of its group {group}, other values on rank {first} than on "
                        f"rank {rank}, which stepped it beside other parameters",
                    )

    def _state_on_device(self) -> Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.empty(0)


def _error(optimizer: Optimizer, what: str) -> OptimizerMismatchError:
    name = " and ".join(type(each).__name__ for each in members(optimizer))
    return OptimizerMismatchError(
        f"{name} {what}. So the step, or a hook of it, does not update each parameter from that parameter alone (or "
        "its kernels round otherwise in each run), and each rank has some of the parameters whole. Clip gradients by "
        "mw.clip_grad_norm_(model, 1.0) in place of a hook; use a plan that leaves weights and state whole (tp=1, "
        "pp=1, zero_stage=0); or, if each element is updated from that element alone, pass "
        "ToDistributedConfig(optimizer_reads='element')"
    )
