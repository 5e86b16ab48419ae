"""Apply tensor and sequence parallelism to a stock decoder: give its parameters their shards, and add hooks.

In each pass a block has one gather at its input and one reduction at its output. These are four collectives per
layer instead of one per projection. Without sequence parallelism, forward all-reduces the output and backward
all-reduces the input's gradient. With sequence parallelism, forward all-gathers the input and reduce-scatters the
output; backward does the reverse of each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.layout.packed_weights import PackedMatrix
from meshwright.layout.row_layout import RowLayout
from meshwright.layout.tensor_layout import TensorLayout, layout_of
from meshwright.mesh.axes import Axis, Mesh
from meshwright.parallel.autograd_graph import in_backward, keep_node
from meshwright.parallel.dropout_streams import DropoutStreams, Restore
from meshwright.parallel.method_chain import ChainStep, RegionBorders, add_step
from meshwright.parallel.shards.added_parameters import KeptModules
from meshwright.parallel.shards.partial_gradients import ModelWindow, OnShards, Window
from meshwright.parallel.shards.sharded_parameter import LocalGradient, guard
from meshwright.parallel.tensor_parallel.block_boundary import (
    BlockHooks,
    SharedDropout,
    hidden_states,
    share_output_projections,
)
from meshwright.parallel.tensor_parallel.second_inputs import SecondInputs
from meshwright.parallel.tensor_parallel.sequence_parallel import AllTokens, SequenceSharding
from meshwright.parallel.tensor_parallel.structure import DecoderStructure
from meshwright.parallel.tensor_parallel.vocab_parallel import RowReads, VocabParallelEmbedding, VocabParallelHead
from meshwright.parallel.tensor_parallel.wide_norms import GroupedNorm, WideNorm
from meshwright.roles.adapters import projection
from meshwright.roles.blocks import Block, Mixer
from meshwright.roles.blocks.experts import adapted_experts

# Takes a parameter and its layout; returns this rank's shard, or None if the parameter holds its values itself.
ShardSource = Callable[[nn.Parameter, TensorLayout], Tensor | None]

# Takes a parameter and its shard; returns the values that the parameter gets.
Keep = Callable[[nn.Parameter, Tensor], Tensor]

Shards = dict[int, tuple[Tensor, TensorLayout]]  # by ``id`` of the parameter that gets them


def make_shards(
    facts: Facts,
    layouts: Mapping[str, TensorLayout],
    mesh: Mesh,
    device: torch.device,
    source: ShardSource,
    keep: Keep = lambda _, shard: shard,
) -> Shards:
    """Return each parameter's layout and its shard on this rank, passed through ``keep``. The model is not changed."""
    shards: Shards = {}
    # Largest first: a shard may need its full tensor, and the fewest other shards are in memory at the start.
    named = sorted(facts.parameters.items(), key=lambda item: -item[1].numel())
    for name, parameter in named:
        if id(parameter) not in shards:
            layout = layouts[name] if name in layouts else TensorLayout.whole(parameter, mesh.tp.size)
            layout = layout.placed(name, mesh)
            if not layout.is_held:
                # Without memory. Modules before the layers run on every stage; NaN shows where their result is used.
                empty = torch.nan if parameter.dtype.is_floating_point else 0
                absent = torch.full((), empty, dtype=parameter.dtype, device=device).expand(layout.shape)
                shards[id(parameter)] = absent, layout
                continue
            shard = source(parameter, layout)
            if shard is None:
                whole = parameter.data.view(layout.shape)
                shard = layout.take(whole) if layout.is_sharded else whole
            shards[id(parameter)] = keep(parameter, shard.to(device)), layout
    return shards


def attach_shards(facts: Facts, shards: Shards) -> None:
    """Give each parameter its shard, its layout, and this rank's part of its gradient, if it has one.

    The parameters stay the same objects, so the user's lists, hooks and optimizers still refer to them.
    """
    for _, parameter in facts.named_parameters():
        shard, layout = shards[id(parameter)]
        gradient, parameter.grad = parameter.grad, None
        _set_values(parameter, shard)
        parameter.meshwright = layout  # type: ignore[attr-defined]
        if not layout.is_held:
            continue
        if gradient is not None and layout.is_sharded:
            gradient = LocalGradient.of(layout.take(gradient).to(parameter.device), layout)
        parameter.grad = None if gradient is None else gradient.to(parameter.device)


def _set_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter other values, of any shape and device; its attributes and hooks stay."""
    if parameter.shape != values.shape or parameter.is_meta:
        keep_node(parameter)
    if parameter.shape != values.shape:
        # An old graph may hold a node that expects the old shape; torch drops that node when the dtype changes.
        other = torch.float32 if parameter.dtype is not torch.float32 else torch.float64
        parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    if not parameter.is_meta:
        parameter.data = values
        return
    # torch cannot give memory to a meta tensor, and torch.utils.swap_tensors refuses tensors with weak references.
    made = nn.Parameter(values, requires_grad=parameter.requires_grad)
    torch._C._swap_tensor_impl(parameter, made)
    parameter._backward_hooks = parameter._backward_hooks  # restores torch's record of the hooks, which the swap moved
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    made._backward_hooks, made._post_accumulate_grad_hooks = {}, {}  # of the memory that the kept node knows
    if type(made) is not nn.Parameter:  # a fake tensor, while a plan is traced
        parameter.__class__ = type(made)
        vars(parameter).update(vars(made))


def install_tensor_parallel(
    structure: DecoderStructure,
    axis: Axis,
    *,
    streams: DropoutStreams,
    keep_logits_sharded: Callable[[], bool],
    is_staged: bool,
) -> tuple[list[BlockHooks], SequenceRegion | None]:
    """Add the hooks that move activations at the borders of every block.

    Returns:
        The hooks of each block, and the region in which each rank has its own tokens, under sequence parallelism. If
        ``is_staged``, a pipeline's stages start and end the region; otherwise its own hooks do.
    """
    for embedding in structure.embeddings:
        if layout_of(embedding.weight).is_held:
            rows = RowLayout.padded(embedding.num_embeddings, axis.size)
            VocabParallelEmbedding(embedding, rows, axis)
            RowReads(structure.model, embedding, rows, axis)
    if structure.head is not None and layout_of(structure.head.weight).is_held:
        VocabParallelHead(structure.head, structure.vocab_size, axis, keep_logits_sharded)
    sequence = SequenceSharding(axis) if structure.is_sequence_parallel else None
    # Only inside of modules that route tokens does each rank have its own, without sequence parallelism.
    in_routed = SequenceSharding(axis) if structure.routed else None
    inside = {id(module) for owner in structure.routed for module in structure.facts.inside(owner)}
    blocks = [
        BlockHooks(structure.facts, block, axis, in_routed if id(block.module) in inside else sequence, streams)
        for block in structure.blocks
    ]
    if in_routed is not None:
        for owner in structure.routed:
            add_step(owner, OwnTokens(owner, in_routed, streams))
    for row in (projection(block.row) for block in structure.blocks):
        packing = PackedMatrix.of(row._parameters.get("weight"))
        if packing is not None and packing.block == 1:
            row.register_forward_pre_hook(_check_reads_values)
    if structure.blocks:
        SecondInputs(structure.layers, structure.blocks, structure.whole.values(), axis, sequence)
    for layer in structure.layers:
        KeptModules(structure.facts, layer)
    for block in structure.blocks:
        block.localise(axis.rank)
    share_output_projections(blocks)
    for dropout in dict.fromkeys(dropout for block in structure.blocks for dropout in block.shared_dropouts):
        SharedDropout(dropout, streams)
    of_norms = {norm: (rows, block.groups) for block in structure.blocks for norm, rows in block.wide_norms}
    for norm, (rows, groups) in of_norms.items():
        WideNorm(norm, rows, axis) if groups is None else GroupedNorm(norm, rows, axis, groups)
    for block in structure.blocks:
        if isinstance(block, Mixer) and block.kind.has_training_kernel:
            WithoutTrainingKernel(block.module)
    if sequence is None:
        return blocks, None
    for module in structure.whole.items():
        AllTokens(*module, sequence, streams)
    region = SequenceRegion(structure, sequence, streams, is_staged=is_staged)
    for module in structure.whole_outside.items():
        AllTokens(*module, sequence, streams, region.is_open)
    return blocks, region


def _check_reads_values(row: nn.Module, args: tuple[Tensor, ...]) -> None:
    """Raise where bitsandbytes would multiply 8-bit weights by activations that it quantises too."""
    if not row.training:
        raise PlanError(
            "in evaluation bitsandbytes quantises each token's activations to 8 bits by their largest one, and under "
            "tp a rank has some of them. Evaluate and generate in one process, or under a plan without tp; or load the "
            "model with BitsAndBytesConfig(load_in_4bit=True)"
        )


def guard_shards(facts: Facts, blocks: Iterable[Block]) -> None:
    """Make sharded parameters raise if read as the whole, except while their own modules or blocks run."""
    for parameter in facts.parameters_inside(facts.model):
        if layout_of(parameter).is_sharded:
            guard(parameter)
    whole = [block.module for block in blocks if block.entries == (block.module,)]
    # Adapters of experts compute with all weights inside of them, before the modules of these run.
    adapted = list(adapted_experts(facts).values())
    whole += [module for module in adapted if all(module is not other.base_layer for other in adapted)]
    inside = {id(module) for block in whole for module in facts.inside(block)}
    for module in whole:
        Window(facts.parameters_inside(module)).over(module)
    for module in facts.names:
        if id(module) not in inside:
            Window(module.parameters(recurse=False)).over(module)
        for name in ("merge_adapter", "unmerge_adapter"):
            if callable(getattr(module, name, None)):
                add_step(module, OnShards(), name)


def share_partial_gradients(facts: Facts, structure: DecoderStructure) -> None:
    """Count the program's own use of a parameter once, although the runtime sums the parameter's gradient over tp.

    Args:
        facts: what a model shows whose parameters have layouts.
        structure: the decoder's structure.
    """
    decoder = structure.model
    records = [(p, layout_of(p)) for p in facts.parameters_inside(facts.model)]
    partial = [p for p, layout in records if layout.has_addends and not layout.is_sharded]
    of_towers = facts.parameters_inside(*structure.towers)
    window = ModelWindow(facts, [p for p in partial if p not in of_towers])
    tower_window = ModelWindow(facts, [p for p in partial if p in of_towers])  # shared in calls of a tower alone
    for tower in structure.towers:
        tower_window.over(tower)
    blocks = [block.module for block in structure.blocks]
    inside = [getattr(decoder, "base_model", None), structure.final_norm, *structure.layers, *blocks]
    # The decoder itself is left out, since its forward may be the program's own and add a penalty.
    for module in {id(x): x for x in inside if isinstance(x, nn.Module) and x is not decoder}.values():
        window.over(module)


class OwnTokens(ChainStep):
    """The step of a module that routes tokens to experts, which makes each rank route its own tokens alone.

    If every rank routed all tokens, rounding could send a token to different experts on two ranks.

    Args:
        module: the module, whose input and output every rank has whole.
        sequence: what gives each rank its tokens.
        streams: the random streams of the model.
    """

    def __init__(self, module: nn.Module, sequence: SequenceSharding, streams: DropoutStreams):
        self.sequence, self.streams = sequence, streams
        self._names = tuple(inspect.signature(module.forward).parameters)

    def __call__(self, *args: object, **kwargs: object) -> object:
        x, put_back = hidden_states(args, kwargs, self._names)
        restore = self.streams.enter_shard(x)
        try:
            own = self.sequence.split(x if x.ndim == 3 else x[None])
            args, kwargs = put_back(own if x.ndim == 3 else own.flatten(0, 1))
            output = self.method(*args, **kwargs)
        finally:
            restore()
        if isinstance(output, Tensor):
            return self._whole(output, own)
        return (self._whole(output[0], own), *output[1:])

    def _whole(self, result: Tensor, own: Tensor) -> Tensor:
        whole = self.sequence.unsplit(result.view(own.shape))
        return whole.flatten(0, 1) if result.ndim == 2 else whole


class SequenceRegion:
    """The region from the first layer's input to the final norm's output, in which each rank has its own tokens.

    It starts after the embedding because models derive positions and masks from the embedding's full
    length. It ends with the norm so that ``last_hidden_state`` is whole. In a model without a known final
    norm, it ends with the last layer.
    """

    def __init__(
        self, structure: DecoderStructure, sequence: SequenceSharding, streams: DropoutStreams, *, is_staged: bool
    ):
        self.sequence, self.streams = sequence, streams
        self._is_open = False
        self._restore: Restore | None = None
        self._restore_recomputed: Restore | None = None
        borders = self._borders = RegionBorders(structure)
        structure.model.register_forward_pre_hook(self._begin_pass)
        if not is_staged:
            borders.first.register_forward_pre_hook(self._start, with_kwargs=True)
            borders.first.register_forward_hook(self._end_recomputation, always_call=True)
        borders.last.register_forward_hook(self._end)
        structure.model.register_forward_hook(self._check_ended)

    def is_open(self) -> bool:
        """Return whether each rank may have its own tokens now; in backward, layers may run again."""
        return self._is_open or in_backward()

    def _begin_pass(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._borders.check()
        self._is_open = False  # an earlier pass may have raised

    def _start(
        self, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, put_back = hidden_states(args, kwargs)
        # If the first layer runs at a later place too, its input there is this rank's tokens already.
        if self._borders.is_first_again and (not self.sequence.is_whole(x) if in_backward() else self._is_open):
            return args, kwargs
        beside = (y for y in tree_leaves((args, kwargs)) if isinstance(y, Tensor) and y is not x)
        self.sequence.keep_whole(y for y in beside if y.is_floating_point())
        self._open(x)
        return put_back(self.sequence.split(x))

    def _open(self, x: Tensor) -> None:
        restore = self.streams.enter_shard(x)
        if in_backward():  # activation checkpointing recomputes only this layer
            self._restore_recomputed = restore
        else:
            self._restore, self._is_open = restore, True
            self._borders.begin()

    def run_first(
        self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, length: int | None
    ) -> Any:
        """Run the first layer of a pipeline stage, which starts the region.

        Args:
            own: the layer's forward.
            args: its positional arguments.
            kwargs: its keyword arguments.
            length: the length of the whole sequence, if the hidden states are this rank's tokens already; None on the
                first stage, where they are split.
        """
        if length is None:
            args, kwargs = self._start(None, args, kwargs)
        else:
            self.sequence.set_length(length)
            self._open(hidden_states(args, kwargs)[0])
        try:
            return own(*args, **kwargs)
        finally:
            self._end_recomputation(None, (), None)

    def end_stage(self) -> None:
        """End the region at the end of a pipeline stage that is not the last."""
        self._is_open = False
        if self._restore is not None:
            self._restore()
            self._restore = None

    def _end_recomputation(self, module: nn.Module | None, args: tuple[Any, ...], output: Any) -> None:
        if self._restore_recomputed is not None:
            self._restore_recomputed()
            self._restore_recomputed = None

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        # A model may apply the norm to its embeddings or inside of layers too.
        if not self._is_open or not self._borders.has_ended():
            return output
        self.end_stage()
        if isinstance(output, Tensor):
            return self.sequence.unsplit(output)
        return (self.sequence.unsplit(output[0]), *output[1:])

    def _check_ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._is_open:
            self._is_open = False
            raise PlanError(
                f"the layers of {type(module).__name__} ran, but the final norm of its sharding plan did not run after "
                "them, so each rank still has its own tokens only. To make the sequence whole after the last layer, "
                "leave the FINAL_NORM out of the plan"
            )


class WithoutTrainingKernel:
    """Hooks that put a mixer, but none of the modules in it, into evaluation mode while it runs.

    They keep Mamba2's code from ``mamba_split_conv1d_scan_combined`` of the package mamba-ssm, which transformers calls
    in training mode only. It takes the weights of the norm and of the output projection instead of calling their
    modules. Under tp each rank has a part of both: the kernel would take the mean square over this rank's channels, and
    nothing would sum its results over the ranks. In evaluation mode the same code calls the kernels of the convolution
    and of the scan, which read local head counts, and then these two modules, which have the runtime's hooks.
    """

    def __init__(self, mixer: nn.Module):
        self._was_training = False
        mixer.register_forward_pre_hook(self._enter)
        mixer.register_forward_hook(self._leave, always_call=True)

    def _enter(self, mixer: nn.Module, args: tuple[object, ...]) -> None:
        self._was_training, mixer.training = mixer.training, False

    def _leave(self, mixer: nn.Module, args: tuple[object, ...], output: object) -> None:
        mixer.training = self._was_training
