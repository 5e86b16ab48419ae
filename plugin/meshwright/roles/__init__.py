"""Which parts a decoder has, and sharding plans: which module plays which role, as data.

A sharding plan only assigns roles. Under tp a parameter without a role is an error; pp, cp and ZeRO need only the parts
of a decoder. Before the first and after the last layer every rank has all tokens, so modules there stay whole, towers
included. Inside of layers a module stays whole if its role is unclear, or if it has a convolution over tokens that tp
cannot cut: under sp it gathers the tokens at its entry and keeps its rank's own at the exit, so every rank computes
whole gradients. If the layer itself owns such a weight, or no module is known to be where tokens meet, all layers stay
whole. What routes tokens to experts never stays whole, since each rank must route its own tokens. A module outside of
the layers that runs between them, or before the final norm, gathers the tokens too. An embedding with further weights
stays whole, and a head with its weight. A tower is a module beside the decoder's layers with layers of its own; the
encoder of an encoder-decoder is one.

    which module becomes column-parallel    registry.py infers the roles; blocks/attention.py, blocks/mlp.py and
                                            blocks/mixer.py claim modules and say which rows a rank holds
    the names of the roles                  sharding_plan.py
    what a structure does not show          family_hints.py, such as the order of fused rows
    layers, embedding, head, towers         decoder.py
    how key/value heads are divided         blocks/head_layout.py
    the layout of each parameter            parallel/tensor_parallel/structure.py, from the roles
    the hooks of a block                    parallel/tensor_parallel/block_boundary.py
    modules with their roles                roled_model.py, which lists parameters without one
    classes of linear layers                linear_kernel.py
    LoRA                                    adapters.py
    what the program brought                brought.py; distribute/rehearse.py tries it
"""

from meshwright.roles.decoder import Decoder, find_decoder
from meshwright.roles.registry import infer_plan, plan_for, register_plan, written_plan
from meshwright.roles.sharding_plan import Role, ShardingPlan, decoder_roles

__all__ = [
    "Decoder",
    "Role",
    "ShardingPlan",
    "decoder_roles",
    "find_decoder",
    "infer_plan",
    "plan_for",
    "register_plan",
    "written_plan",
]
