"""Traits of how the program runs a pass: hooks of torch, contexts, several losses, closures, and rules of the loop."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from conformance.random_programs.trait import SPLIT, TOLD, Trait

if TYPE_CHECKING:
    from conformance.random_programs.run import Run

TRAITS: list[Trait] = []
add = TRAITS.append
_LOSS = frozenset({"head", "keyword", "state", "two passes", "rows", "tail", "batch", "collator", "term"})


# ---- contexts around the pass


def _inside(make: Any) -> Any:
    """Return a loss that is computed, and whose backward runs, inside of a context."""

    def loss(run: Run, batch: dict[str, Any]) -> Tensor:
        with make():
            return run.model(**batch).loss  # type: ignore[no-any-return]

    return loss


@contextlib.contextmanager
def _packed() -> Any:
    """Keep activations for backward as arrays of numpy."""
    with saved_tensors_hooks(lambda x: x.detach().numpy().copy(), torch.from_numpy):
        yield


@contextlib.contextmanager
def _hooked() -> Any:
    """Count the calls of all modules."""
    calls: list[nn.Module] = []
    handles = [
        register_module_forward_hook(lambda module, args, output: calls.append(module)),
        register_module_forward_pre_hook(lambda module, args: None),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _doubled() -> Any:
    """Double what every norm returns."""

    def double(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 2 if "Norm" in type(module).__name__ else None

    handle = register_module_forward_hook(double)
    try:
        yield
    finally:
        handle.remove()


for _name, _make in {
    "activations on the host": save_on_cpu,
    "activations as arrays": _packed,
    "anomaly detection": torch.autograd.detect_anomaly,
    "a hook of all modules": _hooked,
    "a hook of all norms that doubles": _doubled,
    "deterministic algorithms": lambda: torch.backends.mkldnn.flags(enabled=False),
    "a profiler": lambda: torch.autograd.profiler.profile(enabled=True),
    "autocast turned off": lambda: torch.autocast("cpu", enabled=False),
}.items():
    add(Trait(name=f"a pass with {_name}", kind="loss", may=TOLD, loss=_inside(_make), without=_LOSS))


# ---- what hooks keep for the loop


def _norm_of(output: Any) -> float:
    return (output[0] if isinstance(output, tuple) else output).detach().norm().item()  # type: ignore[no-any-return]


def _keep(run: Run, modules: Any) -> None:
    """Keep the norm of what each module returns."""
    run.memory["kept"] = kept = dict[int, float]()
    for index, module in enumerate(modules(run)):
        module.register_forward_hook(lambda *args, index=index: kept.update({index: _norm_of(args[-1])}))


def _say_kept(run: Run) -> None:
    run.say(sum(run.memory["kept"][index] for index in sorted(run.memory["kept"])))


_KEPT: dict[str, dict[str, Any]] = {
    "norms of layers, summed": {"ready": lambda run: _keep(run, lambda run: run.layers), "stepped": _say_kept},
}
for _name, _points in _KEPT.items():
    add(
        Trait(
            name=f"kept by hooks: {_name}",
            kind="module hook",
            may=TOLD,
            tells="hook|mlp|layer",
            warns="changes nothing|tokens only",
            by_design=SPLIT,  # where each part of the batch has norms of its own
            without=_LOSS | {"accumulation", "length", "sharing", "class", "change", "recompute"},
            **_points,
        )
    )


# ---- losses


def _backward_first(run: Run, batch: dict[str, Any]) -> Tensor:
    """Run backward in the loss's function for one half of the loss, and leave the other to the loop."""
    loss = run.model(**batch).loss
    (loss * 0.25).backward(retain_graph=True)
    return loss * 0.75  # type: ignore[no-any-return]


def _of_two_calls(run: Run, batch: dict[str, Any]) -> Tensor:
    """Train on the batch and on the batch backwards, as two calls."""
    turned = {name: value.flip(-1) if value.ndim > 1 else value for name, value in batch.items()}
    first = run.model(**batch).loss
    return first + 0.5 * run.model(**turned).loss  # type: ignore[no-any-return]


def _consistent(run: Run, batch: dict[str, Any]) -> Tensor:
    """Add how far the model is from itself without gradients, as in R-Drop and mean teachers."""
    with torch.no_grad():
        known = run.model(**batch).loss
    return run.model(**batch).loss * (1 + known.detach() * 0)  # type: ignore[no-any-return]


def _with_graph(run: Run, batch: dict[str, Any]) -> Tensor:
    """Add a penalty on the gradient of the embeddings."""
    embedded = run.model.get_input_embeddings()(batch["input_ids"])
    loss = run.model(inputs_embeds=embedded, labels=batch["labels"]).loss
    (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
    return loss + gradient.square().sum()  # type: ignore[no-any-return]


def _noisy(run: Run, batch: dict[str, Any]) -> Tensor:
    """Add an adversarial step to the embeddings, as FreeLB and FGM do."""
    embedding = run.model.get_input_embeddings()
    run.model(**batch).loss.backward()
    change = 0.1 * embedding.weight.grad / (embedding.weight.grad.norm() + 1e-9)
    with torch.no_grad():
        embedding.weight.add_(change)
    loss = run.model(**batch).loss
    loss.backward()
    with torch.no_grad():
        embedding.weight.sub_(change)
    return run.model(**batch).loss  # type: ignore[no-any-return]


def _scaled_by_itself(run: Run, batch: dict[str, Any]) -> Tensor:
    loss = run.model(**batch).loss
    return loss / loss.detach()  # type: ignore[no-any-return]


def _of_parts(run: Run, batch: dict[str, Any]) -> Tensor:
    """Cut each row in two texts."""
    halves = [{name: x[:, part] for name, x in batch.items()} for part in (slice(0, 6), slice(6, 12))]
    return sum(run.model(**half).loss for half in halves) / 2  # type: ignore[no-any-return]


def _penalised(run: Run, batch: dict[str, Any]) -> Tensor:
    norms = [p for p in run.model.parameters() if p.ndim == 1]
    return run.model(**batch).loss + 1e-3 * sum(p.square().sum() for p in norms)  # type: ignore[no-any-return]


def _elastic(run: Run, batch: dict[str, Any]) -> Tensor:
    """Pull weights to where they began, as EWC and L2-SP do."""
    named = run.model.named_parameters()
    return run.model(**batch).loss + 1e-3 * sum((p - run.start[name]).square().sum() for name, p in named)  # type: ignore[no-any-return]


for _name, _loss in {
    "backward of a part inside": _backward_first,
    "two calls": _of_two_calls,
    "a call without gradients before": _consistent,
    "a penalty on gradients of inputs": _with_graph,
    "an adversarial step of the words": _noisy,
    "over itself": _scaled_by_itself,
    "two halves of each row": _of_parts,
    "a penalty on vectors": _penalised,
    "a pull to the start": _elastic,
}.items():
    add(
        Trait(
            name=f"loss: {_name}",
            kind="loss",
            may=TOLD,
            loss=_loss,
            by_design=SPLIT if "halves" in _name else "",
            config={"attn_implementation": "eager"} if "gradients" in _name else {},
            without=_LOSS | {"accumulation", "length", "hook", "freezing", "gradients", "made"},
        )
    )


# ---- steps


def _by_closure(run: Run) -> None:
    """Step with a closure that computes the loss again."""
    step, model = run.optimizer.step, run.model

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = model(**run.current).loss
        loss.backward()
        return loss  # type: ignore[no-any-return]

    run.optimizer.step = lambda: step(closure)


def _rate_by_loss(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = 1e-3 * run.numbers.losses[-1]


def _rate_by_norm(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = 1e-3 * run.numbers.norms[-1]


def _no_large_steps(run: Run) -> Any:
    import meshwright as mw

    norm = (
        mw.clip_grad_norm_(run.model, 1.0) if run.distributed else nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    )
    if norm > 1e-3 and run.step == 0:
        run.optimizer.zero_grad()
    return norm


def _decay_by_dims(run: Run) -> None:
    """Change the groups' options in step 1."""
    for group in run.optimizer.param_groups:
        group["weight_decay"], group["betas"] = 0.3, (0.5, 0.6)


def _new_momentum(run: Run) -> None:
    """Begin with a new state."""
    run.optimizer.state.clear()


def _new_optimizer(run: Run) -> None:
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-2)


def _one_layer_frozen(run: Run) -> None:
    run.layers[0].requires_grad_(False)


def _cast(run: Run) -> None:
    run.model.float().double()


def _noise_on_weights(run: Run) -> None:
    """Add noise that a generator of the program draws."""
    generator = torch.Generator().manual_seed(run.step)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 1e-3)


def _noise_on_gradients(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.grad.add_(torch.randn_like(parameter.grad) * 1e-5)  # type: ignore[union-attr,arg-type]


_STEPS: dict[str, dict[str, Any]] = {
    "with a closure": {"ready": _by_closure},
    "with a rate by the loss": {"gradients": _rate_by_loss},
    "with a rate by the norm": {"stepped": _rate_by_norm},
    "left out if the norm is large": {"clip": _no_large_steps},
    "with other options from step 1 on": {"event": _decay_by_dims},
    "with a new state in step 1": {"event": _new_momentum},
    "by a new optimizer from step 1 on": {"event": _new_optimizer},
    "with a layer frozen by itself": {"event": _one_layer_frozen},
    "after a cast there and back": {"event": _cast},
    "with drawn noise on weights": {"stepped": _noise_on_weights},
    "with noise on gradients": {"gradients": _noise_on_gradients},
}
_STEPPED = frozenset(
    {
        "made", "clipping", "freezing", "optimizer", "step hook", "gradients", "resume", "state", "sharing", "adapter",
        "tied", "parametrization", "average", "loss", "change",
    }
)  # fmt: skip
for _name, _points in _STEPS.items():
    add(
        Trait(
            name=f"steps {_name}",
            kind="schedule",
            may=TOLD,
            without=_STEPPED,
            **_points,
        )
    )
