"""shard_dataloader on real meshes: every input on its mesh, whatever the batch looks like, and what is refused."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset as HubDataset
from datasets.distributed import split_dataset_by_node
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

import meshwright as mw
from meshwright.data.collation_trial import TRIED
from meshwright.data.input_placement import match_targets
from meshwright.data.nested import signature, tensors_of
from support.loading import Numbers, as_list
from support.tiers import crossings

GRID = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
STAGES = [mw.ProcessMesh([0, 1], ["dp"]), mw.ProcessMesh([2, 3], ["dp"])]
SHAPES = ["tensor", "tuple", "named", "nested", "dict", "pair", "with text"]


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Rows(Dataset[Any]):
    """Row k in one of many shapes of batches."""

    def __init__(self, size: int, shape: str):
        self.size, self.shape = size, shape

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        x, y = torch.full((3,), float(index)), torch.tensor(10 * index)
        samples: dict[str, Any] = {
            "tensor": x,
            "tuple": (x, y),
            "named": Pair(x, y),
            "nested": ([x, {"deep": y}], y),
            "dict": {"x": x, "y": y, "text": f"row {index}"},
            "pair": {"inputs": Pair(x, 2 * x), "label": y},
            "with text": (x, f"row {index}"),
        }
        return samples[self.shape]


def collate_with_number(samples: list[Any]) -> Any:
    return {**torch.utils.data.default_collate(samples), "twelve": 12, "scale": torch.tensor(0.5)}


def whole(value: Any) -> Any:
    """DTensors as the tensors they stand for; on their mesh only."""
    if isinstance(value, DTensor):
        return value.full_tensor() if value.device_mesh.get_coordinate() is not None else tuple(value.shape)
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(whole, value))
    return type(value)(map(whole, value)) if isinstance(value, list | tuple) else value


def equal(batches: Any, expected: Any) -> bool:
    """Whether two structures hold the same tensors; of other values each rank has those of its rows."""
    return signature(batches) == signature(expected) and all(
        map(torch.equal, tensors_of(batches), tensors_of(expected))
    )


def placements(value: Any) -> list[str]:
    if isinstance(value, DTensor):
        return ["".join("S" if p.is_shard() else "R" for p in value.placements)]
    if isinstance(value, dict):
        value = list(value.values())
    return [text for item in value for text in placements(item)] if isinstance(value, list | tuple) else []


def read(shape: str, size: int, batch_size: int, meshes: Any, options: dict[str, Any], collate: Any = None) -> Any:
    loader = DataLoader(Rows(size, shape), batch_size=batch_size, collate_fn=collate)
    loader = mw.shard_dataloader(loader, meshes, **options)
    batches = list(loader)
    return [whole(batch) for batch in batches], [placements(batch) for batch in batches]


@pytest.mark.parametrize(
    ("size", "batch_size", "shape"),
    crossings(
        [(*sizes, shape) for sizes in [(8, 4), (7, 4), (9, 4), (5, 3)] for shape in SHAPES],
        but=[*((7, 4, shape) for shape in SHAPES), (8, 4, "nested"), (9, 4, "dict"), (5, 3, "pair")],
    ),
)
def test_whole_batches_are_those_of_one_device(size: int, batch_size: int, shape: str, pool4: Any) -> None:
    """Also where the last batch has an odd number of rows, or one."""
    options = {"shard_dims": "dp", "spread": bool(batch_size % 2)}
    expected = list(DataLoader(Rows(size, shape), batch_size=batch_size))
    for batches, kinds in pool4.run(read, shape, size, batch_size, GRID, options):
        assert equal(batches, expected)
        full = [kind for step, kind in enumerate(kinds) if size - step * batch_size > 1]
        assert all(text == "SR" for kind in full for text in kind)  # rows over dp, the same over tp


def test_a_row_that_cannot_be_shared_out_is_on_all_ranks(pool4: Any) -> None:
    for _, kinds in pool4.run(read, "tensor", 9, 4, GRID, {"shard_dims": "dp"}):
        assert kinds == [["SR"], ["SR"], ["RR"]]


@pytest.mark.parametrize("dim", ["tp", 1, -1, ["tp"]])
def test_the_axis_that_is_named_is_the_one_that_shards(dim: Any, pool4: Any) -> None:
    for batches, kinds in pool4.run(read, "tensor", 8, 4, GRID, {"shard_dims": dim}):
        assert kinds == [["RS"]] * 2
        assert torch.equal(batches[1], next(itertools.islice(DataLoader(Rows(8, "tensor"), batch_size=4), 1, None)))


def test_inputs_of_one_mesh_may_be_laid_out_in_different_ways(pool4: Any) -> None:
    options = {"shard_dims": ["dp", None], "input_keys": ["x", "y"]}
    expected = list(DataLoader(Rows(7, "dict"), batch_size=4))
    for batches, kinds in pool4.run(read, "dict", 7, 4, [GRID, GRID], options):
        assert kinds == [["SR", "RR"]] * 2
        assert equal(batches, expected)


def test_keys_and_values_that_are_no_inputs_stay(pool4: Any) -> None:
    options = {"shard_dims": "dp", "input_keys": ["x"]}
    batches, kinds = pool4.run(read, "dict", 4, 4, GRID, options, collate_with_number)[3]
    assert kinds == [["SR"]]
    assert batches[0]["twelve"] == 12 and batches[0]["scale"] == 0.5
    assert batches[0]["y"].tolist() == [20, 30] and batches[0]["text"] == ["row 2", "row 3"]  # this rank's rows


def stages(output: str) -> Any:
    loader = DataLoader(Rows(4, "pair"), batch_size=4)
    meshes = [[STAGES[0], STAGES[0]], STAGES[1]]
    keys = ["inputs", "label"]
    sharded = mw.shard_dataloader(loader, meshes, input_keys=keys, shard_dims="dp", output=output)
    batch = next(iter(sharded))
    return whole(batch) if output == "dtensor" else batch


def test_each_input_is_delivered_on_its_stage_only(pool4: Any) -> None:
    expected = next(iter(DataLoader(Rows(4, "pair"), batch_size=4)))
    ranks = pool4.run(stages, "dtensor")
    for batch in ranks[:2]:
        assert all(map(torch.equal, batch["inputs"], expected["inputs"])) and batch["label"] == (4,)
    for batch in ranks[2:]:
        assert batch["inputs"] == Pair((4, 3), (4, 3)) and torch.equal(batch["label"], expected["label"])
    ranks = pool4.run(stages, "local")
    assert [x[:, 0].tolist() for x in ranks[1]["inputs"]] == [[2, 3], [4, 6]] and ranks[1]["label"] is None
    assert ranks[2]["inputs"] == Pair(None, None) and ranks[2]["label"].tolist() == [0, 10]


def outside() -> Any:
    loader = mw.shard_dataloader(DataLoader(Rows(4, "tensor"), batch_size=2), STAGES[1], shard_dims="dp")
    return [(tuple(batch.shape), tuple(batch.to_local().shape)) for batch in loader]


def test_a_rank_in_no_mesh_passes_through(pool4: Any) -> None:
    ranks = pool4.run(outside)
    assert ranks[0] == [((2, 3), (0,))] * 2 and ranks[2] == [((2, 3), (1, 3))] * 2


def groups_of_loaders() -> list[int]:
    counts = []
    for _ in range(3):
        outside()
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_a_second_loader_makes_no_process_group(pool4: Any) -> None:
    assert all(len(set(counts)) == 1 for counts in pool4.run(groups_of_loaders))


class Noise(Dataset[Any]):
    """Rows that are other ones at every reading."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.randint(2**30, ()).item() + dist.get_rank()])


class Counting(Numbers):
    """Counts its readings in this process."""

    reads = 0

    def __getitem__(self, index: int) -> int:
        Counting.reads += 1
        return index


def noise(source: str) -> Any:
    torch.manual_seed(dist.get_rank())
    loader = DataLoader(Noise(), batch_size=4)
    return [batch.tolist() for batch in mw.shard_dataloader(loader, GRID, None, "dp", output="local", source=source)]


def test_rows_that_differ_between_peers_are_an_error_that_names_them(pool4: Any) -> None:
    for kind, error in pool4.run_expecting_error(noise, "each"):
        assert kind == "DivergenceError"
        assert "epoch 0, step 0" in error and re.search("rank.s. (0|2), others on rank.s. (1|3)", error), error
        assert "source='leader'" in error


def test_a_leader_reads_for_all_and_each_sample_is_read_once(pool4: Any) -> None:
    ranks = pool4.run(noise, "leader")
    assert ranks[0] == ranks[1] and ranks[2] == ranks[3]
    rows = [row[0] for rank in (0, 2) for batch in ranks[rank] for row in batch]
    assert sorted(rows) == list(range(64))
    ranks = pool4.run(count, "leader")
    tried = 2 * TRIED * 4  # rows of the other rank, in the first batches of each of two loaders
    assert sum(reads for reads, *_ in ranks) == 50 + tried
    assert sum(reads for reads, *_ in pool4.run(count, "each")) == 2 * (50 + tried)
    for _, states, rest in ranks:
        assert states == ranks[0][1]
        assert sorted(rest) == sorted(ranks[0][2] if rest[0] == ranks[0][2][0] else ranks[2][2])


def count(source: str) -> Any:
    """Read a part, save, and go on with the rest elsewhere."""
    Counting.reads = 0
    generator = torch.Generator().manual_seed(3)

    def make() -> Any:
        loader = DataLoader(Counting(50), batch_size=4, shuffle=True, collate_fn=as_list, generator=generator)
        return mw.shard_dataloader(loader, GRID, shard_dims="dp", output="local", source=source, spread=True)

    loader = make()
    list(itertools.islice(loader, 5))
    state = loader.state_dict()
    generator.manual_seed(3)
    resumed = make()
    resumed.load_state_dict(state)
    rest = [row for batch in resumed for row in batch]
    return Counting.reads, (state, resumed.state_dict()), rest


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 11:
            raise OSError("row 11 is gone")
        return index


def broken() -> None:
    loader = DataLoader(Broken(16), batch_size=4)
    list(mw.shard_dataloader(loader, GRID, shard_dims="dp", output="local", source="leader"))
    raise RuntimeError("the other ranks did not read row 11")


def test_a_leaders_error_reaches_the_ranks_it_reads_for(pool4: Any) -> None:
    errors = pool4.run_expecting_error(broken, timeout=30)
    assert [kind for kind, _ in errors[2:]] == ["OSError", "PeerFailedError"]
    assert all("row 11 is gone" in message for _, message in errors[2:])


def averaged_gradient(size: int, weighted: bool) -> Any:
    """Gradients of a mean loss over every rank's rows, averaged over ranks as DDP does."""
    dataset = TensorDataset(torch.randn(size, 5, generator=torch.Generator().manual_seed(0)).double())
    mesh = mw.ProcessMesh(range(4), ["dp"])
    loader = mw.shard_dataloader(DataLoader(dataset, batch_size=8), mesh, shard_dims="dp", output="local", spread=True)
    torch.manual_seed(0)
    model = mw.DataParallel(nn.Linear(5, 3).double())
    gradients = []
    for (x,) in loader:
        loss = (model(x) ** 2).mean()
        (loss * loader.weight if weighted else loss).backward()
        gradients.append(model.module.weight.grad.clone())
        model.zero_grad()
    one = nn.Linear(5, 3).double()
    one.load_state_dict(model.module.state_dict())
    differences = []
    for (x,), gradient in zip(DataLoader(dataset, batch_size=8), gradients, strict=True):
        (expected,) = torch.autograd.grad((one(x) ** 2).mean(), one.weight)
        differences.append(((gradient - expected).abs().max() / expected.abs().max()).item())
    return differences


@pytest.mark.quick
@pytest.mark.parametrize("size", [16, 15, 11, 9])
def test_the_weighted_gradient_of_a_tail_is_that_of_one_process(size: int, pool4: Any) -> None:
    """1e-12: the sums are in float64, in another order."""
    for differences in pool4.run(averaged_gradient, size, True):
        assert max(differences) < 1e-12
    if size in (15, 11):
        assert max(pool4.run(averaged_gradient, size, False)[0]) > 1e-3  # unweighted, it would be wrong


class Lines(IterableDataset[Any]):
    def __init__(self, size: int):
        self.size = size

    def __iter__(self) -> Any:
        return iter(range(self.size))


def loader_of(kind: str) -> Any:
    if kind == "hub":
        return DataLoader(HubDataset.from_dict({"x": list(range(41))}), batch_size=4, shuffle=True)
    rows = HubDataset.from_dict({"x": list(range(41))}).to_iterable_dataset(num_shards=5)
    if kind == "shuffled stream":
        rows = rows.shuffle(seed=1, buffer_size=7)
    if kind == "lines":
        return DataLoader(Lines(41), batch_size=4, collate_fn=lambda rows: {"x": rows})
    return DataLoader(rows, batch_size=4, collate_fn=lambda rows: {"x": [row["x"] for row in rows]})


def elastic(kind: str, meshes: list[Any]) -> Any:
    """The samples that this rank reads of an epoch which meshes of other shapes take in turn, three steps each."""
    state, samples = None, []
    for number, mesh in enumerate(meshes):
        torch.manual_seed(7)
        order: Any = "lanes" if kind == "lanes" else "loader"
        loader = mw.shard_dataloader(loader_of(kind), mesh, shard_dims=0, output="local", spread=True, order=order)
        if state is not None:
            loader.load_state_dict(state)
        steps = itertools.islice(loader, 3 if number < len(meshes) - 1 else None)
        read = [list(map(int, batch["x"])) if loader.weight else [] for batch in steps]
        is_first = mesh.coordinate(dist.get_rank())[1:] in ((), (0,))
        samples += [row for batch in read for row in batch] if is_first else []
        state = loader.state_dict()
    return samples, state


@pytest.mark.parametrize("kind", ["hub", "lanes", "shuffled stream", "lines"])
def test_an_epoch_is_taken_over_by_other_meshes(kind: str, pool4: Any) -> None:
    """Every kind of dataset, through the public call; read once by the ranks together."""
    meshes = [GRID, mw.ProcessMesh(range(4), ["dp"]), mw.ProcessMesh([[0, 1, 2, 3]], ["dp", "tp"])]
    ranks = pool4.run(elastic, kind, meshes)
    assert sorted(row for samples, _ in ranks for row in samples) == list(range(41))
    assert all(state == ranks[0][1] for _, state in ranks)


def own_parts(output: str, drop_last: bool, sizes: list[int]) -> Any:
    rank = dist.get_rank()
    parts = [list(range(100 * part, 100 * part + size)) for part, size in enumerate(sizes)]
    dataset = TensorDataset(torch.tensor(parts[rank // 2]))
    loader = DataLoader(dataset, batch_size=3, drop_last=drop_last, collate_fn=torch.utils.data.default_collate)
    loader = mw.shard_dataloader(loader, GRID, None, "dp", True, output=output, spread=True)
    batches = [batch[0] for batch in loader]
    return [b.full_tensor().tolist() for b in batches] if output == "dtensor" else [b.tolist() for b in batches]


def test_a_split_dataset_is_read_as_it_is(pool4: Any) -> None:
    for batches in pool4.run(own_parts, "dtensor", False, [6, 6]):
        assert batches == [[0, 1, 2, 100, 101, 102], [3, 4, 5, 103, 104, 105]]


def test_parts_of_different_length_end_together(pool4: Any) -> None:
    ranks = pool4.run(own_parts, "local", False, [7, 2])
    assert ranks[0] == [[0, 1, 2], [3, 4, 5], [6]]
    assert len(ranks[2]) == 3 and ranks[2][0] == [100, 101]  # and then copies, of weight 0
    assert [len(batches) for batches in pool4.run(own_parts, "dtensor", True, [9, 7])] == [2] * 4
    for kind, message in pool4.run_expecting_error(own_parts, "dtensor", False, [7, 6]):
        assert kind == "ValueError" and "1 on rank 0 of dp, 0 on rank 1 of dp" in message


def node_part(index: int) -> HubDataset:
    return split_dataset_by_node(HubDataset.from_dict({"x": list(range(8))}), index, 2)


def sharded(change: str) -> None:
    rank = dist.get_rank()
    dataset: Any = Numbers(8)
    meshes: Any = GRID
    options: dict[str, Any] = {"shard_dims": "dp"}
    batch_size, collate = 4, None
    if change == "batch":
        batch_size = 5
    elif change == "meshes":
        dataset, meshes = Rows(8, "dict"), [GRID, GRID]
    elif change == "keys":
        dataset, meshes, options["input_keys"] = Rows(8, "dict"), [GRID, GRID], ["x"]
    elif change == "missing key":
        dataset, options["input_keys"] = Rows(8, "dict"), ["z"]
    elif change == "two meshes":
        dataset, meshes = Rows(8, "tuple"), [GRID, mw.ProcessMesh([0, 1], ["dp"])]
    elif change == "axis":
        options["shard_dims"] = "pp"
    elif change == "index":
        options["shard_dims"] = 2
    elif change == "dims":
        options["shard_dims"] = ["dp", "dp"]
    elif change == "no mesh":
        meshes = []
    elif change == "outside":
        meshes = mw.ProcessMesh(range(8), ["dp"])
    elif change == "split by sampler":
        sampler: Any = DistributedSampler(dataset, num_replicas=2, rank=rank // 2)
        mw.shard_dataloader(DataLoader(dataset, batch_size=4, sampler=sampler), meshes, **options)
    elif change == "split by node":
        stream = HubDataset.from_dict({"x": list(range(8))}).to_iterable_dataset(num_shards=2)
        dataset = split_dataset_by_node(stream, rank // 2, 2)
    elif change == "split by itself":
        dataset = Lines(8)
        dataset.env = SimpleNamespace(world_size=4, global_rank=0)
    elif change == "split map":
        dataset = node_part(rank // 2)
    elif change == "subset":
        dataset = Subset(dataset, list(range(4 * (rank // 2), 4 * (rank // 2) + 4)))
    elif change == "splitted, no dims":
        options = {"is_dataset_splitted": True}
    elif change == "empty":
        dataset = Numbers(0)
    elif change == "empty stream":
        dataset = Lines(0)
    elif change == "collate":
        collate = set
    elif change == "one rank":
        options["shard_dims"] = "tp" if rank == 3 else "dp"
    elif change == "output":
        options["output"] = "numpy"
    elif change == "lengths":
        dataset, collate = Numbers(8), ragged
    list(mw.shard_dataloader(DataLoader(dataset, batch_size=batch_size, collate_fn=collate), meshes, **options))


def ragged(samples: list[int]) -> Tensor:
    return torch.zeros(len(samples), max(samples) + 1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("batch", "batch_size=5 is not divisible by the 2 ranks of axis 'dp'; use 4 or 6"),
        ("meshes", r"inputs \['x', 'y', 'text'\], but there are 2 meshes"),
        ("keys", "input_keys has 1 entries"),
        ("missing key", "no input 'z'"),
        ("two meshes", r"ranks \[0, 1\] are in two different meshes"),
        ("axis", "'pp' is no axis"),
        ("index", "2 is no axis"),
        ("dims", "shard_dims has 2 entries for 1 meshes"),
        ("no mesh", "meshes is empty"),
        ("outside", "rank 7 of the meshes is outside the world of 4"),
        ("split by sampler", r"^(?!.*same call)(.|\n)*split already, by a DistributedSampler"),
        ("split by node", "split already, by a IterableDataset with _distributed.world_size=2"),
        ("split by itself", "split already, by a Lines with env.world_size=4"),
        ("split map", "is_dataset_splitted=True"),
        ("subset", "is_dataset_splitted=True"),
        ("splitted, no dims", "shard_dims=None"),
        ("empty", "the dataset is empty"),
        ("empty stream", "gave no batch"),
        ("collate", "the collate function returned a set"),
        ("one rank", "the ranks do not make the same call"),
        ("output", "must be 'dtensor' or 'local'"),
        ("lengths", "the inputs differ in dtype or size between ranks"),
    ],
)
def test_what_cannot_work_is_an_error_on_all_ranks(change: str, named: str, pool4: Any) -> None:
    for kind, message in pool4.run_expecting_error(sharded, change):
        assert kind == "ValueError" and re.search(named, message), message


def attributes() -> Any:
    user = DataLoader(Numbers(10), batch_size=4, num_workers=1, prefetch_factor=3, pin_memory=True, drop_last=True)
    loader = mw.shard_dataloader(user, GRID, shard_dims="dp", output="local")
    inner: Any = loader._reader._loader()  # type: ignore[attr-defined]
    kept = (inner.num_workers, inner.prefetch_factor, inner.pin_memory, inner.dataset.dataset is user.dataset)
    return len(loader), loader.batch_size, loader.dataset is user.dataset, kept, loader.dropped


def test_the_users_settings_are_kept(pool4: Any) -> None:
    assert pool4.run(attributes) == [(2, 4, True, (1, 3, True, True), 0)] * 4


def test_meshes_of_torch_and_lists_of_one(pool4: Any) -> None:
    assert match_targets([GRID], "dp") == match_targets((GRID,), 0) == match_targets(GRID, ["dp"])
