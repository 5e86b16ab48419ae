"""Apply tensor and sequence parallelism to a stock decoder: replace parameters, add hooks.

Per block and pass there is one gather at the input and one reduction at the output (design: four
collectives a layer, not one a projection). Without sequence parallelism the pair is "nothing forward,
all-reduce backward" and its mirror image; with it, all-gather and reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.parallel.collectives import Axis, reduce, reduce_for_shards, share
from meshwright.parallel.dropout import DropoutStreams, Restore
from meshwright.parallel.layout import RowLayout, ShardRecord, expanded
from meshwright.parallel.regather import RegatheredProjections
from meshwright.parallel.sequence import SequenceSharding
from meshwright.parallel.structure import Block, DecoderStructure
from meshwright.parallel.vocab import VocabParallelEmbedding, VocabParallelHead

# Given a parameter and its layout: this rank's shard, or None where the parameter holds its values itself.
ShardSource = Callable[[nn.Parameter, RowLayout], Tensor | None]

# Given a parameter and its shard: what is to be put in the parameter's place.
Keep = Callable[[nn.Parameter, Tensor], Tensor]

Shards = dict[int, tuple[Tensor, ShardRecord]]  # by ``id`` of the parameter that they are to replace


def make_shards(
    model: nn.Module,
    layouts: dict[str, Any],
    axis: Axis,
    device: torch.device,
    source: ShardSource,
    keep: Keep = lambda _, shard: shard,
) -> Shards:
    """This rank's shard of each parameter, or what ``keep`` makes of it; the model is not changed."""
    shards: Shards = {}
    # Largest first: a shard may pass through its full tensor, which then adds to the fewest other shards.
    named = sorted(model.named_parameters(remove_duplicate=False), key=lambda item: -item[1].numel())
    for name, parameter in named:
        if id(parameter) not in shards:
            rows = layouts[name].rows if name in layouts else _whole(parameter, axis)
            record = ShardRecord(
                name=name,
                global_shape=parameter.shape,
                layout=rows,
                rank=axis.rank,
                is_grad_partial=name in layouts and layouts[name].is_grad_partial,
            )
            shard = source(parameter, rows)
            if shard is None:
                shard = parameter.data if rows.is_replicated else rows.take(parameter.data, axis.rank)
            shards[id(parameter)] = keep(parameter, shard.to(device)), record
    return shards


def shard_shape(parameter: nn.Parameter, layout: Any | None) -> torch.Size:
    """The shape of a rank's shard of a parameter, given its ParameterLayout, if it has one."""
    shape = list(parameter.shape)
    if layout is not None and not layout.rows.is_replicated:
        shape[layout.rows.dim] = layout.rows.local_size
    return torch.Size(shape)


def attach_shards(model: nn.Module, shards: Shards) -> dict[int, nn.Parameter]:
    """Replace each parameter by its shard; a tied parameter stays one parameter.

    Returns:
        ``id`` of the old parameter -> the new one, for the optimizer.
    """
    replaced: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in replaced:
            shard, record = shards[id(parameter)]
            new = parameter
            if record.is_sharded or parameter.is_meta:
                new = nn.Parameter(shard, requires_grad=parameter.requires_grad)
            else:
                new.data = shard  # its identity may matter to the user; only .data moves
            new.meshwright = record  # type: ignore[attr-defined]
            replaced[id(parameter)] = new
        module_name, _, suffix = name.rpartition(".")
        model.get_submodule(module_name)._parameters[suffix] = replaced[id(parameter)]
    return replaced


def install_tensor_parallel(
    structure: DecoderStructure,
    axis: Axis,
    *,
    sequence_parallel: bool,
    streams: DropoutStreams,
    keep_logits_sharded: Callable[[], bool],
) -> None:
    """Add the hooks that move activations at the borders of every block."""
    VocabParallelEmbedding(structure.embedding, RowLayout.padded(structure.vocab_size, axis.size), axis)
    if structure.head is not None:
        VocabParallelHead(structure.head, structure.vocab_size, axis, keep_logits_sharded)
    sequence = SequenceSharding(axis) if sequence_parallel else None
    for block in structure.blocks:
        _BlockHooks(block, axis, sequence, streams)
        _localise_attributes(block)
        for norm, rows in block.wide_norms:
            _WideNorm(norm, rows, axis)
    if sequence is not None:
        _SequenceRegion(structure, sequence, streams)


def _whole(parameter: Tensor, axis: Axis) -> RowLayout:
    return RowLayout.replicated(parameter.shape[0] if parameter.ndim else 1, axis.size)


class _BlockHooks:
    """The two borders of one block."""

    def __init__(self, block: Block, axis: Axis, sequence: SequenceSharding | None, streams: DropoutStreams):
        self.axis, self.sequence, self.streams = axis, sequence, streams
        self._restore: Restore | None = None
        self._bias: nn.Parameter | None = None
        self._projections = RegatheredProjections(list(block.columns)) if sequence is not None else None
        block.module.register_forward_pre_hook(self._enter, with_kwargs=True)
        block.module.register_forward_hook(self._close, always_call=True)
        block.row.register_forward_pre_hook(self._lift_bias)
        block.row.register_forward_hook(self._reduce, always_call=True)

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, put_back = _hidden_states(args, kwargs)
        x = _cast_for_autocast(x)
        if self.sequence is None:
            self._restore = self.streams.enter_shard(x)
            return put_back(share(x, self.axis))
        assert self._projections is not None
        full = self.sequence.gather(x)
        self._projections.open(full, x, self.axis)
        return put_back(full)

    def _close(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._projections is not None:
            self._projections.close()

    def _lift_bias(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # Each rank would add the bias to its partial sum: take it out of the call, add it once after.
        self._bias, module._parameters["bias"] = module._parameters["bias"], None

    def _reduce(self, module: nn.Module, args: tuple[Any, ...], output: Tensor | None) -> Tensor | None:
        bias, self._bias = self._bias, None
        module._parameters["bias"] = bias
        if output is None:  # the projection raised; the hook runs only to put the bias back
            return None
        if self._restore is not None:
            self._restore()
            self._restore = None
        summed = reduce(output, self.axis) if self.sequence is None else self.sequence.reduce_scatter(output)
        return summed if bias is None else summed + bias.to(summed.dtype)


class _SequenceRegion:
    """From the first layer's input to the final norm's output, each rank has its own tokens.

    It starts after the embedding because models derive positions and masks from the embedding's full
    length, and ends with the norm so that ``last_hidden_state`` is whole.
    """

    def __init__(self, structure: DecoderStructure, sequence: SequenceSharding, streams: DropoutStreams):
        self.sequence, self.streams = sequence, streams
        self._restore: Restore | None = None
        structure.first_layer.register_forward_pre_hook(self._start, with_kwargs=True)
        structure.final_norm.register_forward_hook(self._end)

    def _start(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, put_back = _hidden_states(args, kwargs)
        self._restore = self.streams.enter_shard(x)
        return put_back(self.sequence.split(x))

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if self._restore is not None:
            self._restore()
            self._restore = None
        return self.sequence.unsplit(output)


class _WideNorm:
    """An RMS norm over a width that is sharded: the mean square is that of all ranks.

    The stock module divides by the root mean square of the local part. Its output times
    ``rms_local / rms_global`` is exact, whatever it does with its weight.
    """

    def __init__(self, norm: nn.Module, rows: RowLayout, axis: Axis):
        self.axis, self.size = axis, rows.size
        eps: Any = getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))
        self.eps = float(eps)
        # A key head that several ranks hold counts once.
        self.weight = 1.0 / expanded(rows.copies(axis.rank), torch.empty(0, dtype=torch.float64))
        norm.register_forward_hook(self._rescale)

    def _rescale(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        square = args[0].to(torch.promote_types(args[0].dtype, torch.float32)).pow(2)
        own_mean = square.mean(-1, keepdim=True)
        weighted = (square * self.weight.to(square)).sum(-1, keepdim=True)
        mean = reduce_for_shards(weighted, self.axis) / self.size
        return output * ((own_mean + self.eps) / (mean + self.eps)).sqrt().to(output.dtype)


class LocalConfig:
    """A model's config with some values replaced, for one module that reads its head counts there."""

    def __init__(self, config: Any, **local: int):
        self.__dict__.update(_config=config, **local)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_config" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_config"], name)


def _localise_attributes(block: Block) -> None:
    if block.heads is None:
        return
    for name, value in block.heads.local_attributes(block.module).items():
        setattr(block.module, name, value)
    if block.has_fused_qkv and hasattr(block.module, "config"):
        local = LocalConfig(
            block.module.config,
            num_attention_heads=block.heads.local_heads,
            num_key_value_heads=block.heads.num_local_kv_heads,
        )
        setattr(block.module, "config", local)  # noqa: B010  nn.Module's annotations refuse the plain form


def _hidden_states(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The activation among a block's arguments, and how to put another in its place."""
    if args and isinstance(args[0], Tensor):
        return args[0], lambda x: ((x, *args[1:]), kwargs)
    for name in ("hidden_states", "x", *kwargs):
        value = kwargs.get(name)
        if isinstance(value, Tensor) and value.is_floating_point():
            return value, lambda x, name=name: (args, {**kwargs, name: x})
    raise AssertionError("a block was called without hidden states")


def _cast_for_autocast(x: Tensor) -> Tensor:
    """Under autocast the projections would cast their input anyway: doing it first halves the bytes."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
