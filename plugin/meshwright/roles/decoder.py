"""The anatomy of a decoder: its embedding, its layers, its final norm and head, and the towers beside them.

It is found without the roles of modules inside of layers, so a plan that cuts no matrix can cut any decoder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from meshwright.errors import PlanError
from meshwright.facts import Facts, fact
from meshwright.roles.adapters import is_adapted
from meshwright.roles.linear_kernel import in_features, is_projection


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The parts of a decoder.

    Args:
        facts: what the whole model shows.
        embedding: the embedding of the tokens.
        layers: the decoder's layers in their order; a layer that runs at several places is listed at each.
        final_norm: the norm after the last layer; None if there is none, or if several could be it.
        head: the module that scores the vocabulary; None if there is none.
        towers: the modules beside the layers that have layers of their own, such as an encoder of images.
    """

    facts: Facts
    embedding: nn.Module
    layers: tuple[nn.Module, ...]
    final_norm: nn.Module | None
    head: nn.Module | None
    towers: tuple[nn.Module, ...]

    @property
    def model(self) -> nn.Module:
        """The whole model."""
        return self.facts.model


def load_of_towers(decoder: Decoder) -> float:
    """Return how many layers have as much work as the towers, if these see as many patches as the layers see tokens.

    Each weight works once in forward, once for the gradient of its input and once for its own gradient. A tower that is
    frozen has no backward.
    """

    def work(module: nn.Module, *, has_backward: bool) -> int:
        parameters = decoder.facts.parameters_inside(module)
        return sum(p.numel() * (1 + has_backward + p.requires_grad) for p in parameters)

    towers = sum(work(m, has_backward=any(p.requires_grad for p in m.parameters())) for m in decoder.towers)
    layers = sum(work(layer, has_backward=True) for layer in decoder.layers)
    return towers * len(decoder.layers) / layers if layers else 0.0


def embeds_tokens(tower: nn.Module, embedding: nn.Module) -> bool:
    """Return whether a tower embeds tokens with the decoder's weight, as the encoder of an encoder-decoder does."""
    weight = embedding._parameters.get("weight")
    return weight is not None and any(module._parameters.get("weight") is weight for module in tower.modules())


@fact
def find_decoder(facts: Facts) -> Decoder:
    """Find the parts of a decoder by its structure and, if it is one of transformers' models, by its getters.

    Raises:
        PlanError: if no stack of layers or no token embedding is found, or several could be the decoder's.
    """
    name, stack = layer_stack(facts)
    layers, embedding = tuple(stack), token_embedding(facts, name)
    towers, head = tuple(towers_beside(facts, layers)), _head(facts, embedding)
    norm = _final_norm(facts, stack, embedding, head, towers)
    return Decoder(facts=facts, embedding=embedding, layers=layers, final_norm=norm, head=head, towers=towers)


@fact
def stacks_of(facts: Facts) -> dict[nn.Module, str]:
    """Return the lists of layers in a model, each with its name."""
    return {module: name for module, name in facts.names.items() if is_stack(facts, module)}


@fact
def layer_stack(facts: Facts) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of a decoder's layers.

    It is the outermost stack inside of the text decoder, so layers of towers do not count.

    Raises:
        PlanError: if there is no stack, or several are outermost.
    """
    names, kind = stacks_of(facts), type(facts.model).__name__
    if not names:
        raise PlanError(
            f"{kind} has no stack of decoder layers (an nn.ModuleList of blocks with linear layers), "
            "so no sharding plan can be inferred; pass ToDistributedConfig(sharding_plan=...)"
        )
    inside = [module for module in facts.inside(_text_part(facts)) if module in names]
    outermost = min(names[module].count(".") for module in inside or names)
    found = [module for module in inside or names if names[module].count(".") == outermost]
    if len(found) > 1:
        raise PlanError(
            f"{kind} has {len(found)} stacks of layers ({', '.join(names[m] for m in found)}), and its "
            "structure does not show which one is the decoder's. Give its layers Role.LAYER in "
            "ToDistributedConfig.sharding_plan"
        )
    assert isinstance(found[0], nn.ModuleList)
    return names[found[0]], found[0]


def is_stack(facts: Facts, module: nn.Module) -> bool:
    """Return whether a module is a list of layers."""
    return (
        isinstance(module, nn.ModuleList)
        and len(module) > 0
        and all(sum(map(is_projection, facts.inside(layer))) >= 2 for layer in module)
    )


def owner_of_layers(decoder: Decoder) -> nn.Module:
    """Return the module that runs a decoder's layers: the owner of the list of its first layer."""
    modules, first = decoder.facts.names, decoder.layers[0]
    around = next(module for module in modules if first in set(module.children()))
    return next((module for module in modules if around in set(module.children())), around)


def towers_beside(facts: Facts, layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules with layers of their own that are around none of a decoder's layers."""
    around, stacks = _around(facts, layers), stacks_of(facts)

    def beside(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if child not in around:
                if not stacks.keys().isdisjoint(facts.inside(child)):
                    yield child
            elif child not in stacks:
                yield from beside(child)

    return beside(facts.model)


def _around(facts: Facts, modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return some modules of a model, and all modules around them."""
    inside = set(modules)
    prefixes = {""} | {name[:end] for name, m in facts.modules.items() if m in inside for end in _ends(name)}
    return {facts.modules[name] for name in prefixes}


def _ends(name: str) -> Iterator[int]:
    return (end for end in range(1, len(name) + 1) if end == len(name) or name[end] == ".")


def modules_beside(facts: Facts, layers: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the modules that a forward pass may leave out: towers, and what else is outside of the text decoder.

    The embedding of the tokens and the head are no such modules, wherever they are.
    """
    layers, model = set(layers), facts.model
    text = ask(facts, "get_decoder")
    inside = set(facts.inside(model if text is None else text))
    if inside.isdisjoint(layers):
        inside = set(facts.names)
    inside |= {found for getter in ("get_input_embeddings", "get_output_embeddings") if (found := ask(facts, getter))}
    towers = towers_beside(facts, layers)
    return {*(module for tower in towers for module in facts.inside(tower)), *facts.names.keys() - inside}


@fact
def towers_of(facts: Facts) -> tuple[nn.Module, ...]:
    """Return the towers beside a model's decoder; none if it has no decoder."""
    try:
        _, layers = layer_stack(facts)
    except PlanError:
        return ()
    return tuple(towers_beside(facts, tuple(layers)))


def all_towers(facts: Facts, structure: Decoder | None) -> tuple[nn.Module, ...]:
    """Return the towers beside a decoder, for images or sound; the whole model if its decoder is not known."""
    if structure is not None:
        return structure.towers
    try:
        layer_stack(facts)
    except PlanError:  # no decoder
        return (facts.model,) if len(stacks_of(facts)) > 1 else ()
    return towers_of(facts)


def modules_left_out(facts: Facts, structure: Decoder | None) -> set[nn.Module]:
    """Return the modules that a forward pass may leave out, depending on its inputs; none without towers."""
    towers = all_towers(facts, structure)
    if facts.model in towers:
        return set(facts.names)
    layers = layer_stack(facts)[1] if structure is None else structure.layers
    return modules_beside(facts, layers) if towers else set()


def modules_apart(facts: Facts, structure: Decoder | None) -> set[nn.Module]:
    """Return the modules that a forward of the program may run for some rows only, such as the heads of tasks.

    They are outside of the modules that run stacks of layers, of the towers, and of the largest part of a model without
    stacks; the embedding of the tokens, the final norm and the head are none of them.
    """
    model = facts.model
    stacks = list(_outermost_stacks(model, stacks_of(facts)))
    largest = max((stack for _, stack in stacks), key=_size, default=None)
    # A list that the model itself runs may be of heads, if it is not the largest.
    parts = [stack if owner is model else owner for owner, stack in stacks if owner is not model or stack is largest]
    parts = parts or sorted(model.children(), key=_size)[-1:]
    parts += [tower for tower in all_towers(facts, structure) if tower is not model]
    with contextlib.suppress(PlanError):
        found = structure or find_decoder(facts)
        parts += filter(None, (found.embedding, found.final_norm, found.head))
    inside = {module for part in parts for module in facts.inside(part)}
    return facts.names.keys() - inside - {model}


def _outermost_stacks(module: nn.Module, stacks: Collection[nn.Module]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield the outermost lists of layers, each with the module that has it."""
    for child in module.children():
        if child in stacks:
            yield module, child
        else:
            yield from _outermost_stacks(child, stacks)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def ask(model: nn.Module | Facts, getter: str) -> nn.Module | None:
    """Return the module that a getter of a transformers model returns; None if the model does not implement it."""
    try:
        found = getattr(model.model if isinstance(model, Facts) else model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None


@fact
def text_decoder(facts: Facts) -> nn.Module | None:
    """Return what ``get_decoder()`` returns, and if that is an encoder-decoder, its decoder; None if there is none."""
    found, inner = None, ask(facts, "get_decoder")
    while inner is not None and inner is not found:
        found, inner = inner, ask(inner, "get_decoder")
    return found


def _text_part(facts: Facts) -> nn.Module:
    text = text_decoder(facts)
    return facts.model if text is None else text


def token_embedding(facts: Facts, layers_name: str) -> nn.Embedding:
    """Return the embedding of the tokens.

    Args:
        facts: what the whole model shows.
        layers_name: the name of the list of layers.

    Raises:
        PlanError: if there is none outside of the layers.
    """
    outside = (m for m, name in facts.names.items() if not f"{name}.".startswith(f"{layers_name}."))
    embeddings = [module for module in outside if isinstance(module, nn.Embedding)]
    if not embeddings:
        raise PlanError(f"no token embedding found outside {layers_name!r} in {type(facts.model).__name__}")
    # An encoder-decoder may name its encoder's.
    own = ask(_text_part(facts), "get_input_embeddings") or ask(facts, "get_input_embeddings")
    return next((m for m in embeddings if m is own), None) or max(embeddings, key=lambda m: m.num_embeddings)


def hidden_size(layers: Iterable[nn.Module], embedding: nn.Embedding) -> int:
    """Return the embedding's width or, if no projection of a layer reads that, the most common input width."""
    widths = [in_features(m) for m in next(iter(layers)).modules() if is_projection(m)]
    return embedding.embedding_dim if embedding.embedding_dim in widths else max(widths, key=widths.count)


def _head(facts: Facts, embedding: nn.Embedding) -> nn.Linear | None:
    own = ask(facts, "get_output_embeddings")
    if isinstance(own, nn.Linear):
        return own
    inside = {module for stack in stacks_of(facts) for module in facts.inside(stack)}
    words = embedding.num_embeddings
    found = [m for m in facts.names if isinstance(m, nn.Linear) and m.out_features == words and m not in inside]
    if len(found) > 1:
        raise PlanError(
            f"{type(facts.model).__name__} has {len(found)} linear layers that score {words} words, and its structure "
            "does not show which one is the head. Give it Role.HEAD in ToDistributedConfig.sharding_plan"
        )
    return found[0] if found else None


def _final_norm(
    facts: Facts,
    layers: nn.ModuleList,
    embedding: nn.Embedding,
    head: nn.Module | None,
    towers: tuple[nn.Module, ...],
) -> nn.Module | None:
    """Return the only norm after the layers; with several, the structure does not show which one is the final norm.

    A module with a table of its own, but without that of the tokens, may norm its table instead. A module with
    projections of its own beside the layers is a head, and norms what these compute.
    """
    owner = next(m for m in facts.names if layers in m._modules.values())
    tables = [m for m in owner._modules.values() if isinstance(m, nn.Embedding)]
    if tables and all(m.weight is not embedding.weight for m in tables):
        return None
    text, around = text_decoder(facts) if towers else None, _around(facts, [layers])
    named = list(facts.named_inside(text if text in around else facts.model))
    # By names, since a layer may hold the final norm too.
    others = tuple(f"{n}." for n, m in named if m in (embedding, head) or m in stacks_of(facts) or is_adapted(m))
    hidden, is_after = hidden_size(layers, embedding), False
    of_heads = {
        child
        for module in facts.names
        if module not in around and any(m is not head and is_projection(m) for m in module.children())
        for child in module.children()
    }
    found = []
    for name, module in named:
        is_after |= module is layers
        # A norm of the embeddings may be registered after the layers, but it runs before them.
        is_of_embeddings = "emb" in name.rpartition(".")[2]
        if (
            is_after
            and not f"{name}.".startswith(others)
            and is_norm(module, hidden)
            and not is_of_embeddings
            and module not in of_heads
        ):
            found.append(module)
    return found[0] if len(found) == 1 else None


def is_norm(module: nn.Module, *sizes: int) -> bool:
    """Return whether a module is a norm whose weights have one of these sizes."""
    parameters = list(module.parameters())
    return (
        bool(parameters)
        and not list(module.children())
        and not is_projection(module)
        and not isinstance(module, nn.Embedding)
        and all(p.ndim == 1 and p.shape[0] in sizes for p in parameters)
    )
