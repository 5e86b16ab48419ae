"""``python -m conformance.quantised_bases``: frozen bases of HQQ, GPTQ and AWQ under plans, against one process.

Each library quantises the projections of a small Llama to 4 bits in groups of 64. What is beside them is trained for
three steps. Sums in another order differ by about 1e-6 in float32, in which HQQ and GPTQ compute, so their tolerance is
1e-5. AWQ's layers compute in float16, of which one rounding is 5e-4. The packed weights must be the same bytes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from conformance.families.markdown import table
from harness.torchrun import torchrun
from support.exact import relative_difference
from support.models import build, labels_for, tokens

PLANS = ("dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "pp2", "cp2", "tp2", "tp2+sp")
TOLERANCES = {"hqq": 1e-5, "gptq": 1e-5, "awq": 2**-11}
GROUP = 64


def hqq(linear: nn.Linear) -> nn.Module:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear  # type: ignore[import-not-found,unused-ignore]

    config = BaseQuantizeConfig(nbits=4, group_size=GROUP)
    made: nn.Module = HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu")
    return made


def gptq(linear: nn.Linear) -> nn.Module:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear  # type: ignore[import-not-found,unused-ignore]

    made = TorchLinear(**_options(linear))
    scales = _scales(linear)
    made.pack_original(linear, scales, torch.full_like(scales, 8), torch.arange(linear.in_features) // GROUP)
    made.post_init()
    return made  # type: ignore[no-any-return,unused-ignore]


def awq(linear: nn.Linear) -> nn.Module:
    from gptqmodel.nn_modules.qlinear.torch_awq import (  # type: ignore[import-not-found,unused-ignore]
        AwqTorchLinear,
    )

    made = AwqTorchLinear(**_options(linear), register_buffers=True)
    scales = _scales(linear)
    made.pack(linear, scales, torch.full_like(scales, 8))
    made.post_init()
    return made  # type: ignore[no-any-return,unused-ignore]


LIBRARIES: dict[str, Callable[[nn.Linear], nn.Module]] = {"hqq": hqq, "gptq": gptq, "awq": awq}


def _options(linear: nn.Linear) -> dict[str, Any]:
    sizes = {"in_features": linear.in_features, "out_features": linear.out_features, "bias": linear.bias is not None}
    return {"bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, **sizes}


def _scales(linear: nn.Linear) -> Tensor:
    groups = linear.weight.detach().view(linear.out_features, -1, GROUP)
    return (groups.abs().amax(2) / 7).clamp_min(1e-6)


def train(library: str, plan: str | None) -> dict[str, Tensor]:
    """Train what is beside the base for three steps; returns the losses and all tensors of the model."""
    model: Any = build("llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            model.set_submodule(name, LIBRARIES[library](module))
    model.is_quantized, model.quantization_method = True, library
    optimizer: Any = torch.optim.SGD([p for p in model.parameters() if p.is_floating_point()], lr=0.1)
    batches: Any = [{"input_ids": x, "labels": labels_for(x)} for x in (tokens(4, 11, seed=step) for step in range(3))]
    if plan is not None:
        model, optimizer, batches = mw.to_distributed(model, optimizer, batches, plan=plan)
    losses = []
    for batch in batches:
        loss = model.train()(**batch).loss
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict() if plan is None else mw.full_state_dict(model)
    return {"losses": torch.stack(losses)} | {name: x for name, x in state.items() if isinstance(x, Tensor)}


def compare(library: str, plan: str, expected: dict[str, Tensor]) -> str:
    """Return "equal", the error that refuses the plan, or how far the plan is from one process."""
    try:
        actual = train(library, plan)
    except mw.PlanError as error:
        return f"refused: {error}"
    if dist.get_rank():
        return ""
    if lost := expected.keys() - actual.keys():
        return f"differs: {len(lost)} tensors are not in the state, such as {min(lost)}"
    worst = 0.0
    for name, x in expected.items():
        if not x.is_floating_point() and not torch.equal(x, actual[name]):
            return f"differs: the bytes of {name}"
        if x.is_floating_point() and "k_proj.bias" not in name:  # whose gradient is rounding alone
            worst = max(worst, relative_difference(actual[name], x))
    return "equal" if worst < TOLERANCES[library] else f"differs by {worst:.1e}"


def main(arguments: list[str]) -> int:
    """Run the libraries on two ranks, and print a table; the status is 1 if one differs."""
    logging.disable(logging.WARNING)
    if not dist.is_torchelastic_launched():
        return torchrun(2, "conformance.quantised_bases", *arguments)
    rows, failed = [], False
    for library in arguments or LIBRARIES:
        try:
            expected = train(library, None)
        except ImportError as error:
            rows.append([library, f"not run here: {error}", *[""] * (len(PLANS) - 1)])
            continue
        cells = [compare(library, plan, expected) for plan in PLANS]
        failed |= any(cell.startswith("differs") for cell in cells)
        rows.append([library, *cells])
    if dist.is_initialized() and dist.get_rank():
        return 0
    print("\n".join(table(("base", *PLANS), rows)))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
