"""The memory of saves in the background: the same for each save of a run."""

import torch

from meshwright.checkpoint.host_memory import HostMemory
from meshwright.checkpoint.part_files import RankPart, Source
from meshwright.checkpoint.regions import Block


def part(values: dict[str, torch.Tensor]) -> RankPart:
    def source(value: torch.Tensor) -> Source:
        own = [Block(0, 0, len(value))]
        return Source(dtype=value.dtype, values=lambda: value, held=own, share=own)

    return RankPart(place=0, sources={key: source(value) for key, value in values.items()}, random=None)


def test_each_snapshot_is_copied_to_the_same_memory() -> None:
    # The narrow dtypes come last, so that an odd number of them leaves the others aligned.
    values = {"a": torch.arange(3, dtype=torch.int8), "b": torch.rand(5, dtype=torch.float64), "c": torch.rand(3)}
    memory, places = HostMemory(), []
    for _ in range(2):
        copied = {key: source.values() for key, source in part(values).snapshot(memory).sources.items()}
        expected = {key: value.clone() for key, value in values.items()}
        for value in values.values():
            value.add_(1)
        assert copied.keys() == expected.keys()
        assert all(torch.equal(copied[key], expected[key]) for key in expected)
        places.append({key: value.data_ptr() for key, value in copied.items()})
    assert places[0] == places[1]
    assert len(memory.take(7)) == 7
