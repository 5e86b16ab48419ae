"""``to_static``: a step as one call, with the numbers of the loop that it replaces.

float64; only the order of sums differs between a loop and its compiled step, by at most 1e-12 here. A step that skipped
the clip or kept the gradients of the step before would be off by more than 1e-3.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import meshwright as mw
from examples import static_step
from examples.shard_dataloader import BATCH_SIZE, RandomRows, Stages, loss_of
from support.models import build, labels_for, tokens

EAGERLY_TRACED = {"backend": "aot_eager"}  # traced and differentiated as inductor's, without generating code


def one_process(*, max_norm: float | None = None) -> tuple[list[float], Tensor]:
    model = Stages(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    losses = []
    for inputs, label in DataLoader(RandomRows(), batch_size=BATCH_SIZE):
        loss = loss_of(model(inputs), label)
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.w1.detach()


@pytest.mark.parametrize("is_static", [False, True], ids=["RUN_STATIC=0", "RUN_STATIC=1"])
def test_the_seed_program_on_two_meshes(is_static: bool, pool4: Any) -> None:
    expected, _ = one_process()
    for losses in pool4.run(static_step.run, is_static=is_static):
        assert losses == pytest.approx(expected, rel=1e-12)


def clipped_on_one_mesh(max_norm: float) -> tuple[list[float], Tensor, list[list[str]]]:
    torch._dynamo.reset()
    graphs: list[list[str]] = []

    def record(graph: Any, inputs: Any) -> Any:
        graphs.append([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    mesh = mw.ProcessMesh(range(dist.get_world_size()), ["x"])
    model = Placed(mesh)
    loader = mw.shard_dataloader(DataLoader(RandomRows(), batch_size=BATCH_SIZE), meshes=mesh, shard_dims="x")
    # SGD, since AdamW's step hardly depends on the gradients' scale.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = mw.to_static(model, loader, loss_of, optimizer, max_norm=max_norm, compile_options={"backend": record})
    losses = [step(inputs, label).item() for inputs, label in loader]
    return losses, model.w1.full_tensor().detach(), graphs  # type: ignore[attr-defined]


class Placed(nn.Module):
    """The model of ``Stages`` on one mesh, or in one process."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        one = Stages(None)
        self.mesh = mesh
        self.w0 = nn.Parameter(
            one.w0.detach() if mesh is None else mw.shard_tensor(one.w0.detach(), mesh, [mw.Shard(1)])
        )
        self.w1 = nn.Parameter(
            one.w1.detach() if mesh is None else mw.shard_tensor(one.w1.detach(), mesh, [mw.Shard(0)])
        )

    def forward(self, x: Any) -> Any:
        if self.mesh is not None:
            x = mw.reshard(x, self.mesh, [mw.Replicate()])
        y = torch.tanh(x @ self.w0) @ self.w1
        return y if self.mesh is None else mw.reshard(y, self.mesh, [mw.Replicate()])


def test_a_clipped_step_on_one_mesh(pool2: Any) -> None:
    model = Placed(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    expected = []
    for inputs, label in DataLoader(RandomRows(), batch_size=BATCH_SIZE):
        loss = loss_of(model(inputs), label)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm > 1  # so that every step clips
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for losses, weight, graphs in pool2.run(clipped_on_one_mesh, 0.5):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert torch.allclose(weight, model.w1.detach(), rtol=0, atol=1e-12)
        assert graphs.count(["matmul", "tanh", "matmul"]) == 1, graphs  # the code between two calls of reshard


def stepped(plan: str | None, *, is_static: bool) -> list[float]:
    """The losses of three clipped steps, and of an evaluation, of a model with its own loss."""
    model: Any = build("llama").double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, _ = mw.to_distributed(model, optimizer, plan=plan)
    dp = mw.plan_of(model).dp
    batches = []
    for seed in range(3):
        ids = tokens(4, 12, seed=seed)
        batch = {"input_ids": ids, "labels": labels_for(ids)}
        batches.append({name: rows.chunk(dp)[dist.get_rank() % dp] for name, rows in batch.items()})
    losses = []
    if is_static:
        step = mw.to_static(model, batches, optimizer=optimizer, max_norm=0.1, compile_options=EAGERLY_TRACED)
        losses = [step(batch).item() for batch in batches]
        return [*losses, step.eval()(**batches[0]).item()]
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        mw.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return [*losses, model(**batches[0]).loss.item()]


@pytest.mark.parametrize("plan", ["tp2+sp", "dp2 zero3"])
def test_a_distributed_model(plan: str, pool2: Any) -> None:
    # Stage 3 runs eagerly, with the same numbers.
    for found, expected in zip(
        pool2.run(stepped, plan, is_static=True, timeout=200), pool2.run(stepped, plan, is_static=False), strict=True
    ):
        assert found == pytest.approx(expected, rel=1e-10)


def test_a_plain_module_and_its_batches() -> None:
    def losses(take: Any) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1).double()
        inputs, label = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.to_static(model, None, nn.MSELoss(), optimizer, compile_options={"backend": "eager"})
        found = [take(step, inputs, label).item() for _ in range(3)]
        step.eval()
        before = model.weight.clone()
        found.append(take(step, inputs, label).item())
        assert torch.equal(model.weight, before) and not model.training and found[3] < found[0]
        return found

    expected = losses(lambda step, x, y: step(x, y))
    assert losses(lambda step, x, y: step([x, y])) == expected
    assert losses(lambda step, x, y: step([x], y)) == expected
    assert losses(lambda step, x, y: step({"inputs": [x], "label": y})) == expected


def test_wrong_calls_say_what_to_write() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, 2)
    options: dict[str, Any] = {"compile_options": {"backend": "eager"}}
    with pytest.raises(mw.PlanError, match="the order is to_static"):
        mw.to_static(model, optimizer, nn.MSELoss())
    with pytest.raises(mw.PlanError, match="not a SGD"):
        mw.to_static(model, None, optimizer)
    with pytest.raises(mw.PlanError, match=r"to_static\(model, loader, loss, optimizer\)"):
        mw.to_static(model, None, nn.MSELoss(), **options).train()
    with pytest.raises(ValueError, match="must be a scalar tensor, but it is a tensor of shape"):
        mw.to_static(model, None, nn.MSELoss(reduction="none"), optimizer, **options)(x, x)
    with pytest.raises(ValueError, match=r"write step\(inputs, label\)"):
        mw.to_static(model, None, nn.MSELoss(), optimizer, **options)(x)
    with pytest.raises(ValueError, match="returned no loss"):
        mw.to_static(model, None, None, optimizer, **options)(x)
    with pytest.raises(ValueError, match=r"passes all its arguments to Linear.forward.*for step\(inputs, label\)"):
        mw.to_static(model, None, None, optimizer, **options)(x, x)
    with pytest.raises(mw.PlanError, match="the SGD has no parameter of this Linear"):
        mw.to_static(model, None, nn.MSELoss(), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    for max_norm in (-1.0, 0, "1"):
        with pytest.raises(mw.PlanError, match=r"max_norm=.* must be a number above zero"):
            mw.to_static(model, None, nn.MSELoss(), optimizer, max_norm=max_norm)  # type: ignore[arg-type]
    with pytest.raises(mw.PlanError, match="compile_options='eager' must be a dict"):
        mw.to_static(model, None, nn.MSELoss(), optimizer, compile_options="eager")  # type: ignore[arg-type]


def test_tensors_on_meshes_of_some_ranks_run_eagerly_and_the_log_says_so(pool2: Any) -> None:
    for lines in pool2.run(logged):
        assert len(lines) == 1 and "runs Stages eagerly" in lines[0]
        assert "meshes of some of the ranks, [0] and [1]" in lines[0]


def logged() -> list[str]:
    meshes = [mw.ProcessMesh([[0]], ["x", "y"]), mw.ProcessMesh([[1]], ["x", "y"])]
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("meshwright.distribute.to_static")
    logger.addHandler(handler)
    try:
        mw.to_static(Stages(meshes), None, loss_of)
    finally:
        logger.removeHandler(handler)
    return lines
