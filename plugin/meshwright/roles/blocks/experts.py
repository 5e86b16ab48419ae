"""Experts, their router and their adapters. They take each token by itself, so no block gathers tokens for them.

PEFT adapts a weight of all E experts (``LoraConfig.target_parameters``) by two factors of a rank r: A has r rows for
each expert, one expert after the other, and B has E columns for each of its r ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import nn

from meshwright.errors import PlanError
from meshwright.facts import Facts, fact
from meshwright.layout.row_layout import RowLayout
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.roles.adapters import is_adapted, projection
from meshwright.roles.blocks.block import BlockKind
from meshwright.roles.linear_kernel import is_projection, out_features
from meshwright.roles.sharding_plan import Role

_OUTPUT_BIAS = "down_proj_bias"  # transformers' implementations of experts read their weights by these names
_ROUTERS = frozenset({"router", "gate"})


class Experts(BlockKind):
    """A module, or a layer, that owns experts and a router that sends tokens to them.

    Experts that every token takes are an MLP, which gathers its input itself.
    """

    @classmethod
    def claim(cls, module: nn.Module, hidden: int, hinted: Mapping[str, Role]) -> dict[str, Role]:
        return roles_of_experts(module)


def roles_of_experts(module: nn.Module) -> dict[str, Role]:
    """Return the roles of the experts and routers that a module owns, by name; empty if it owns no experts.

    The owner of experts with adapters is the module around these.
    """
    if is_adapted(module):
        return {}
    children = dict(module.named_children())
    experts = [name for name, child in children.items() if is_experts(projection(child))]
    stacked = [name for name, child in children.items() if name not in experts and _is_own_code(name, child)]
    if not experts and _ROUTERS & children.keys():
        experts, stacked = stacked, []
    # What looks at token ids would need those of this rank's tokens.
    if not experts or "input_ids" in inspect.signature(module.forward).parameters:
        return {}
    is_layer = any(hasattr(m, "is_causal") or isinstance(m, nn.Conv1d) for m in module.modules())  # where tokens meet
    routers = {
        name: child
        for name, child in children.items()
        if name in _ROUTERS or _is_gate(child) or (is_projection(child) and not is_layer)
    }
    inside = {f"{name}.{n}".rstrip("."): m for name, child in routers.items() for n, m in child.named_modules()}
    token_wise = [name for name, m in inside.items() if _is_token_wise(m)]
    # Experts of a family's own code may hold their weights in a module of theirs.
    own = {name: children[name] for name in experts if not is_experts(projection(children[name]))}
    inside = {n: m for name, child in own.items() for n, m in child.named_modules(prefix=name) if m is not child}
    parts = [name for name, m in inside.items() if list(m.parameters(recurse=False))]
    roles = dict.fromkeys(("", *token_wise, *stacked, *parts), Role.ROUTER)
    return roles | dict.fromkeys(experts, Role.EXPERTS)


@fact
def routed_modules(facts: Facts) -> list[tuple[str, nn.Module, Role]]:
    """Return the experts of a model, their owners and their routers, each with its name and its role."""
    return [
        (f"{owner}.{name}".strip("."), module.get_submodule(name), role)
        for module, owner in facts.names.items()
        for name, role in roles_of_experts(module).items()
    ]


@fact
def experts_of_own_code(facts: Facts) -> str | None:
    """Return the name of experts that a model calls otherwise than by transformers' interface; None if there are none.

    Every rank can have such experts whole, but ranks cannot share them.
    """
    experts = ((name, module) for name, module, role in routed_modules(facts) if role is Role.EXPERTS)
    return next((name for name, module in experts if not is_experts(projection(module))), None)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module computes, for each token by itself, the weighted sum of what some experts return.

    The marks are those that transformers' ``use_experts_implementation`` sets on each such module. The arguments of its
    forward are the tokens and what the router has chosen for them, so that ranks can exchange the tokens.
    """
    return all(name in vars(module) for name in ("has_gate", "is_transposed", "config")) and hasattr(
        module.config, "_experts_implementation"
    )


@fact
def has_experts(facts: Facts) -> bool:
    """Return whether a model has a module of experts."""
    return any(map(is_experts, facts.names))


@fact
def owners_of_experts(facts: Facts) -> list[nn.Module]:
    """Return the modules that call experts, perhaps through adapters of these."""
    return [
        module
        for module in facts.names
        if not is_adapted(module) and any(is_experts(projection(child)) for child in module.children())
    ]


def has_output_bias(module: nn.Module) -> bool:
    """Return whether experts add a bias to their results."""
    return _OUTPUT_BIAS in module._parameters


def expert_layouts(facts: Facts, *, ep: int, etp: int) -> dict[str, TensorLayout]:
    """Return the layout of each weight of experts by name, if ``ep`` x ``etp`` ranks share them."""
    if ep * etp == 1:
        return {}
    return {
        f"{name}.{own}": TensorLayout(
            shape=parameter.shape,
            cuts=(
                ("ep", RowLayout.padded(parameter.shape[0], ep)),
                *((("etp", _slices(module, own, parameter, etp, name)),) if etp > 1 else ()),
            ),
        )
        for name, module in facts.modules.items()
        if is_experts(module)
        for own, parameter in module.named_parameters()
    }


def _slices(module: nn.Module, name: str, parameter: nn.Parameter, etp: int, owner: str) -> RowLayout:
    """Return which rows of a weight of experts each rank of etp holds: those of a part of the channels between the
    projections."""
    if name == _OUTPUT_BIAS:
        return RowLayout.replicated(parameter.shape[0], etp)
    is_inner = name.removesuffix("_bias") in ("gate_up_proj", "up_proj")
    if not is_inner and name != "down_proj":
        raise PlanError(
            f"the experts {owner} have a weight {name!r}, which ParallelPlan.etp cannot slice; set etp=1, and ep "
            "for more ranks that share experts"
        )
    is_last = name.endswith("_bias") or is_inner is bool(module.is_transposed)
    dim = parameter.ndim - 1 if is_last else parameter.ndim - 2
    size = parameter.shape[dim]
    halves = 2 if is_inner and module.has_gate else 1
    if size // halves % etp:
        raise PlanError(
            f"each expert of {owner} has {size // halves} channels, which ParallelPlan.etp={etp} ranks cannot share "
            "evenly; set etp to a divisor"
        )
    # If the halves alternate, as in gpt-oss, a rank's part is contiguous.
    parts = (size // halves,) * halves if getattr(module, "is_concatenated", True) else (size,)
    return RowLayout.even(size, etp, dim, parts=parts)


def _is_own_code(name: str, module: nn.Module) -> bool:
    """Return whether a module that code of the family's own calls holds the stacked weights of several experts."""
    weights = module.parameters()
    first = next(weights, None)
    if first is None or (name != "experts" and not (first.ndim == 3 and all(weight.ndim == 3 for weight in weights))):
        return False
    return not any(is_projection(m) or isinstance(m, nn.Embedding | nn.modules.conv._ConvNd) for m in module.modules())


def _is_gate(module: nn.Module) -> bool:
    """Return whether a module gives each token one number, which scales what shared experts return."""
    return is_projection(module) and out_features(module) == 1


def _is_token_wise(module: nn.Module) -> bool:
    """Return whether a module has weights of its own, and the dims of these leave no room for several tokens."""
    own = list(module.parameters(recurse=False))
    return bool(own) and all(parameter.ndim <= 2 for parameter in own) and not isinstance(module, nn.Embedding)


@fact
def adapted_experts(facts: Facts) -> dict[str, nn.Module]:
    """Return the modules that hold adapters of experts, by name; one for each adapted weight, around each other."""
    found = facts.modules.items()
    return {name: module for name, module in found if is_adapted(module) and is_experts(projection(module))}


def check_adapted_experts(facts: Facts, ep: int, etp: int, zero_stage: int) -> None:
    """Raise if ep ranks cannot share the adapters of a model's experts, or a plan cuts each expert."""
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
