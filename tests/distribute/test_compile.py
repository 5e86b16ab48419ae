"""torch.compile of a distributed model: the same numbers, and one graph between two collectives.

float64: a traced graph computes the same operations, so only fused sums may differ, by 1e-12; the tolerance is 1e-10. A
block whose graph kept another layer's state, or whose output were reduced twice, would be off by more than 1e-2.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

import meshwright as mw
from meshwright.parallel.forward.compiled_layers import check_compile_options
from support.models import build, labels_for, tokens
from support.tiers import crossing, nightly

TOLERANCE = 1e-10
LAYERS = 9  # more than the 8 variants of one function that dynamo compiles before it gives up with a warning


def trained(
    plan: str,
    how: str,
    *,
    family: str = "llama",
    layers: int = 2,
    backend: str = "aot_eager",
    lengths: tuple[int, ...] = (12, 17),
    draws: Any = "device",
    **options: Any,
) -> Any:
    """Train for a step of each length and evaluate, and return what was computed and what was compiled.

    Args:
        plan: the plan in words.
        how: what is compiled: "nothing", "layers" (by the config), "model" or "each layer" (by the program, after the
            call); "model before", "forward before" or "layers before" (by the program, which also trains for a step).
        family: the model's family.
        layers: the number of layers.
        backend: the backend of torch.compile.
        lengths: the tokens of a row in each step.
        draws: what is drawn; a graph hides from which lines, so that its draws cannot be those of one device.
        options: the arguments of the model's config.

    Returns:
        The losses and gradient norms; the names of the operations of each graph; the warnings.
    """
    torch._dynamo.reset()
    graphs: list[list[str]] = []

    def record(graph: Any, inputs: Any) -> Any:
        found = (getattr(n.target, "__name__", str(n.target)) for n in graph.graph.nodes if n.op.startswith("call"))
        graphs.append(list(found))
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    model: Any = build(family, num_hidden_layers=layers, **options).double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    whole = model
    if how == "model before":
        model = torch.compile(model, backend=record)
    elif how == "forward before":
        model.compile(backend=record)
    elif how == "layers before":
        for name, layer in list(model.model.layers.named_children()):
            model.model.layers.register_module(name, torch.compile(layer, backend=record))
    if how.endswith("before"):
        ids = tokens(4, 12, seed=12)
        model(input_ids=ids, labels=labels_for(ids)).loss.backward()
        optimizer.zero_grad()
        graphs.clear()
    given = {"compile": "layers", "compile_options": {"backend": record}} if how == "layers" else {}
    config = mw.ToDistributedConfig(plan=plan, draws=draws, **given)
    model, optimizer, _ = mw.to_distributed(model, optimizer, config=config)
    called = torch.compile(model, backend=record) if how == "model" else model
    assert not any("_orig_mod" in name for name, _ in whole.named_parameters())
    if how == "each layer":
        for layer in model.model.layers:
            layer.compile(backend=record)
    shape = mw.plan_of(model)
    assert shape.dp == 1 or shape.pp == 1
    first = 4 // shape.dp * (dist.get_rank() // (shape.tp * shape.cp) % shape.dp)
    rows = slice(first, first + 4 // shape.dp)
    numbers = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in lengths:  # 17 is padded under sequence parallelism; a second length is compiled anew for any
            ids = tokens(4, length, seed=length)
            batch = {"input_ids": ids[rows], "labels": labels_for(ids)[rows]}
            loss = called(**batch).loss
            loss.backward()
            numbers += [loss.item(), float(mw.clip_grad_norm_(called, 1.0))]
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            numbers.append(called(**batch).loss.item())
    return numbers, graphs, [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def check(pool: Any, plan: str, how: str, *, tolerance: float = TOLERANCE, **options: Any) -> list[list[str]]:
    """Compare a compiled run with an eager one, and return the compiled graphs."""
    plain = pool.run(trained, plan, "nothing", **options)
    compiled = pool.run(trained, plan, how, timeout=300, **options)
    for (expected, no_graphs, _), (found, graphs, warned) in zip(plain, compiled, strict=True):
        assert found == pytest.approx(expected, rel=tolerance)
        assert graphs and not no_graphs and not warned
    return compiled[0][1]


@pytest.mark.parametrize("how", ["layers", nightly("model"), nightly("each layer")])
def test_one_graph_between_two_collectives(how: str, pool2: Any) -> None:
    # Layers are also differentiated as traced graphs, of one length, in test_to_static.py.
    graphs = check(pool2, "tp2+sp", how, layers=LAYERS, backend="eager" if how == "layers" else "aot_eager")
    # Each layer has four collectives (gather and reduce of two blocks), and regions of four kinds between them. All
    # layers share a region's graph, which is compiled for the first length, for any length, and without gradients.
    kinds = {
        "norm, after a residual or not": lambda ops: "rsqrt" in ops and "linear" not in ops,
        "attention": lambda ops: ops.count("linear") == 3 and "scaled_dot_product_attention" in ops,
        "MLP": lambda ops: ops.count("linear") == 2 and "silu" in ops,
        "the last residual": lambda ops: "add" in ops and not {"rsqrt", "linear", "silu"} & set(ops),
    }
    found = [[name for name, is_kind in kinds.items() if is_kind(ops)] for ops in graphs]
    assert all(len(names) == 1 for names in found), graphs
    for name in kinds:
        variants = found.count([name])
        assert 0 < variants < LAYERS * (2 if name.startswith("norm") else 1), (name, graphs)


@pytest.mark.parametrize("plan", [crossing("pp2 mb2"), nightly("tp2+sp recompute=full ga2")])
def test_other_plans(plan: str, pool2: Any) -> None:
    check(pool2, plan, "layers")


@pytest.mark.parametrize(
    ("plan", "how", "family"),
    [
        nightly("dp2 tp2+sp zero2", "layers", "gemma2"),
        crossing("cp4(hybrid-2)", "layers", "llama"),
    ],
)
def test_plans_of_four_ranks(plan: str, how: str, family: str, pool4: Any) -> None:
    check(pool4, plan, how, family=family, layers=1)


@pytest.mark.parametrize(
    ("plan", "how"),
    [
        crossing("tp2+sp", "model before"),
        nightly("dp2", "layers before"),
        nightly("dp2 zero2", "forward before"),
        nightly("pp2 mb2", "model"),
    ],
)
def test_a_compiled_model_of_other_plans(plan: str, how: str, pool2: Any) -> None:
    check(pool2, plan, how, layers=2 if "pp2" in plan else 1)


@pytest.mark.crossing
@pytest.mark.parametrize("how", ["model before", "layers before"])
def test_layers_that_cannot_be_compiled_run_eagerly(how: str, pool2: Any) -> None:
    plain = pool2.run(trained, "dp2 zero3", "nothing")
    for (expected, _, _), (found, graphs, warned) in zip(plain, pool2.run(trained, "dp2 zero3", how), strict=True):
        assert found == pytest.approx(expected, rel=TOLERANCE)
        assert not graphs and not warned


def test_names_in_files_are_those_of_the_plain_model(tmp_path: Path) -> None:
    plain: Any = build("llama")
    names = set(plain.state_dict())
    model: Any = build("llama")
    for name, layer in list(model.model.layers.named_children()):
        model.model.layers.register_module(name, torch.compile(layer, backend="eager"))
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(compiled.parameters())
    returned, optimizer, _ = mw.to_distributed(compiled, optimizer, plan="dp1")
    assert returned is compiled
    assert set(mw.full_state_dict(compiled)) == names
    compiled.save_pretrained(tmp_path / "weights")
    with safe_open(tmp_path / "weights/model.safetensors", "pt") as weights:
        assert set(weights.keys()) <= names
    with torch.no_grad():
        model.model.norm.weight.fill_(3)
    mw.save_checkpoint(tmp_path / "run", compiled, optimizer, step=1)
    other, other_optimizer, _ = mw.to_distributed(plain, torch.optim.AdamW(plain.parameters()), plan="dp1")
    mw.load_checkpoint(tmp_path / "run", other, other_optimizer)
    assert torch.equal(plain.model.norm.weight, model.model.norm.weight)


def test_a_call_that_raises_leaves_the_model_compiled() -> None:
    model: Any = build("llama")
    layer = model.model.layers[0]
    compiled: Any = torch.compile(layer, backend="eager")
    model.model.layers[0] = compiled
    with pytest.raises(mw.PlanError, match="needs 2 processes"):
        mw.to_distributed(model, plan="dp2")
    assert model.model.layers[0] is compiled and layer._compiled_call_impl is None


@pytest.mark.crossing
def test_generated_code(pool2: Any) -> None:
    # Llama's norms compute in float32 whatever the model's dtype, and generated code sums them in another order. The
    # tests above hold the graphs themselves to 1e-10, for other lengths as well. The compiler of C++ takes the time.
    check(pool2, "tp2+sp", "layers", layers=1, backend="inductor", lengths=(12,), tolerance=1e-7)


@pytest.mark.crossing
def test_dropout_draws_the_masks_of_an_eager_model(pool2: Any) -> None:
    check(pool2, "tp2", "layers", attention_dropout=0.2, draws="rank")


def copied() -> Any:
    model: Any = build("llama", num_hidden_layers=1).double()
    config = mw.ToDistributedConfig(plan="tp2+sp", compile="layers", compile_options={"backend": "eager"})
    model, _, _ = mw.to_distributed(model, config=config)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.model.layers.parameters():
            parameter.mul_(0.5)
    batch = {"input_ids": tokens(2, 8), "labels": labels_for(tokens(2, 8))}
    return [m(**batch).loss.item() for m in (model, other, model)]


def test_a_copy_compiles_its_own_layers(pool2: Any) -> None:
    for first, other, again in pool2.run(copied):
        assert first == again != other


def compiled_after_copying() -> Any:
    model: Any = mw.to_distributed(build("llama", num_hidden_layers=1).double(), plan="tp2+sp")[0]
    graphs: list[Any] = []

    def record(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    step = mw.to_static(copy.deepcopy(model), compile_options={"backend": record})
    batch = {"input_ids": tokens(2, 8), "labels": labels_for(tokens(2, 8))}
    with torch.no_grad():
        eager, num_graphs = model.eval()(**batch).loss.item(), len(graphs)
    return eager, step(batch).item(), num_graphs, len(graphs)


def test_compiling_a_copy_leaves_the_original_eager(pool2: Any) -> None:
    for eager, compiled, graphs_of_original, graphs in pool2.run(compiled_after_copying):
        assert compiled == pytest.approx(eager, rel=TOLERANCE)
        assert graphs > graphs_of_original == 0


def refused(plan: str, **options: Any) -> None:
    model = build("llama")
    try:
        mw.to_distributed(model, config=mw.ToDistributedConfig(plan=plan, compile="layers", compile_options=options))
    finally:
        assert not any(module._forward_pre_hooks for module in model.modules()), "the model has changed"


def test_what_cannot_be_compiled_is_an_error(pool2: Any) -> None:
    for plan, options, message in (
        ("dp2 zero3", {}, "set zero_stage=2, or leave compile out"),
        ("pp2(zb-h1) mb2", {}, "set schedule='1f1b'"),
        ("tp2", {"fullgraph": True}, "leave fullgraph out"),
    ):
        for kind, said in pool2.run_expecting_error(refused, plan, **options):
            assert kind == "PlanError" and message in said
    for options, message in (({"bakend": "eager"}, "write 'backend'"), ({"backend": "inducter"}, "write 'inductor'")):
        with pytest.raises(mw.PlanError, match=message):
            check_compile_options(options)
    with pytest.raises(mw.PlanError, match=r'used by compile="layers" only'):
        mw.to_distributed(torch.nn.Linear(2, 2), plan="dp1", config=mw.ToDistributedConfig(compile_options={}))
    with pytest.raises(mw.PlanError, match="compile='all' must be None or 'layers'"):
        mw.ToDistributedConfig(compile="all")  # type: ignore[arg-type]
