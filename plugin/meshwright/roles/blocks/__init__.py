"""The kinds of blocks: which modules each kind claims, and what each rank of tp holds of their weights.

A block lies between one gather and one reduction: activations are gathered before its input projections and reduced
after its output projection. It is a module, or the projections of an MLP that the layer owns directly. As in BERT, the
output projection may be in another part of a block than the input projections; the part with these then gathers.
Replicated weights in a block have partial gradients, which are summed. Biases of heads are cut when they enter, and
head counts that stock code reads are replaced by local counts.

    block.py         what all kinds have in common        attention.py     attention
    mlp.py           the smallest kind                    head_layout.py   heads over ranks, key/value heads on several
    mixer.py         recurrences and convolutions         mixer_kinds.py   the parts of the rows of their weights
    experts.py       experts, routers and their adapters
"""

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
