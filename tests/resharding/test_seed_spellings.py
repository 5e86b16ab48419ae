"""Calls as Paddle's documents spell them: they work, and give the numbers of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

import meshwright as mw

SIZE, SAMPLES, BATCH = 8, 12, 4


class Samples(Dataset):  # type: ignore[type-arg]
    """Single tensors, without labels."""

    def __init__(self) -> None:
        self.rows = torch.randn(SAMPLES, 3, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]

    def __len__(self) -> int:
        return SAMPLES


class Mlp(nn.Module):
    """Two matrices, each on a mesh of its own; whole in one process."""

    def __init__(self, meshes: Any = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        w0, w1 = torch.randn(2, SIZE, SIZE, dtype=torch.float64, generator=generator).unbind()
        self.meshes = meshes
        if meshes is not None:
            w0 = mw.shard_tensor(w0, meshes[0], [mw.Replicate()])
            w1 = mw.shard_tensor(w1, meshes[1], [mw.Replicate()])
        self.w0, self.w1 = nn.Parameter(w0), nn.Parameter(w1)

    def forward(self, x: Tensor) -> Tensor:
        y: Any = torch.matmul(x, self.w0)
        if self.meshes is not None:
            y = mw.reshard(y, self.meshes[1], [mw.Shard(0)])
        return torch.matmul(y, self.w1)


def trained(meshes: Any, kind: type[torch.optim.Optimizer], **options: Any) -> tuple[list[float], list[Tensor], Any]:
    """The losses, the weights at the end, and where the optimizer's state lies."""
    model = Mlp(meshes)
    optimizer = kind(model.parameters(), lr=0.05, **options)  # type: ignore[call-arg]
    loader: Any = DataLoader(Samples(), batch_size=BATCH)
    if meshes is not None:
        loader = mw.shard_dataloader(dataloader=loader, meshes=list(meshes), shard_dims="x")
        assert mw.shard_optimizer(optimizer) is optimizer
    losses, weights = [], [model.w0, model.w1]
    for data in loader if meshes is None else loader():
        loss: Any = torch.mean(model(data) ** 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if meshes is not None:
            loss = mw.reshard(loss, mw.ProcessMesh(list(range(dist.get_world_size())), ["x"]), [mw.Replicate()])
            loss = loss.to_local()
        losses.append(loss.item())
    states = [type(value).__name__ for state in optimizer.state.values() for value in state.values() if value.ndim]
    if meshes is not None:
        whole = mw.ProcessMesh(list(range(dist.get_world_size())), ["x"])
        weights = [mw.reshard(w.detach(), whole, [mw.Replicate()]).to_local() for w in weights]
    return losses, [w.detach() for w in weights], states


def two_meshes(kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    half = dist.get_world_size() // 2
    ranks = list(range(2 * half))
    return trained((mw.ProcessMesh(ranks[:half], ["x"]), mw.ProcessMesh(ranks[half:], ["x"])), kind, **options)


def one_mesh(kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    mesh = mw.ProcessMesh(list(range(dist.get_world_size())), ["x"])
    return trained((mesh, mesh), kind, **options)


@pytest.mark.parametrize("where", [one_mesh, two_meshes])
def test_single_tensors_and_placed_parameters(where: Any, pool4: Any) -> None:
    """List B: an optimizer over ``shard_tensor``ed parameters without a mesh, and single tensors on two meshes."""
    for kind, options in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})):
        losses, weights, _ = trained(None, kind, **options)
        for found, at_end, states in pool4.run(where, kind, **options):
            assert found == pytest.approx(losses, abs=1e-12)
            for actual, expected in zip(at_end, weights, strict=True):
                assert torch.allclose(actual, expected, rtol=0, atol=1e-12)
            assert set(states) == {"DTensor"}


def without_a_group() -> Any:
    assert not dist.is_initialized()
    mesh = mw.ProcessMesh([[0]], ["dp", "tp"])
    x = mw.shard_tensor([[1.0, 2.0], [3.0, 4.0]], mesh, [mw.Shard(0), mw.Shard(1)])
    y = mw.reshard(x, mesh, [mw.Replicate(), mw.Replicate()])
    return y.to_local().tolist(), dist.get_world_size()


def fresh(call: str) -> str:
    """What a line prints in a new process without a launcher, which finds this file where it was started."""
    import os
    import subprocess
    import sys
    from pathlib import Path

    hidden = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    result = subprocess.run(
        [sys.executable, "-c", call],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=Path(__file__).parent,
        check=False,
    )
    return result.stdout + result.stderr


def test_placement_before_any_group() -> None:
    """List B: ``shard_tensor`` and ``reshard`` in one process, and with a mesh that needs more."""
    printed = fresh(
        "import test_seed_spellings as t, meshwright as mw\n"
        "print(t.without_a_group())\n"
        "try: mw.shard_tensor([1.0, 2.0], mw.ProcessMesh([0, 1], ['x']), [mw.Shard(0)])\n"
        "except ValueError as error: print(error)\n"
    )
    assert "([[1.0, 2.0], [3.0, 4.0]], 1)" in printed
    assert "world of 1" in printed and "torchrun --nproc-per-node 2" in printed


def test_names_of_arguments() -> None:
    layers = nn.Linear(2, 2)
    assert mw.DataParallel(layers=layers).module is layers
    with pytest.raises(ValueError, match="both model= and layers="):
        mw.DataParallel(nn.Linear(2, 2), layers=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="not NoneType"):
        mw.DataParallel()
    loader = DataLoader(Samples(), batch_size=BATCH)
    mesh = mw.ProcessMesh([0], ["x"])
    for call in ({"dataloader": loader}, {"loader": loader}):
        rows = [batch.shape[0] for batch in mw.shard_dataloader(**call, meshes=mesh, shard_dims="x", output="local")]
        assert rows == [BATCH] * 3
    with pytest.raises(ValueError, match="two names of one argument"):
        mw.shard_dataloader(loader, mesh, loader=loader)
    with pytest.raises(ValueError, match="got no dataloader"):
        mw.shard_dataloader(meshes=mesh)
    with pytest.raises(ValueError, match=r"no meshes; write shard_dataloader\(dataloader, meshes=mesh\)"):
        mw.shard_dataloader(loader)


def placed_with_a_mesh() -> None:
    mesh = mw.ProcessMesh([0, 1], ["dp"])
    weight = nn.Parameter(mw.shard_tensor(torch.ones(4), mesh, [mw.Shard(0)]))
    mw.shard_optimizer(torch.optim.SGD([weight], lr=0.1), mesh=mesh)


def test_a_mesh_for_placed_parameters_is_an_error(pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(placed_with_a_mesh):
        assert kind == "PlanError" and "leave mesh out: shard_optimizer(optimizer)" in message


def differing_parameters() -> None:
    weight = nn.Parameter(torch.ones(4) + dist.get_rank())
    mw.shard_optimizer(torch.optim.SGD([weight], lr=0.1))


def test_without_a_mesh_the_parameters_must_be_equal(pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(differing_parameters):
        assert kind == "ValueError" and "values of parameter 0 (4,)" in message


class RandomDataset(Dataset):  # type: ignore[type-arg]
    """Draws a sample when it is read, from NumPy's global generator."""

    def __getitem__(self, index: int) -> Any:
        return np.random.uniform(size=[3, SIZE])

    def __len__(self) -> int:
        return SAMPLES


class MlpModel(nn.Module):
    """The models of the seed's sections 4.1 to 4.4 on one process, and what each section marks."""

    def __init__(self, section: str | None, mesh0: Any = None, mesh1: Any = None) -> None:
        super().__init__()
        self.section, self.mesh0, self.mesh1 = section, mesh0, mesh1
        generator = torch.Generator().manual_seed(0)
        w0, w1 = (
            nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator))
            for shape in ((SIZE, 2 * SIZE), (2 * SIZE, SIZE))
        )
        # A plain parameter beside the distributed ones. One element is a case of its own in torch.
        self.bias = nn.Parameter(torch.randn(SIZE, dtype=torch.float64, generator=generator))
        self.scale = nn.Parameter(torch.randn(1, dtype=torch.float64, generator=generator))
        marks = {
            None: (None, None),
            "4.1": (None, None),
            "4.2": ([mw.Shard(1)], [mw.Shard(0)]),
            "4.3": ([mw.Replicate()], [mw.Replicate()]),
            "4.4": ([mw.Replicate(), mw.Shard(1)], [mw.Replicate(), mw.Shard(0)]),
        }[section]
        self.w0 = w0 if marks[0] is None else mw.shard_tensor(w0, mesh0, marks[0])
        self.w1 = w1 if marks[1] is None else mw.shard_tensor(w1, mesh1 or mesh0, marks[1])

    def forward(self, x: Any) -> Any:
        if self.section == "4.1":
            mw.shard_tensor(x, self.mesh0, [mw.Shard(0)])
        if self.section == "4.4":
            mw.shard_tensor(x, self.mesh0, [mw.Shard(0), mw.Replicate()])
        y = torch.matmul(x, self.w0)
        if self.section == "4.3":
            y = mw.reshard(y, self.mesh1, [mw.Replicate()])
        if self.section == "4.4":
            y = mw.reshard(y, self.mesh1, [mw.Shard(0), mw.Shard(2)])
        return torch.matmul(y, self.w1) * self.scale + self.bias


def as_written(section: str | None, *, seed: Any = 7, clips: bool = False) -> tuple[list[float], list[list[float]]]:
    """The seed's program, on the ranks that there are: the losses and the weights at the end."""
    np.random.seed(seed(dist.get_rank()) if callable(seed) else seed)
    ranks = list(range(dist.get_world_size() if dist.is_initialized() else 1))
    half = len(ranks) // 2
    mesh0, mesh1 = mw.ProcessMesh(ranks, dim_names=["x"]), None
    if section == "4.3":
        mesh0, mesh1 = (mw.ProcessMesh(part, dim_names=["x"]) for part in (ranks[:half], ranks[half:]))
    elif section == "4.4":
        mesh0, mesh1 = (mw.ProcessMesh([[part[0], part[1]]], ["x", "y"]) for part in (ranks[:half], ranks[half:]))
    model = MlpModel(section, mesh0, mesh1)
    sampler = BatchSampler(SequentialSampler(range(SAMPLES)), batch_size=BATCH, drop_last=False)
    dataloader: Any = DataLoader(RandomDataset(), batch_sampler=sampler)
    if section == "4.4":
        dataloader = mw.shard_dataloader(dataloader, meshes=[mesh0, mesh1], shard_dims="x")
    opt = torch.optim.AdamW(lr=0.05, params=model.parameters())
    if section is not None:
        opt = mw.shard_optimizer(opt)
    everywhere = mw.ProcessMesh(ranks, dim_names=["x"])

    def whole(x: Any) -> Tensor:
        return mw.reshard(x.detach(), everywhere, [mw.Replicate()]).to_local() if hasattr(x, "placements") else x

    losses = []
    for step, inputs in enumerate(dataloader):
        logits = model(inputs)
        loss = torch.mean(logits**2)
        loss.backward()
        if clips:
            assert whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)) > 1
        opt.step()
        opt.zero_grad()
        losses.append(whole(loss).item())
        assert step < 3
    return losses, [whole(p).tolist() for p in model.parameters()]


@pytest.mark.parametrize("section", ["4.1", "4.2", "4.3", "4.4"])
def test_the_seed_programs_as_written(section: str, pool4: Any) -> None:
    """Plain inputs and parameters beside distributed weights, on one mesh and two, forward and backward.

    float64: only the order of the sums over the ranks differs, by less than 1e-12 here. The gradient of a plain
    parameter that had only a rank's addend would move the weights by more than 1e-3.
    """
    clips = section == "4.2"  # torch's clip_grad_norm_ cannot add norms on two meshes, and ZeRO has slices
    losses, weights = as_written(None, clips=clips)
    assert losses[0] > losses[-1]
    for found, at_end in pool4.run(as_written, section, clips=clips):
        assert found == pytest.approx(losses, abs=1e-12)
        for actual, expected in zip(at_end, weights, strict=True):
            assert np.allclose(actual, expected, rtol=0, atol=1e-12)


def own_seed(rank: int) -> int:
    return rank


def written_in_place() -> tuple[list[float], str]:
    """Plain tensors that are written from DTensors, and an optimizer over lists of both."""
    mesh = mw.ProcessMesh(range(dist.get_world_size()), ["x"])
    placed = mw.shard_tensor(torch.arange(4.0), mesh, [mw.Shard(0)])
    total = torch.zeros(4)
    total += placed
    total[1:] = placed[1:] * 2
    torch.mul(placed, 10, out=(scaled := torch.empty(4)))
    assert type(total) is type(scaled) is Tensor
    placed.copy_(total + scaled)  # the value of a plain tensor, which every rank has
    return mw.reshard(placed, mesh, [mw.Replicate()]).to_local().tolist(), type(placed).__name__


def test_what_is_written_keeps_its_kind(pool2: Any) -> None:
    assert pool2.run(written_in_place) == [([0.0, 12.0, 24.0, 36.0], "DTensor")] * 2


def test_plain_tensors_that_differ_are_an_error(pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(as_written, "4.2", seed=own_seed):
        assert kind == "ValueError" and "values in matmul, of a plain tensor beside a DTensor: digest" in message
        assert "on rank 0" in message and "on rank 1" in message
