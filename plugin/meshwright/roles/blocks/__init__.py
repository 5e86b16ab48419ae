"""The kinds of blocks: which modules each kind claims, and what each rank of tp holds of their weights."""

from meshwright.roles.blocks.attention import Attention
from meshwright.roles.blocks.block import Block, BlockKind
from meshwright.roles.blocks.experts import Experts
from meshwright.roles.blocks.mixer import Mixer, has_attention, keeps_states, mixers_of, recurrences
from meshwright.roles.blocks.mixer_kinds import kind_of_mixer
from meshwright.roles.blocks.mlp import Mlp
from meshwright.roles.sharding_plan import Role

__all__ = [
    "BLOCKS",
    "KINDS",
    "Attention",
    "Block",
    "BlockKind",
    "Experts",
    "Mixer",
    "Mlp",
    "has_attention",
    "keeps_states",
    "kind_of_mixer",
    "mixers_of",
    "recurrences",
]

# By the role of the module that owns a block. A layer may own the projections of an MLP directly.
BLOCKS: dict[Role, type[Block]] = {Role.ATTENTION: Attention, Role.MLP: Mlp, Role.MIXER: Mixer, Role.LAYER: Mlp}

# In the order in which they are asked what they claim.
KINDS: tuple[type[BlockKind], ...] = (Mixer, Attention, Mlp, Experts)
