"""Datasets that look alike and are not, and batches that a mesh cannot take: an error on every rank alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset as HubDataset
from test_loader import axes
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import meshwright as mw
from meshwright.data.fingerprint import fingerprint
from meshwright.data.loader import DistributedLoader, made_together
from meshwright.data.nested import digest
from meshwright.data.peers import LoaderMesh, Peers
from meshwright.mesh.axes import Axis
from meshwright.plan.loader_options import LoaderOptions
from support.loading import as_list, ranks_of
from support.logs import logged


class Documents(Dataset[torch.Tensor]):
    """Rows of whatever it is given, which it counts and keeps; with noise, other ones each time."""

    def __init__(self, noise: float = 0.0, **held: Any):
        self.__dict__.update(held)
        self.noise, self.reads = noise, 0
        self.cache: list[Any] = [None] * 8

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        self.cache[index] = torch.rand(1)
        return torch.tensor([float(index)]) + self.noise * self.cache[index]


def holding(kind: str, first: int) -> Dataset[Any]:
    """Eight rows from ``first`` on, held in one way or another."""
    rows = list(range(first, first + 8))
    if kind == "subset":
        return Subset(Documents(rows=rows), range(8))
    if kind == "joined":
        return ConcatDataset([Documents(rows=rows[:4])])
    held: dict[str, dict[str, Any]] = {
        "list": {"rows": rows},
        "texts": {"rows": [{"text": f"document {row}"} for row in rows]},
        "files": {"files": tuple(f"/data/{row}.txt" for row in rows)},
        "tensor": {"tokens": torch.tensor(rows)},
        "array": {"tokens": np.array(rows)},
        "array of texts": {"texts": np.array([f"document {row}" for row in rows], dtype=object)},
        "columns": {"encodings": {"inputs": {"input_ids": rows}, "name": "all"}},
        "frame": {"frame": pd.DataFrame({"x": rows, "text": [f"document {row}" for row in rows]})},
        "dataset": {"inner": HubDataset.from_dict({"x": rows})},
        "nested": {"inner": Documents(rows=rows)},
        "number": {"first": first},
    }
    return Documents(**held[kind])


KINDS = ["list", "texts", "files", "tensor", "array", "array of texts", "columns", "frame", "dataset", "nested"]


def made(dataset: Any, tp: int = 1, **options: Any) -> DistributedLoader:
    tp_axis, dp_axis = axes(tp)
    user, chosen = DataLoader(dataset, batch_size=4), LoaderOptions(**options)
    mesh = LoaderMesh(dp=dp_axis, peers=Peers((tp_axis,)))
    return made_together(lambda: DistributedLoader(user, mesh, blanks="weighted", options=chosen))


def outcome(call: Callable[[], Any]) -> str:
    """What a call raises, as text: the other rank is asked too."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def split(kinds: list[str], **options: Any) -> dict[str, str]:
    first = 8 * dist.get_rank()
    return {kind: outcome(lambda kind=kind: made(holding(kind, first), **options)) for kind in kinds}


def test_an_undeclared_split_is_refused_before_a_row_is_read(pool2: Any) -> None:
    """Row 40: each rank has its part, of the same class and length."""
    kinds = [*KINDS, "number", "subset", "joined"]
    ranks = pool2.run(split, kinds)
    assert ranks[0] == ranks[1]
    for kind, message in ranks[0].items():
        assert "is_dataset_splitted=True" in message and "fingerprint='a name'" in message, (kind, message)
    assert "Documents of 8, first=0, " in ranks[0]["number"] and "first=8, " in ranks[0]["number"]
    assert pool2.run(split, kinds, fingerprint="mine") == [dict.fromkeys(kinds, "nothing")] * 2


def noisy() -> tuple[str, list[bool]]:
    """Nothing is read to compare, whatever a dataset draws, counts or keeps on one rank alone."""
    rank = dist.get_rank()
    message = outcome(lambda: made(Documents(noise=1.0, rows=[rank] * 8)))
    torch.manual_seed(rank)
    dataset = Documents(noise=1.0, rows=[1] * 8)
    before = torch.get_rng_state()
    loader = made(dataset)
    is_untouched = [dataset.reads == 0, torch.equal(before, torch.get_rng_state())]
    rows = [list(loader), list(made(dataset)), list(made(Subset(dataset, range(8))))]
    return message, [*is_untouched, *(len(batches) == 2 for batches in rows)]


def test_a_dataset_that_draws_counts_and_keeps_is_not_taken_for_another(pool2: Any) -> None:
    """Row 40: a split is refused, and the same dataset, which every rank has read in part since, is not."""
    for message, facts in pool2.run(noisy):
        assert "is_dataset_splitted=True" in message
        assert all(facts), facts


def led(tp: int) -> str:
    rank = dist.get_rank()
    return outcome(lambda: list(made(Documents(rows=[rank] * 8), tp, source="leader")))


def test_only_ranks_that_read_must_have_the_same_data(pool2: Any) -> None:
    """Row 40: what the others hold is never used."""
    assert pool2.run(led, 2) == ["nothing"] * 2
    assert all("is_dataset_splitted=True" in message for message in pool2.run(led, 1))


def resumed(before: Any, after: Any, **options: Any) -> list[Any]:
    def make(dataset: Any) -> DistributedLoader:
        return ranks_of(1, lambda: DataLoader(dataset, batch_size=2, collate_fn=as_list), LoaderOptions(**options))[0]

    loader = make(before)
    next(iter(loader))
    other = make(after)
    other.load_state_dict(loader.state_dict())
    return list(other)


@pytest.mark.parametrize("kind", [*KINDS, "subset", "joined", "bare list", "batches"])
def test_a_state_of_other_data_is_refused(kind: str) -> None:
    """Row 41: of the same class and length."""

    def make(first: int) -> Any:
        return list(range(first, first + 8)) if kind == "bare list" else holding(kind, first)

    if kind == "batches":  # a loader of the program's own
        first, second = (DistributedLoader([torch.ones(4) * k] * 2, LoaderMesh(dp=Axis("dp"))) for k in range(2))
        with pytest.raises(ValueError, match="the state is of another dataset"):
            second.load_state_dict(first.state_dict())
        return
    with pytest.raises(ValueError, match=r"sample k would be a different one.*fingerprint='a name'"):
        resumed(make(0), make(100))
    assert len(resumed(make(0), make(0))) == 3
    assert len(resumed(make(0), make(100), fingerprint="mine")) == 3


def test_a_state_holds_where_files_were_moved_and_numbers_changed() -> None:
    """Row 41: other rows are refused; the same ones in another directory, or in another epoch, are not."""
    paths = [f"{k}.txt" for k in range(8)]
    before = Documents(files=[f"/job1/{path}" for path in paths], epoch=0)
    assert len(resumed(before, Documents(files=[f"/job2/{path}" for path in paths], epoch=3))) == 3
    with pytest.raises(ValueError, match="files="):
        resumed(before, Documents(files=[f"/job1/new-{path}" for path in paths], epoch=0))


def test_a_dataset_may_hold_one_that_holds_it_and_what_is_no_data() -> None:
    outer = Documents(transforms=[len], options={"device": "cuda:1"}, sparse=torch.eye(8).to_sparse(), rows=[1])
    outer.inner = Documents(outer=outer)  # type: ignore[attr-defined]
    assert "rows=" in fingerprint(outer) and "inner=" in fingerprint(outer) and "options" not in fingerprint(outer)


def test_arrays_of_objects_are_compared_by_value() -> None:
    """A digest of the pointers would differ between ranks that have the same rows."""
    first, second = (np.array(["".join(["do", "cument"]), [1, 2]], dtype=object) for _ in range(2))
    assert digest({"x": first}) == digest({"x": second}) != digest({"x": second[:1]})


def tuples() -> tuple[str, list[int], list[str]]:
    rows = torch.arange(5.0).reshape(5, 1)
    tp_axis, dp_axis = axes(1)
    seen: list[int] = []

    def run() -> None:
        user = DataLoader(TensorDataset(rows, rows), batch_size=4)
        for x, _ in DistributedLoader(user, LoaderMesh(dp=dp_axis, peers=Peers((tp_axis,)))):
            seen.append(len(x))

    with logged("meshwright.data.loader") as messages:
        message = outcome(run)
    return message, seen, messages


def test_a_last_tuple_batch_of_fewer_rows_than_ranks_is_an_error_on_all(pool2: Any) -> None:
    """It was an error on rank 0 alone, at the end of the epoch; the first step says that it will come."""
    ranks = pool2.run(tuples)
    assert ranks[0] == ranks[1]
    message, seen, warnings = ranks[0]
    assert "the last batch has 1 rows, fewer than the 2 data-parallel ranks" in message and seen == [2]
    assert warnings == [f"this epoch will end in an error: {message}"]


def sparse(kind: str) -> Any:
    """A batch with a graph, sparse, beside the rows."""
    graph = torch.eye(7 if kind == "other rows" else 4)
    made: dict[str, Callable[[], torch.Tensor]] = {
        "csr": graph.to_sparse_csr,
        "bsr": lambda: graph.to_sparse_bsr((2, 2)),
    }
    batch = {"x": torch.arange(12.0).reshape(4, 3), "graph": made.get(kind, graph.to_sparse)()}
    keys = ["x"] if kind == "left out" else None
    output: Any = "dtensor" if kind in ("left out", "dtensor") else "local"
    result: list[Any] = []

    def run() -> None:
        mesh = mw.ProcessMesh([0, 1], dim_names=["dp"])
        (placed,) = mw.shard_dataloader([batch], mesh, keys, "dp", output=output)
        x = placed["x"].to_local() if output == "dtensor" else placed["x"]
        result.extend([x[:, 0].tolist(), placed["graph"].layout, placed["graph"].to_dense().tolist()])

    message = outcome(run)
    return result or message


@pytest.mark.parametrize("kind", ["coo", "csr", "other rows", "left out"])
def test_sparse_tensors_are_cut_by_rows(kind: str, pool2: Any) -> None:
    whole = torch.eye(7 if kind == "other rows" else 4)
    for rank, (x, layout, graph) in enumerate(pool2.run(sparse, kind)):
        assert x == [[0.0, 3.0], [6.0, 9.0]][rank]
        assert layout == (torch.sparse_csr if kind == "csr" else torch.sparse_coo)
        assert graph == (whole if kind == "other rows" else whole[2 * rank : 2 * rank + 2]).tolist()


@pytest.mark.parametrize(("kind", "named"), [("dtensor", "sparse_coo"), ("bsr", "sparse_bsr")])
def test_sparse_tensors_that_cannot_be_cut_are_named(kind: str, named: str, pool2: Any) -> None:
    first, second = pool2.run(sparse, kind)
    assert first == second and f"a {named} tensor" in first and "x.to_dense()" in first


def test_other_values_of_a_sparse_tensor_are_other_rows() -> None:
    one, two = torch.eye(4), 2 * torch.eye(4)
    assert digest(one.to_sparse()) == digest(one.to_sparse().coalesce()) != digest(two.to_sparse())
    assert digest(one.to_sparse_csr()) != digest(two.to_sparse_csr())
