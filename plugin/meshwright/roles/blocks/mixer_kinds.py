"""The kinds of mixers that tp cuts by heads: what the rows of each of their weights are, in the words of their code.

The rows of a fused weight have parts of different widths. A part belongs to the heads, or to groups of consecutive
heads that share it, as query heads share a key head. Mamba2 of 4 heads in 2 groups, on two ranks::

    in_proj   | gate h0 h1 h2 h3 | x h0 h1 h2 h3 | B g0 g1 | C g0 g1 | dt h0 h1 h2 h3 |
    rank 0    | gate h0 h1       | x h0 h1       | B g0    | C g0    | dt h0 h1       |
    rank 1    |           h2 h3  |        h2 h3  |      g1 |      g1 |          h2 h3 |

If there are fewer groups than ranks, several ranks hold a group, as they hold a key head.

One rule makes the layouts of all kinds from these parts, and the same table checks that a module is of the kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from meshwright.layout.row_layout import RowLayout, Span
from meshwright.roles.blocks.head_layout import HeadLayout
from meshwright.roles.linear_kernel import in_features, is_projection, out_features

Parts = tuple[str, ...]  # the parts of some rows in their order: "head", "group", or a word of the kind


@dataclass(frozen=True, kw_only=True)
class MixerKind:
    """One kind of mixer. A module is of it if it has these attributes and no other weights, all of matching sizes.

    Names are those of attributes, weights and modules inside of the mixer; a kind may list names that only some of its
    mixers have. A part "head" has one row for each head, and a part "group" one for each group.

    Args:
        heads: the attribute that counts the heads.
        groups: the attribute that counts the groups of heads; None if each head is a group.
        per_head: the other parts with rows for each head, and the attribute that counts these.
        per_group: the other parts with rows for each group, and the attribute that counts these.
        rows: the parts of each weight, or of each module's weights and buffers.
        rows_by_group: the same for weights in which all parts of a group follow each other.
        outputs: the possible names of the output projection.
        reads: the parts of the channels that the output projection reads.
        shared: the projections of the input to values that all heads share.
        norms: the norms of one head, whose weights all heads share.
        group_norm: the norm over the channels of each group, or of all groups.
        sizes: the attributes that count something that is cut, by its parts.
        has_training_kernel: whether its code, in training mode, may call a kernel that contains the norm and the
            output projection.
        functions: the functions in which its tokens meet, by the global names that transformers' code calls; none if
            it has other code for this.
    """

    heads: str
    groups: str | None = None
    per_head: Mapping[str, str] = field(default_factory=dict)
    per_group: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, Parts]
    rows_by_group: Mapping[str, Parts] = field(default_factory=dict)
    outputs: frozenset[str]
    reads: Parts
    shared: frozenset[str] = frozenset()
    norms: frozenset[str] = frozenset()
    group_norm: str | None = None
    sizes: Mapping[str, Parts] = field(default_factory=dict)
    has_training_kernel: bool = False
    functions: tuple[str, ...] = ()

    def key_of(self, name: str) -> str | None:
        """Return under which name the kind lists a weight of a mixer, or the module around it; None if it does not."""
        listed = (*self.rows, *self.rows_by_group, *self.outputs, *self.shared, *self.norms)
        return next((key for key in listed if f"{name}.".startswith(f"{key}.")), None)

    def output_of(self, mixer: nn.Module) -> str | None:
        """Return the name of the output projection; None if the mixer has none."""
        found = [name for name in self.outputs if is_projection(getattr(mixer, name, mixer))]
        return found[0] if len(found) == 1 else None


class MixerHeads:
    """The heads of one mixer over ``tp`` ranks.

    Args:
        kind: the kind of mixer.
        mixer: the mixer with the sizes of one device.
        tp: the number of ranks, a divisor of the number of heads.
    """

    def __init__(self, kind: MixerKind, mixer: nn.Module, tp: int):
        heads = _count(mixer, kind.heads)
        groups = heads if kind.groups is None else _count(mixer, kind.groups)
        self.layout = HeadLayout(heads=heads, kv_heads=groups, head_dim=1, tp=tp)
        self._of_heads = {"head": 1} | {part: _count(mixer, name) for part, name in kind.per_head.items()}
        self._of_groups = {"group": 1} | {part: _count(mixer, name) for part, name in kind.per_group.items()}

    def rows(self, parts: Parts, *, by_group: bool = False) -> RowLayout:
        """Return which of the rows of these parts each rank holds."""
        find = self._by_group if by_group else self._by_part
        spans = [tuple(_joined(find(parts, rank))) for rank in range(self.layout.tp)]
        return RowLayout(0, sum(map(self._size, parts)), tuple(spans))

    def _size(self, part: str) -> int:
        if part in self._of_heads:
            return self.layout.heads * self._of_heads[part]
        return self.layout.kv_heads * self._of_groups[part]

    def _by_part(self, parts: Parts, rank: int) -> Iterator[Span]:
        own, start = self.layout.local_heads, 0
        for part in parts:
            if part in self._of_heads:
                width = self._of_heads[part]
                yield start + rank * own * width, start + (rank + 1) * own * width
            else:
                width = self._of_groups[part]
                for group in self.layout.local_kv_heads(rank):
                    yield start + group * width, start + (group + 1) * width
            start += self._size(part)

    def _by_group(self, parts: Parts, rank: int) -> Iterator[Span]:
        own, in_group = self.layout.queries_per_kv_head, self.layout.heads // self.layout.kv_heads
        for index, group in enumerate(self.layout.local_kv_heads(rank)):
            start = group * (sum(map(self._size, parts)) // self.layout.kv_heads)
            first = (rank * self.layout.local_heads + index * own) % in_group
            for part in parts:
                if part in self._of_heads:
                    width = self._of_heads[part]
                    yield start + first * width, start + (first + own) * width
                else:
                    yield start, start + self._of_groups[part]
                start += self._size(part) // self.layout.kv_heads


def kind_of_mixer(mixer: nn.Module) -> MixerKind | None:
    """Return the kind of a mixer; None if it is not of a known kind."""
    return next((kind for kind in MIXER_KINDS if _is_of_kind(mixer, kind)), None)


def attribute(mixer: nn.Module, name: str) -> object:
    """Return an attribute of a mixer or of a module in it, by its dotted name; None if there is none."""
    found: object = mixer
    for own in name.split("."):
        found = getattr(found, own, None)
    return found


def _count(mixer: nn.Module, name: str) -> int:
    value = attribute(mixer, name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise AttributeError(name)
    return value


def _is_of_kind(mixer: nn.Module, kind: MixerKind) -> bool:
    try:
        heads = MixerHeads(kind, mixer, tp=1)
    except AttributeError:
        return False
    if heads.layout.heads % heads.layout.kv_heads or (output := kind.output_of(mixer)) is None:
        return False
    if in_features(mixer.get_submodule(output)) != heads.rows(kind.reads).size:
        return False
    if any(kind.key_of(name) is None for name, _ in mixer.named_parameters()):
        return False
    weights = (*kind.rows.items(), *kind.rows_by_group.items())
    if any(not _has_rows(attribute(mixer, name), heads.rows(parts).size) for name, parts in weights):
        return False
    counts = ((attribute(mixer, name), parts) for name, parts in kind.sizes.items())
    return all(count is None or count == heads.rows(parts).size for count, parts in counts)


def _has_rows(found: object, size: int) -> bool:
    """Return whether a weight, or each weight of a module, has this many rows; also if there is none."""
    if isinstance(found, nn.Module):
        return out_features(found) == size if is_projection(found) else all(size in x.shape for x in found.parameters())
    return not isinstance(found, Tensor) or size in found.shape


def _joined(spans: Iterator[Span]) -> Iterator[Span]:
    """Yield the spans with those joined that follow each other."""
    start = stop = 0
    for first, last in spans:
        if first != stop and stop > start:
            yield start, stop
            start = first
        elif stop == start:
            start = first
        stop = last
    yield start, stop


_CONVOLUTION = "causal_conv1d_fn"
_QUERY_KEY_VALUE = ("key", "key", "value")

# Yang et al. 2024, arXiv:2412.06464; in Qwen3-Next all rows of a key head follow each other.
_GATED_DELTA_NET = MixerKind(
    heads="num_v_heads",
    groups="num_k_heads",
    per_head={"value": "head_v_dim"},
    per_group={"key": "head_k_dim"},
    rows={
        **dict.fromkeys(("in_proj_qkv", "conv1d"), _QUERY_KEY_VALUE),
        **dict.fromkeys(("q_proj", "k_proj"), ("key",)),
        **dict.fromkeys(("v_proj", "g_proj", "in_proj_z"), ("value",)),
        **dict.fromkeys(("a_proj", "b_proj", "in_proj_a", "in_proj_b", "A_log", "dt_bias"), ("head",)),
    },
    rows_by_group={"in_proj_qkvz": (*_QUERY_KEY_VALUE, "value"), "in_proj_ba": ("head", "head")},
    outputs=frozenset({"out_proj", "o_proj"}),
    reads=("value",),
    norms=frozenset({"norm", "o_norm"}),
    sizes={
        "num_v_heads": ("head",),
        "num_k_heads": ("group",),
        "key_dim": ("key",),
        "value_dim": ("value",),
        "conv_dim": _QUERY_KEY_VALUE,
    },
    functions=(_CONVOLUTION, "torch_chunk_gated_delta_rule"),
)

# Kimi's delta attention decays each channel by itself.
_DELTA_ATTENTION = MixerKind(
    heads="num_heads",
    per_head={"channel": "head_dim"},
    rows={
        "conv1d": ("channel",) * 3,
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj", "g_b_proj"), ("channel",)),
        **dict.fromkeys(("forget_gate.f_proj", "forget_gate.f_b_proj", "forget_gate.dt_bias"), ("channel",)),
        **dict.fromkeys(("b_proj", "forget_gate.A_log"), ("head",)),
    },
    outputs=frozenset({"o_proj"}),
    reads=("channel",),
    shared=frozenset({"g_a_proj", "forget_gate.f_a_proj"}),
    norms=frozenset({"o_norm"}),
    sizes={
        **dict.fromkeys(("num_heads", "forget_gate.num_heads"), ("head",)),
        **dict.fromkeys(("qkv_dim", "forget_gate.qkv_dim"), ("channel",)),
        "conv_dim": ("channel",) * 3,
    },
    functions=(_CONVOLUTION, "chunk_kimi_delta_attention"),
)

_CONVOLVED = ("channel", "state", "state")  # x, B and C

# Dao and Gu 2024, arXiv:2405.21060.
_MAMBA2 = MixerKind(
    heads="num_heads",
    groups="n_groups",
    per_head={"channel": "head_dim"},
    per_group={"state": "ssm_state_size"},
    rows={
        **dict.fromkeys(("in_proj", "mup_vector"), ("channel", *_CONVOLVED, "head")),
        "conv1d": _CONVOLVED,
        "norm": ("channel",),
        **dict.fromkeys(("A_log", "D", "dt_bias"), ("head",)),
    },
    outputs=frozenset({"out_proj"}),
    reads=("channel",),
    group_norm="norm",
    sizes={
        "num_heads": ("head",),
        "n_groups": ("group",),
        "norm.n_groups": ("group",),
        "intermediate_size": ("channel",),
        "groups_time_state_size": ("state",),
        "conv_dim": _CONVOLVED,
    },
    has_training_kernel=True,
    functions=(_CONVOLUTION, "mamba2_chunk_scan"),
)

# A gated convolution, in which each channel is by itself.
_SHORT_CONVOLUTION = MixerKind(
    heads="conv.in_channels",
    rows={"in_proj": ("head",) * 3, "conv": ("head",)},
    outputs=frozenset({"out_proj"}),
    reads=("head",),
    functions=(_CONVOLUTION,),
)

_GATES = ("input", "recurrent")

# De et al. 2024, arXiv:2402.19427; the gates are block-diagonal, and a block is a head here.
_REAL_GATED_LRU = MixerKind(
    heads="rg_lru.num_attention_heads",
    per_head={"channel": "rg_lru.block_width"},
    rows={
        **dict.fromkeys(("linear_x", "linear_y", "conv_1d", "rg_lru.recurrent_param"), ("channel",)),
        **dict.fromkeys((f"rg_lru.{gate}_gate_{of}" for gate in _GATES for of in ("weight", "bias")), ("head",)),
    },
    outputs=frozenset({"linear_out"}),
    reads=("channel",),
    sizes={"lru_width": ("channel",), "rg_lru.num_attention_heads": ("head",)},
)

MIXER_KINDS = (_GATED_DELTA_NET, _DELTA_ATTENTION, _MAMBA2, _SHORT_CONVOLUTION, _REAL_GATED_LRU)
