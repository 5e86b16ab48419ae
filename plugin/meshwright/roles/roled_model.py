"""A model and the roles that a sharding plan gives to its modules and parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, cast

from torch import nn

from meshwright.errors import PlanError, UncoveredParameterError
from meshwright.facts import Facts
from meshwright.roles.adapters import check_adapters, is_adapted, projection
from meshwright.roles.sharding_plan import BlockPart, Role, ShardingPlan

M = TypeVar("M", bound=nn.Module)


def _check_stored(name: str, module: nn.Module) -> None:
    """Raise if a module computes its weight or bias from other tensors, since tp shards parameters."""
    for own in ("weight", "bias"):
        is_computed = vars(module).get(own) is not None or isinstance(getattr(type(module), own, None), property)
        if own not in module._parameters and is_computed:
            raise PlanError(
                f"{name}.{own} is no parameter: each forward pass computes it from other tensors "
                "(torch.nn.utils.prune, weight_norm or a parametrization), and tp shards parameters. Store it before "
                f"to_distributed: prune.remove(module, {own!r}), remove_weight_norm(module) or "
                f"parametrize.remove_parametrizations(module, {own!r}); or use ParallelPlan(tp=1)"
            )


class RoledModel:
    """A model, and the roles of its modules and parameters.

    Args:
        facts: what the decoder shows.
        plan: the sharding plan that gives the roles.
        instead: the plan to use if a module is missing, for messages.

    Attributes:
        modules: the modules by name; a module with several names is listed under each.
        roles: the role of each module, and of each parameter that the plan lists by its own name.
    """

    def __init__(self, facts: Facts, plan: ShardingPlan, *, instead: str = "ParallelPlan(tp=1)"):
        self.facts, self.plan, self.instead = facts, plan, instead
        self.model, self.modules = facts.model, facts.modules
        self.roles = {name: role for name in self.modules if (role := plan.role_of(name)) is not None}
        self.roles |= self._roles_inside_of_whole_modules()
        self.roles |= self._roles_of_parameters()
        self._owners = {name: owner for name in self.roles if (owner := self._owning_block(name)) is not None}

    @property
    def block_names(self) -> list[str]:
        """The names of the modules that own attention and MLP blocks, in the order of the model."""
        owners = set(self._owners.values())
        return [name for name, role in self.roles.items() if role.part is BlockPart.BLOCK or name in owners]

    def inside(self, block_name: str) -> dict[str, Role]:
        """Return the roles of the modules and parameters in a block, by name."""
        return {name: self.roles[name] for name, owner in self._owners.items() if owner == block_name}

    def parameters(self, name: str) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters, with full names, that the role of ``name`` applies to."""
        if name not in self.modules:
            owner, _, own = name.rpartition(".")
            return [(name, cast(nn.Parameter, self.modules[owner]._parameters[own]))]
        module = self.modules[name]
        inside = self.facts.named_inside(module) if is_adapted(module) else [("", module)]
        found: dict[nn.Parameter, str] = {}
        for inner, part in inside:
            for own, parameter in part._parameters.items():
                if parameter is not None:
                    found.setdefault(parameter, ".".join(filter(None, (name, inner, own))))
        return [(full_name, parameter) for parameter, full_name in found.items()]

    def only(self, role: Role, kind: type[M]) -> M:
        """Return the only module with a role.

        Args:
            role: the role.
            kind: the class that the module must have, without adapters; nn.Module for any.

        Raises:
            PlanError: if no module or several have the role, or the module has adapters or another class.
        """
        if (module := self.only_if_any(role, kind)) is not None:
            return module
        raise PlanError(
            f"{self.plan.source} names no module of this model as the {role.value}. Give one Role.{role.name} "
            f"in ToDistributedConfig.sharding_plan, or use {self.instead}"
        )

    def only_if_any(self, role: Role, kind: type[M]) -> M | None:
        """Return the only module with a role, as :meth:`only` does; None if no module has it."""
        found = self.modules_with(role)
        # Modules with one tied weight count once.
        names = list({id(m._parameters.get("weight", m)): n for m, n in reversed(found.items())}.values())
        if len(names) > 1:
            raise PlanError(f"{self.plan.source} names {len(names)} modules as the {role.value}: {', '.join(names)}")
        if not names:
            return None
        module = self.modules[names[0]]
        if kind is not nn.Module and is_adapted(module):
            raise PlanError(
                f"the {role.value} {names[0]!r} has adapters, which cannot be sharded over tp there. Leave it out of "
                "LoraConfig.target_modules, or use ParallelPlan(tp=1)"
            )
        if not isinstance(module, kind):
            raise PlanError(f"the {role.value} {names[0]!r} must be a {kind.__name__}, not {type(module).__name__}")
        return module

    def modules_with(self, role: Role) -> dict[nn.Module, str]:
        """Return the modules with a role, each with its first name."""
        named = [name for name, own in self.roles.items() if own is role and name in self.modules]
        return {self.modules[name]: name for name in reversed(named)}

    def check_coverage(self) -> None:
        """Raise unless every parameter has a role, and tp can shard what is stored in its module.

        Raises:
            UncoveredParameterError: if parameters have no role; the message lists them.
            PlanError: if a module computes its weight from other tensors, or has adapters that cannot be sharded.
        """
        # Experts, which are not cut over tp, have their adapters whole as well.
        whole = tuple(f"{name}." for name, role in self.roles.items() if role is Role.EXPERTS)
        check_adapters({name: m for name, m in self.modules.items() if not f"{name}.".startswith(whole)})
        for name, role in self.roles.items():
            is_sharded = role in (Role.EMBEDDING, Role.HEAD) or role.part not in (None, BlockPart.BLOCK, BlockPart.COPY)
            if is_sharded and name in self.modules:
                _check_stored(name, projection(self.modules[name]))
        missing = self.missing
        for name in missing:  # a weight that is computed hides the block that it is in
            if (owner := name.partition(".parametrizations.")[0]) in self.modules:
                _check_stored(owner, projection(self.modules[owner]))
        if missing:
            named = list(self.facts.parameters.items())
            known = {id(parameter): name for name, parameter in named if name not in missing}
            aliases = {name: known[id(parameter)] for name, parameter in named if id(parameter) in known}
            raise UncoveredParameterError(missing, self.plan.source, aliases=aliases)

    @property
    def missing(self) -> list[str]:
        """The names of the parameters that have no role."""
        covered = {
            full_name
            for name, role in self.roles.items()
            if not (role.is_structural or (role.part is not None and name not in self._owners))
            for full_name, _ in self.parameters(name)
        }
        return [name for name in self.facts.parameters if name not in covered]

    @property
    def whole_in_layers(self) -> dict[str, nn.Module]:
        """The outermost modules inside of layers that stay whole, by name; one with several names only once."""
        layers = tuple(f"{name}." for name, role in self.roles.items() if role is Role.LAYER)
        return self._outermost_whole(name for name in self.modules if name.startswith(layers))

    def whole_beside(self, parts: Iterable[nn.Module]) -> dict[str, nn.Module]:
        """Return the outermost modules that stay whole and are neither in these parts nor around them, by name."""
        inside = {module for part in parts for module in self.facts.inside(part)}
        beside = (n for n, module in self.modules.items() if inside.isdisjoint(self.facts.inside(module)))
        return self._outermost_whole(beside)

    def _outermost_whole(self, names: Iterable[str]) -> dict[str, nn.Module]:
        whole = {n: self.modules[n] for n in names if self.roles.get(n) is Role.WHOLE}
        outermost = {n: m for n, m in whole.items() if n.rpartition(".")[0] not in whole}
        return {name: module for module, name in {m: n for n, m in reversed(outermost.items())}.items()}

    def _roles_inside_of_whole_modules(self) -> dict[str, Role]:
        """Return the role of the modules without one in a module that stays whole and has no other roles inside.

        A model with weights of its own around its layers is no such module.
        """
        others = [name for name, role in self.roles.items() if role is not Role.WHOLE]
        named = (f"{name}." for name, role in self.roles.items() if role is Role.WHOLE and name)
        whole = tuple(prefix for prefix in named if not any(name.startswith(prefix) for name in others))
        return {name: Role.WHOLE for name in self.modules if name.startswith(whole) and name not in self.roles}

    def _roles_of_parameters(self) -> dict[str, Role]:
        """Return the roles of parameters that the plan lists by their own names, because their module has no role."""

        def owner_has_one(name: str) -> bool:
            owner = self.roles.get(name.rpartition(".")[0])
            return owner is not None and not owner.is_structural

        named = (name for name in self.facts.parameters if not owner_has_one(name))
        return {name: role for name in named if (role := self.plan.role_of(name)) is not None}

    def _owning_block(self, name: str) -> str | None:
        """Return the block around a module or parameter; for projections that a layer owns directly, the layer."""
        owner, is_projection = name.rpartition(".")[0], self.roles[name].part in (BlockPart.COLUMN, BlockPart.ROW)
        while owner and ((role := self.roles.get(owner)) is None or role.part is not BlockPart.BLOCK):
            if is_projection and role is Role.LAYER:
                return owner
            owner = owner.rpartition(".")[0]
        return owner or None
