"""Carries out what was decided about one model: gives it this rank's weights, and installs each part of the plan.

``copy.deepcopy`` copies a distributed model with what is installed: the copy has its own weights, under the same plan.

``FEATURES`` has the functions of ``features/`` that add the parts of a plan, each with those that must come before it,
since their hooks run in this order. What a part leaves on the model, such as its loss or its region, is found by its
class (``Runtime.features``) and copied with the model, so a new part needs no field in the runtime.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from meshwright.checkpoint.one_device.save_pretrained import export_with_full_weights
from meshwright.construct.initial_weights import NewTensors
from meshwright.context.attend import GROUPS
from meshwright.distribute.quantised import check_float8, check_quantised
from meshwright.errors import AlreadyDistributedError, PlanError, UnreadableTensorError
from meshwright.faults.together import succeed_together
from meshwright.features import passes, splits, training
from meshwright.features.decision import Build, Refusal
from meshwright.layout.packed_weights import packed_modules
from meshwright.optim.attach_gradients import install_gradient_sync
from meshwright.optim.runtime import Runtime, attach
from meshwright.optim.state_dicts import guard_model
from meshwright.optim.zero.zero3_layers import ShardedWeights
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.draws.device_draws import DeviceDraws
from meshwright.parallel.dropout_streams import DropoutStreams
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright.parallel.tensor_parallel.apply import guard_shards, share_partial_gradients
from meshwright.roles.adapters import check_methods, close_changes

Make = Callable[..., NewTensors]


@dataclass(frozen=True)
class Feature:
    """A part of a plan.

    Args:
        install: a function that adds the part to a model if the plan has it.
        after: the parts that must be there before, since this one finds what they installed, or its hooks must lie
            outside of theirs.
        refusals: the rows by which a call is refused that the part cannot serve.
        is_settled: whether they ask about whole weights, and so not when a distributed model gets an optimizer later.
    """

    install: Callable[[Build], None]
    after: tuple[Callable[[Build], None], ...] = ()
    refusals: tuple[Refusal, ...] = ()
    is_settled: bool = False


_ADAPTERS = Refusal.by(
    "any plan", check_methods, lambda call: (call.model, call.plan.cut_axes, call.plan.has_micro_batches),
    "Use ParallelPlan(dp=..., zero_stage=...) alone, or a LoraConfig",
)  # fmt: skip
_QUANTISED = Refusal.by(
    "any plan", check_quantised, lambda call: (call.facts, call.plan, call.device),
    "Load the model with BitsAndBytesConfig(load_in_4bit=True), or without quantization_config",
)  # fmt: skip
_FLOAT8 = Refusal.by(
    "any plan",
    check_float8,
    lambda decision: (decision,),
    "Keep the layer in 16 bits, or train in bf16",
    after_cut=True,
)

# The order in which the parts are installed, and so in which their hooks run.
FEATURES = (
    Feature(training.hold_shards, refusals=(*training.STEPS, *training.MEMORY)),
    Feature(passes.compare_replicas),
    Feature(passes.watch_passes, (training.hold_shards, passes.compare_replicas), passes.SPLIT_ROWS),
    Feature(passes.scale_float8, (training.hold_shards, passes.watch_passes), (_FLOAT8,), True),
    Feature(passes.cut_blocks, (passes.watch_passes, passes.scale_float8), (_QUANTISED, _ADAPTERS), True),
    Feature(passes.spread_experts, (training.hold_shards,), passes.EXPERTS, True),
    Feature(splits.separate_documents),
    Feature(splits.part_tokens, (passes.cut_blocks, splits.separate_documents)),
    Feature(splits.check_positions),
    Feature(splits.watch_wrappers),
    Feature(splits.part_features, (passes.cut_blocks, splits.part_tokens)),
    Feature(splits.share_towers, (passes.watch_passes,)),
    Feature(passes.count_experts, (passes.spread_experts, splits.part_tokens)),
    Feature(training.synchronise_gradients, (training.hold_shards, passes.compare_replicas), training.GRADIENTS),
    Feature(training.average_loss, (splits.part_tokens, training.synchronise_gradients), training.LOSS),
    Feature(splits.run_in_parts, (training.average_loss,), splits.PARTS),
    Feature(passes.generate_alike, (passes.scale_float8,)),
    Feature(training.recompute, refusals=training.RECOMPUTE),
    Feature(training.replay, (training.recompute, passes.spread_experts, splits.separate_documents)),
    Feature(training.defer_logits, (passes.cut_blocks,)),
    Feature(training.compile_layers, (passes.cut_blocks,), (*training.COMPILE, *passes.UNCOMPILABLE), True),
)
REFUSALS = tuple(row for feature in FEATURES for row in feature.refusals)
REFUSALS_LATER = tuple(row for feature in FEATURES if not feature.is_settled for row in feature.refusals)


def distribute(build: Build, optimizer: Optimizer | None, make: Make, *, seed: int) -> None:
    """Give the model its shards and its hooks, and make operations raise that would read a shard as the whole.

    Args:
        build: the model and what was decided about it.
        optimizer: the optimizer over the model's parameters, if the call has one.
        make: the function that computes this rank's shards; see :func:`make_weights`.
        seed: the seed of the dropout streams, the same on all ranks.
    """
    model, runtime = build.model, build.runtime
    succeed_together(lambda: make_weights(build, make)).attach(build.facts)
    if any(x.device != build.device for x in build.facts.tensors()):
        model.to(build.device)  # not for nothing, since HQQ's layers then make their parameters anew, without a layout
    install(build, optimizer, seed=seed)
    if runtime.engine is None:
        guard_weights(build)
    guard_model(build.facts, runtime)
    for part in build.owners:
        export_with_full_weights(part)
        attach(part, runtime)
        if runtime.engine is None:
            make_copyable(part, model, runtime)
    close_changes(
        build.facts,
        axes=build.plan.weight_axes,
        is_gathered=runtime.weights is not None,
        is_packed=next(packed_modules(build.facts), None) is not None,
    )
    object.__setattr__(model, "_ddp_params_and_buffers_to_ignore", _NoWrapper())


def make_weights(build: Build, make: Make) -> NewTensors:
    """Return the weights that this rank will hold, without changing the model.

    Under ZeRO stage 3, this rank's part of each shard goes to ``runtime.weights``.

    Args:
        build: the model and what was decided about it.
        make: a function of the model's facts, its layouts, the mesh, the device and, under stage 3, a function that
            keeps this rank's part of a shard.
    """
    layouts, mesh = build.layouts, build.runtime.mesh
    if build.plan.zero_stage < 3 or mesh.tokens.size == 1:
        return make(build.facts, layouts, mesh, build.device)
    on_host = build.plan.offload is not None
    sharded = ShardedWeights(
        build.model, layouts, mesh, build.device, beside=build.beside, apart=build.apart, on_host=on_host
    )
    made = make(build.facts, layouts, mesh, build.device, sharded.keep)
    build.runtime.weights = sharded
    return made


def install(build: Build, optimizer: Optimizer | None, *, seed: int) -> None:
    """Install the parts of the plan on a model whose parameters are shards, without communication.

    Args:
        build: the model and what was decided about it.
        optimizer: the optimizer over the model's parameters, if the call has one.
        seed: the seed of the dropout streams, the same on all ranks.
    """
    build = dataclasses.replace(build, optimizer=optimizer)
    build.runtime.features.add(BatchFormat.of(getattr(build.decoder, "config", None), build.config.batch_dims))
    streams = build.runtime.features.add(DropoutStreams(mesh=build.runtime.mesh, seed=seed))
    build.runtime.features.add(
        DeviceDraws(
            mesh=build.runtime.mesh,
            streams=streams,
            format=build.runtime.features.get(BatchFormat),
            is_on=build.draws_as_one_device,
            shares_tokens=build.shares_tokens,
            wholes=build.wholes,
        )
    )
    modules = build.of_decoder.names if build.draws_as_one_device else ()
    before = {module: _read_of_sizes(module) for module in modules}
    done: list[Callable[[Build], None]] = []
    for feature in FEATURES:
        assert set(feature.after) <= set(done), f"{feature.install.__name__} is installed too early"
        feature.install(build)
        done.append(feature.install)
    for module, values in before.items():
        now = vars(module)
        if changed := {name: x for name, x in values.items() if now.get(name) is not x or name == GROUPS}:
            build.wholes[module] = changed


def _read_of_sizes(module: nn.Module) -> dict[str, Any]:
    """Return what a module has read from a config, such as its number of heads."""
    return {name: x for name, x in vars(module).items() if not name.startswith("_")}


def guard_weights(build: Build) -> None:
    """Make operations raise that would read a shard as the whole."""
    if build.cuts_weights:
        guard_shards(build.facts, () if build.tensor_structure is None else build.tensor_structure.blocks)
    if build.runtime.weights is not None:
        build.runtime.weights.guard()
    elif build.tensor_structure is not None:
        share_partial_gradients(build.facts, build.tensor_structure)


class _NoWrapper:
    """Raises when DistributedDataParallel looks up which parameters to ignore."""

    def __iter__(self) -> Iterator[str]:
        raise AlreadyDistributedError(
            "this model is distributed by meshwright. DistributedDataParallel (which accelerate's prepare and the "
            "stock Trainer put around models) would overwrite the shards of all ranks with those of the first. Use "
            "the model as it is, or write from meshwright_hf.accelerate import Accelerator, or from "
            "meshwright_hf.trainer import MeshwrightTrainer as Trainer"
        )


def make_copyable(part: nn.Module, model: nn.Module, runtime: Runtime) -> None:
    """Let ``copy.deepcopy`` and ``torch.optim.swa_utils.AveragedModel`` copy a distributed model.

    Args:
        part: the model, or the decoder inside the wrappers of adapters.
        model: the whole model.
        runtime: the model's runtime.
    """
    object.__setattr__(part, "__deepcopy__", _Copier(part, model, runtime))
    object.__setattr__(part, "__reduce_ex__", _refuse_pickling)


def _refuse_pickling(protocol: object) -> NoReturn:
    raise UnreadableTensorError(
        "torch.save(model) or pickle of a distributed model would write this rank's part of it, with hooks and groups "
        "of this process. On all ranks call meshwright.save_weights(model, folder), model.save_pretrained(folder), or "
        "state = meshwright.full_state_dict(model), and torch.save(state, file) on rank 0"
    )


class _Copier:
    """The ``__deepcopy__`` method of a model, as an object that is copied with the model.

    A copy has its own shards, hooks and runtime, and shares the model's axes and guard. It has no optimizer yet:
    ``to_distributed(copy, optimizer)`` adds one.
    """

    def __init__(self, part: nn.Module, model: nn.Module, runtime: Runtime):
        self.part, self.model, self.runtime = part, model, runtime

    def __call__(self, memo: dict[int, Any]) -> Any:
        if self.runtime.mesh.pp.size > 1:
            raise PlanError(
                "a model whose layers are spread over the ranks of pp cannot be copied. For an average of its weights "
                "or a frozen copy, use a plan with pp=1"
            )
        if id(self.runtime) in memo:  # inside a wrapper that is being copied
            return _reconstruct(self.part, memo)
        new = self.runtime.without_gradients()
        gradients = self.runtime.gradients
        memo[id(self.runtime)], memo[id(gradients)] = new, new.gradients
        memo[id(gradients.syncs)] = new.gradients.syncs
        if self.runtime.comparison is not None:
            memo[id(self.runtime.comparison)] = new.comparison = self.runtime.comparison.for_copy()
            memo[id(self.runtime.comparison.losses)] = new.comparison.losses
        if self.runtime.weights is not None:
            self.runtime.weights.release()
        for parameter in self.model.parameters():
            _copy_parameter(parameter, self.runtime, memo)
        part = _reconstruct(self.part, memo)
        model = copy.deepcopy(self.model, memo)
        new.features = copy.deepcopy(self.runtime.features, memo)
        if new.comparison is not None:
            new.comparison.look_at(model, new.features.find(DeviceDraws))
        new.weights = copy.deepcopy(self.runtime.weights, memo)
        if new.weights is not None:
            new.weights.find_places()
            new.weights.guard()
        stage = 0 if self.runtime.plan is None else self.runtime.plan.zero_stage
        with reading_shards():
            install_gradient_sync(
                new, list(model.parameters()), None, zero_stage=stage, bucket_bytes=gradients.bucket_bytes
            )
        return part


def _copy_parameter(parameter: nn.Parameter, runtime: Runtime, memo: dict[int, Any]) -> None:
    """Put a copy of a parameter, with its layout, into the memo of a ``deepcopy``."""
    if id(parameter) in memo:
        new = memo[id(parameter)]
    elif runtime.weights is not None and runtime.weights.holds(parameter):
        # The values are copied with ``runtime.weights``; the parameter itself has no memory.
        new = nn.Parameter(runtime.weights.place_holder(parameter), requires_grad=parameter.requires_grad)
    else:
        new = copy.deepcopy(parameter, memo)
    memo[id(parameter)] = new
    new.meshwright = parameter.meshwright  # type: ignore[attr-defined]


def _reconstruct(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Copy a module as ``copy.deepcopy`` copies an object without a ``__deepcopy__``."""
    if (own := getattr(type(module), "__deepcopy__", None)) is not None:
        return own(module, memo)
    reduced: Any = type(module).__reduce_ex__(module, 4)
    make, args, state = reduced[:3]
    new = make(*args)
    memo[id(module)] = new
    new.__setstate__(copy.deepcopy(state, memo))
    return new
