"""The anatomy of a decoder: its embedding, its layers, its final norm and head, and the towers beside them.

It is found without the roles of modules inside of layers, so a plan that cuts no matrix can cut any decoder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from meshwright.errors import PlanError
from meshwright.roles.adapters import is_adapted
from meshwright.roles.projection import in_features, is_projection


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The parts of a decoder.

    Args:
        model: the whole model.
        embedding: the embedding of the tokens.
        layers: the decoder's layers in their order; a layer that runs at several places is listed at each.
        final_norm: the norm after the last layer; None if there is none, or if several could be it.
        head: the module that scores the vocabulary; None if there is none.
        towers: the modules beside the layers that have layers of their own, such as an encoder of images.
    """

    model: nn.Module
    embedding: nn.Module
    layers: tuple[nn.Module, ...]
    final_norm: nn.Module | None
    head: nn.Module | None
    towers: tuple[nn.Module, ...]


def load_of_towers(decoder: Decoder) -> float:
    """Return how many layers have as much work as the towers, if these see as many patches as the layers see tokens.

    Each weight works once in forward, once for the gradient of its input and once for its own gradient. A tower that is
    frozen has no backward.
    """

    def work(module: nn.Module, *, has_backward: bool) -> int:
        return sum(p.numel() * (1 + has_backward + p.requires_grad) for p in module.parameters())

    towers = sum(work(m, has_backward=any(p.requires_grad for p in m.parameters())) for m in decoder.towers)
    layers = sum(work(layer, has_backward=True) for layer in decoder.layers)
    return towers * len(decoder.layers) / layers if layers else 0.0


def embeds_tokens(tower: nn.Module, embedding: nn.Module) -> bool:
    """Return whether a tower embeds tokens with the decoder's weight, as the encoder of an encoder-decoder does."""
    weight = embedding._parameters.get("weight")
    return weight is not None and any(module._parameters.get("weight") is weight for module in tower.modules())


def find_decoder(model: nn.Module) -> Decoder:
    """Find the parts of a decoder by its structure and, if it is one of transformers' models, by its getters.

    Raises:
        PlanError: if no stack of layers or no token embedding is found, or several could be the decoder's.
    """
    name, layers = layer_stack(model)
    embedding = token_embedding(model, name)
    towers = tuple(towers_beside(model, tuple(layers)))
    head = _head(model, embedding)
    return Decoder(
        model=model,
        embedding=embedding,
        layers=tuple(layers),
        final_norm=_final_norm(model, layers, embedding, head, towers),
        head=head,
        towers=towers,
    )


def layer_stack(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of a decoder's layers.

    It is the outermost stack inside of the text decoder, so layers of towers do not count.

    Raises:
        PlanError: if there is no stack, or several are outermost.
    """
    names = {module: name for name, module in model.named_modules() if is_stack(module)}
    if not names:
        raise PlanError(
            f"{type(model).__name__} has no stack of decoder layers (an nn.ModuleList of blocks with linear layers), "
            "so no sharding plan can be inferred; pass ToDistributedConfig(sharding_plan=...)"
        )
    text = text_decoder(model)
    inside = [module for module in (model if text is None else text).modules() if module in names]
    outermost = min(names[module].count(".") for module in inside or names)
    found = [module for module in inside or names if names[module].count(".") == outermost]
    if len(found) > 1:
        raise PlanError(
            f"{type(model).__name__} has {len(found)} stacks of layers ({', '.join(names[m] for m in found)}), and its "
            "structure does not show which one is the decoder's. Give its layers Role.LAYER in "
            "ToDistributedConfig.sharding_plan"
        )
    assert isinstance(found[0], nn.ModuleList)
    return names[found[0]], found[0]


def is_stack(module: nn.Module) -> bool:
    """Return whether a module is a list of layers."""
    return (
        isinstance(module, nn.ModuleList)
        and len(module) > 0
        and all(sum(is_projection(m) for m in layer.modules()) >= 2 for layer in module)
    )


def owner_of_layers(model: nn.Module, layers: Iterable[nn.Module]) -> nn.Module:
    """Return the module that runs a decoder's layers: the owner of the list of its first layer."""
    modules, first = list(model.modules()), next(iter(layers))
    around = next(module for module in modules if first in set(module.children()))
    return next((module for module in modules if around in set(module.children())), around)


def towers_beside(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules with layers of their own that are around none of a decoder's layers."""
    for child in model.children():
        inside = set(child.modules())
        if inside.isdisjoint(layers):
            if any(map(is_stack, inside)):
                yield child
        elif not is_stack(child):
            yield from towers_beside(child, layers)


def modules_beside(model: nn.Module, layers: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the modules that a forward pass may leave out: towers, and what else is outside of the text decoder.

    The embedding of the tokens and the head are no such modules, wherever they are.
    """
    layers = set(layers)
    text = ask(model, "get_decoder")
    inside = set((model if text is None else text).modules())
    if inside.isdisjoint(layers):
        inside = set(model.modules())
    inside |= {found for getter in ("get_input_embeddings", "get_output_embeddings") if (found := ask(model, getter))}
    towers = towers_beside(model, layers)
    return {*(module for tower in towers for module in tower.modules()), *set(model.modules()).difference(inside)}


def towers_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the towers beside a model's decoder; none if it has no decoder."""
    try:
        _, layers = layer_stack(model)
    except PlanError:
        return ()
    return tuple(towers_beside(model, tuple(layers)))


def all_towers(model: nn.Module, structure: Decoder | None) -> tuple[nn.Module, ...]:
    """Return the towers beside a decoder, for images or sound; the whole model if its decoder is not known."""
    if structure is not None:
        return structure.towers
    try:
        _, layers = layer_stack(model)
    except PlanError:  # no decoder
        return (model,) if sum(map(is_stack, model.modules())) > 1 else ()
    return tuple(towers_beside(model, tuple(layers)))


def modules_left_out(model: nn.Module, structure: Decoder | None) -> set[nn.Module]:
    """Return the modules that a forward pass may leave out, depending on its inputs; none without towers."""
    towers = all_towers(model, structure)
    if model in towers:
        return set(model.modules())
    layers = layer_stack(model)[1] if structure is None else structure.layers
    return modules_beside(model, layers) if towers else set()


def modules_apart(model: nn.Module, structure: Decoder | None) -> set[nn.Module]:
    """Return the modules that a forward of the program may run for some rows only, such as the heads of tasks.

    They are outside of the modules that run stacks of layers, of the towers, and of the largest part of a model without
    stacks; the embedding of the tokens, the final norm and the head are none of them.
    """
    stacks = list(_stacks(model))
    largest = max((stack for _, stack in stacks), key=_size, default=None)
    # A list that the model itself runs may be of heads, if it is not the largest.
    parts = [stack if owner is model else owner for owner, stack in stacks if owner is not model or stack is largest]
    parts = parts or sorted(model.children(), key=_size)[-1:]
    parts += [tower for tower in all_towers(model, structure) if tower is not model]
    with contextlib.suppress(PlanError):
        found = structure or find_decoder(model)
        parts += filter(None, (found.embedding, found.final_norm, found.head))
    inside = {module for part in parts for module in part.modules()}
    return set(model.modules()) - inside - {model}


def _stacks(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield the outermost lists of layers, each with the module that has it."""
    for child in module.children():
        if is_stack(child):
            yield module, child
        else:
            yield from _stacks(child)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def ask(model: nn.Module, getter: str) -> nn.Module | None:
    """Return the module that a getter of a transformers model returns; None if the model does not implement it."""
    try:
        found = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None


def text_decoder(model: nn.Module) -> nn.Module | None:
    """Return what ``get_decoder()`` returns, and if that is an encoder-decoder, its decoder; None if there is none."""
    found, inner = None, ask(model, "get_decoder")
    while inner is not None and inner is not found:
        found, inner = inner, ask(inner, "get_decoder")
    return found


def token_embedding(model: nn.Module, layers_name: str) -> nn.Embedding:
    """Return the embedding of the tokens.

    Args:
        model: the whole model.
        layers_name: the name of the list of layers.

    Raises:
        PlanError: if there is none outside of the layers.
    """
    outside = (m for n, m in model.named_modules() if not f"{n}.".startswith(f"{layers_name}."))
    embeddings = [module for module in outside if isinstance(module, nn.Embedding)]
    if not embeddings:
        raise PlanError(f"no token embedding found outside {layers_name!r} in {type(model).__name__}")
    text = text_decoder(model)  # an encoder-decoder may name its encoder's
    own = ask(model if text is None else text, "get_input_embeddings") or ask(model, "get_input_embeddings")
    return next((m for m in embeddings if m is own), None) or max(embeddings, key=lambda m: m.num_embeddings)


def hidden_size(layers: Iterable[nn.Module], embedding: nn.Embedding) -> int:
    """Return the embedding's width or, if no projection of a layer reads that, the most common input width."""
    widths = [in_features(m) for m in next(iter(layers)).modules() if is_projection(m)]
    return embedding.embedding_dim if embedding.embedding_dim in widths else max(widths, key=widths.count)


def _head(model: nn.Module, embedding: nn.Embedding) -> nn.Linear | None:
    own = ask(model, "get_output_embeddings")
    if isinstance(own, nn.Linear):
        return own
    inside = {module for stack in model.modules() if is_stack(stack) for module in stack.modules()}
    words = embedding.num_embeddings
    found = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == words and m not in inside]
    if len(found) > 1:
        raise PlanError(
            f"{type(model).__name__} has {len(found)} linear layers that score {words} words, and its structure does "
            "not show which one is the head. Give it Role.HEAD in ToDistributedConfig.sharding_plan"
        )
    return found[0] if found else None


def _final_norm(
    model: nn.Module,
    layers: nn.ModuleList,
    embedding: nn.Embedding,
    head: nn.Module | None,
    towers: tuple[nn.Module, ...],
) -> nn.Module | None:
    """Return the only norm after the layers; with several, the structure does not show which one is the final norm.

    A module with a table of its own, but without that of the tokens, may norm its table instead. A module with
    projections of its own beside the layers is a head, and norms what these compute.
    """
    owner = next(m for m in model.modules() if layers in m._modules.values())
    tables = [m for m in owner._modules.values() if isinstance(m, nn.Embedding)]
    if tables and all(m.weight is not embedding.weight for m in tables):
        return None
    text = text_decoder(model) if towers else None
    scope = model if text is None or layers not in set(text.modules()) else text
    named = list(scope.named_modules(remove_duplicate=False))
    # By names, since a layer may hold the final norm too.
    others = tuple(f"{n}." for n, m in named if m in (embedding, head) or is_stack(m) or is_adapted(m))
    hidden, is_after = hidden_size(layers, embedding), False
    of_heads = {
        child
        for module in model.modules()
        if layers not in set(module.modules()) and any(m is not head and is_projection(m) for m in module.children())
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
