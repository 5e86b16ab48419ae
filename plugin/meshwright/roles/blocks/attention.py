"""Attention: projections whose channels are those of heads, of which each rank has some."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from torch import nn

from meshwright.errors import PlanError
from meshwright.roles.blocks.block import Block, direct_projections, split_projections
from meshwright.roles.blocks.head_layout import QUERY_HEADS, HeadLayout, head_layout
from meshwright.roles.decoder import is_norm
from meshwright.roles.linear_kernel import in_features, out_features
from meshwright.roles.sharding_plan import Role

_NAMES = {
    Role.Q: {"q_proj", "query_proj", "q", "query", "wq", "to_q", "q_lin"},
    Role.K: {"k_proj", "key_proj", "k", "key", "wk", "to_k", "k_lin"},
    Role.V: {"v_proj", "value_proj", "v", "value", "wv", "to_v", "v_lin"},
    Role.O: {"o_proj", "out_proj", "output_proj", "o", "out", "wo", "to_out", "out_lin", "dense", "proj", "c_proj"},
}
# Latent attention: the heads are computed from two narrow projections that all ranks hold whole.
_LATENT = {
    Role.SHARED: {"q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm", "k_rope_only_layernorm"},
    Role.PER_HEAD: {"q_proj", "q_b_proj", "kv_b_proj", "g_proj", "gate_proj", "q_gate_proj", "sinks"},
    Role.O: {"o_proj"},
}
_NORMS = {"q": (Role.Q, Role.Q_NORM), "k": (Role.K, Role.K_NORM)}
_FUSED = frozenset({Role.QKV, Role.QKV_BY_GROUP, Role.QKV_IN_FOUR})


class LocalConfig:
    """A model's config with some values replaced, for one module that reads its head counts from the config."""

    def __init__(self, config: object, **local: int):
        self.__dict__.update(_config=config, **local)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or "_config" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_config"], name)


class Attention(Block):
    """An attention block."""

    heads: HeadLayout

    rows: ClassVar = {
        # A query and a key may be wider or narrower than a value.
        Role.Q: lambda block, size: block.heads.rows_per_head(size),
        Role.K: lambda block, size: block.heads.kv_rows(size // block.heads.kv_heads),
        Role.V: lambda block, _: block.heads.kv_rows(),
        Role.QKV: lambda block, _: block.heads.fused_rows(),
        Role.QKV_BY_GROUP: lambda block, _: block.heads.grouped_rows(),
        Role.QKV_IN_FOUR: lambda block, _: block.heads.rows_in_four(),
        Role.O: lambda block, _: block.heads.query_rows(),
        Role.Q_NORM: lambda block, _: block.heads.query_rows(),
        Role.K_NORM: lambda block, _: block.heads.kv_rows(),
        Role.INNER_NORM: lambda block, _: block.heads.query_rows(),
        Role.PER_HEAD: lambda block, size: block.heads.rows_per_head(size),
    }

    def divide(self, by_role: Mapping[Role, nn.Module]) -> None:
        fused = [module for role, module in by_role.items() if role in _FUSED]
        if Role.K in by_role and by_role.keys() & {Role.Q, Role.PER_HEAD}:
            # A query projection with the role PER_HEAD has more rows for each head than its query.
            is_even = Role.Q not in by_role or out_features(by_role[Role.Q]) == self.width
            kv_width = out_features(by_role[Role.K if is_even else Role.V])
        elif Role.PER_HEAD in by_role:  # latent attention makes keys and values for each query head
            kv_width = self.width
        elif fused:
            kv_width = (out_features(fused[0]) - self.width) // 2
        else:
            raise PlanError(
                f"{self.roled.plan.source}: {self.name!r} has neither query, key and value projections nor a fused one"
            )
        config = getattr(self.roled.model, "config", None)
        self.heads = head_layout(self.reader, config, query_width=self.width, kv_width=kv_width, tp=self.tp)
        self._local = self.heads.local_attributes(self.reader)
        self._is_fused = bool(fused)

    def localise(self, rank: int) -> None:
        super().localise(rank)
        for name, value in self._local.items():
            setattr(self.reader, name, value)
        if self._is_fused and hasattr(self.reader, "config"):
            self.reader.config = LocalConfig(  # type: ignore[assignment]
                self.reader.config,
                num_attention_heads=self.heads.local_heads,
                num_key_value_heads=self.heads.num_local_kv_heads,
            )

    @classmethod
    def claim(cls, module: nn.Module, hidden: int, hinted: Mapping[str, Role]) -> dict[str, Role]:
        if latent := _latent(module):
            return latent
        linears = direct_projections(module)
        parts = {} if linears else split_projections(module)
        linears = linears or parts
        roles = {n: role for n in linears for role, names in _NAMES.items() if n.lower().rpartition(".")[2] in names}
        roles |= {n: hinted[n] for n in linears if n in hinted}
        by_role = {role: linears[n] for n, role in roles.items()}
        fused = _FUSED & by_role.keys()
        # A query projection has the role PER_HEAD if a hint says that it has more rows than those of the query.
        separate = {Role.K, Role.V} <= by_role.keys() and by_role.keys() & {Role.Q, Role.PER_HEAD}
        if not (fused or separate) or Role.O not in by_role:
            return {}
        output, query = by_role[Role.O], by_role.get(Role.Q)
        inputs = [m for role, m in by_role.items() if role is not Role.O]
        is_even = fused or query is None or in_features(output) == _value_width(module, out_features(query))
        if not is_even or out_features(output) != hidden or any(in_features(m) != hidden for m in inputs):
            return {}
        if parts and (len(roles) != len(by_role) or len(roles) != len(parts)):
            return {}
        readers = {n.partition(".")[0] for n, role in roles.items() if role is not Role.O}
        if query is not None and _counts_by_another_name(module, out_features(query)):
            return {}
        roles |= _biases_of_heads(module)
        norms = _norms_beside(module, readers, hidden) if parts else _query_key_norms(module, by_role)
        return {"": Role.ATTENTION} | roles | norms


def _latent(attention: nn.Module) -> dict[str, Role]:
    """Return the roles of a latent attention and of what is in it; empty if it is none.

    Its indexer chooses from the whole input, without a gradient, which tokens a query sees: the same for all heads.
    """
    named = {**attention._modules, **attention._parameters}
    if not {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} <= named.keys():
        return {}
    roles = {name: role for role, names in _LATENT.items() for name in names if named.get(name) is not None}
    inner = () if (indexer := attention._modules.get("indexer")) is None else indexer.named_modules(prefix="indexer")
    roles |= {name: Role.SHARED for name, module in inner if list(module.parameters(recurse=False))}
    return {"": Role.ATTENTION} | roles


def _counts_by_another_name(attention: nn.Module, query_width: int) -> bool:
    """Return whether an attention has its heads in an attribute that is not known, which a cut would not change."""
    own = vars(attention)
    dim = own.get("head_dim")
    named = {name: x for name, x in own.items() if "heads" in name and isinstance(x, int)}
    counts = {name for name, x in named.items() if isinstance(dim, int) and x * dim == query_width}
    return bool(counts) and counts.isdisjoint(QUERY_HEADS)


def _biases_of_heads(attention: nn.Module) -> dict[str, Role]:
    """Return the roles of the tables of an attention with one number for each head, such as T5's of distances."""
    heads = {vars(attention).get(name) for name in QUERY_HEADS}
    tables = ((n, m) for n, m in attention._modules.items() if isinstance(m, nn.Embedding))
    return {name: Role.PER_HEAD for name, table in tables if table.embedding_dim in heads}


def _norms_beside(block: nn.Module, readers: Collection[str], hidden: int) -> dict[str, Role]:
    """Return the roles of the norms in a block of parts, which are of tokens outside of the part with the heads."""
    named = ((name, m) for name, m in block.named_modules() if name.partition(".")[0] not in readers)
    return {name: Role.NORM for name, module in named if is_norm(module, hidden)}


def _value_width(attention: nn.Module, query_width: int) -> int:
    """Return the width of the values of as many heads as the queries have."""
    own = vars(attention)
    query_dim, value_dim = own.get("head_dim"), own.get("v_head_dim")
    return query_width // query_dim * value_dim if query_dim and value_dim else query_width


def _query_key_norms(block: nn.Module, projections: Mapping[Role, nn.Module]) -> dict[str, Role]:
    roles = {}
    head_dim = getattr(block, "head_dim", getattr(block, "head_size", None))
    for name, module in block._modules.items():
        if module is None or (letter := name.lower()[:1]) not in _NORMS:
            continue
        role, norm = _NORMS[letter]
        if head_dim and is_norm(module, head_dim):
            roles[name] = Role.HEAD_NORM
        # Only an RMS norm can be cut: the mean square of its channels is a sum over ranks.
        elif role in projections and is_norm(module, out_features(projections[role])):
            roles |= {} if isinstance(module, nn.LayerNorm) else {name: norm}
    per_head = {type(block._modules[name]) for name, role in roles.items() if role is Role.HEAD_NORM}
    values = ((n, m) for n, m in block._modules.items() if n.lower().startswith("v") and type(m) in per_head)
    return roles | {n: Role.HEAD_NORM for n, m in values if m is not None and not list(m.parameters())}
