"""Makes each rank's shard of each weight from its source: the model itself, a recipe, or a checkpoint.

For a model that was built on the meta device, a second model is built, and how it initialises itself is recorded as
recipes.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint.format.load_weights import open_weights
from meshwright.checkpoint.one_device.safetensors_file import memory_of
from meshwright.checkpoint.one_device.weight_files import WeightFiles, WeightSource, read_statistics
from meshwright.construct.deferred_init import Recipe, forget_recipe, recipe_of, record
from meshwright.construct.init_recording import Tape
from meshwright.errors import PlanError, UninitialisedParameterError
from meshwright.facts import Facts
from meshwright.faults.memory_digest import memory_digest
from meshwright.faults.together import take_from_first
from meshwright.layout.packed_weights import Attribute, PackedMatrix, matrix_shape, packed_modules, statistics_of
from meshwright.layout.row_layout import numel
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.axes import Mesh
from meshwright.parallel.tensor_parallel.apply import Keep, Shards, attach_shards, make_shards

_SOURCE = "_meshwright_source"  # attribute of a tensor: the checkpoint that has its values, and their name there


@dataclass(frozen=True)
class NewTensors:
    """A model's tensors on this rank: the parameters' shards, and all others as attributes of what has them."""

    shards: Shards
    others: list[Attribute]

    def attach(self, facts: Facts) -> None:
        """Put all tensors into the model; see ``attach_shards``."""
        for owner, name, value in self.others:
            owner[name] = value
        attach_shards(facts, self.shards)
        for parameter in facts.parameters.values():
            forget_recipe(parameter)
            vars(parameter).pop(_SOURCE, None)


def tensors_beside_parameters(facts: Facts) -> list[Attribute]:
    """Return the buffers of a model's modules, and the tensors that are plain attributes of these."""
    owners = [owner for module in facts.names for owner in (module._buffers, vars(module))]
    return [(owner, name, x) for owner in owners for name, x in owner.items() if isinstance(x, Tensor)]


@dataclass
class InitialWeights:
    """The sources of tensors that have no values in the model or get new ones; the dicts are keyed by ``id``.

    Args:
        files: the checkpoint, if any.
        names: the name in the checkpoint of each tensor to read from it.
        recipes: the recipe of each deferred parameter.
        values: the values of each meta tensor, such as a buffer, that has values in the rebuilt model.
    """

    files: WeightFiles | None = None
    names: dict[int, str] = field(default_factory=dict)
    recipes: dict[int, Recipe] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def find(facts: Facts, source: WeightSource | None) -> InitialWeights:
        """Find a source for every tensor without values, without changing the model.

        Args:
            facts: what the model shows, which may be materialised, deferred, or on the meta device.
            source: the checkpoint from which all parameters are read (see ``open_weights``), if any.

        Raises:
            CheckpointError: if the checkpoint is damaged or belongs to another model.
            UninitialisedParameterError: if nothing initialises some tensors; the message lists all of them.
            PlanError: if the model is on the meta device and its config describes another model, or if a deferred
                parameter was changed after ``deferred_init()`` ended.
        """
        weights = InitialWeights()
        if source is not None:
            weights.files = open_weights(source, facts.model)
            weights.names = weights.files.names_for(facts.model)
        else:
            weights._find_deferred_files(facts)
        for name, parameter in facts.named_parameters():
            recipe = recipe_of(parameter)
            if parameter.is_meta and recipe is not None and id(parameter) not in weights.names:
                if not recipe.is_current(parameter):
                    raise PlanError(
                        f"{name} was changed after meshwright.deferred_init() ended, but has no values to change yet. "
                        "Move the change into the block"
                    )
                weights.recipes[id(parameter)] = recipe
        if lacking := weights._lacking(facts):
            are_drawn = any(isinstance(x, nn.Parameter) for x in lacking.values())
            weights._take_from(build_twin(facts.model, draws=are_drawn), lacking)
        recipes = {name: weights.recipes.get(id(p)) for name, p in facts.named_parameters()}
        unwritten = [name for name, recipe in recipes.items() if recipe is not None and not recipe.is_written]
        if empty := [*weights._lacking(facts), *unwritten]:
            raise UninitialisedParameterError(sorted(empty))
        return weights

    def _find_deferred_files(self, facts: Facts) -> None:
        """Find the checkpoint from which :meth:`defer` left some tensors to be read."""
        found = {id(x): vars(x)[_SOURCE] for x in facts.tensors() if _SOURCE in vars(x)}
        self.names = {key: name for key, (_, name) in found.items()}
        checkpoints = list({id(files): files for files, _ in found.values()}.values())
        if len(checkpoints) > 1:
            raise PlanError(
                f"parts of the model wait for different checkpoints, {checkpoints[0].source} and "
                f"{checkpoints[1].source}, and weights are read from one. Load one of the parts outside of "
                "meshwright.deferred_init()"
            )
        self.files = next(iter(checkpoints), None)

    def defer(self, facts: Facts) -> None:
        """Leave a model's parameters to be read by ``to_distributed``, and fill what is computed and not read."""
        for tensor in facts.tensors():
            if id(tensor) in self.names:
                vars(tensor)[_SOURCE] = self.files, self.names[id(tensor)]
        for owner, name, tensor in tensors_beside_parameters(facts):
            if id(tensor) in self.values:
                owner[name] = self.values[id(tensor)].to(tensor.dtype)

    def make(
        self,
        facts: Facts,
        layouts: Mapping[str, TensorLayout],
        mesh: Mesh,
        device: torch.device,
        keep: Keep = lambda _, shard: shard,
    ) -> NewTensors:
        """Return all tensors that this rank will hold, computed or read; the model is not changed."""
        with contextlib.nullcontext() if self.files is None else self.files.progress as progress:
            if progress is not None:
                progress.start(self._bytes_to_read(facts, layouts, mesh))
            shards = make_shards(facts, layouts, mesh, device, self._shard, keep)
            return NewTensors(shards, [*self._buffers(facts), *self._statistics(facts, shards, device)])

    def _shard(self, parameter: nn.Parameter, layout: TensorLayout) -> Tensor | None:
        if self.files is not None and id(parameter) in self.names:
            return self.files.read(self.names[id(parameter)], parameter.dtype, layout)
        if id(parameter) in self.recipes:
            full = self.recipes[id(parameter)].compute(parameter.dtype)
        elif id(parameter) in self.values:
            full = self.values[id(parameter)].to(parameter.dtype)
        else:
            return None
        return layout.take(full) if layout.is_sharded else full

    def _statistics(self, facts: Facts, shards: Shards, device: torch.device) -> Iterator[Attribute]:
        """Yield what belongs to this rank's shards of packed weights."""
        for _, module, packing in packed_modules(facts):
            shard, layout = shards[id(module.weight)]
            name = self.names.get(id(module.weight)) if layout.is_held else None
            stored = None
            if self.files is not None and name is not None:
                stored = read_statistics(self.files, name, module, packing, device)
            yield from own_statistics(module, packing, shard, layout, stored)

    def _buffers(self, facts: Facts) -> list[Attribute]:
        found: list[Attribute] = []
        for owner, name, tensor in tensors_beside_parameters(facts):
            if self.files is not None and id(tensor) in self.names:
                found.append((owner, name, self.files.read(self.names[id(tensor)], tensor.dtype)))
            elif tensor.is_meta:
                found.append((owner, name, self.values[id(tensor)].to(tensor.dtype)))
        return found

    def _bytes_to_read(self, facts: Facts, layouts: Mapping[str, TensorLayout], mesh: Mesh) -> int:
        assert self.files is not None
        total = 0
        for name, parameter in facts.named_parameters():
            if id(parameter) not in self.names:
                continue
            num_bytes = self.files.entries[self.names[id(parameter)]][1].num_bytes
            layout = layouts.get(name, TensorLayout.whole(parameter, mesh.tp.size)).placed(name, mesh)
            if layout.is_held:
                total += num_bytes * numel(layout.blocks()) // max(layout.shape.numel(), 1)
        return total

    def _own_tensors(self, facts: Facts) -> list[Tensor]:
        """Return the tensors that already have values and that the model starts from."""
        found = [t.detach() for t in facts.tensors() if not t.is_meta and id(t) not in self.names]
        statistics = [x for x in statistics_of(facts) if not x.is_meta]
        return [*found, *statistics, *self.values.values()]

    def digests(self, facts: Facts, device: torch.device) -> list[str]:
        """Return digests of the form of the weights, of what their recipes draw, and of their values."""
        tensors, tapes = self._own_tensors(facts), self._tapes
        form = [
            *(len(self.recipes), len(self.values), sorted(self.names.values())),
            *([(tuple(t.shape), t.dtype) for t in tensors], *(tape.form() for tape in tapes)),
        ]
        digests = torch.stack([memory_digest(t).to(device) for t in tensors]).tolist() if tensors else []
        return [_text_digest(form), _digest(tapes), _text_digest(digests)]

    def equalise(self, facts: Facts, ranks: list[list[str]], device: torch.device) -> bool:
        """Give every rank the first rank's weights if they differ, for example because no seed was set.

        Args:
            facts: what the model shows.
            ranks: the :meth:`digests` of all ranks.
            device: a device from which the process group can send.

        Returns:
            Whether any rank's weights differed.

        Raises:
            PlanError: if the ranks did not build the same model.
        """
        first = ranks[0]
        if all(digests == first for digests in ranks):
            return False
        if others := [rank for rank, (other, *_) in enumerate(ranks) if other != first[0]]:
            raise PlanError(
                f"rank(s) {', '.join(map(str, others))} built another model than rank 0, or passed another "
                "ToDistributedConfig.weights, so weights would be initialised differently or come from other sources. "
                "Build the same model and pass the same weights on every rank"
            )
        drawn = [x for tape in self._tapes for x in (*tape.states, *tape.constants())]
        differing = [
            x
            for place, group in ((1, drawn), (2, self._own_tensors(facts)))
            if any(rank[place] != first[place] for rank in ranks)
            for x in group
        ]
        for tensor in differing:
            take_from_first(tensor, device)
        return bool(differing)

    @property
    def _tapes(self) -> list[Tape]:
        return list({id(recipe.tape): recipe.tape for recipe in self.recipes.values()}.values())

    def _lacking(self, facts: Facts) -> dict[str, Tensor]:
        """Return the tensors on the meta device that have no source, by name."""
        found: dict[str, Tensor] = {name: p for name, p in facts.named_parameters() if p.is_meta}
        for module, name in facts.names.items():
            found |= {f"{name}.{key}".lstrip("."): x for key, x in meta_tensors(module).items()}
        sources = self.names.keys() | self.recipes.keys() | self.values.keys()
        return {name: x for name, x in found.items() if id(x) not in sources}

    def _take_from(self, twin: nn.Module, lacking: dict[str, Tensor]) -> None:
        for name, tensor in lacking.items():
            owner_name, _, attribute = name.rpartition(".")
            made = getattr(twin.get_submodule(owner_name), attribute, None)
            if isinstance(made, Tensor) and made.shape == tensor.shape:
                if (recipe := recipe_of(made)) is not None:
                    self.recipes[id(tensor)] = recipe
                elif not made.is_meta:
                    self.values[id(tensor)] = made.detach()


def own_statistics(
    module: Any, packing: PackedMatrix, shard: Tensor, layout: TensorLayout, stored: Any = None
) -> Iterator[Attribute]:
    """Yield the attributes that a module gets together with a rank's shard of its packed weight.

    Args:
        module: the module, of which nothing is changed.
        packing: how its weight is stored.
        shard: what this rank has of the weight.
        layout: the layout of the weight.
        stored: the statistics of the whole weight as a checkpoint has them; None for those that the module has.
    """
    # On some CPUs bitsandbytes would round the weights to bfloat16 in evaluation, and could train no more.
    yield vars(module), "support_avx512bf16_for_cpu", False
    weight = module.weight
    if packing.block == 1:
        scales = next(x for x in (stored, weight.SCB, module.state.SCB) if x is not None)
        whole = PackedMatrix(shape=layout.shape, values=1, block=1)
        yield vars(weight), "SCB", _of_rank(scales, whole, layout, shard.device)
        yield vars(weight), "CB", shard
        yield from ((vars(module.state), name, None) for name in ("SCB", "CB"))  # where the first pass moves them
        return
    state = weight.quant_state if stored is None else stored
    own = dict(vars(state))
    if layout.is_sharded:
        absmax = flat_statistics(state) if layout.is_held else state.absmax
        own |= {"absmax": _of_rank(absmax, packing, layout, shard.device), "nested": False}
        own |= {"state2": None, "offset": None, "shape": state.shape}
        if layout.is_held:
            own["shape"] = torch.Size((shard.shape[0], shard.shape[1] * packing.values))
        else:
            own["code"] = torch.zeros(state.code.shape, device=shard.device)
    yield from ((vars(weight.quant_state), name, value) for name, value in own.items())


def _of_rank(statistics: Tensor, packing: PackedMatrix, layout: TensorLayout, device: torch.device) -> Tensor:
    """Return the statistics of a rank's blocks, of those of the whole weight."""
    if not layout.is_held:
        return torch.zeros(1, device=device).expand(statistics.shape)  # no memory, as the weight
    for axis, rows in layout.cuts:
        statistics = packing.statistics(statistics, rows, layout.rank(axis))
    return statistics.to(device)


def flat_statistics(state: Any) -> Tensor:
    """Return the statistics of a 4-bit weight in float32, as bitsandbytes itself computes quantised ones."""
    absmax: Tensor = state.absmax
    if not state.nested:
        return absmax
    second = state.state2
    dequantize = torch.ops.bitsandbytes.dequantize_blockwise.default
    flat: Tensor = dequantize(absmax, second.absmax, second.code.to(absmax.device), second.blocksize, second.dtype)
    flat += state.offset
    return flat.float()


def is_waiting(model: nn.Module) -> bool:
    """Return whether :meth:`InitialWeights.defer` left parameters of a model to be read from a checkpoint."""
    return any(_SOURCE in vars(parameter) for parameter in model.parameters())


def _text_digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _digest(tapes: list[Tape]) -> str:
    digest = hashlib.sha256()
    for tape in tapes:
        for tensor in (*tape.states, *tape.constants()):
            digest.update(memory_of(tensor))
    return digest.hexdigest()


def build_twin(model: nn.Module, *, draws: bool) -> nn.Module:
    """Build a second module with the names of ``model``, deferred weights and real buffers.

    A model that is built from its ``.config`` (as in transformers) is built again, so its weights are those that one
    process would draw from the current seed. Any other model is copied, and its modules' ``reset_parameters`` run in
    the order of ``modules()``.

    Args:
        model: a model built on the meta device.
        draws: whether weights will be drawn; if False, the generators do not advance.

    Raises:
        PlanError: if the config builds a model with other parameters.
    """
    if _is_built_from_config(model):
        twin = _from_config(model, draws)
        ours = {name: tuple(matrix_shape(p)) for name, p in model.named_parameters(remove_duplicate=False)}
        built = {name: tuple(p.shape) for name, p in twin.named_parameters(remove_duplicate=False)}
        if differing := sorted(name for name in ours.keys() | built.keys() if ours.get(name) != built.get(name)):
            shown = "\n  ".join(
                f"{n}: {ours.get(n)} in the model, {built.get(n)} from its config" for n in differing[:20]
            )
            raise PlanError(
                f"{type(model).__name__} is on the meta device, but its config builds another model: {len(differing)} "
                f"parameter(s) differ:\n  {shown}\nBuild and change it under meshwright.deferred_init() instead"
            )
        return twin
    return _reset_copy(model, draws)


def _is_built_from_config(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    if config is None or not hasattr(type(model), "config_class"):
        return False
    required = [
        parameter
        for parameter in inspect.signature(type(model)).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    return len(required) == 1


def _from_config(model: nn.Module, draws: bool) -> nn.Module:
    dtype = next((p.dtype for p in model.parameters() if p.is_meta and p.is_floating_point()), None)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype or previous)
    try:
        with torch.device("cpu"), record(Tape(draws)):
            made: nn.Module = type(model)(copy.deepcopy(model.config))
            return made
    finally:
        torch.set_default_dtype(previous)


def _reset_copy(model: nn.Module, draws: bool) -> nn.Module:
    twin = copy.deepcopy(model)
    with torch.no_grad(), record(Tape(draws)) as recorder:
        deferred: dict[int, Tensor] = {}

        def defer(tensor: Tensor | None) -> Any:
            if tensor is None or not tensor.is_meta:
                return tensor
            if id(tensor) not in deferred:
                values = recorder.adopt(tensor)
                is_parameter = isinstance(tensor, nn.Parameter)
                deferred[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
            return deferred[id(tensor)]

        metas = {name: x for name, x in twin.named_buffers() if x.is_meta}
        modules = [m for m in twin.modules() if any(x.is_meta for x in (*_own(m._parameters), *_own(m._buffers)))]
        for module in modules:
            for name, parameter in list(module._parameters.items()):
                module.register_parameter(name, defer(parameter))
            module._buffers.update({name: defer(buffer) for name, buffer in module._buffers.items()})
        for module in modules:
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        for name, buffer in metas.items():
            owner, _, suffix = name.rpartition(".")
            buffers = twin.get_submodule(owner)._buffers
            if not recorder.is_written(buffers[suffix]):
                buffers[suffix] = buffer
    return twin


def _own(tensors: dict[str, Any]) -> list[Tensor]:
    return [x for x in tensors.values() if x is not None]


def meta_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's meta tensors that are not parameters, by attribute."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return {name: x for name, x in {**module._buffers, **plain}.items() if x is not None and x.is_meta}
