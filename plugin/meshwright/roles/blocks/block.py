"""What all kinds of blocks have in common: input projections, one output projection, and what is between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import nn

from meshwright.errors import PlanError
from meshwright.layout.packed_weights import PackedMatrix, matrix_shape, stored_shape
from meshwright.layout.row_layout import RowLayout
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.roles.adapters import is_adapted, projection
from meshwright.roles.blocks.head_layout import HeadLayout
from meshwright.roles.linear_kernel import form_of, in_features, is_projection, output_dim
from meshwright.roles.roled_model import RoledModel
from meshwright.roles.sharding_plan import BlockPart, Role

OVER_TP = frozenset(("tp",))


class BlockKind(ABC):
    """Modules of a layer that belong together, and which of them a kind claims."""

    @classmethod
    @abstractmethod
    def claim(cls, module: nn.Module, hidden: int, hinted: Mapping[str, Role]) -> dict[str, Role]:
        """Return the roles of a module of a layer and of what is in it; empty if it is not of this kind.

        Args:
            module: the module.
            hidden: the width of the hidden states.
            hinted: the roles that hints give, by name in the module.

        Returns:
            The roles by name in the module; the name of the module itself is "".
        """


class Block(BlockKind):
    """A part of a layer that gathers activations, projects them, and reduces the result over tp.

    A subclass is a kind of block: :meth:`claim` finds its modules, and ``rows`` says what each rank holds of them.

    Args:
        roled: the model and its roles.
        name: the name of the module that owns the block; for an MLP this may be the decoder layer itself.
        tp: the number of ranks.

    Attributes:
        module: the module that owns the block.
        reader: the module that reads the input: the block, or a part of it that has only the input projections, with
            the output projection in another part, as in BERT.
        entries: the modules that gather their input: the reader, or the column projections if a layer owns the block.
        columns: the modules that project the block's input, which every rank has whole.
        row: the output projection.
        width: the number of channels that the output projection reads, on one device.
        heads: how heads are divided over the ranks, if the channels are those of heads.
        wide_norms: the norms whose mean square is of channels on several ranks, each with the rows of its weight that
            each rank holds.
        groups: the groups of heads over whose channels the wide norms take a mean square; None for all channels.

    Raises:
        PlanError: if the modules do not make a block of this kind, or ``tp`` does not divide it.
    """

    rows: ClassVar[Mapping[Role, Callable[..., RowLayout]]]
    """The rows that each rank holds of a weight, by role, from the block and the number of the weight's rows. For the
    output projection these are the rows of what it reads."""

    heads: HeadLayout | None = None
    groups: HeadLayout | None = None

    returns_projected: ClassVar[bool] = False
    """Whether what the block returns is a linear function of what its output projection returns. The ranks' results are
    then summed at the end of the block, since its code may run several times, on some of the tokens each."""

    def __init__(self, roled: RoledModel, name: str, tp: int):
        self.roled, self.name, self.module, self.tp = roled, name, roled.modules[name], tp
        kind = roled.roles[name]
        modules = [(n, role, roled.modules[n]) for n, role in roled.inside(name).items() if n in roled.modules]
        for inner, role, module in modules:
            _check(roled.plan.source, inner, role, module)

        def having(*parts: BlockPart) -> tuple[nn.Module, ...]:
            # A module with two names, such as a key projection that is the value projection too, gets its hooks once.
            return tuple(dict.fromkeys(module for _, role, module in modules if role.part in parts))

        rows, columns = having(BlockPart.ROW), having(BlockPart.COLUMN)
        others = (m for m in having(BlockPart.INNER, BlockPart.COPY) if is_projection(m) and m not in columns)
        self.columns = (*columns, *others)
        if len(rows) != 1 or not self.columns:
            raise PlanError(
                f"{roled.plan.source}: the {kind.value} {name!r} has {len(rows)} output projections and "
                f"{len(self.columns)} input projections, but needs one output projection and at least one input "
                "projection"
            )
        self.row = rows[0]
        self.width = in_features(self.row)
        self.reader = self.module if kind is Role.LAYER else self._reader()
        self.entries = columns if kind is Role.LAYER else (self.reader,)
        self.divide({role: module for _, role, module in modules})
        self.wide_norms = tuple(
            (module, self.rows_of(n, role, 0)) for n, role, module in modules if role.part is BlockPart.WIDE_NORM
        )

    def _reader(self) -> nn.Module:
        """Return the part of the block that has all input projections, if the output projection is in another part."""
        of = {BlockPart.COLUMN: set[str](), BlockPart.ROW: set[str]()}
        for name, role in self.roled.inside(self.name).items():
            if role.part in of:
                of[role.part].add(name.removeprefix(f"{self.name}.").partition(".")[0])
        columns, rows = of.values()
        is_split = len(columns) == 1 and columns != rows and not is_projection(self.module.get_submodule(*columns))
        reader: nn.Module = self.module.get_submodule(*columns) if is_split else self.module
        return reader

    def divide(self, by_role: Mapping[Role, nn.Module]) -> None:
        """Determine how the channels between the projections are divided, if their number does not say it.

        Raises:
            PlanError: if they cannot be divided.
        """

    def localise(self, rank: int) -> None:
        """Set what the block's modules have read from the sizes of one device to a rank's part."""
        for module in map(projection, (*self.columns, self.row)):
            if (kernel := form_of(module)) is not None:
                kernel.fit(module)

    @property
    def shared_dropouts(self) -> list[nn.Module]:
        """The adapters' dropouts on the block's input, which every rank has whole."""
        adapted = [column for column in self.columns if is_adapted(column)]
        return [m for column in adapted for m in column.get_submodule("lora_dropout").children()]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules that stay whole in place of the block: itself, or what a layer owns of it."""
        if self.module in self.entries or self.reader is not self.module:
            return (self.name,)
        return tuple(self.roled.inside(self.name))

    @property
    def inside(self) -> tuple[nn.Module, ...]:
        """The modules between the block's two borders, whose inputs or outputs are of a rank's heads or channels.

        In a layer that owns the projections, these are also what it owns without weights, such as an activation.
        """
        if self.names == (self.name,):
            inside = self.roled.facts.inside(self.module)
            return inside if self.returns_projected else inside[1:]
        own = (self.roled.modules[name] for name in self.names if name in self.roled.modules)
        between = (m for m in self.module.children() if next(m.parameters(), None) is None)
        return (*own, *between)

    def rows_of(self, name: str, role: Role, size: int) -> RowLayout:
        """Return which of a weight's rows each rank holds.

        Args:
            name: the name of the weight or of its module, for messages.
            role: its role.
            size: the number of the weight's rows.
        """
        if role not in self.rows:
            raise PlanError(
                f"{self.roled.plan.source} gives {name!r} the role {role.value}, which is not of this kind of block "
                f"({type(self).__name__})"
            )
        return self.rows[role](self, size)

    def layouts(self, *, sequence_parallel: bool) -> dict[str, TensorLayout]:
        """Return the layout of each parameter of the block by name."""
        found = {}
        for name, role in self.roled.inside(self.name).items():
            if role.part in (None, BlockPart.BLOCK):
                continue
            for full_name, parameter in self.roled.parameters(name):
                suffix = full_name.removeprefix(f"{name}.")
                rows = self._rows(name, role, full_name, parameter)
                # A copied row gets a gradient from its rank's heads or channels only, even if every rank holds all rows
                # (a shared head norm, the only key head, an adapter's factor). An output projection's bias gets it
                # from local tokens only.
                is_bias = role.part is BlockPart.ROW and rows.is_replicated and not suffix.startswith("lora_B.")
                has_addends = sequence_parallel if is_bias else rows.has_copies
                found[full_name] = cut_over_tp(parameter, rows, full_name, has_addends=has_addends)
        return found

    def _rows(self, name: str, role: Role, full_name: str, parameter: nn.Parameter) -> RowLayout:
        """Return which rows of a parameter each rank holds, along the dim that is cut."""
        shape = matrix_shape(parameter)
        rows = RowLayout.replicated(shape[0] if shape else 1, self.tp)
        is_row = role.part is BlockPart.ROW
        suffix = full_name.removeprefix(f"{name}.")
        if is_row and suffix.startswith("lora_B.") and suffix.endswith(".bias"):
            raise PlanError(
                f"{full_name} is the bias of an adapter on an output projection, and every rank would add it. Use "
                "lora_bias=False, or ParallelPlan(tp=1)"
            )
        # An adapter's factor without the weight's sharded dim stays whole.
        is_factor = suffix.startswith("lora_B." if is_row else "lora_A.")
        if is_factor or role.part is BlockPart.COPY or (is_row and len(shape) == 1):
            return rows
        module = self.roled.modules.get(name)
        is_table = isinstance(module, nn.Embedding)  # with a column for each head
        rows = self.rows_of(full_name, role, shape[1] if is_table else rows.size)
        is_swapped = is_table or (len(shape) == 2 and module is not None and output_dim(module) == 1)
        if is_row is not is_swapped:
            rows = RowLayout(1, rows.size, rows.spans)
        if rows.size != shape[rows.dim]:
            raise PlanError(
                f"{full_name} has {shape[rows.dim]} rows in dim {rows.dim}, but its role ({role.value}) "
                f"and the model's head counts imply {rows.size}. Remove what gives the module weights of other "
                "shapes before to_distributed, or use ParallelPlan(tp=1)"
            )
        return rows


def direct_projections(module: nn.Module) -> dict[str, nn.Module]:
    """Return the projections that a module owns itself, by name; one with two names under both."""
    # Not named_children(), which leaves out the second name.
    return {name: child for name, child in module._modules.items() if child is not None and is_projection(child)}


def split_projections(module: nn.Module) -> dict[str, nn.Module]:
    """Return the projections that the parts of a module own, by name in the module, such as ``output.dense`` of BERT.

    Empty if one part has all of them, since it then is the block itself.
    """
    parts = [(name, part) for name, part in module._modules.items() if part is not None and not is_projection(part)]
    found = [(name, {f"{name}.{n}": m for n, m in direct_projections(part).items()}) for name, part in parts]
    owners = [name for name, projections in found if projections]
    return {n: m for _, projections in found for n, m in projections.items()} if len(owners) > 1 else {}


def cut_over_tp(parameter: nn.Parameter, rows: RowLayout, name: str, *, has_addends: bool = False) -> TensorLayout:
    """Return the layout of a parameter, of this name, of which each rank of tp holds some rows.

    Raises:
        PlanError: if the parameter is packed, and a rank would hold a part of a block of values.
    """
    packing = PackedMatrix.of(parameter)
    rows = rows if packing is None else packing.stored_rows(rows, name)
    addends = OVER_TP if has_addends else frozenset()
    return TensorLayout(shape=stored_shape(parameter), cuts=(("tp", rows),), addends=addends)


def _check(source: str, name: str, role: Role, module: nn.Module) -> None:
    """Raise if a module's class does not fit its role."""
    if role.part in (BlockPart.COLUMN, BlockPart.ROW) and not is_projection(module):
        raise PlanError(
            f"{source} gives {name!r} the role {role.value}, but it is a {type(module).__name__}. Only nn.Linear "
            "projections can be sharded, alone or with LoRA, and quantised by bitsandbytes"
        )
    if role.part is BlockPart.WIDE_NORM and isinstance(module, nn.LayerNorm):
        raise PlanError(
            f"{source} gives {name!r} the role {role.value}, but it is a LayerNorm. Only an RMS norm can be sharded, "
            "with its mean square taken over all ranks"
        )
