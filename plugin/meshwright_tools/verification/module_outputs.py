"""Records each module's output in a form that does not depend on how the tokens are sharded over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.plan.config import ParallelPlan
from meshwright.roles.adapters import is_adapted
from meshwright.roles.blocks import mixers_of
from meshwright_tools.verification.comparison_report import Difference


@dataclass(frozen=True)
class Output:
    """The output of one module, summed over the tokens.

    Args:
        tokens: the number of tokens.
        ndim: the output's number of dims.
        sums: the sums of the values and of their squares, [2, width].
    """

    tokens: int
    ndim: int
    sums: Tensor


class ModuleOutputs:
    """Records the first output of each module, in the order of the calls.

    A projection and its adapters are recorded together, since only their sum is reduced over tp, and so is a mixer,
    which is reduced at its end.
    """

    def __init__(self, model: nn.Module):
        self.seen: dict[str, Output] = {}
        adapted = [module for module in model.modules() if is_adapted(module)]
        together = [*adapted, *mixers_of(model).values()]
        addends = {part for module in together for part in module.modules()}.difference(together)
        self._handles = [
            module.register_forward_hook(self._hook(name))
            for name, module in model.named_modules()
            if name and module not in addends
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> object:
        def take(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            x = output[0] if isinstance(output, tuple | list) and output else output
            if name in self.seen or not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
                return
            rows = x.detach().reshape(-1, x.shape[-1])
            self.seen[name] = Output(len(rows), x.ndim, torch.stack([rows.sum(0), rows.square().sum(0)]))

        return take


def output_differences(
    expected: Mapping[str, Output], ranks: Sequence[Mapping[str, Output]], plan: ParallelPlan
) -> list[Difference]:
    """Compare the outputs of modules on all ranks with those on one device.

    An output is compared if every rank of its pipeline stage holds all of it, or a contiguous slice of its tokens
    (sequence parallelism). An output that is sharded over its width or over heads is not compared, but later outputs
    computed from it are.

    Args:
        expected: the outputs on one device.
        ranks: the outputs on each rank of the plan, all for the same batch, of the modules of the rank's stages.
        plan: the plan.
    """
    found, tp = [], plan.tp
    for name, one in expected.items():
        parts = [rank[name] for rank in ranks if name in rank]
        if one.ndim != 3 or len(parts) < plan.dp * tp or any(part.sums.shape != one.sums.shape for part in parts):
            continue
        if all(part.tokens == one.tokens for part in parts):
            sums = [part.sums for part in parts]
        elif all(part.tokens * tp == one.tokens for part in parts):
            sums = [sum_of([part.sums for part in parts[i : i + tp]]) for i in range(0, len(parts), tp)]
        else:
            continue
        scale = one.sums.abs().amax(1, keepdim=True).clamp_min(torch.finfo(one.sums.dtype).tiny)
        worst = max(float(((actual - one.sums) / scale).abs().max()) for actual in sums)
        found.append(Difference("outputs of modules, in evaluation", name, "the first batch", worst))
    return found


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)
