"""Hooks inside of mixers: sums between their channels, and a kernel of Mamba that parts of its weights cannot use.

In training, transformers may call one kernel of the package mamba-ssm for all from the convolution to the output
projection: ``mamba_inner_fn`` or ``mamba_split_conv1d_scan_combined``. It takes the weights of the norm and of the
projections instead of calling their modules. Under tp each rank has a part of them: the kernel would take the mean
square over this rank's channels, and nothing would sum its results over the ranks. In evaluation mode the same code
calls the kernels of the convolution and of the scan, which work on each channel or head alone, and then the modules,
which have the runtime's hooks.
"""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import reduce_for_shards


class WithoutTrainingKernel:
    """Hooks that put a mixer, but none of the modules in it, into evaluation mode while it runs."""

    def __init__(self, mixer: nn.Module):
        self._was_training = False
        mixer.register_forward_pre_hook(self._enter)
        mixer.register_forward_hook(self._leave, always_call=True)

    def _enter(self, mixer: nn.Module, args: tuple[object, ...]) -> None:
        self._was_training, mixer.training = mixer.training, False

    def _leave(self, mixer: nn.Module, args: tuple[object, ...], output: object) -> None:
        mixer.training = self._was_training


class SummedForChannels:
    """A hook that sums what the ranks compute of values that the channels of every rank use."""

    def __init__(self, projection: nn.Module, axis: Axis):
        self._axis = axis
        projection.register_forward_hook(self._sum)

    def _sum(self, projection: nn.Module, args: tuple[object, ...], output: Tensor) -> Tensor:
        return reduce_for_shards(output, self._axis)
