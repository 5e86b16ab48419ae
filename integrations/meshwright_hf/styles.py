"""Styles for transformers' own tensor parallelism, which a ``tp_plan`` can use after ``register``.

They correct two problems of transformers' own styles: a wrong gradient of norms under accumulation, and the memory of
the logits. A model that Meshwright distributes needs neither style.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from transformers.distributed.tensor_parallel import ColwiseParallel, TensorParallelLayer

from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import share
from meshwright.parallel.losses.cross_entropy import VocabParallelCrossEntropy, Words
from meshwright.parallel.shards.stand_in import ShardedLogits, reading_shards


class PartialNorm(TensorParallelLayer):
    """The style of a replicated norm over sharded heads (q_norm, k_norm), whose gradient is summed once per pass.

    transformers' ``replicated_with_grad_allreduce`` sums ``parameter.grad``, including the gradients of earlier passes.
    With two accumulation steps and two ranks the gradient becomes 1.5 times as large.
    """

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        hooked: dict[str, Tensor] = {}

        def add_up(grad: Tensor) -> Tensor:
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=mesh.get_group())
            return grad

        def hook(module: nn.Module, _: object) -> None:
            # Loading replaces the parameters after install_forward, so hooks are added at the first forward pass.
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and hooked.get(name) is not parameter:
                    parameter.register_hook(add_up)
                    hooked[name] = parameter

        module.register_forward_pre_hook(hook)
        return module


class VocabHead(ColwiseParallel):
    """The style of a head whose logits stay sharded over the vocabulary until transformers' causal-LM loss.

    If gradients are disabled, the logits are gathered, as by ``colwise_gather_output``.
    """

    def __init__(self) -> None:
        super().__init__(output_layouts=None)
        self._gathering = ColwiseParallel(output_layouts=Replicate())

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True

    def transform_inputs_pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh
    ) -> Any:
        if not torch.is_grad_enabled():
            return self._gathering.transform_inputs_pre_forward(module, args, kwargs, mesh)
        return (share(args[0], _axis(mesh)), *args[1:]), kwargs

    def transform_output_post_forward(self, module: nn.Module, output: Tensor, mesh: DeviceMesh) -> Any:
        if not torch.is_grad_enabled():
            return self._gathering.transform_output_post_forward(module, output, mesh)
        words: int = module.out_features  # type: ignore[assignment]
        return VocabLogits.of(output, words, _axis(mesh))


class VocabLogits(ShardedLogits):
    """This rank's columns of the logits; only ``cross_entropy`` may read them, any other read raises an error."""

    vocab_size: int
    axis: Axis

    @classmethod
    def of(cls, local: Tensor, vocab_size: int, axis: Axis) -> VocabLogits:
        """Return this rank's columns as VocabLogits; all ranks except the last have the same number of columns."""
        logits = local.as_subclass(cls)
        logits.vocab_size, logits.axis = vocab_size, axis
        return logits

    @classmethod
    def run(cls, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        logits = args[0] if args else kwargs.get("input")
        if not isinstance(logits, VocabLogits):
            return super().run(func, name, args, kwargs)
        if func is F.cross_entropy:
            return _cross_entropy(logits, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
        if name == "view" and args[1:] == (-1, logits.vocab_size):
            with reading_shards():
                return cls.of(logits.reshape(-1, logits.shape[-1]), logits.vocab_size, logits.axis)
        result = super().run(func, name, args, kwargs)
        if isinstance(result, cls):
            result.vocab_size, result.axis = logits.vocab_size, logits.axis
        return result


def _cross_entropy(
    logits: VocabLogits, target: Tensor, *, ignore_index: int = -100, reduction: str = "mean", **others: object
) -> Tensor:
    if reduction not in ("mean", "sum") or any(value not in (None, 0.0) for value in others.values()):
        raise ValueError(
            f"sharded logits support only cross_entropy(reduction='mean' or 'sum'), not reduction={reduction!r}, "
            f"{', '.join(others)}; use the style 'colwise_gather_output' for the head"
        )
    axis = logits.axis
    share_of_words = -(-logits.vocab_size // axis.size)
    words = Words.of_columns(share_of_words, vocab_size=logits.vocab_size, ignored=ignore_index, axis=axis)
    total = VocabParallelCrossEntropy.apply(logits.as_subclass(Tensor), target, words)
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _axis(mesh: DeviceMesh) -> Axis:
    return Axis("tp", size=mesh.size(), rank=mesh.get_local_rank(), group=mesh.get_group())


STYLES: dict[str, TensorParallelLayer] = {
    "meshwright_partial_norm": PartialNorm(),
    "meshwright_vocab_head": VocabHead(),
}
