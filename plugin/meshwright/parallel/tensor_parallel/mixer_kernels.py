"""Keep Mamba2's code from a kernel that computes, in training, all from the convolution to the output projection.

``mamba_split_conv1d_scan_combined`` of the package mamba-ssm takes the weights of the norm and of the output projection
instead of calling their modules. Under tp each rank has a part of both: the kernel would take the mean square over this
rank's channels, and nothing would sum its results over the ranks. transformers calls it in training mode only. In
evaluation mode the same code calls the kernels of the convolution and of the scan, which read local head counts, and
then the modules of the norm and of the projection, which have the runtime's hooks.
"""

from __future__ import annotations

from torch import nn


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
