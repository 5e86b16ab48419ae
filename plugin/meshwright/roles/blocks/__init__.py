"""The kinds of blocks: which modules each kind claims, and what each rank of tp holds of their weights."""

from meshwright.roles.blocks.attention import Attention
from meshwright.roles.blocks.block import Block
from meshwright.roles.blocks.mlp import Mlp
from meshwright.roles.sharding_plan import Role

__all__ = ["KINDS", "Attention", "Block", "Mlp"]

# By the role of the module that owns a block. A layer may own the projections of an MLP directly.
KINDS: dict[Role, type[Block]] = {Role.ATTENTION: Attention, Role.MLP: Mlp, Role.LAYER: Mlp}
