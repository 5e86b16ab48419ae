"""Low-rank adapters of experts: a rank that holds some of the experts holds the adapters' parts for these.

PEFT adapts a weight of all E experts (``LoraConfig.target_parameters``) by two factors of a rank r: A has r rows for
each expert, one expert after the other, and B has E columns for each of its r ranks.
"""

from __future__ import annotations

from torch import nn

from meshwright.errors import PlanError
from meshwright.facts import Facts, fact
from meshwright.layout.row_layout import RowLayout
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.roles.adapters import is_adapted, projection
from meshwright.roles.blocks.experts import is_experts


@fact
def adapted_experts(facts: Facts) -> dict[str, nn.Module]:
    """Return the modules that hold adapters of experts, by name; one for each adapted weight, around each other."""
    found = facts.modules.items()
    return {name: module for name, module in found if is_adapted(module) and is_experts(projection(module))}


def check_adapted_experts(facts: Facts, *, ep: int, etp: int, zero_stage: int) -> None:
    """Raise a PlanError if ``ep`` ranks cannot share the adapters of a model's experts, or a plan cuts each expert."""
    for name, module in adapted_experts(facts).items():
        if zero_stage == 3:
            raise PlanError(
                f"{name!r} has adapters (LoraConfig.target_parameters), whose forward writes the weights of the "
                "experts, but under ParallelPlan.zero_stage=3 no rank has these whole. Use zero_stage=2"
            )
        if etp > 1:
            raise PlanError(
                f"{name!r} has adapters (LoraConfig.target_parameters) of whole experts, but ParallelPlan.etp={etp} "
                "slices the experts; set etp=1, and ep for more ranks that share experts"
            )
        if (count := _count(module)) % ep:
            raise PlanError(
                f"{name!r} has adapters (LoraConfig.target_parameters) of {count} experts, which {ep} ranks cannot "
                "share evenly; set ParallelPlan.ep to a divisor of the number of experts"
            )


def adapter_layouts(facts: Facts, ep: int) -> dict[str, TensorLayout]:
    """Return the layout of each factor of the adapters of experts by name, if ``ep`` ranks share these."""
    layouts = {}
    for name, module in adapted_experts(facts).items() if ep > 1 else ():
        for factor, dim in (("lora_A", 0), ("lora_B", 1)):
            for own, parameter in module.get_submodule(factor).named_parameters():
                size, count = parameter.shape[dim], _count(module)
                rows = RowLayout.even(size, ep, dim, parts=[size] if dim == 0 else [count] * (size // count))
                layouts[f"{name}.{factor}.{own}"] = TensorLayout(shape=parameter.shape, cuts=(("ep", rows),))
    return layouts


def keep_local_adapters(facts: Facts, ep: int) -> None:
    """Let the adapters of experts compute for as many experts as each of ``ep`` ranks holds."""
    for module in adapted_experts(facts).values():
        module.num_experts = module.num_experts // ep  # type: ignore[operator, assignment]


def _count(adapted: nn.Module) -> int:
    return next(projection(adapted).parameters()).shape[0]
